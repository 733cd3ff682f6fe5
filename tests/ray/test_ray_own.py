"""A Ray of our own, started for a run; and a cluster's address that leads nowhere. Not beside a connected driver."""

import hashlib
import json
import os
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.ray

CLI = [sys.executable, "-m", "requant.convert.cli"]


def sha256s(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.glob("*.safetensors"))}


def requant(*arguments):
    environ = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.run([*CLI, *arguments], capture_output=True, text=True, check=False, env=environ)


@pytest.fixture
def manifest(kit):
    path = kit.tmp / "m.yaml"
    path.write_text(kit.manifest_text(kit.dsv4(), kit.tmp / "out", kit.EXPERTS))
    return str(path)


def test_without_an_address_a_ray_is_started_and_stopped(kit, manifest):
    done = requant("run", manifest, "--quiet")
    assert done.returncode == 0, done.stderr
    reference = sha256s(kit.tmp / "out")
    done = requant("run", manifest, "--force", "--format", "json", "--set", "execute.engine=ray")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)["run"]
    assert record["engine"] == "ray"
    assert record["bytes"] == sum(node["bytes"] for node in record["nodes"]) > 0
    assert "100%" in done.stderr, "one bar, full"
    assert sha256s(kit.tmp / "out") == reference


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Ray's Cluster leaves a pipe open
def test_nodes_that_join_later_are_waited_for_and_a_driver_outside_the_cluster_reaches_them(kit, manifest):
    """A head without processors and a `ray://` driver; the only worker joins when the run has begun."""
    from ray.cluster_utils import Cluster

    requant("run", manifest, "--quiet")
    reference = sha256s(kit.tmp / "out")
    small = {"object_store_memory": 80 * 2**20}
    port = 20000 + os.getpid() % 20000
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "ray_client_server_port": port, **small})
    partial = kit.tmp / "out.partial" / ".requant"

    sets = ["--set", "execute.engine=ray", "--set", f"execute.ray_address=ray://127.0.0.1:{port}"]
    with (kit.tmp / "stdout").open("w") as out, (kit.tmp / "stderr").open("w") as err:
        command = [*CLI, "run", manifest, "--force", "--quiet", "--format", "json", *sets]
        driver = subprocess.Popen(command, stdout=out, stderr=err)
    try:
        while not list(partial.glob("run-*")) and driver.poll() is None:
            time.sleep(0.2)
        time.sleep(3)
        assert driver.poll() is None, (kit.tmp / "stderr").read_text()
        cluster.add_node(num_cpus=1, **small)
        assert driver.wait(120) == 0, (kit.tmp / "stderr").read_text()
    finally:
        driver.kill()
        driver.wait()
        cluster.shutdown()
    assert len(json.loads((kit.tmp / "stdout").read_text())["run"]["nodes"]) == 1
    assert sha256s(kit.tmp / "out") == reference


@pytest.mark.parametrize("address", ["auto", "ray://127.0.0.1:1"])
def test_no_cluster_at_the_address_is_an_environment_fault(kit, manifest, address):
    sets = ["--set", "execute.engine=ray", "--set", f"execute.ray_address={address}"]
    done = requant("run", manifest, "--quiet", *sets)
    assert done.returncode == 6, done.stdout + done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith(f"error: {address}: cannot reach or start Ray: ")
    assert not (kit.tmp / "out").exists()
