"""Reading, writing and copying byte ranges at known offsets, from many threads at once.

Everything is positional (pread, pwrite, copy_file_range with both offsets): no shared file position, and no mapping
that a truncated file could turn into a signal. Where the system or the file system lacks a call, the plain path does
the same through a buffer.

Linux lets one thread at a time write into a file, and those who wait spin: two workers in one shard burn a third more
CPU than one. So writers take turns per file by a lock that sleeps; meanwhile the others read, compute, or write
elsewhere.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

from numpy.typing import NDArray
from requant.manifests.errors import SourceError

__all__ = [
    "COPY_CHUNK",
    "Files",
    "copy_range",
    "preallocate",
    "read_exact",
    "read_into",
    "start_writeback",
    "write_all",
]

COPY_CHUNK: Final = 8 * 2**20
"""Bytes per call: large enough that calls are free, small enough for a live progress bar and a prompt interrupt."""

_NO_COPY_RANGE: Final = {errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.ETXTBSY}


_TURNS: Final = tuple(threading.Lock() for _ in range(64))


def _turn(fd: int) -> threading.Lock:
    """Whose turn it is to write into a file."""
    return _TURNS[fd % len(_TURNS)]


def read_exact(fd: int, nbytes: int, offset: int, file: str) -> bytes:
    """`nbytes` from `offset`, or SourceError if the file ends before."""
    data = os.pread(fd, nbytes, offset)
    if len(data) == nbytes:
        return data
    chunks = [data]
    got = len(data)
    while got < nbytes:
        data = os.pread(fd, nbytes - got, offset + got)
        if not data:
            raise SourceError(
                f"ends at byte {offset + got:,}, {nbytes - got:,} bytes short",
                where=file,
                hint="the source changed while it was read: restore it and run again",
            )
        chunks.append(data)
        got += len(data)
    return b"".join(chunks)


def read_into(fd: int, view: NDArray[Any], offset: int, file: str) -> None:
    """Fill a contiguous array of bytes from `offset`, or SourceError if the file ends before."""
    left = memoryview(cast("bytearray", view)).cast("B")
    while len(left):
        got = os.preadv(fd, [left], offset) if hasattr(os, "preadv") else 0
        if not got:
            data = read_exact(fd, len(left), offset, file)
            left[:] = data
            return
        left = left[got:]
        offset += got


def write_all(fd: int, data: bytes | NDArray[Any], offset: int) -> None:
    """Write every byte of `data` (an array: its own, C-contiguous) at `offset`."""
    view = memoryview(cast("bytes", data)).cast("B")
    while len(view):
        with _turn(fd):
            written = os.pwrite(fd, view, offset)
        view = view[written:]
        offset += written


WRITEBACK_FROM: Final = 2**20
"""Copies of at least this many bytes are sent on to the disk at once."""
_SYNC_FILE_RANGE_WRITE: Final = 2
"""Start writing what is dirty and wait for nothing (linux/fs.h)."""


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """The system call, which Python's os module does not offer; None off Linux."""
    import ctypes

    try:
        call = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError):
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return cast("Callable[[int, int, int, int], int]", call)


def start_writeback(fd: int, begin: int, nbytes: int) -> None:
    """Let the disk begin on a finished range, so that a shard's fsync finds little left to wait for. Only a hint."""
    call = _sync_file_range()
    if call is not None and nbytes >= WRITEBACK_FROM:
        call(fd, begin, nbytes, _SYNC_FILE_RANGE_WRITE)


def copy_range(source: int, target: int, nbytes: int, *, begin_in: int, begin_out: int, file: str) -> None:
    """Copy a byte range between files, inside the kernel where it can. file: the source's name, for the error."""
    whole = begin_out, nbytes
    if hasattr(os, "copy_file_range"):
        while nbytes:
            try:
                with _turn(target):
                    done = os.copy_file_range(source, target, min(nbytes, COPY_CHUNK), begin_in, begin_out)
            except OSError as error:
                if error.errno not in _NO_COPY_RANGE:
                    raise
                break
            if not done:
                break  # end of file: the plain path reports it
            nbytes -= done
            begin_in += done
            begin_out += done
    while nbytes:
        data = read_exact(source, min(nbytes, COPY_CHUNK), begin_in, file)
        write_all(target, data, begin_out)
        nbytes -= len(data)
        begin_in += len(data)
        begin_out += len(data)
    start_writeback(target, *whole)


def preallocate(fd: int, nbytes: int) -> None:
    """Give a file its final size, reserving the blocks where the file system can: a full disk shows now."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, nbytes)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
    os.ftruncate(fd, nbytes)


class Files:
    """Open files of one folder by relative name, opened once each and shared by all threads."""

    def __init__(self, root: Path, flags: int) -> None:
        self._root = root
        self._flags = flags
        self._fds: dict[str, int] = {}
        self._lock = threading.Lock()

    def __call__(self, file: str) -> int:
        """The descriptor of `file`."""
        fd = self._fds.get(file)
        if fd is None:
            with self._lock:
                fd = self._fds.get(file)
                if fd is None:
                    fd = os.open(self._root / file, self._flags | getattr(os, "O_CLOEXEC", 0))
                    self._fds[file] = fd
        return fd

    def close(self, file: str | None = None) -> None:
        """Close one file, or all."""
        with self._lock:
            names = list(self._fds) if file is None else [file]
            for name in names:
                fd = self._fds.pop(name, None)
                if fd is not None:
                    os.close(fd)
