"""A Ray of our own, started for a run; and a cluster's address that leads nowhere. Not beside a connected driver."""

import hashlib
import json
import os
import subprocess
import sys

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


@pytest.mark.parametrize("address", ["auto", "ray://127.0.0.1:1"])
def test_no_cluster_at_the_address_is_an_environment_fault(kit, manifest, address):
    sets = ["--set", "execute.engine=ray", "--set", f"execute.ray_address={address}"]
    done = requant("run", manifest, "--quiet", *sets)
    assert done.returncode == 6, done.stdout + done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith(f"error: {address}: cannot reach or start Ray: ")
    assert not (kit.tmp / "out").exists()
