"""A checkpoint in an object store as a remote one: known by sizes and versions, read by ranges, fetched into a cache.

A store keeps no history: what was planned with is the listing's size and version (ETag, generation) of each object.
They are compared before a run goes on and after its last read, so that a change in between ends it with an error and
nothing of it counts.

Whole files are cached in `$XDG_CACHE_HOME/requant/objects/<address>/`, each under a folder named by its version.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

from requant.convert.objects import RECORDS, Store
from requant.convert.remote import CONNECTIONS, Remote, RemoteFile
from requant.manifests.errors import SourceError

__all__ = ["ObjectRemote", "changed_fault", "resolve_objects"]

_PIECE: Final = 32 * 10**6


@dataclass(frozen=True, slots=True)
class ObjectRemote:
    """Objects below an address, as they were listed."""

    url: str
    files: Mapping[str, RemoteFile]

    @property
    def name(self) -> str:
        """The address."""
        return self.url

    @property
    def commit(self) -> str | None:
        """Stores have none."""
        return None

    @property
    def folder(self) -> Path:
        """The cache's folder of this state of the checkpoint."""
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "requant" / "objects"
        seed = "\n".join(f"{f.name} {f.size} {f.version}" for _, f in sorted(self.files.items()))
        return base / hashlib.sha256(f"{self.url}\n{seed}".encode()).hexdigest()[:32]

    def only(self, names: Iterable[str]) -> Self:
        """As remote.Remote says."""
        return replace(self, files={name: self.files[name] for name in names})

    def read(self, name: str, begin: int, end: int, write: Callable[[bytes, int], object]) -> None:
        """As remote.Remote says."""
        Store(self.url).read(name, begin, end, write)

    def fetch(self, names: Sequence[str], *, by_name: bool = False) -> Path:
        """The cache's folder with these files in it; what is there already is not transferred twice."""
        del by_name
        folder = self.folder
        missing = [name for name in names if not (folder / name).exists()]
        with ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="requant-fetch") as pool:
            for name in missing:
                self._fetch(pool, folder / name, name)
        if missing and (changed := self.only(missing).changed()):
            for name in missing:  # which of their bytes are old and which new, nobody knows
                (folder / name).unlink(missing_ok=True)
            raise changed_fault(self, changed)
        return folder

    def _fetch(self, pool: ThreadPoolExecutor, target: Path, name: str) -> None:
        """One file, through a name of its own: what bears the final name is whole."""
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f"{target.name}.{os.getpid()}.part")
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        jobs: list[Future[None]] = []
        try:
            size = self.files[name].size
            os.ftruncate(fd, size)
            jobs = [
                pool.submit(self.read, name, at, min(at + _PIECE, size), lambda data, place: os.pwrite(fd, data, place))
                for at in range(0, size, _PIECE)
            ]
            for job in jobs:
                job.result()
            temporary.replace(target)
        finally:
            for job in jobs:
                job.cancel()
            wait(jobs)  # the number of a closed descriptor may be another file's by the time they write
            os.close(fd)
            temporary.unlink(missing_ok=True)

    def changed(self) -> list[str]:
        """Names of objects that are gone or have another size or version."""
        now = Store(self.url).listing()
        return sorted(name for name, file in self.files.items() if now.get(name) != file)


def changed_fault(remote: Remote, names: Sequence[str]) -> SourceError:
    """What is said when files are not what was planned with."""
    return SourceError(
        f"changed since it was planned with: {', '.join(names[:5])}",
        where=remote.name,
        hint="let it settle, then run again with --force",
    )


def resolve_objects(url: str) -> ObjectRemote:
    """The objects below `url` as they stand now, those of a run aside. SourceError if there are none."""
    files = {name: file for name, file in Store(url).listing().items() if not name.startswith(RECORDS)}
    if not files:
        raise SourceError("holds no object", where=url, hint="check the address: it must be the checkpoint's prefix")
    return ObjectRemote(url, files)
