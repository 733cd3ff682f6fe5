"""The safetensors container: read and check a header, lay out and render one.

A shard is 8 bytes (little-endian header length), a JSON header, then the tensors' bytes without holes. Headers are read
here rather than through the safetensors library because planning must know byte ranges, must not load torch, and must
read dtypes (F4, F8_E8M0) that some of its frameworks refuse. Everything a hostile or damaged file can do is refused
with one message that names file and tensor; nothing is mapped into memory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from json.encoder import encode_basestring as quote
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from requant.convert.canonical import Columns, columns_of
from requant.manifests.errors import SourceError

__all__ = [
    "DTYPE_BITS",
    "HEADER_LIMIT",
    "Shard",
    "TensorInfo",
    "described",
    "frame_header",
    "is_lfs_pointer",
    "nbytes_of",
    "read_shard_header",
    "render_header",
]

HEADER_LIMIT: Final = 100_000_000
"""The safetensors library refuses longer headers (safetensors 0.8, MAX_HEADER_SIZE)."""

DTYPE_BITS: Final[Mapping[str, int]] = {
    "F4": 4,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}
"""Bits per element of each dtype name (safetensors 0.8, Dtype)."""

_INT: Final = {int}
"""Types of dimensions: JSON's true is an int too, and no dimension."""

LFS_POINTER: Final = b"version https://git-lfs"


class TensorInfo(NamedTuple):
    """One tensor of one shard. `begin` is the absolute byte offset in the file; `shape` is the header's."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Shard:
    """A checked header. `file` is relative to the checkpoint's folder; times in nanoseconds, sizes in bytes."""

    file: str
    size: int
    mtime_ns: int
    header_sha256: str
    metadata: Mapping[str, str]
    tensors: tuple[TensorInfo, ...]


@lru_cache(maxsize=4096)  # a checkpoint has many tensors and few shapes
def nbytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a dense tensor. ValueError when a 4-bit tensor does not fill whole bytes."""
    count = 1
    for n in shape:
        count *= n
    bits = count * DTYPE_BITS[dtype]
    if bits % 8:
        raise ValueError(f"{count} elements of {dtype} do not fill whole bytes")
    return bits // 8


def is_lfs_pointer(path: Path) -> bool:
    """Whether a file holds the address of its content instead of the content."""
    with path.open("rb") as handle:
        return handle.read(len(LFS_POINTER)) == LFS_POINTER


def _fail(file: str, message: str, hint: str, tensor: str = "") -> SourceError:
    return SourceError(message, where=f"{file}: {tensor}" if tensor else file, hint=hint)


def read_shard_header(path: Path, file: str) -> Shard:
    """Read and check the header of `path`, named `file` in messages. SourceError on anything out of order."""
    again = "download the shard again; its size on the Hub is the one to compare with"
    try:
        with path.open("rb") as handle:
            stat = os.fstat(handle.fileno())
            prefix = handle.read(8)
            if LFS_POINTER.startswith(prefix) and len(prefix) == 8:
                raise _fail(file, "is a Git LFS pointer, not the shard", "run `git lfs pull`, or `hf download`")
            if len(prefix) < 8:
                raise _fail(file, f"is {stat.st_size} bytes long: too short for a safetensors file", again)
            length = int.from_bytes(prefix, "little")
            if length > HEADER_LIMIT:
                raise _fail(
                    file,
                    f"header length {length:,} is over the limit of {HEADER_LIMIT:,} bytes",
                    "the file is damaged or not safetensors; if it is genuine, split it into more shards",
                )
            if 8 + length > stat.st_size:
                raise _fail(file, f"truncated inside its header ({stat.st_size:,} of {8 + length:,} bytes)", again)
            raw = handle.read(length)
    except OSError as error:
        raise _fail(file, f"cannot be read: {error.strerror}", "check the path and its permissions") from error
    quick = columns_of(raw, stat.st_size - 8 - length, nbytes_of)
    if quick is not None:
        return Shard(
            file=file,
            size=stat.st_size,
            mtime_ns=stat.st_mtime_ns,
            header_sha256=hashlib.sha256(prefix + raw).hexdigest(),
            metadata={str(k): str(v) for k, v in quick.metadata.items()},
            tensors=_infos(quick, file, 8 + length),
        )
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:  # the latter: brackets nested a thousand deep
        raise _fail(file, f"header is not JSON ({error})", again) from error
    if not isinstance(header, dict):
        raise _fail(file, "header is not a JSON object", again)
    entries = cast("dict[str, Any]", header)
    metadata: object = entries.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict):
        raise _fail(file, "__metadata__ is not a JSON object", again)
    tensors = _check_entries(file, entries, 8 + length, stat.st_size)
    return Shard(
        file=file,
        size=stat.st_size,
        mtime_ns=stat.st_mtime_ns,
        header_sha256=hashlib.sha256(prefix + raw).hexdigest(),
        metadata={str(k): str(v) for k, v in cast("dict[Any, Any]", metadata).items()},
        tensors=tensors,
    )


def _infos(columns: Columns, file: str, data_start: int) -> tuple[TensorInfo, ...]:
    """The columns as rows."""
    begins = (data_start + begin for begin in columns.begins)
    rows = zip(columns.names, columns.dtypes, columns.shapes, repeat(file), begins, columns.sizes, strict=False)
    return tuple(map(TensorInfo._make, rows))


def _check_entries(file: str, entries: dict[str, Any], data_start: int, size: int) -> tuple[TensorInfo, ...]:
    """Every entry well formed, the byte ranges side by side from the header's end to the file's."""
    tensors: list[TensorInfo] = []
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
    for name, entry in entries.items():
        try:
            dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            if not (
                type(begin) is int
                and type(end) is int
                and {*map(type, shape)} <= _INT
                and (not shape or min(shape) >= 0)
            ):
                raise TypeError
            shape = shapes.setdefault(shape, shape)  # few shapes, many tensors
            if not isinstance(dtype, str):
                raise TypeError
        except (KeyError, TypeError, ValueError) as error:
            raise _fail(file, "malformed header entry", "the file is damaged: download it again", name) from error
        if dtype not in DTYPE_BITS:
            raise _fail(
                file,
                f"unknown dtype {dtype!r}",
                f"known are {', '.join(DTYPE_BITS)}; a newer safetensors may have written this file",
                name,
            )
        try:
            expected = nbytes_of(dtype, shape)
        except ValueError as error:
            raise _fail(file, f"shape {list(shape)}: {error}", "the writer was wrong; re-export it", name) from error
        if begin < 0 or end - begin != expected:
            raise _fail(
                file,
                f"{dtype} {list(shape)} needs {expected:,} bytes, offsets [{begin}, {end}] give {end - begin:,}",
                "the header is damaged: download the shard again",
                name,
            )
        tensors.append(TensorInfo(name, dtype, shape, file, data_start + begin, expected))
    position = data_start
    in_order = sorted(tensors, key=itemgetter(4, 5))  # begin, nbytes
    for tensor in in_order:
        if tensor[4] != position:
            what = "overlaps the tensor before it" if tensor.begin < position else "leaves a hole before it"
            raise _fail(
                file,
                f"offset {tensor.begin - data_start} {what} (expected {position - data_start})",
                "offsets must lie side by side; the header is damaged or hostile",
                tensor.name,
            )
        position += tensor[5]
    if position != size:
        kind = "truncated" if size < position else "over-long"
        raise _fail(
            file,
            f"{kind}: the header describes {position:,} bytes, the file has {size:,}",
            "download the shard again; its size on the Hub is the one to compare with",
        )
    return tuple(tensors)


@lru_cache(maxsize=4096)
def described(dtype: str, shape: tuple[int, ...]) -> str:
    """A header entry between its name and its offsets."""
    return f':{{"dtype":"{dtype}","shape":[{",".join(map(str, shape))}],"data_offsets":['


def render_header(entries: Iterable[tuple[str, str, tuple[int, ...], int, int]], metadata: Mapping[str, str]) -> bytes:
    """Length prefix and header of a shard, padded with spaces to a multiple of 8.

    entries: (name, dtype, shape, begin, end) with offsets from the data's start, in file order.
    """
    rendered = (f"{quote(name)}{described(d, shape)}{begin},{end}]}}" for name, d, shape, begin, end in entries)
    return frame_header(",".join(rendered), metadata)


def frame_header(entries: str, metadata: Mapping[str, str]) -> bytes:
    """`render_header` of entries that are rendered already, as `"NAME":{...},"NAME":{...}`."""
    head = f'{{"__metadata__":{json.dumps(dict(metadata), separators=(",", ":"))}'
    raw = f"{head},{entries}}}".encode() if entries else f"{head}}}".encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw
