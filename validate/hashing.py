"""sha256 of every file of an output folder, in parallel: hashlib lets go of the GIL, so threads are enough."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["FileHash", "hash_files", "judged_files"]

_CHUNK: Final = 1 << 20
_OWN: Final = "requant.signoff."
"""Files of the sign-off itself, which cannot cover themselves."""
_REPOSITORY: Final = frozenset({"README.md", ".gitattributes"})
"""The model card, which shows the sign-off and so comes after it, and git's rules: of the repository, not the model."""
_PRIVATE: Final = frozenset({".requant-local", ".cache", ".git"})
"""Folders that belong to this machine: where the source is, what a download left, a clone's history."""


@dataclass(frozen=True, slots=True)
class FileHash:
    """name: relative to the folder, with forward slashes. size: bytes. sha256: 64 hex digits."""

    name: str
    size: int
    sha256: str


def judged_files(output: Path) -> list[str]:
    """Every regular file under `output`, sorted, but those of the sign-off, of the repository and of this machine."""
    names = (path.relative_to(output).as_posix() for path in output.rglob("*") if path.is_file())
    return sorted(name for name in names if _is_judged(name))


def _is_judged(name: str) -> bool:
    folder, _, base = name.rpartition("/")
    own = base.lstrip(".").startswith(_OWN) or name in _REPOSITORY
    return not own and folder.partition("/")[0] not in _PRIVATE


def hash_files(
    output: Path, names: Sequence[str], *, progress: Callable[[int, int], None] | None = None
) -> tuple[FileHash, ...]:
    """sha256 of the files `names` of `output`, in that order. progress: (bytes hashed, bytes in all)."""
    total = sum((output / name).stat().st_size for name in names)
    done, lock = 0, threading.Lock()

    def advance(nbytes: int) -> None:
        nonlocal done
        if progress is not None:
            with lock:
                done += nbytes
                progress(done, total)

    def hash_one(name: str) -> FileHash:
        digest, size = hashlib.sha256(), 0
        buffer = bytearray(_CHUNK)
        view = memoryview(buffer)
        with (output / name).open("rb", buffering=0) as stream:
            while read := stream.readinto(buffer):
                digest.update(view[:read])
                size += read
                advance(read)
        return FileHash(name, size, digest.hexdigest())

    with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
        return tuple(pool.map(hash_one, names))
