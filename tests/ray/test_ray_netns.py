"""Two Ray nodes in network namespaces of their own, joined by a wire to each other and to an S3 server in a third.

    rq-store  10.201.77.1   bridge; the S3 server
    rq-head   10.201.77.2   Ray's head, one processor; the driver
    rq-node   10.201.77.3   the other node, one processor; with a /tmp of its own it sees no file of the driver

Needs root: namespaces, links and mounts are made, and are gone afterwards.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from module_files import load

STORE, HEAD, NODE = (f"10.201.77.{host}" for host in (1, 2, 3))
PORT, S3_PORT = 6391, 5391
ENVIRON = {
    "AWS_ENDPOINT_URL": f"http://{STORE}:{S3_PORT}",
    "AWS_ACCESS_KEY_ID": "AKIATESTTESTTESTTEST",
    "AWS_SECRET_ACCESS_KEY": "secret-key-of-the-tests-0123456789",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "of-the-tests-" + 40 * "0",
    "RAY_health_check_failure_threshold": "2",  # a node that does not answer is lost after seconds, not a minute
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_grpc_client_keepalive_time_ms": "10000",  # else a silent connection is given up after seven minutes
    "RAY_grpc_client_keepalive_timeout_ms": "5000",
}
UPLOAD = """
import sys, pathlib, boto3
s3 = boto3.client("s3")
for bucket in ("models", "out"):
    s3.create_bucket(Bucket=bucket)
folder = pathlib.Path(sys.argv[1])
for path in folder.rglob("*"):
    if path.is_file():
        s3.upload_file(str(path), "models", f"tiny/{path.relative_to(folder).as_posix()}")
"""
DOWNLOAD = """
import sys, json, hashlib, boto3
s3 = boto3.client("s3")
names = [e["Key"] for e in s3.list_objects_v2(Bucket="out", Prefix="tiny/").get("Contents", [])]
body = {n.partition("/")[2]: s3.get_object(Bucket="out", Key=n)["Body"].read() for n in names}
print(json.dumps({n: hashlib.sha256(b).hexdigest() for n, b in body.items()}))
"""


def why_not():
    """Why namespaces cannot be made here, or ""."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2"
    name = f"rq-probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return "this kernel or container makes no network namespaces"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


pytestmark = pytest.mark.ray


def sh(text):
    subprocess.run(["bash", "-euc", text], check=True, capture_output=True, text=True)


def within(space, *command):
    return ["ip", "netns", "exec", space, *command]


def taken_down():
    for space in ("rq-head", "rq-node", "rq-store"):
        subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


@contextmanager
def running(command, log, environ):
    """A process group for the time being."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environ, start_new_session=True)
    try:
        yield process
    finally:
        for sig in (15, 9):
            try:
                os.killpg(process.pid, sig)
            except ProcessLookupError:
                break
            time.sleep(1)
        process.wait()


def until(what, seconds=90):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if what():
            return
        time.sleep(0.3)
    raise AssertionError("did not come about in time")


@pytest.fixture(scope="module")
def spaces():
    """The three namespaces on one bridge."""
    if why := why_not():
        pytest.skip(why)
    taken_down()  # what a killed test left
    lines = ["ip netns add rq-store; ip -n rq-store link set lo up"]
    lines.append(f"ip -n rq-store link add br0 type bridge; ip -n rq-store addr add {STORE}/24 dev br0")
    lines.append("ip -n rq-store link set br0 up")
    for space, address in (("rq-head", HEAD), ("rq-node", NODE)):
        wire = space.replace("rq-", "w-")
        lines.append(f"ip netns add {space}; ip -n {space} link set lo up")
        lines.append(f"ip -n rq-store link add {wire} type veth peer name eth0 netns {space}")
        lines.append(f"ip -n rq-store link set {wire} master br0 up")
        lines.append(f"ip -n {space} addr add {address}/24 dev eth0; ip -n {space} link set eth0 up")
        lines.append(f"ip -n {space} route add default via {STORE}")
    try:
        sh("\n".join(lines))
        yield
    finally:
        taken_down()


@pytest.fixture
def cluster(spaces, tmp_path):
    """S3 server, head and node; (environment, a folder with a short name for Ray's sockets)."""
    clean = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    environ = {**clean, **ENVIRON, "TMPDIR": "/tmp"}
    environ.pop("RAY_ADDRESS", None)
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1", "--disable-usage-stats"]
    ray += [f"--object-store-memory={80 * 2**20}"]
    short = Path(tempfile.mkdtemp(prefix="rq", dir="/tmp"))
    head = [*ray, "--head", f"--node-ip-address={HEAD}", f"--port={PORT}", "--include-dashboard=false"]
    head += [f"--temp-dir={short}"]
    node = [*ray, f"--address={HEAD}:{PORT}", f"--node-ip-address={NODE}"]
    alone = 'mount -t tmpfs tmpfs /tmp; mount -t tmpfs tmpfs /dev/shm; exec "$@"'
    s3 = [sys.executable, "-m", "moto.server", "-H", STORE, "-p", str(S3_PORT)]
    try:
        with (
            running(within("rq-store", *s3), tmp_path / "s3.log", environ),
            running(within("rq-head", *head), tmp_path / "head.log", environ),
        ):
            until(lambda: b"started" in (tmp_path / "head.log").read_bytes())
            command = within("rq-node", "unshare", "-m", "bash", "-euc", alone, "bash", *node)
            with running(command, tmp_path / "node.log", environ) as worker:
                until(lambda: b"started" in (tmp_path / "node.log").read_bytes())
                hidden = f"test ! -e {tmp_path}"
                sh(f"nsenter -t {worker.pid} -m bash -c '{hidden}'")
                yield environ, short
    finally:
        shutil.rmtree(short, ignore_errors=True)


@pytest.fixture
def job(cluster, tmp_path):
    """The source in the store, a manifest through the cluster, and the sha256s of the ordinary way."""
    kit = load("objects/conftest.py").Kit(tmp_path)
    source = kit.source(layers=8)
    assert kit.requant("run", kit.manifest(source, "ordinary", shard_size="12kB"), "--quiet") == 0
    kit.whole = kit.shas(tmp_path / "ordinary")
    assert len(kit.whole) > 12
    sent = [sys.executable, "-c", UPLOAD, str(source)]
    subprocess.run(within("rq-store", *sent), check=True, capture_output=True, env=cluster[0])
    execute = {"stream": True, "engine": "ray", "ray_address": f"{HEAD}:{PORT}"}
    kit.path = kit.manifest("s3://models/tiny", target="s3://out/tiny", shard_size="12kB", **execute)
    return kit


def driver(environ, kit):
    command = [sys.executable, "-m", "requant.convert.cli", "convert", str(kit.path), "--quiet", "--format", "json"]
    return within("rq-head", *command), {**environ, "XDG_CACHE_HOME": str(kit.tmp / "cache")}


def arrived(environ):
    command = within("rq-store", sys.executable, "-c", DOWNLOAD)
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environ)
    return json.loads(done.stdout)


def check(environ, kit):
    """Everything arrived, signed off; (the shards' sha256s, the nodes that made them)."""
    found = arrived(environ)
    assert {name: sha for name, sha in found.items() if name.endswith(".safetensors")} == kit.whole
    assert "requant.lock.json" in found
    assert ".requant/begun.json" not in found
    signoff = (kit.tmp / "out" / "requant.signoff.json").read_bytes()
    assert json.loads(signoff)["signed_off"] is True
    assert found["requant.signoff.json"] == hashlib.sha256(signoff).hexdigest()
    record = json.loads((kit.tmp / "out" / ".requant-local" / "run.json").read_text())
    return {node["node"]: node["tasks"] for node in record["nodes"]}


def test_nodes_that_share_only_the_wire_convert_and_send(cluster, job):
    command, environ = driver(cluster[0], job)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ, timeout=300)
    assert done.returncode == 0, done.stderr
    nodes = check(environ, job)
    assert len(nodes) == 2
    assert sum(nodes.values()) == len(job.whole)


def test_a_wire_that_is_cut_costs_the_node_and_nothing_else(cluster, job):
    """The node is not killed: it goes on, unheard. The head's node makes its shards again."""
    command, environ = driver(cluster[0], job)
    with running(command, job.tmp / "driver.log", environ) as process:
        journal = job.tmp / "out.partial" / ".requant" / "journal.jsonl"
        until(lambda: process.poll() is not None or (journal.exists() and journal.read_bytes().count(b"\n") > 4), 200)
        assert process.poll() is None, (job.tmp / "driver.log").read_text()
        sh("ip -n rq-store link set w-node down")
        try:
            assert process.wait(300) == 0, (job.tmp / "driver.log").read_text()
        finally:
            sh("ip -n rq-store link set w-node up")
    nodes = check(environ, job)
    assert sum(nodes.values()) == len(job.whole)
