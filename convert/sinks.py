"""Where finished shards go when they do not stay in the output's folder: blobs of the Hub, or objects of a store.

A sink takes a shard by its path and says what is needed to know it again. It can be pickled, so that the workers of a
cluster write theirs directly; it holds no credentials: each process finds its own.

| sink      | a shard is                     | visible                     | recorded in     |
|-----------|--------------------------------|-----------------------------|-----------------|
| HubSink   | a blob, uploaded under no name | with the commit of publish  | `uploaded.json` |
| StoreSink | an object under its final name | once its upload is complete | `stored.json`   |
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, cast

from requant.convert.hub import hub_api, hub_faults
from requant.convert.objects import RECORDS, Store
from requant.convert.private import STORED_FILE, UPLOADED_FILE
from requant.manifests.errors import IncompleteError

__all__ = ["BEGUN", "HubSink", "Sink", "StoreSink", "Uploaded", "read_records", "write_records"]

BEGUN: Final = f"{RECORDS}begun.json"
"""The object that says which plan an unfinished output of a store belongs to."""


class Uploaded(NamedTuple):
    """A shard that is elsewhere. sample: its first 512 bytes, for the Hub. version: of the object, for a store.

    freed: what is here under its name is hollow.
    """

    size: int
    sha256: str
    sample: bytes = b""
    version: str = ""
    freed: bool = True


class Sink(Protocol):
    """Takes shards."""

    @property
    def record(self) -> str:
        """The file of the output's folder that says what it took."""
        ...

    def put(self, path: Path, name: str) -> Uploaded:
        """Take the shard that lies at `path`."""
        ...


@dataclass(frozen=True, slots=True)
class HubSink:
    """Blobs of a repository, for a commit on `revision`."""

    repo: str
    revision: str

    @property
    def record(self) -> str:
        """As Sink says."""
        return UPLOADED_FILE

    def put(self, path: Path, name: str) -> Uploaded:
        """As Sink says."""
        hub: Any = import_module("huggingface_hub")
        with hub_faults(self.repo, "the upload", publishing=True):
            operation = hub.CommitOperationAdd(name, str(path))
            hub_api().preupload_lfs_files(self.repo, [operation], revision=self.revision, free_memory=False)
        info = operation.upload_info
        return Uploaded(int(info.size), info.sha256.hex(), bytes(info.sample))


@dataclass(frozen=True, slots=True)
class StoreSink:
    """Objects below an address. plan: the plan whose output it is; another one's is not written into."""

    url: str
    plan: str

    @property
    def record(self) -> str:
        """As Sink says."""
        return STORED_FILE

    def put(self, path: Path, name: str) -> Uploaded:
        """As Sink says."""
        store = Store(self.url, writing=True)
        if plan_of(store) != self.plan:
            raise IncompleteError(
                "was begun anew by another run meanwhile", where=self.url, hint="one run writes an output at a time"
            )
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        store.put(name, path)
        there, size = store.stat(name), path.stat().st_size
        if there is None or there.size != size:
            raise IncompleteError(f"{name} did not arrive whole", where=self.url, hint="run the same command again")
        return Uploaded(size, digest, version=there.version)


def plan_of(store: Store) -> str | None:
    """The plan that an unfinished output belongs to, "" if that cannot be read, None if nothing was begun."""
    raw = store.text(BEGUN)
    if raw is None:
        return None
    try:
        return str(json.loads(raw)["plan"])
    except (ValueError, KeyError, TypeError):
        return ""


def read_records(path: Path) -> dict[str, Uploaded]:
    """The shards of a record, by name; none if there is no record."""
    try:
        raw: object = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    found = cast("Mapping[str, Mapping[str, Any]]", raw)
    return {
        name: Uploaded(f["size"], f["sha256"], base64.b64decode(f["sample"]), f["version"], f["freed"])
        for name, f in found.items()
    }


def write_records(path: Path, shards: Mapping[str, Uploaded]) -> None:
    """Write a record, at once or not at all; it is on the disk before what it speaks of is made hollow."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    raw = {n: {**s._asdict(), "sample": base64.b64encode(s.sample).decode()} for n, s in shards.items()}
    temporary = path.with_suffix(".new")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(json.dumps(raw))
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
