"""Engine ray on clusters of several nodes: the same bytes, whichever node, driver or engine is lost on the way."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from requant.convert import engine as engine_module
from requant.convert import engine_ray
from requant.convert import plan as plan_module
from requant.convert.engine import LocalEngine
from requant.convert.engine_ray import RayEngine
from requant.convert.execute import execute, partial_of
from requant.convert.pipeline import prepare, run_job
from requant.convert.ray_task import run_batch
from requant.convert.runrecord import RECORD_FILE
from requant.manifests.errors import EnvironmentFault, SourceError

pytestmark = pytest.mark.ray

MEMORY = 100 * 2**20
DRIVER = """
import os, signal, sys
from requant.convert import engine, plan
from requant.convert.pipeline import prepare, run_job

plan.COPY_BATCH_PIECES = 4
engine.LEAST_BATCH = 3000
left = int(sys.argv[3])

def progress(nbytes):
    global left
    left -= nbytes > 0
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)

run_job(prepare(sys.argv[1], ["execute.engine=ray", "execute.ray_address=" + sys.argv[2]]), progress=progress)
"""


def sha256s(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.glob("*.safetensors"))}


class Stop(Exception):  # noqa: N818 - not an error
    """Ends a run in the middle."""


def stopping_after(tasks):
    left = [tasks]

    def progress(nbytes):
        left[0] -= nbytes > 0
        if left[0] < 0:
            raise Stop

    return progress


@pytest.fixture
def job(kit, monkeypatch):
    """Some forty units, in about as many tasks, in three output shards."""
    monkeypatch.setattr(plan_module, "COPY_BATCH_PIECES", 4)
    monkeypatch.setattr(engine_module, "LEAST_BATCH", 3000)
    source = kit.dsv4(shards=3, experts=4, layers=3, low=96, high=116)
    (kit.tmp / "job.yaml").write_text(kit.manifest_text(source, kit.tmp / "out", kit.EXPERTS, shard_size="36KB"))
    return prepare(str(kit.tmp / "job.yaml"))


@pytest.fixture
def local(kit, job):
    """sha256s of a run by threads, and the counts in its lock."""
    run_job(job)
    found = sha256s(job.plan.output), json.loads((job.plan.output / "requant.lock.json").read_text())["groups"]
    job.plan.output.rename(kit.tmp / "reference")
    return found


@pytest.fixture
def engine(cluster):
    return RayEngine(cluster.address, None, MEMORY)


def test_two_nodes_give_the_same_bytes_and_each_stands_in_the_record(kit, cluster, job, local):
    seen = []
    sets = ["execute.engine=ray", f"execute.ray_address={cluster.address}"]
    result = run_job(prepare(str(kit.tmp / "job.yaml"), sets), progress=seen.append)
    assert sha256s(job.plan.output) == local[0]
    assert json.loads((job.plan.output / "requant.lock.json").read_text())["groups"] == local[1]
    assert sum(seen) == job.plan.bytes_in
    record = json.loads((job.plan.output / RECORD_FILE).read_text())
    assert record == json.loads(json.dumps(result.record))
    assert record["engine"] == "ray"
    assert len(record["nodes"]) == 2
    assert all(node["tasks"] >= 1 for node in record["nodes"])
    assert sum(node["bytes"] for node in record["nodes"]) == job.plan.bytes_in


def test_a_node_killed_in_the_middle_of_a_task_costs_nothing_but_time(kit, cluster, job, local, engine, monkeypatch):
    """The victim has written half of its batch and hangs when its node is killed; the other node does all the rest."""
    from ray import cloudpickle

    victim = cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    cluster.wait_for_nodes()
    mark, doomed = kit.tmp / "mark", victim.node_id

    def task(batch):
        import ray as worker_ray

        node = worker_ray.get_runtime_context().get_node_id()
        if node == doomed:
            run_batch(batch._replace(units=batch.units[: len(batch.units) // 2 + 1]), node)
            mark.touch()
            time.sleep(600)
        time.sleep(0.05)  # so that the victim gets its share
        return run_batch(batch, node)

    def kill():
        while not mark.exists():
            time.sleep(0.02)
        cluster.remove_node(victim, allow_graceful=False)

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setattr(engine_ray, "_on_a_node", task)
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        result = execute(job.plan, lambda *_: None, engine=engine)
    finally:
        mark.touch()
        killer.join()
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert sha256s(job.plan.output) == local[0]
    names = {node["node"].rpartition("-")[2] for node in result.record["nodes"]}
    assert names
    assert doomed[:6] not in names
    assert sum(node["bytes"] for node in result.record["nodes"]) == job.plan.bytes_in


@pytest.mark.parametrize("resume", ["local", "ray"])
def test_a_killed_driver_is_resumed_here_or_on_the_cluster(kit, cluster, job, local, engine, resume):
    script = kit.tmp / "driver.py"
    script.write_text(DRIVER)
    command = [sys.executable, str(script), str(kit.tmp / "job.yaml"), cluster.address, "6"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not job.plan.output.exists()
    assert len(list((partial_of(job.plan.output) / ".requant").glob("run-*"))) == 1
    result = execute(job.plan, lambda *_: None, engine=engine if resume == "ray" else LocalEngine(2))
    assert 6 <= result.resumed < len(job.plan.units)
    assert sha256s(job.plan.output) == local[0]


def test_a_local_run_is_finished_by_the_cluster(job, local, engine):
    with pytest.raises(Stop):
        execute(job.plan, lambda *_: None, workers=1, progress=stopping_after(9))
    result = execute(job.plan, lambda *_: None, engine=engine)
    assert 9 <= result.resumed < len(job.plan.units)
    assert sha256s(job.plan.output) == local[0]


def test_never_more_tasks_are_out_than_twice_the_places(job, local, engine, monkeypatch):
    import ray

    deadline = time.monotonic() + 60
    while sum(n["Alive"] for n in ray.nodes()) > 3 and time.monotonic() < deadline:  # one was killed a moment ago
        time.sleep(0.5)
    most = []
    real = engine_ray._Tasks._submit

    def submit(self, batch):
        real(self, batch)
        most.append(len(self._pending))

    monkeypatch.setattr(engine_ray._Tasks, "_submit", submit)
    execute(job.plan, lambda *_: None, engine=engine)
    assert max(most) == 4
    assert len(most) > 8


def test_a_bad_source_ends_the_run_with_the_local_message(kit, job, engine):
    path = kit.tmp / "src" / "model-00002-of-00003.safetensors"
    raw = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    name = next(n for n in header if n.endswith(".scale") and ".experts." in n)
    raw[start + header[name]["data_offsets"][0]] = 255
    stat = path.stat()
    path.write_bytes(raw)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(SourceError, match=rf"{name}: E8M0 scale 255 \(NaN\) at row 0, block 0"):
        execute(job.plan, lambda *_: None, engine=engine)
    assert not list((partial_of(job.plan.output) / ".requant").glob("run-*"))


def test_a_cluster_too_small_is_said_before_a_task_is_sent(job, cluster):
    with pytest.raises(EnvironmentFault, match=r"offers a CPU and 1048576 MiB of memory\n  -> "):
        execute(job.plan, lambda *_: None, engine=RayEngine(cluster.address, None, 2**40))


def test_a_transient_disk_error_is_tried_again_and_a_lasting_one_stops_resumably(kit, job, local, engine, monkeypatch):
    from ray import cloudpickle
    from requant.convert.ray_task import Fault

    folder = kit.tmp / "failures"
    folder.mkdir()
    allowed = [3]

    def task(batch):
        failures = len(list(folder.iterdir()))
        if batch.units[0][0] == 0 and failures < allowed[0]:
            (folder / str(failures)).touch()
            report = run_batch(batch, "x")
            return report._replace(units=[], fault=Fault("OSError", "Stale file handle", "n: f", "", 116))
        return run_batch(batch, "x")

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setattr(engine_ray, "_on_a_node", task)
    try:
        execute(job.plan, lambda *_: None, engine=engine)
        assert len(list(folder.iterdir())) == 3
        assert sha256s(job.plan.output) == local[0]
        job.plan.output.rename(kit.tmp / "second")
        allowed[0] = 100
        with pytest.raises(engine_ray.IncompleteError, match="Stale file handle"):
            execute(job.plan, lambda *_: None, engine=engine)
        assert len(list(folder.iterdir())) == 3 + 1 + engine_ray.RETRIES
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
