"""Rows and column panels of source tensors, read in tiles of bounded size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray
from requant.convert.files import read_exact, read_into
from requant.convert.layouts.base import Rows
from requant.convert.shards import TensorInfo
from requant.manifests.errors import SourceError

__all__ = ["TILE_BYTES", "Opened", "read_panel", "read_rows", "read_scalar", "read_whole", "row_tiles"]

TILE_BYTES: Final = 4 * 2**20
"""Bytes of codes (or floats) in flight per worker; the L2 of a server core times a few, and memory stays small."""


class Opened(Protocol):
    """Descriptors by file name: sources for reading, output shards (by number) for writing."""

    def source(self, file: str) -> int: ...

    def output(self, shard: int) -> int: ...


def row_tiles(rows: Rows, files: Opened, row_cost: int = 0) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """(first row, uint8 [count, row_bytes]) tiles of about TILE_BYTES (of `row_cost` bytes a row, if given)."""
    cost = max(rows.row_bytes * rows.step, row_cost, 1)
    per_tile = max(TILE_BYTES // cost, 1)
    fd = files.source(rows.tensor.file)
    for first in range(0, rows.n_rows, per_tile):
        yield first, read_rows(rows, fd, first, min(per_tile, rows.n_rows - first))


def read_rows(rows: Rows, fd: int, first: int, count: int) -> NDArray[np.uint8]:
    """uint8 [count, row_bytes]: rows first..first+count of the selection (a view over skipped rows if strided)."""
    span = (count - 1) * rows.step + 1
    begin = rows.begin + first * rows.step * rows.row_bytes
    data = read_exact(fd, span * rows.row_bytes, begin, rows.tensor.file)
    return np.frombuffer(data, dtype=np.uint8).reshape(span, rows.row_bytes)[:: rows.step]


def read_panel(
    tensor: TensorInfo, files: Opened, lines: int, width: int, columns: tuple[int, int], line: int = 0
) -> NDArray[np.uint8]:
    """uint8 [lines, bytes]: byte columns [columns) of `lines` lines of `width` bytes, from line number `line` on."""
    fd = files.source(tensor.file)
    begin, end = columns
    if (begin, end) == (0, width):
        data = read_exact(fd, lines * width, tensor.begin + line * width, tensor.file)
        return np.frombuffer(data, dtype=np.uint8).reshape(lines, width)
    panel = np.empty((lines, end - begin), dtype=np.uint8)
    for number in range(lines):
        at = tensor.begin + (line + number) * width + begin
        read_into(fd, panel[number], at, tensor.file)
    return panel


def read_whole(tensor: TensorInfo, files: Opened) -> NDArray[np.uint8]:
    """All bytes of a small tensor."""
    data = read_exact(files.source(tensor.file), tensor.nbytes, tensor.begin, tensor.file)
    return np.frombuffer(data, dtype=np.uint8)


def read_scalar(tensor: TensorInfo, files: Opened, index: int = 0) -> np.float32:
    """A scale that is one number (or the one of an expert). SourceError unless it is finite and positive."""
    raw = read_whole(tensor, files)
    if tensor.dtype == "BF16":
        values: NDArray[Any] = (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        values = raw.view("<f2" if tensor.dtype == "F16" else "<f4")
    value = np.float32(values[min(index, len(values) - 1)])
    if not (math.isfinite(value) and value > 0):
        raise SourceError(
            f"{'activation' if 'input' in tensor.name else 'global'} scale is {value!r}",
            where=f"{tensor.file}: {tensor.name}",
            hint="it must be finite and positive: the checkpoint is damaged, or its quantization failed",
        )
    return value
