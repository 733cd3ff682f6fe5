"""Engine ray without a shared file system: nodes that have nothing in common but the Hub, or an object store."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import hub_server
import pytest
import s3_server
from module_files import load

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")]

SOURCE, REPO, PR = "upstream/tiny", "tester/tiny-mxfp4", "refs/pr/1"
DRIVER = """
import os, signal, sys
from requant.convert import pipeline, stream, uploads
from requant.convert.cli import main

stream.WINDOW_MIN, uploads.SMALL_BYTES = 1, 1000
left, real = int(sys.argv[1]), pipeline.execute

def execute(*args, progress, **more):
    def counted(nbytes):
        global left
        progress(nbytes)
        left -= nbytes > 0
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, progress=counted, **more)

pipeline.execute = execute
main(sys.argv[2:])
"""


_objects = load("objects/conftest.py")


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """A Hub and an S3 server, and the environment that leads to them; a node takes over the one it is started in."""
    base = tmp_path_factory.mktemp("servers")
    with hub_server.HubServer(base / "hub") as hub, s3_server.S3Server() as s3, pytest.MonkeyPatch.context() as patched:
        for name, value in s3.environ().items():
            patched.setenv(name, value)
        patched.setenv("HF_ENDPOINT", hub.url)
        patched.setenv("HF_TOKEN", hub.token)
        patched.setenv("HF_HUB_DISABLE_XET", "1")
        patched.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        yield hub, s3


@pytest.fixture(scope="module")
def apart(servers):
    """A head without processors and two nodes of one each, started where the servers are known."""
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 80 * 2**20})
    for _ in range(2):
        made.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    ray.init(address=made.address, log_to_driver=False, logging_level="error")
    made.wait_for_nodes()
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def client(servers, tmp_path, monkeypatch):
    """The driver's side: caches of its own, windows that a tiny checkpoint needs several of."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _http, disable_progress_bars
    from requant.convert import objects, stream, uploads

    disable_progress_bars()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(stream, "WINDOW_MIN", 1)
    monkeypatch.setattr(uploads, "SMALL_BYTES", 1000)
    objects._filesystem.cache_clear()
    hub, s3 = servers
    hub.repos.clear()
    hub.requests.clear()
    s3.reset()
    s3.client.create_bucket(Bucket="out")
    yield servers
    _http.close_session()


@pytest.fixture
def job(client, tmp_path):
    """The source on the Hub and in a bucket; the sha256s of the ordinary way; a maker of manifests for both."""
    kit = _objects.Kit(tmp_path)
    source = kit.source(layers=4)
    client[0].put_folder(SOURCE, source)
    client[1].put_folder("models", "tiny", source)
    assert kit.requant("run", kit.manifest(source, "ordinary", shard_size="12kB"), "--quiet") == 0
    kit.whole = kit.shas(tmp_path / "ordinary")
    assert len(kit.whole) > 6
    return kit


def manifest(kit, way, cluster, engine="ray", output="out"):
    """The manifest of a way: hub (to a pull request), s3 (to a bucket), or mixed (from the Hub to the bucket)."""
    execute = {"stream": True, "engine": engine, **({"ray_address": cluster.address} if engine == "ray" else {})}
    if way == "hub":
        if engine == "local":
            execute["max_disk"] = 150_000
        path = kit.manifest(kit.tmp / "src", output, shard_size="12kB", publish={"repo": REPO}, **execute)
        path.write_text(path.read_text().replace(f"path: {kit.tmp / 'src'}", f"repo: {SOURCE}"))
        return path, ("--push",)
    if way == "mixed":
        path = kit.manifest(kit.tmp / "src", output, target="s3://out/tiny", shard_size="12kB", **execute)
        path.write_text(path.read_text().replace(f"path: {kit.tmp / 'src'}", f"repo: {SOURCE}"))
        return path, ()
    return kit.manifest("s3://models/tiny", output, target="s3://out/tiny", shard_size="12kB", **execute), ()


def arrived(servers, way):
    """(sha256s of the shards, the sign-off) where they were sent."""
    hub, s3 = servers
    if way == "hub":
        tree = hub.tree(REPO, PR)
        shas = {name: entry.lfs for name, entry in sorted(tree.items()) if name.endswith(".safetensors")}
        return shas, json.loads(hub.content(REPO, "requant.signoff.json", PR))
    names = s3.objects("out", "tiny")
    shas = {n: hashlib.sha256(s3.content("out", f"tiny/{n}")).hexdigest() for n in names if n.endswith(".safetensors")}
    return shas, json.loads(s3.content("out", "tiny/requant.signoff.json"))


def check(servers, kit, way, output="out"):
    """Everything arrived, signed off, once."""
    shas, signoff = arrived(servers, way)
    assert shas == kit.whole
    assert signoff["signed_off"] is True
    assert {n: f["sha256"] for n, f in signoff["files"].items() if n in shas} == shas
    if way == "hub":
        assert len(servers[0].repos[REPO].pulls) == 1
        assert len(servers[0].asked("^POST .*/commit/")) == 1
    else:
        assert ".requant/begun.json" not in servers[1].objects("out", "tiny")


@pytest.mark.parametrize("way", ["hub", "s3", "mixed"])
def test_nodes_fetch_and_send_by_themselves_and_the_result_is_signed_off(apart, servers, job, way):
    path, push = manifest(job, way, apart)
    assert job.requant("convert", path, *push, "--quiet") == 0
    check(servers, job, way)
    assert not list((job.tmp / "out").glob("*.safetensors")), "the driver never held one"
    record = json.loads((job.tmp / "out" / ".requant-local" / "run.json").read_text())
    assert record["engine"] == "ray"
    assert len(record["nodes"]) == 2
    judged = json.loads((job.tmp / "out" / "requant.signoff.json").read_text())["stages"]
    assert job.requant("validate", job.tmp / "ordinary", "--quiet") == 0
    expected = json.loads((job.tmp / "ordinary" / "requant.signoff.json").read_text())["stages"]
    for ours, theirs in zip(judged, expected, strict=True):
        assert (ours["stage"], ours["data"]) == (theirs["stage"], theirs["data"])


def test_from_the_hub_into_a_folder_that_all_see(apart, servers, job):
    path = manifest(job, "hub", apart)[0]
    assert job.requant("convert", path, "--quiet") == 0
    assert job.shas(job.tmp / "out") == job.whole
    assert json.loads((job.tmp / "out" / "requant.signoff.json").read_text())["signed_off"] is True
    assert not [p.name for p in (job.tmp / "out").iterdir() if ".part" in p.name]


@pytest.mark.parametrize("way", ["hub", "s3"])
@pytest.mark.parametrize(("first", "second"), [("ray", "local"), ("local", "ray"), ("ray", "ray")])
def test_what_one_engine_began_another_ends(apart, servers, job, way, first, second):
    path, push = manifest(job, way, apart, first)
    driver = job.tmp / "driver.py"
    driver.write_text(DRIVER)
    command = [sys.executable, str(driver), "5", "convert", str(path), *push, "--quiet"]
    environ = {**os.environ, "HF_HUB_CACHE": str(job.tmp / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == -signal.SIGKILL, done.stderr
    requests = len(servers[1].requests)
    before = set(servers[1].objects("out", "tiny"))
    path, push = manifest(job, way, apart, second)
    assert job.requant("convert", path, *push, "--quiet") == 0
    check(servers, job, way)
    if way == "s3" and first == "ray":
        again = {r.line.split("?")[0].rpartition("/")[2] for r in servers[1].requests[requests:] if "PUT" in r.line}
        kept = {name for name in before if name.endswith(".safetensors")} - again
        assert len(kept) >= 3, "shards that had arrived are not sent again"


@pytest.mark.parametrize("way", ["hub", "s3"])
def test_a_node_killed_in_the_middle_of_a_shard_costs_nothing_but_time(apart, servers, job, way, monkeypatch):
    """The victim has begun to upload when its node dies; another node makes the shard again."""
    from ray import cloudpickle
    from requant.convert import engine_ray

    victim = apart.add_node(num_cpus=1, object_store_memory=80 * 2**20)
    apart.wait_for_nodes()
    mark, doomed = job.tmp / "mark", victim.node_id

    def task(item, *shared):
        import ray as worker_ray

        node = worker_ray.get_runtime_context().get_node_id()
        if node == doomed:
            item.run(node, *shared)
            mark.touch()
            time.sleep(600)
        time.sleep(0.3)  # so that the victim gets its share
        return item.run(node, *shared)

    def kill():
        while not mark.exists():
            time.sleep(0.02)
        apart.remove_node(victim, allow_graceful=False)

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setattr(engine_ray, "_on_a_node", task)
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        path, push = manifest(job, way, apart)
        assert job.requant("convert", path, *push, "--quiet") == 0
    finally:
        killed = mark.exists()
        mark.touch()
        killer.join()
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert killed
    check(servers, job, way)
    record = json.loads((job.tmp / "out" / ".requant-local" / "run.json").read_text())
    assert doomed[:6] not in {node["node"].rpartition("-")[2] for node in record["nodes"]}


def test_a_store_that_fails_on_the_nodes_ends_the_run_with_one_error_and_it_goes_on(apart, servers, job, capsys):
    fault = s3_server.Fault
    servers[1].faults = [fault("^PUT /out/tiny/model-00004", status=403, code="AccessDenied", times=10**6)]
    path, _ = manifest(job, "s3", apart)
    assert job.requant("convert", path, "--quiet") == 6
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith("error: s3://out/tiny: writing model-00004-of-")
    assert not {"config.json", "requant.lock.json"} & set(servers[1].objects("out", "tiny"))
    servers[1].faults = []
    assert job.requant("convert", path, "--quiet") == 0
    check(servers, job, "s3")


def test_a_disk_limit_that_no_shard_fits_is_refused(apart, servers, job, capsys):
    path, _ = manifest(job, "s3", apart)
    assert job.requant("convert", path, "--quiet", "--set", "execute.max_disk=10kB") == 2
    assert "allow more disk, or smaller shards" in capsys.readouterr().err


def test_no_credential_is_sent_through_the_cluster(apart, servers, job, monkeypatch):
    """What a task is made of holds none: each node finds its own."""
    from ray import cloudpickle
    from requant.convert import engine_ray

    sent = []
    real = engine_ray._Tasks._submit

    def submit(self, item):
        sent.append(cloudpickle.dumps(item))
        real(self, item)

    monkeypatch.setattr(engine_ray._Tasks, "_submit", submit)
    path, push = manifest(job, "hub", apart)
    assert job.requant("convert", path, *push, "--quiet") == 0
    assert len(sent) == len(job.whole)
    for secret in (os.environ["HF_TOKEN"], os.environ["AWS_SECRET_ACCESS_KEY"]):
        assert not [data for data in sent if secret.encode() in data]
