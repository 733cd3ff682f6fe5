"""A store for every test of this folder: the S3 server where a test asks for it, fsspec's memory otherwise."""

import hashlib
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import s3_server
from module_files import load

_hub = load("hub/conftest.py")
disk_watch = _hub.disk_watch


class Kit(_hub.Kit):
    """Manifests whose source or output is an address."""

    def manifest(self, source, output="out", *, target=None, **more):
        import yaml

        path = super().manifest(source if isinstance(source, Path) else "owner/name", output, **more)
        body = yaml.safe_load(path.read_text())
        if not isinstance(source, Path):
            body["source"] = {"path": source}
        if target is not None:
            body["target"]["output"] = target
            body.setdefault("execute", {})["work"] = str(self.tmp / output)
        path.write_text(yaml.safe_dump(body))
        return path

    @staticmethod
    def shas(folder):
        """sha256 by name of a folder's shards."""
        return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.glob("*.safetensors"))}

    @staticmethod
    def signoff(folder):
        return json.loads((folder / "requant.signoff.json").read_text())


@pytest.fixture
def kit(tmp_path):
    """Makers of checkpoints and manifests."""
    return Kit(tmp_path)


@pytest.fixture
def slept(monkeypatch, tmp_path):
    """Waits between attempts, cut short; a cache of its own; windows that a tiny checkpoint needs several of."""
    from requant.convert import objects, stream, uploads

    waits = []
    monkeypatch.setattr(objects, "time", SimpleNamespace(**{**vars(time), "sleep": waits.append}))
    monkeypatch.setattr(stream, "WINDOW_MIN", 1)
    monkeypatch.setattr(uploads, "SMALL_BYTES", 1000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return waits


@pytest.fixture(scope="session")
def s3_process():
    """One server for all tests."""
    with s3_server.S3Server() as server:
        yield server


@pytest.fixture
def s3(s3_process, monkeypatch, slept):
    """The server, empty, with the environment that leads a client to it."""
    from requant.convert import objects

    s3_process.reset()
    s3_process.client.create_bucket(Bucket="out")
    for name, value in s3_process.environ().items():
        monkeypatch.setenv(name, value)
    objects._filesystem.cache_clear()
    yield s3_process
    objects._filesystem.cache_clear()


@pytest.fixture
def fault(s3_process):
    """Maker of faults."""
    return s3_server.Fault


@pytest.fixture
def memory(slept):
    """fsspec's memory, empty: (folder -> address) to put a folder there, and the file system."""
    from fsspec.implementations.memory import MemoryFileSystem
    from requant.convert import objects

    fs = MemoryFileSystem(skip_instance_cache=True)
    objects._filesystem.cache_clear()
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]

    def put(folder, url="memory://bucket/model"):
        fs.put(str(folder), url.partition("://")[2], recursive=True)
        return url

    yield SimpleNamespace(put=put, fs=fs)
    fs.store.clear()
    objects._filesystem.cache_clear()
