"""A checkpoint that is elsewhere, known without being fetched: its files, and its shards' headers by ranged reads.

    Remote                       a repository at a commit (hub_remote.py), or objects in a store (object_remote.py)
    remote_catalogue(remote)     -> the same Catalogue that a folder gives, from a mirror that holds only headers

The mirror is a folder of sparse files of the right names and sizes, in which configs, indices and headers are real: so
the one reader of checkpoints (checkpoint.py), with all that it refuses, serves all three. It is gone once it is read.
A plan of a checkpoint of any size moves its JSON files and headers, a few megabytes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Final, Protocol, Self, cast

from requant.convert.checkpoint import INDEX_SUFFIX, Catalogue, open_checkpoint, read_json
from requant.convert.shards import HEADER_LIMIT
from requant.manifests.errors import SourceError

__all__ = [
    "CONNECTIONS",
    "FILE_LIMIT",
    "Remote",
    "RemoteFile",
    "check_name",
    "mirror_headers",
    "refuse_changed",
    "remote_catalogue",
]

FIRST_READ: Final = 64 * 1024
"""Bytes of a shard that are asked for at once: most headers fit, and a second request costs more than these."""
CONNECTIONS: Final = 8
FILE_LIMIT: Final = 1 << 43
"""No file on the Hub is larger (its limit is 500 GB), and no object of S3 (5 TB); what says so is no checkpoint."""
_READ_IN_FULL: Final = ("config.json", "hf_quant_config.json")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file elsewhere. sha256: of its content, where it is known. version: what changes with the content, or ""."""

    name: str
    size: int
    sha256: str | None
    version: str = ""


class Remote(Protocol):
    """A checkpoint elsewhere, as it stood when it was asked for. It can be pickled, and holds no credentials."""

    @property
    def name(self) -> str:
        """As messages call it."""
        ...

    @property
    def commit(self) -> str | None:
        """The commit, where there is such a thing."""
        ...

    @property
    def files(self) -> Mapping[str, RemoteFile]:
        """By name, relative to the checkpoint."""
        ...

    @property
    def folder(self) -> Path:
        """Where fetched files lie, or will."""
        ...

    def only(self, names: Iterable[str]) -> Self:
        """The same with only these files, for a worker that needs no others."""
        ...

    def read(self, name: str, begin: int, end: int, write: Callable[[bytes, int], object]) -> None:
        """Bytes begin..end of a file, handed to write(data, offset) as they come; what breaks off is taken up again.

        SourceError if it is gone, EnvironmentFault if nobody answers.
        """
        ...

    def fetch(self, names: Sequence[str], *, by_name: bool = False) -> Path:
        """A folder on this machine that holds these files, whole. by_name: as what the user called the checkpoint,
        so that a cache finds them by that name when it is offline."""
        ...

    def changed(self) -> list[str]:
        """Names of files that are not what they were."""
        ...


def check_name(repo: str, name: object) -> None:
    """A name from the server is a path below the folder, or nothing."""
    if isinstance(name, str) and name and "\\" not in name and "\0" not in name:
        parts = PurePosixPath(name).parts
        if not name.startswith("/") and ".." not in parts and parts:
            return
    raise SourceError(
        f"lists a file named {name!r}, which leads out of the folder",
        where=repo,
        hint="the server or the repository is hostile or broken: do not use it",
    )


def remote_catalogue(remote: Remote) -> Catalogue:
    """The catalogue of a checkpoint from its headers; `root` is where it would be fetched to, and need not exist yet.

    SourceError for whatever would be wrong with the checkpoint on disk, too.
    """
    with tempfile.TemporaryDirectory(prefix="requant-headers-") as folder:
        mirror_headers(remote, Path(folder))
        catalogue = open_checkpoint(Path(folder))
    shards = tuple(replace(shard, mtime_ns=0) for shard in catalogue.shards)  # of the mirror's making
    return replace(catalogue, root=remote.folder, shards=shards)


def mirror_headers(remote: Remote, mirror: Path, whole: Iterable[str] = ()) -> None:
    """Make `mirror` the checkpoint with holes: every file in its size, JSON, headers and the files `whole` real."""
    wanted = {name for name in remote.files if name in _READ_IN_FULL or name.endswith(INDEX_SUFFIX)} | set(whole)
    cached = remote.fetch(sorted(wanted), by_name=True)
    for file in remote.files.values():
        target = mirror / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.name in wanted:
            target.write_bytes((cached / file.name).read_bytes())
        else:
            target.touch()
            os.truncate(target, file.size)
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        jobs = [pool.submit(_mirror_header, remote, mirror, name) for name in _shards(mirror, remote)]
        for job in jobs:
            job.result()


def _shards(mirror: Path, remote: Remote) -> list[str]:
    """Files whose headers are wanted: those of the index, or all that lie at the top."""
    indices = [name for name in remote.files if name.endswith(INDEX_SUFFIX) and "/" not in name]
    named: set[str] = set()
    for index in indices:
        weight_map = read_json(mirror / index, index).get("weight_map")
        if isinstance(weight_map, dict):
            named.update(v for v in cast("dict[str, object]", weight_map).values() if isinstance(v, str))
    if not indices:
        named = {name for name in remote.files if name.endswith(".safetensors") and "/" not in name}
    return sorted(name for name in named if name in remote.files and name.endswith(".safetensors"))


def _mirror_header(remote: Remote, mirror: Path, name: str) -> None:
    """Write the header's bytes where they stand in the file."""
    size = remote.files[name].size
    with (mirror / name).open("r+b") as stream:

        def write(data: bytes, at: int) -> None:
            stream.seek(at)
            stream.write(data)

        first = min(FIRST_READ, size)
        remote.read(name, 0, first, write)
        stream.seek(0)
        end = 8 + int.from_bytes(stream.read(8), "little")
        if first < end <= min(size, 8 + HEADER_LIMIT):  # otherwise the reader of headers says what is wrong
            remote.read(name, first, end, write)


def refuse_changed(planned: Catalogue, fetched: Catalogue, name: str) -> None:
    """SourceError unless the fetched shards have the headers that were planned with."""
    before = {shard.file: (shard.size, shard.header_sha256) for shard in planned.shards}
    after = {shard.file: (shard.size, shard.header_sha256) for shard in fetched.shards}
    if before != after:
        changed = sorted(file for file in {*before, *after} if before.get(file) != after.get(file))
        raise SourceError(
            f"the files in the cache are not those that were planned with: {', '.join(changed[:5])}",
            where=name,
            hint="remove them from the cache (the Hub's: `hf cache rm`) and run again",
        )
