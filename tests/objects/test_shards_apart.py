"""Shards made by workers that share nothing: pickled tasks, done in this process; a cluster of one, less Ray."""

import hashlib
import json
import pickle
import shutil
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from requant.convert import engine_shards, pipeline, shard_task
from requant.convert import plan as plan_module
from requant.convert.engine_ray import RayEngine
from requant.convert.windows import shards_of, units_by_shard
from requant.manifests.errors import EnvironmentFault, IncompleteError

TARGET = "memory://results/tiny"


class Stop(Exception):  # noqa: N818 - not an error
    """Ends a run in the middle."""


@dataclass(frozen=True)
class Post(RayEngine):
    """Sends tasks through pickle. stop_after: that many; sent: numbers of the shards."""

    stop_after: int | None = None
    sent: list = field(default_factory=list)

    @contextmanager
    def connected(self):
        yield None

    def run_tasks(self, ray, items, enter, shared):
        kit = pickle.loads(pickle.dumps(shared))
        for number, item in enumerate(items):
            if number == self.stop_after:
                raise Stop
            self.sent.append(item.number)
            report = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(item)).run("abcdef012345", kit)))
            if report.fault:
                raise report.fault.exception()
            enter(item, report)


@dataclass(frozen=True)
class MakeJudge:
    """The command line's, as what can be pickled without Ray's help."""

    def __call__(self, source, view, record):
        from requant.validate.streamed import Judge

        return Judge(source, view, record, None)


@pytest.fixture
def job(memory, kit, monkeypatch):
    """A function: arguments of Post -> (job, the engine that its runs use); with the ordinary sha256s as .whole."""
    monkeypatch.setattr(plan_module, "COPY_BATCH_PIECES", 4)
    source = kit.source()
    url = memory.put(source)
    assert kit.requant("run", kit.manifest(source, "ordinary", shard_size="4kB"), "--quiet") == 0

    def make(target=TARGET, **more):
        post = Post(None, None, 0, **more)
        monkeypatch.setattr(pipeline, "engine_of", lambda _: post)
        path = kit.manifest(url, target=target, shard_size="4kB", stream=True, engine="ray")
        return pipeline.prepare(str(path)), post

    make.whole = kit.shas(kit.tmp / "ordinary")
    assert len(make.whole) > 6
    return make


def run(job):
    return pipeline.run_job(job, make_judge=MakeJudge())


def stored(memory):
    root = "/results/tiny/"
    paths = [path for path in memory.fs.find(root) if path.endswith(".safetensors")]
    return {path.removeprefix(root): hashlib.sha256(memory.fs.cat_file(path)).hexdigest() for path in sorted(paths)}


def judged(folder):
    numerics = json.loads((folder / ".requant-local" / "numerics.json").read_text())["stages"][0]
    return numerics["status"], numerics["reason"], numerics["data"], numerics["findings"]


def test_every_shard_is_made_by_itself_to_the_same_bytes_and_judged(memory, kit, job):
    made, post = job()
    result = run(made)
    assert post.sent == list(range(len(job.whole)))
    assert stored(memory) == job.whole
    assert len(result.counts) >= len(made.plan.units)
    lock = json.loads((kit.tmp / "out" / "requant.lock.json").read_text())
    ordinary = json.loads((kit.tmp / "ordinary" / "requant.lock.json").read_text())
    assert lock["groups"] == ordinary["groups"]
    assert lock["plan_sha256"] == ordinary["plan_sha256"]
    status, reason, data, findings = judged(kit.tmp / "out")
    assert status == "passed"
    assert findings == []
    assert "14 converted and 6 copied tensors" in reason
    expected = kit.requant("validate", kit.tmp / "ordinary", "--quiet")
    assert expected == 0
    assert data == kit.signoff(kit.tmp / "ordinary")["stages"][1]["data"]


def test_a_unit_at_the_border_of_two_shards_is_done_for_both_and_entered_once(job, monkeypatch):
    from requant.convert.journal import Journal
    from requant.convert.stream import streamed_source

    made, _ = job()
    plan = streamed_source(made.plan, made.remote)
    border = [i for i, unit in enumerate(plan.units) if len(shards_of(plan, unit)) > 1]
    assert border, "this checkpoint has some"
    members = units_by_shard(plan)
    for index in border:
        assert all(index in members[shard] for shard in shards_of(plan, plan.units[index]))
    assert {i for units in members.values() for i in units} == set(range(len(plan.units)))
    entered, real = [], Journal.unit

    def enter(self, index, counts, **more):
        entered.append(index)
        real(self, index, counts, **more)

    monkeypatch.setattr(Journal, "unit", enter)
    run(made)
    assert sorted(entered) == list(range(len(plan.units)))


@pytest.mark.parametrize("stop_after", [1, 4, 7])
def test_an_interrupted_run_makes_only_what_is_missing(memory, kit, job, stop_after):
    made, post = job(stop_after=stop_after)
    with pytest.raises(Stop):
        run(made)
    assert len(stored(memory)) == stop_after
    made, post = job()
    run(made)
    assert post.sent == list(range(stop_after, len(job.whole)))
    assert stored(memory) == job.whole
    assert judged(kit.tmp / "out")[0] == "passed"


def test_a_driver_that_lost_its_journal_or_judgement_makes_the_shards_again(memory, kit, job):
    made, _ = job(stop_after=5)
    with pytest.raises(Stop):
        run(made)
    (kit.tmp / "out.stream" / "numerics.jsonl").unlink()
    made, post = job()
    run(made)
    assert set(range(5, len(job.whole))) <= set(post.sent)
    assert len(post.sent) > len(job.whole) - 5
    assert stored(memory) == job.whole
    assert judged(kit.tmp / "out")[0] == "passed"
    shutil.rmtree(kit.tmp / "out")
    memory.fs.rm("/results", recursive=True)
    made, post = job(stop_after=3)
    with pytest.raises(Stop):
        run(made)
    shutil.rmtree(kit.tmp / "out.partial")  # another machine
    made, post = job()
    run(made)
    assert post.sent == list(range(len(job.whole)))
    assert stored(memory) == job.whole


def test_a_shard_that_a_local_run_began_is_made_from_its_beginning(memory, kit, job, monkeypatch):
    made, _ = job()
    left = [9]

    def stopping(nbytes):
        left[0] -= nbytes > 0
        if left[0] < 0:
            raise Stop

    from requant.convert.engine import LocalEngine

    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "engine_of", lambda _: LocalEngine(1))
        with pytest.raises(Stop):
            pipeline.run_job(made, make_judge=MakeJudge(), progress=stopping)
    made, post = job()
    result = run(made)
    assert result.resumed > 0
    assert 0 not in post.sent
    assert stored(memory) == job.whole
    assert judged(kit.tmp / "out")[0] == "passed"


def test_another_version_on_a_node_is_named(job, monkeypatch):
    made, _ = job()
    monkeypatch.setattr(shard_task, "version", lambda _: "9.9")
    with pytest.raises(EnvironmentFault, match=r"node .*-abcdef: has requant 9.9, the driver "):
        run(made)


def test_a_node_without_the_disk_is_named(job, monkeypatch):
    made, _ = job()
    real = shutil.disk_usage
    monkeypatch.setattr(shard_task.shutil, "disk_usage", lambda path: real(path)._replace(free=10))
    monkeypatch.setattr(pipeline, "execute", pipeline.execute)
    with pytest.raises(EnvironmentFault, match="bytes"):
        run(made)


def test_a_worker_does_not_write_into_an_output_that_was_begun_anew(memory, job, monkeypatch):
    made, _ = job()
    real = engine_shards._tasks

    def tasks(*arguments):
        for number, item in enumerate(real(*arguments)):
            if number == 2:
                memory.fs.pipe_file("/results/tiny/.requant/begun.json", b'{"plan": "another"}')
            yield item

    monkeypatch.setattr(engine_shards, "_tasks", tasks)
    with pytest.raises(IncompleteError, match="was begun anew by another run"):
        run(made)
    assert len(stored(memory)) == 2


def test_a_shard_whose_upload_failed_is_judged_again_by_the_same_process(memory, kit, job, monkeypatch):
    from requant.convert.sinks import StoreSink

    real, failures = StoreSink.put, []

    def put(self, path, name):
        if len(failures) < 3:
            failures.append(name)
            raise IncompleteError("the network is away")
        return real(self, path, name)

    def run_tasks(self, ray, items, enter, shared):
        for item in items:
            report = item.run("abcdef012345", shared)
            while report.fault and report.fault.passing:
                report = item.run("abcdef012345", shared)
            enter(item, report)

    monkeypatch.setattr(StoreSink, "put", put)
    monkeypatch.setattr(Post, "run_tasks", run_tasks)
    made, _ = job()
    run(made)
    assert len(failures) == 3
    assert stored(memory) == job.whole
    status, reason, _, findings = judged(kit.tmp / "out")
    assert (status, findings) == ("passed", [])
    assert "14 converted and 6 copied tensors" in reason


def test_a_shared_folder_gets_a_shard_whole_or_not_at_all(tmp_path):
    partial, token, made = tmp_path / "out.partial", tmp_path / "token", tmp_path / "made"
    partial.mkdir()
    made.write_bytes(b"whole")
    folder = shard_task.SharedFolder(str(partial), str(token))
    with pytest.raises(FileNotFoundError):
        folder.put(made, "model.safetensors")
    assert list(partial.iterdir()) == []
    token.touch()
    assert folder.put(made, "model.safetensors").size == 5
    assert {p.name: p.read_bytes() for p in partial.iterdir()} == {"model.safetensors.part": b"whole"}


def test_a_run_that_ends_during_the_copy_leaves_no_half(tmp_path, monkeypatch):
    partial, token, made = tmp_path / "out.partial", tmp_path / "token", tmp_path / "made"
    partial.mkdir()
    token.touch()
    made.write_bytes(b"whole")
    real = shard_task.copy_range
    monkeypatch.setattr(shard_task, "copy_range", lambda *a, **k: (real(*a, **k), token.unlink()))
    with pytest.raises(FileNotFoundError):
        shard_task.SharedFolder(str(partial), str(token)).put(made, "model.safetensors")
    assert list(partial.iterdir()) == []


def test_nothing_stays_on_a_node(job, monkeypatch, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(shard_task.tempfile, "gettempdir", lambda: str(scratch))
    killed = scratch / f"requant-shard-run-1@{shard_task._space()}-999999999"
    killed.mkdir()
    (killed / "left").write_bytes(b"by a process that was killed")
    elsewhere = scratch / f"requant-shard-run-1@another-{shard_task._space()}-999999999"
    elsewhere.mkdir()  # of a process on a node that shares this TMPDIR: who knows whether it lives
    made, _ = job()
    run(made)
    assert elsewhere.exists()
    (home,) = (path for path in scratch.iterdir() if path != elsewhere)
    assert sorted(path.name for path in home.iterdir()) == ["judged.jsonl", "source", "view"]
    assert sum(path.lstat().st_blocks for path in home.rglob("*") if path.is_file()) * 512 < 400_000
