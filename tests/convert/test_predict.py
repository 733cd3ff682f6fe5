"""Predicted times: each limit binds where it is the narrowest, and what is not known is said."""

import json

import pytest
from requant.convert.cli import main
from requant.convert.engine import Task, batch_limit
from requant.convert.predict import START_S, Fleet, Load, predict
from requant.convert.runrecord import RECORD_FILE, run_record

GB = 10**9
LOAD = Load(bytes_in=1600 * GB, bytes_out=1700 * GB, unit=GB // 10)


def seconds(**fleet):
    found = predict(LOAD, Fleet(**{"nodes": 4, "workers_per_node": 8, "worker_gb_per_s": 0.5, **fleet}))
    return found.bound, found.seconds - found.start - found.tail


def test_the_workers_bind_where_nothing_else_is_known():
    assert seconds() == ("workers", pytest.approx(100))
    assert seconds(nodes=8) == ("workers", pytest.approx(50))


def test_the_network_binds_by_the_larger_direction_of_a_node():
    assert seconds(network_gbit_per_s=10) == ("network", pytest.approx(1700 / 4 / 1.25))
    assert seconds(network_gbit_per_s=100)[0] == "workers"


def test_the_file_system_binds_whatever_the_number_of_nodes():
    assert seconds(nodes=64, storage_gb_per_s=11) == ("storage", pytest.approx(300))
    assert seconds(nodes=8, storage_gb_per_s=11) == ("storage", pytest.approx(300))


def test_one_unit_is_never_cut():
    found = predict(Load(GB, GB, GB), Fleet(64, 16, 0.5))
    assert (found.bound, found.parts["largest unit"], found.tail) == ("largest unit", 2.0, 0.0)


def test_start_and_last_batch_come_on_top():
    found = predict(LOAD, Fleet(4, 8, 0.5))
    assert found.start == START_S
    assert found.tail == pytest.approx(batch_limit(LOAD.bytes_in, 32) / 0.5e9)
    assert predict(LOAD, Fleet(1, 1, 0.5)).tail == 0.0


def test_batches_are_small_enough_for_every_worker_and_not_smaller():
    assert batch_limit(1600 * GB, 32) == 512 * 2**20
    assert batch_limit(8 * 16 * 100 * 2**20, 16) == 100 * 2**20
    assert batch_limit(1000, 16) == 8 * 2**20


@pytest.fixture
def manifest(kit):
    path = kit.tmp / "m.yaml"
    path.write_text(kit.manifest_text(kit.dsv4(), kit.tmp / "out", kit.EXPERTS))
    return str(path)


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


def test_plan_predicts_for_nodes_and_says_what_it_assumes(capsys, manifest):
    code, out, _ = run(capsys, "plan", manifest, "--nodes", "4", "--gbps", "25", "--workers-per-node", "2")
    assert code == 0
    assert "4 nodes of 2 workers: about " in out
    assert "0.50 GB/s of source a worker (assumed, not measured: give --rate or --rate-from)" in out
    assert "shared file system: not considered (--storage)" in out
    assert "network: not considered" not in out
    assert out.count("    assumes: ") == 4


def test_plan_takes_the_rate_from_an_earlier_run(capsys, kit, manifest):
    (kit.tmp / "done" / RECORD_FILE).parent.mkdir(parents=True)
    record = run_record("local", [Task("a", "1", GB, 0.0, 4.0)], 9.0)
    (kit.tmp / "done" / RECORD_FILE).write_text(json.dumps(record))
    arguments = ["--format", "json", "--nodes", "2", "--rate-from", str(kit.tmp / "done")]
    code, out, _ = run(capsys, "plan", manifest, *arguments)
    assert code == 0
    facts = json.loads(out)
    assert facts["prediction"]["fleet"]["worker_gb_per_s"] == 0.25
    expected = facts["source"]["bytes"] / 0.25e9 / 2 / facts["prediction"]["fleet"]["workers_per_node"]
    assert facts["prediction"]["parts"]["workers"] == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gbps", "10"], "only with --nodes"),
        (["--rate", "1"], "only with --nodes"),
        (["--nodes", "2", "--gbps", "0"], "positive numbers"),
        (["--nodes", "2", "--rate", "nan"], "positive numbers"),
        (["--nodes", "2", "--rate", "1", "--rate-from", "x"], "exclude each other"),
        (["--nodes", "2", "--rate-from", "nowhere"], "holds no record of a run"),
        (["--nodes", "0"], "--nodes"),
    ],
)
def test_figures_that_cannot_be_are_usage_errors(capsys, manifest, arguments, message):
    code, _, err = run(capsys, "plan", manifest, *arguments)
    assert code == 2
    assert message in err
