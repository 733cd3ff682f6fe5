"""Two stored weights compared as numbers, whatever the formats, in tiles of bounded size."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from requant.convert.decode import code_rows, float_tiles, scale_rows
from requant.convert.files import Files
from requant.convert.layouts.base import SourceWeight
from requant.convert.rows import Opened, read_rows, read_scalar

__all__ = ["Compared", "Selected", "compare_weight", "experts_of", "whole"]

CHUNK_WEIGHTS: Final = 1 << 20
TURNED: Final = 2.0**-23
"""How far from 1 a global scale times its FP32 reciprocal may be: one step of FP32."""


class Selected(NamedTuple):
    """Rows start, start + step, ... of a stored weight, under the module name that they have when they stand alone."""

    name: str
    weight: SourceWeight
    start: int
    step: int
    rows: int


class Compared(NamedTuple):
    """What became of one weight. a, b: formats. sqnr_db: None where equal, or where A is all zeros."""

    module: str
    a: str
    b: str
    equal: bool
    max_error: float
    sqnr_db: float | None


def whole(weight: SourceWeight) -> Selected:
    """A weight as it is stored, all experts together."""
    return Selected(weight.module, weight, 0, 1, weight.rows * max(weight.experts, 1))


def experts_of(weight: SourceWeight) -> Iterator[Selected]:
    """The single experts of a stack, gate and up apart, under the names that they have in other layouts."""
    base, _, name = weight.module.rpartition(".")
    both = weight.interleaved or (weight.more.split and name == "gate_up_proj")
    leaves = ("gate_proj", "up_proj") if both else (name,)
    per_leaf = weight.rows // len(leaves)
    for expert in range(weight.experts):
        for number, leaf in enumerate(leaves):
            start = expert * weight.rows + (number if weight.interleaved else number * per_leaf)
            yield Selected(f"{base}.{expert}.{leaf}", weight, start, len(leaves) if weight.interleaved else 1, per_leaf)


class _Sources:
    """Source files of one checkpoint."""

    def __init__(self, root: Path) -> None:
        self.files = Files(root, os.O_RDONLY)

    def source(self, file: str) -> int:
        return self.files(file)

    def output(self, shard: int) -> int:
        raise LookupError(f"a comparison does not write (shard {shard})")


def compare_weight(root_a: Path, a: Selected, root_b: Path, b: Selected) -> Compared:
    """Compare the numbers. Same FP4 codes and scales are equal; everything else is decoded. SourceError."""
    left, right = _Sources(root_a), _Sources(root_b)
    try:
        formats = (_label(a.weight), _label(b.weight))
        if a.weight.format == b.weight.format and a.weight.format in ("mxfp4", "nvfp4") and _same(a, left, b, right):
            return Compared(b.name, *formats, equal=True, max_error=0.0, sqnr_db=None)
        worst = noise = signal = 0.0
        for first, count in _ranges(a, b):
            one, other = _values(a, first, count, left), _values(b, first, count, right)
            with np.errstate(invalid="ignore"):
                error = np.where((one == other) | (np.isnan(one) & np.isnan(other)), 0.0, one - other)
            worst = max(worst, float(np.abs(error).max(initial=0.0)))
            noise += float(np.square(error).sum())
            signal += float(np.square(one).sum())
        equal = worst == 0.0
        sqnr = None if equal or not (signal > 0 and noise > 0) else 10 * (math.log10(signal) - math.log10(noise))
        return Compared(b.name, *formats, equal=equal, max_error=worst, sqnr_db=sqnr)
    finally:
        left.files.close()
        right.files.close()


def _label(weight: SourceWeight) -> str:
    return weight.codes.dtype.lower() if weight.format == "plain" else weight.format


def _ranges(a: Selected, b: Selected) -> Iterator[tuple[int, int]]:
    """(first, count) over the rows, at starts that every format can be read from."""
    head = max((w.rows // w.more.rotary for w in (a.weight, b.weight) if w.more.rotary), default=1)
    grain = math.lcm(8, head)
    step = max(CHUNK_WEIGHTS // max(a.weight.cols, 1) // grain, 1) * grain
    for first in range(0, a.rows, step):
        yield first, min(step, a.rows - first)


def _values(selected: Selected, first: int, count: int, files: Opened) -> NDArray[np.float64]:
    weight, step = selected.weight, selected.step
    tiles = [_wide(t) for _, t in float_tiles(weight, selected.start + first * step, step, count, files)]
    return np.concatenate(tiles).astype(np.float64)


def _wide(tile: NDArray[Any]) -> NDArray[np.float32]:
    if tile.dtype == np.uint16:
        return (tile.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return tile.astype(np.float32)


def _same(a: Selected, left: Opened, b: Selected, right: Opened) -> bool:
    """Codes and block scales byte for byte, and the same global scale, in either dialect."""
    for first, count in _ranges(a, b):
        for rows_of in (code_rows, scale_rows):
            planes: list[NDArray[np.uint8]] = []
            for selected, files in ((a, left), (b, right)):
                rows = rows_of(selected.weight, selected.start, selected.step, selected.rows)
                if rows is None:
                    return False
                planes.append(read_rows(rows, files.source(rows.tensor.file), first, count))
            if not np.array_equal(planes[0], planes[1]):
                return False
    one, other = (
        read_scalar(s.weight.scalar, files, s.start // s.weight.rows) if s.weight.scalar else np.float32(1.0)
        for s, files in ((a, left), (b, right))
    )
    if a.weight.more.reciprocal == b.weight.more.reciprocal:
        return bool(one == other)
    return abs(float(one) * float(other) - 1.0) <= TURNED
