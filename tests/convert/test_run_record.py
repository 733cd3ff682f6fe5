"""The record of a run: rates, nodes, stragglers, and what is taken from it for a prediction."""

import json

import pytest
from requant.convert.engine import Task
from requant.convert.runrecord import RECORD_FILE, measured_rate, run_record, run_text
from requant.convert.show import result_json, result_text
from requant.manifests.errors import UsageError

GB = 10**9


def test_rates_are_over_the_run_and_over_the_workers_time():
    tasks = [Task("a", "1", GB, 0.0, 1.0), Task("a", "2", GB, 0.0, 1.0), Task("b", "1", 2 * GB, 5.0, 7.0)]
    record = run_record("ray", tasks, 2.0)
    assert (record["bytes"], record["gb_per_s"], record["workers"], record["worker_gb_per_s"]) == (4 * GB, 2.0, 3, 1.0)
    rows = [(n["node"], n["workers"], n["tasks"], n["gb_per_s"], n["worker_gb_per_s"]) for n in record["nodes"]]
    assert rows == [("a", 2, 2, 1.0, 1.0), ("b", 1, 1, 1.0, 1.0)]
    assert record["stragglers"] == []


def test_a_slow_node_and_a_straggler_are_named():
    tasks = [Task(node, "1", GB, float(i), i + 1.0) for node in "ab" for i in range(4)]
    tasks += [Task("c", "1", GB, 0.0, 3.0), Task("c", "1", GB, 3.0, 12.0)]
    record = run_record("ray", tasks, 12.0)
    assert [n["node"] for n in record["nodes"] if n["slow"]] == ["c"]
    late = {"node": "c", "bytes": GB, "seconds": 9.0, "expected_seconds": 1.0, "first": False}
    assert record["stragglers"] == [late]
    text = run_text(record)
    assert "node c: 1 workers, 2 tasks, 2.00 GB, 0.17 GB/s (slow)" in text
    assert "straggler: 1.00 GB on c took 9.0 s, 1.0 s expected" in text


def test_the_first_task_of_a_worker_is_no_straggler_but_said():
    tasks = [Task("a", str(w), GB, 0.0, 5.0 + w) for w in range(3)]
    tasks += [Task("a", str(w), GB, 8.0 + i, 9.0 + i) for w in range(3) for i in range(4)]
    record = run_record("local", tasks, 12.0)
    assert [(entry["seconds"], entry["first"]) for entry in record["stragglers"]] == [
        (7.0, True),
        (6.0, True),
        (5.0, True),
    ]
    text = run_text(record)
    assert "the first task of a worker took up to 6.0 s more: it compiles the loops or loads them" in text
    assert "straggler" not in text


def test_the_tail_is_what_the_first_idle_worker_of_a_node_waits():
    tasks = [Task("a", "1", GB, 0.0, 4.0), Task("a", "2", GB, 0.0, 9.5), Task("b", "1", GB, 100.0, 105.0)]
    assert run_record("ray", tasks, 10.0)["tail_seconds"] == 5.5


def test_a_run_without_work_has_an_empty_record():
    record = run_record("local", [], 0.0)
    assert (record["gb_per_s"], record["nodes"], record["tail_seconds"]) == (0.0, [], 0.0)


def test_a_conversion_leaves_its_record_beside_the_output_and_in_the_result(kit):
    job = kit.job(kit.dsv4())
    from requant.convert.pipeline import run_job

    result = run_job(job)
    record = json.loads((job.plan.output / RECORD_FILE).read_text())
    assert record == json.loads(json.dumps(result_json(job.plan, result)["run"]))
    assert (record["engine"], record["bytes"]) == ("local", job.plan.bytes_in)
    assert sum(node["tasks"] for node in record["nodes"]) == len(job.plan.units)
    assert "GB/s of source" in result_text(job.plan, result)
    assert "run" not in json.loads((job.plan.output / "requant.lock.json").read_text())


@pytest.mark.parametrize("content", [None, "", "{}", '{"worker_gb_per_s": "fast"}', '{"worker_gb_per_s": 0}'])
def test_no_rate_is_taken_from_a_record_that_has_none(tmp_path, content):
    if content is not None:
        (tmp_path / RECORD_FILE).parent.mkdir()
        (tmp_path / RECORD_FILE).write_text(content)
    with pytest.raises(UsageError, match=r"run\.json: .*\n  -> .*--rate"):
        measured_rate(tmp_path)


def test_the_rate_of_one_worker_is_taken_from_the_record(tmp_path):
    (tmp_path / RECORD_FILE).parent.mkdir()
    (tmp_path / RECORD_FILE).write_text(json.dumps(run_record("local", [Task("a", "1", GB, 0.0, 4.0)], 9.0)))
    assert measured_rate(tmp_path) == 0.25
