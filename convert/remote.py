"""A checkpoint on the Hub, known without being fetched: its files at one commit, its shards' headers by ranged reads.

    resolve(repo, revision)      -> the commit, and every file's size and sha256
    remote_catalogue(remote)     -> the same Catalogue that a folder gives, from a mirror that holds only headers
    read_range(remote, ...)      -> bytes of one file, resumed where a connection breaks

The mirror is a folder of sparse files of the right names and sizes, in which configs, indices and headers are real: so
the one reader of checkpoints (checkpoint.py), with all that it refuses, serves both. It is gone once it is read.
A plan of a repository of any size moves its JSON files and headers, a few megabytes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, Final, cast

from requant.convert.checkpoint import INDEX_SUFFIX, Catalogue, open_checkpoint, read_json
from requant.convert.hub import AGAIN, fetch, hub_api, hub_faults, network_errors
from requant.convert.shards import HEADER_LIMIT
from requant.manifests.errors import EnvironmentFault, SourceError

__all__ = [
    "Remote",
    "RemoteFile",
    "mirror_headers",
    "read_range",
    "refuse_changed",
    "remote_catalogue",
    "resolve",
    "snapshot_folder",
]

FIRST_READ: Final = 64 * 1024
"""Bytes of a shard that are asked for at once: most headers fit, and a second request costs more than these."""
CONNECTIONS: Final = 8
STUCK: Final = 3
"""Attempts at a ranged read that bring nothing, each after the library's own retries, before it is given up."""
FILE_LIMIT: Final = 1 << 43
"""No file on the Hub is larger (its limit is 500 GB); what says so is no checkpoint."""
_READ_IN_FULL: Final = ("config.json", "hf_quant_config.json")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a commit. sha256: of its content if it is a large one."""

    name: str
    size: int
    sha256: str | None


@dataclass(frozen=True, slots=True)
class Remote:
    """A repository at a commit (40 hex digits), which `revision` stood for when it was asked."""

    repo: str
    revision: str
    commit: str
    files: Mapping[str, RemoteFile]


def resolve(repo: str, revision: str) -> Remote:
    """The commit that `revision` stands for now, and its files. SourceError if it is not there or names are hostile."""
    with hub_faults(repo, "the request", revision=revision):
        info: Any = hub_api().model_info(repo, revision=revision, files_metadata=True)
    files: dict[str, RemoteFile] = {}
    for entry in info.siblings:
        _check_name(repo, entry.rfilename)
        digest = str(entry.lfs.sha256) if entry.lfs else None
        size = int(entry.size or 0)
        if not 0 <= size <= FILE_LIMIT:
            raise SourceError(f"says that {entry.rfilename} has {size:,} bytes", where=repo, hint="do not use it")
        files[entry.rfilename] = RemoteFile(entry.rfilename, size, digest)
    return Remote(repo, revision, str(info.sha), files)


def _check_name(repo: str, name: object) -> None:
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


def snapshot_folder(remote: Remote) -> Path:
    """Where huggingface_hub's cache holds this commit, or will."""
    constants: Any = import_module("huggingface_hub.constants")
    name = "models--" + remote.repo.replace("/", "--")
    return Path(constants.HF_HUB_CACHE) / name / "snapshots" / remote.commit


def remote_catalogue(remote: Remote) -> Catalogue:
    """The catalogue of a repository from its headers; `root` is the snapshot folder, which need not exist yet.

    SourceError for whatever would be wrong with the checkpoint on disk, too.
    """
    with tempfile.TemporaryDirectory(prefix="requant-headers-") as folder:
        mirror_headers(remote, Path(folder))
        catalogue = open_checkpoint(Path(folder))
    shards = tuple(replace(shard, mtime_ns=0) for shard in catalogue.shards)  # of the mirror's making
    return replace(catalogue, root=snapshot_folder(remote), shards=shards)


def mirror_headers(remote: Remote, mirror: Path, whole: Iterable[str] = ()) -> None:
    """Make `mirror` the repository with holes: every file in its size, JSON, headers and the files `whole` real."""
    wanted = {name for name in remote.files if name in _READ_IN_FULL or name.endswith(INDEX_SUFFIX)} | set(whole)
    cached = _cached(remote, sorted(wanted))
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


def _cached(remote: Remote, files: list[str]) -> Path:
    """The snapshot folder with these files in it. Asked for by the revision's name, the cache remembers what it was."""
    folder, commit = fetch(remote.repo, remote.revision, files)
    return folder if commit == remote.commit else fetch(remote.repo, remote.commit, files)[0]


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
        read_range(remote, name, 0, first, write)
        stream.seek(0)
        end = 8 + int.from_bytes(stream.read(8), "little")
        if first < end <= min(size, 8 + HEADER_LIMIT):  # otherwise the reader of headers says what is wrong
            read_range(remote, name, first, end, write)


def read_range(remote: Remote, name: str, begin: int, end: int, write: Callable[[bytes, int], object]) -> None:
    """Bytes begin..end of a file, handed to write(data, offset) as they come; a broken connection is taken up again.

    SourceError if the file or the commit is gone, EnvironmentFault if the Hub does not answer.
    """
    at = begin
    with hub_faults(remote.repo, f"reading {name}", revision=remote.commit):
        stuck = 0
        while at < end:
            before = at
            try:
                for data in _stream(remote, name, at, end):
                    write(data, at)
                    at += len(data)
            except network_errors() as error:
                if isinstance(error, OSError):  # an answer, or the disk: not a broken connection
                    raise
                if stuck == STUCK:
                    raise
            stuck = 0 if at > before else stuck + 1
            if stuck > STUCK:
                raise EnvironmentFault(f"{name} ends {end - at:,} bytes early", where=remote.repo, hint=AGAIN)


def _stream(remote: Remote, name: str, begin: int, end: int) -> Any:
    """The pieces of one ranged GET through huggingface_hub's session, at most end - begin bytes of them."""
    hub: Any = import_module("huggingface_hub")
    utils: Any = import_module("huggingface_hub.utils")
    api = hub_api()
    url = hub.hf_hub_url(remote.repo, name, revision=remote.commit, endpoint=api.endpoint)
    headers = {**utils.build_hf_headers(), "Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
    wanted, broken = end - begin, None
    with utils.http_stream_backoff("GET", url, headers=headers, follow_redirects=True) as response:
        utils.hf_raise_for_status(response)
        skip = begin if response.status_code == 200 else 0  # a proxy that knows no ranges
        try:
            for piece in response.iter_raw():
                data = piece[skip:] if skip else piece
                skip = max(skip - len(piece), 0)
                if data:
                    yield data[:wanted]
                    wanted -= min(len(data), wanted)
                if not wanted:
                    break
        except network_errors() as error:  # not thrown into the library's retry loop, which would send all of it again
            broken = error
    if broken is not None:
        raise broken


def refuse_changed(planned: Catalogue, fetched: Catalogue, repo: str) -> None:
    """SourceError unless the fetched shards have the headers that were planned with."""
    before = {shard.file: (shard.size, shard.header_sha256) for shard in planned.shards}
    after = {shard.file: (shard.size, shard.header_sha256) for shard in fetched.shards}
    if before != after:
        changed = sorted(file for file in {*before, *after} if before.get(file) != after.get(file))
        raise SourceError(
            f"the files in the cache are not those of the commit: {', '.join(changed[:5])}",
            where=repo,
            hint="remove them from the cache (`hf cache rm`) and run again",
        )
