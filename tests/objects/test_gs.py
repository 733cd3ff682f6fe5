"""gs:// by gcsfs, from and to an emulator of Google Cloud Storage in a process of its own."""

import hashlib
import json
import socket
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.objects

SOURCE, TARGET = "gs://models/tiny", "gs://out/tiny"


@pytest.fixture
def gs(monkeypatch, slept, tmp_path):
    """gcsfs on the empty emulator."""
    from requant.convert import objects

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "gcp_storage_emulator", "start", "--host=127.0.0.1", f"--port={port}"]
    process = subprocess.Popen([*command, "--in-memory"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("FSSPEC_GS_TOKEN", "anon")
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # it would ask another service for bucket kinds
    objects._filesystem.cache_clear()
    try:
        for _ in range(300):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        import gcsfs

        fs = gcsfs.GCSFileSystem(token="anon", project="tests", skip_instance_cache=True, use_listings_cache=False)
        for bucket in ("models", "out"):
            fs.mkdir(bucket)
        yield fs
    finally:
        process.terminate()
        process.wait()
        objects._filesystem.cache_clear()


@pytest.fixture
def ordinary(gs, kit):
    source = kit.source()
    for path in source.iterdir():
        gs.pipe_file(f"models/tiny/{path.name}", path.read_bytes())
    assert kit.requant("run", kit.manifest(source, "ordinary"), "--quiet") == 0
    return kit.shas(kit.tmp / "ordinary")


def stored(gs):
    root = "out/tiny/"
    return {path.removeprefix(root): hashlib.sha256(gs.cat_file(path)).hexdigest() for path in gs.find(root)}


@pytest.mark.parametrize("stream", [False, True])
def test_from_bucket_to_bucket_signed_off(gs, kit, ordinary, stream):
    assert kit.requant("convert", kit.manifest(SOURCE, target=TARGET, stream=stream), "--quiet") == 0
    found = stored(gs)
    assert {name: sha for name, sha in found.items() if name.endswith(".safetensors")} == ordinary
    assert json.loads(gs.cat_file("out/tiny/requant.signoff.json"))["signed_off"] is True
    assert "requant.lock.json" in found
    assert ".requant/begun.json" not in found
    lock = json.loads(gs.cat_file("out/tiny/requant.lock.json"))
    assert all(facts["version"] for facts in lock["source"]["files"].values())


def test_an_interrupted_run_goes_on_and_a_replaced_shard_is_sent_again(gs, kit, ordinary, monkeypatch):
    from requant.convert.destination import Destination

    def stop(*_):
        raise KeyboardInterrupt

    manifest = kit.manifest(SOURCE, target=TARGET, stream=True)
    with monkeypatch.context() as patched:
        patched.setattr(Destination, "finish", stop)
        assert kit.requant("convert", manifest, "--quiet") == 130
    assert "requant.lock.json" not in stored(gs)
    gs.pipe_file("out/tiny/model-00001-of-00002.safetensors", b"of somebody else")
    assert kit.requant("convert", manifest, "--quiet") == 0
    assert {name: sha for name, sha in stored(gs).items() if name.endswith(".safetensors")} == ordinary


def test_a_missing_bucket_is_said(gs, kit, ordinary, capsys):
    assert kit.requant("plan", kit.manifest("gs://nowhere/tiny")) == 3
    assert "error: gs://nowhere/tiny: " in capsys.readouterr().err
