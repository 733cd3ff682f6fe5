"""What travels to a cluster's workers and what they do with it, here without a cluster; and life without the extra."""

import errno
import hashlib
import json
import os
import pickle
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from requant.convert import engine_ray, ray_task
from requant.convert import plan as plan_module
from requant.convert.engine import Done, LocalEngine
from requant.convert.execute import execute, partial_of
from requant.convert.pipeline import engine_of, prepare, run_job
from requant.convert.ray_task import Batch, batches, run_batch
from requant.manifests.errors import EnvironmentFault, IncompleteError, SourceError

CLI = [sys.executable, "-m", "requant.convert.cli"]


def sha256s(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.glob("*.safetensors"))}


class Stop(Exception):  # noqa: N818 - not an error
    """Ends a run in the middle."""


class PostEngine:
    """Batches that are pickled, done by run_batch, and whose reports are pickled: a cluster of one, less Ray."""

    name = "ray"
    whole_shards = False

    def __init__(self, limit=3000, stop_after=None, tamper=lambda batch: batch):
        self.limit, self.stop_after, self.tamper = limit, stop_after, tamper
        self.sizes, self.sent = [], 0

    def drive(self, plan, files, todo, done):
        with engine_ray.run_token(files.partial) as token:
            for number, batch in enumerate(batches(plan, todo, self.limit, files.partial, token)):
                if number == self.stop_after:
                    raise Stop
                raw = pickle.dumps(self.tamper(batch))
                self.sent += 1
                self.sizes.append((batch.nbytes, len(batch.units), len(raw)))
                report = pickle.loads(pickle.dumps(run_batch(pickle.loads(raw), "abcdef012345")))
                if report.fault:
                    raise report.fault.exception()
                done(Done(report.units, report.task, synced=True))


@pytest.fixture
def job(kit, monkeypatch):
    """Some forty units in three output shards."""
    monkeypatch.setattr(plan_module, "COPY_BATCH_PIECES", 4)
    source = kit.dsv4(shards=3, experts=4, layers=3, low=96, high=116)
    (kit.tmp / "job.yaml").write_text(kit.manifest_text(source, kit.tmp / "out", kit.EXPERTS, shard_size="36KB"))
    return prepare(str(kit.tmp / "job.yaml"))


@pytest.fixture
def local(kit, job):
    """sha256s of a run by threads."""
    execute(job.plan, lambda *_: None, workers=2)
    found = sha256s(job.plan.output)
    job.plan.output.rename(kit.tmp / "reference")
    return found


def test_batches_that_travel_give_the_same_bytes(job, local):
    engine = PostEngine()
    result = execute(job.plan, lambda *_: None, engine=engine)
    assert sha256s(job.plan.output) == local
    assert engine.sent > 5
    assert result.record["nodes"][0]["tasks"] == engine.sent
    assert result.record["nodes"][0]["node"].endswith("-abcdef")


def test_a_batch_is_cut_by_bytes_and_holds_what_it_needs(job, kit):
    partial = kit.tmp / "p"
    cut = list(batches(job.plan, range(len(job.plan.units)), 5000, partial, partial / "token"))
    assert [index for batch in cut for index, _ in batch.units] == list(range(len(job.plan.units)))
    assert all(batch.nbytes <= 5000 or len(batch.units) == 1 for batch in cut)
    assert all(a.nbytes + b.units[0][1].nbytes > 5000 for a, b in pairwise(cut))
    used = set()
    for batch in cut:
        for _, unit in batch.units:
            if hasattr(unit, "pieces"):
                wanted = {piece.out for piece in unit.pieces}
            else:
                outs = [(m.out_codes, m.out_scales, m.out_global) for m in unit.members]
                wanted = {out for group in outs for out in group if out is not None}
            assert wanted <= batch.tensors.keys()
            used |= wanted
        assert {place.shard for place in batch.tensors.values()} == batch.shards.keys()
        assert all(batch.tensors[out] == job.plan.tensors[out] for out in batch.tensors)
    assert sum(len(batch.tensors) for batch in cut) == len(job.plan.tensors) == len(used)


def test_a_batch_is_small_whatever_the_plan(job):
    engine = PostEngine()
    execute(job.plan, lambda *_: None, engine=engine)
    whole = len(pickle.dumps(job.plan))
    assert max(size for _, _, size in engine.sizes) < whole / 5
    assert max(size / units for _, units, size in engine.sizes) < 4000


def test_a_cluster_run_is_resumed_here_and_a_local_run_there(job, local):
    for first, second in ((PostEngine(stop_after=4), LocalEngine(2)), (LocalEngine(1), PostEngine())):
        with pytest.raises(Stop):
            execute(job.plan, lambda *_: None, engine=first, progress=stopping_after(9))
        result = execute(job.plan, lambda *_: None, engine=second)
        assert result.resumed >= 4
        assert sha256s(job.plan.output) == local
        for path in job.plan.output.iterdir():
            path.unlink()
        job.plan.output.rmdir()


def stopping_after(calls):
    """A progress callback that ends the run at its turn."""
    left = [calls]

    def progress(_):
        left[0] -= 1
        if left[0] < 0:
            raise Stop

    return progress


def test_what_workers_synced_is_believed_on_another_machine(job, local, monkeypatch):
    with pytest.raises(Stop):
        execute(job.plan, lambda *_: None, engine=PostEngine(stop_after=6))
    lines = (partial_of(job.plan.output) / ".requant" / "journal.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines[1:]]
    assert len(records) >= 6
    assert all(record["synced"] for record in records)
    monkeypatch.setattr("requant.convert.journal.boot_id", lambda: "another machine")
    again = PostEngine()
    execute(job.plan, lambda *_: None, engine=again)
    assert sha256s(job.plan.output) == local
    assert sum(units for _, units, _ in again.sizes) <= len(job.plan.units) - len(records)


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("version", "9.9", EnvironmentFault, r"has requant .*, the driver 9\.9\n  -> install the same version"),
        ("root", "/nowhere", EnvironmentFault, r"does not see /nowhere/model.*\n  -> .*every node mounts"),
        ("token", "/nowhere/run-1", EnvironmentFault, r"does not see /nowhere/run-1"),
        ("sources", {"model-00001-of-00003.safetensors": 5}, SourceError, r"bytes on node .*, the plan says 5"),
    ],
)
def test_a_node_that_sees_something_else_is_named_and_writes_nothing(job, field, value, error, message):
    engine = PostEngine(tamper=lambda batch: batch._replace(**{field: value}))
    with pytest.raises(error, match=message):
        execute(job.plan, lambda *_: None, engine=engine)
    shards = [partial_of(job.plan.output) / f"{shard.file}.part" for shard in job.plan.shards]
    data = b"".join(path.read_bytes()[shard_begin(path) :] for path in shards)
    assert data == bytes(len(data))


def shard_begin(path):
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_a_worker_whose_run_is_over_does_not_write_into_the_next(kit, job, monkeypatch):
    """Its token is removed before anything else is touched; it looks for it after each file it opens."""
    folder = kit.tmp / "next"
    folder.mkdir()
    for shard in job.plan.shards:
        (folder / f"{shard.file}.part").write_bytes(b"new" * 100)
    (folder / "token").touch()
    batch = next(batches(job.plan, range(3), 10**9, folder, folder / "token"))
    monkeypatch.setattr(ray_task, "_check_node", lambda batch, node: Path(batch.token).unlink())
    report = run_batch(batch)
    assert (report.fault.kind, report.fault.code, report.units) == ("OSError", errno.ENOENT, [])
    assert all(path.read_bytes() == b"new" * 100 for path in folder.glob("*.part"))


def test_a_new_run_removes_the_tokens_of_killed_ones(job, local):
    records = partial_of(job.plan.output) / ".requant"
    with pytest.raises(Stop):
        execute(job.plan, lambda *_: None, engine=PostEngine(stop_after=2))
    (records / "run-of-a-killed-driver").touch()
    seen = []
    execute(job.plan, lambda *_: seen.append(sorted(p.name for p in records.glob("run-*"))), engine=PostEngine())
    assert seen == [[]]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.ESTALE])
def test_disk_errors_of_a_worker_keep_their_number(job, code, monkeypatch):
    def broken(*_):
        raise OSError(code, os.strerror(code), "/data/model.part")

    monkeypatch.setattr(ray_task, "run_unit", broken)
    with pytest.raises(IncompleteError, match="full" if code == errno.ENOSPC else os.strerror(code)):
        execute(job.plan, lambda *_: None, engine=PostEngine())
    report = run_batch(batch_of(job))
    assert report.fault.passing is (code != errno.ENOSPC)


def batch_of(job):
    """A batch of one unit, of a run that is on."""
    partial = partial_of(job.plan.output)
    token = partial / ".requant" / "run-x"
    token.touch()
    batch = next(batches(job.plan, [0], 1, partial, token))
    assert isinstance(batch, Batch)
    return batch


def test_a_bad_source_is_the_same_error_as_locally(kit, job, monkeypatch):
    path = kit.tmp / "src" / "model-00002-of-00003.safetensors"
    raw = bytearray(path.read_bytes())
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    name = next(n for n in header if n.endswith(".scale") and ".experts." in n)
    raw[8 + int.from_bytes(raw[:8], "little") + header[name]["data_offsets"][0]] = 255
    stat = path.stat()
    path.write_bytes(raw)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    texts = []
    for engine in (LocalEngine(1), PostEngine()):
        with pytest.raises(SourceError, match="NaN") as caught:
            execute(job.plan, lambda *_: None, engine=engine)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


# --- without the extra ------------------------------------------------------------------------------------------------


def test_a_missing_extra_is_one_clear_line_and_nothing_is_begun(kit, monkeypatch):
    source = kit.dsv4()
    text = kit.manifest_text(source, kit.tmp / "out", kit.EXPERTS)
    (kit.tmp / "m.yaml").write_text(text + "execute: {engine: ray}\n")
    job = prepare(str(kit.tmp / "m.yaml"))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EnvironmentFault, match=r"needs Ray, which is not installed\n  -> pip install 'requant\[ray\]'"):
        run_job(job)
    assert not partial_of(job.plan.output).exists()


def test_the_engine_is_the_manifests(kit, monkeypatch):
    (kit.tmp / "m.yaml").write_text(kit.manifest_text(kit.dsv4(), kit.tmp / "out", kit.EXPERTS))
    monkeypatch.setattr(engine_ray, "require_ray", lambda: None)
    sets = ["execute.engine=ray", "execute.ray_address=ray://head:10001", "execute.workers=7"]
    engine = engine_of(prepare(str(kit.tmp / "m.yaml"), sets).plan)
    assert (engine.name, engine.address, engine.workers) == ("ray", "ray://head:10001", 7)
    assert 300 * 2**20 < engine.memory < 400 * 2**20
    assert engine_of(prepare(str(kit.tmp / "m.yaml"), ["execute.workers=3"]).plan) == LocalEngine(3)


def test_a_local_conversion_never_imports_ray(kit):
    """A `ray` that leaves a mark when it is imported: it does for engine ray, and not otherwise."""
    trap = kit.tmp / "trap"
    trap.mkdir()
    mark = kit.tmp / "imported"
    (trap / "ray.py").write_text(f"open({str(mark)!r}, 'w').close()\nraise ModuleNotFoundError('no', name='ray')\n")
    (kit.tmp / "m.yaml").write_text(kit.manifest_text(kit.dsv4(), kit.tmp / "out", kit.EXPERTS))
    path = os.pathsep.join([str(trap), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [*CLI, "run", str(kit.tmp / "m.yaml"), "--quiet"]
    options = {"env": {**os.environ, "PYTHONPATH": path}, "capture_output": True, "text": True}
    done = subprocess.run(command, check=False, **options)
    assert (done.returncode, mark.exists()) == (0, False), done.stderr
    done = subprocess.run([*command, "--force", "--set", "execute.engine=ray"], check=False, **options)
    assert (done.returncode, mark.exists()) == (6, True)
    assert done.stderr.startswith("error: execute.engine: ray needs Ray")
