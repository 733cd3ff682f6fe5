"""Tile by tile through two checkpoints: one paired weight or one copied tensor at a time, in bounded memory.

`compare` runs the proof without decoding over all tiles. A second look over the same tiles is taken only where
something needs it: a loss (for the signal in SQNR and the all-zero census), or exponents that span more than 14 over
all blocks (then only the live ones count). What comes out is one `Result` per output weight, to be judged elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray
from requant.kernels.formats import E8M0_BIAS, MARLIN_WINDOW, NumberFormat
from requant.validate.carried_scales import numbers_of
from requant.validate.numerics_blocks import (
    Planes,
    Tally,
    bf16_spacing,
    compare_codes,
    compare_rounded,
    compare_values,
    decode,
    e4m3_spacing,
    live_blocks,
    signal_energy,
    steps_of,
)
from requant.validate.numerics_read import MappedReader
from requant.validate.opened import Tensor
from requant.validate.pairing import Copy, Pair, Weight

__all__ = ["Result", "compare", "compare_copy", "compare_kept", "look_again"]

_TILE_BYTES: Final = 2 << 20
"""Codes, or bytes of a copied tensor, read at a time and per side."""
_TURNED: Final = 2.0**-23
"""How far from 1 a scale times its FP32 reciprocal may be: one step of FP32."""
_FUSED: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
_OF_ALL: Final = {"input_scale": max, "input_global_scale": min}
_TILE_VALUES: Final = 1 << 17
"""Plain weights decoded at a time: 1 MB per float64 array."""


@dataclass(slots=True)
class Result:
    """One output weight (all experts of a stack together).

    by_codes: FP4 on both sides, compared without decoding. k: least and largest exponent, over all blocks until the
    second look narrows it to the live ones; None without E8M0 scales or live blocks. source_live, output_live: any
    nonzero weight; taken for granted where nothing was lost. activation: what is wrong with its activation scale.
    """

    name: str
    pairs: list[Pair]
    tally: Tally = field(default_factory=Tally)
    k: tuple[int, int] | None = None
    by_codes: bool = False
    looked: bool = False
    source_live: bool = True
    output_live: bool = True
    activation: str = ""

    @property
    def weights(self) -> int:
        """Weights compared."""
        return sum(pair.output.rows * pair.output.k for pair in self.pairs)

    @property
    def span(self) -> int | None:
        """Largest minus least exponent."""
        return None if self.k is None else self.k[1] - self.k[0]

    @property
    def rms_error(self) -> float:
        """Root of the mean squared error over all weights, in weight units."""
        return math.sqrt(self.tally.squared_error / self.weights) if self.weights else 0.0

    @property
    def sqnr_db(self) -> float | None:
        """10 log10(signal / noise); None where nothing was lost, or where there was no signal."""
        noise, signal = self.tally.squared_error, self.tally.signal
        return 10 * (math.log10(signal) - math.log10(noise)) if noise > 0 and signal > 0 else None

    def widen(self, low: int, high: int) -> None:
        """Take in the exponents from low to high."""
        self.k = (low, high) if self.k is None else (min(self.k[0], low), max(self.k[1], high))


def compare(
    name: str, pairs: list[Pair], before: MappedReader, after: MappedReader, advance: Callable[[int], None]
) -> Result:
    """Compare one output weight with its source. advance: told the bytes of the source after each tile."""
    result = Result(name, pairs, by_codes=_same_kind(pairs[0].source, pairs[0].output))
    if not result.by_codes:
        result.source_live = result.output_live = False
    for pair in pairs:
        for start, stop in _tiles(pair):
            if result.by_codes:
                source = _planes(pair.source, before, start, stop)
                compare_codes(source, _twin(pair, before, after, start, stop), result.tally)
                if pair.source.format is NumberFormat.MXFP4:
                    low, high = int(source.scales.min()), int(source.scales.max())
                    result.widen(low - E8M0_BIAS, high - E8M0_BIAS)
            else:
                _compare_by_value(pair, before, after, start, stop, result)
            advance((stop - start) * _row_bytes(pair.source))
    if result.by_codes and (not result.tally.lossless or (result.span or 0) > MARLIN_WINDOW):
        look_again(result, before, after)
    return result


def _same_kind(source: Weight, output: Weight) -> bool:
    """FP4 on both sides, and no larger blocks in the output: then equal codes and scales prove equal weights."""
    return source.packed and output.packed and source.format.group >= output.format.group


def _twin(pair: Pair, before: MappedReader, after: MappedReader, start: int, stop: int) -> Planes:
    """The output's planes. A global scale that is the source's turned over, as FP32 can say it, is the source's."""
    planes = _planes(pair.output, after, start, stop)
    source, output = pair.source, pair.output
    if source.global_scale is None or output.global_scale is None or source.reciprocal == output.reciprocal:
        return planes
    product = before.scalar(source.global_scale) * after.scalar(output.global_scale)
    if abs(product - 1.0) > _TURNED:
        return planes
    return Planes(planes.codes, planes.scales, steps_of(source.format, _global_scale(source, before)), planes.group)


def _compare_by_value(
    pair: Pair, before: MappedReader, after: MappedReader, start: int, stop: int, result: Result
) -> None:
    """Decode the source's rows; the output's codes must be the nearest under the scales that are stored."""
    values, output = _values(pair.source, before, start, stop), pair.output
    result.source_live = result.source_live or bool(values.any())
    if output.packed:
        planes = _planes(output, after, start, stop)
        compare_values(values, planes, result.tally)
        result.output_live = result.output_live or bool((planes.codes & 0x77).any())
        return
    if output.decoded is not None:
        decoded, steps = output.decoded.codes_and_steps(after, start, stop)
        compare_rounded(values, decoded, e4m3_spacing(values, steps), result.tally)
    else:
        decoded = _values(output, after, start, stop)
        compare_rounded(values, decoded, bf16_spacing(values), result.tally)
    result.output_live = result.output_live or bool(decoded.any())


def _values(weight: Weight, reader: MappedReader, start: int, stop: int) -> NDArray[np.float64]:
    """Rows of a weight in any format, as float64."""
    if weight.decoded is not None:
        return weight.decoded.values(reader, start, stop)
    return decode(_planes(weight, reader, start, stop)) if weight.packed else reader.values(weight.codes, start, stop)


def look_again(result: Result, before: MappedReader, after: MappedReader) -> None:
    """Fill in what only the codes tell: live exponents, liveness of both sides, and the signal if there was a loss."""
    if result.looked or not result.by_codes:
        return
    result.looked, result.k = True, None
    result.source_live = result.output_live = False
    for pair in result.pairs:
        for start, stop in _tiles(pair):
            source = _planes(pair.source, before, start, stop)
            live = live_blocks(source.codes, source.group)
            if live.any():
                result.source_live = True
                if pair.source.format is NumberFormat.MXFP4:
                    exponents = source.scales[live]
                    result.widen(int(exponents.min()) - E8M0_BIAS, int(exponents.max()) - E8M0_BIAS)
            if not result.output_live:
                result.output_live = bool((after.codes(pair.output.codes, start, stop) & 0x77).any())
            if result.tally.squared_error:
                result.tally.signal += signal_energy(source)


def compare_copy(copy: Copy, before: MappedReader, after: MappedReader) -> str:
    """The empty string if the output tensor holds the source's bytes (an input_scale of another dtype: its numbers), or
    else what is wrong with it."""
    source, output = copy.source, copy.output
    if copy.expert is not None:
        rows = max(1, output.shape[0]) if output.shape else 1
        same = source.dtype == output.dtype and np.array_equal(before.part(copy), after.rows(output, 0, rows))
        return "" if same else f"differs from expert {copy.expert} of {source.name}"
    if output.name.endswith(".input_scale") and source.dtype != output.dtype:  # BF16 in some of compressed-tensors'
        theirs, ours = numbers_of(source, before), numbers_of(output, after)
        if theirs is not None and ours is not None:
            return "" if np.array_equal(theirs, ours) else f"is {ours.tolist()}, its source {theirs.tolist()}"
    if (source.dtype, source.shape) != (output.dtype, output.shape):
        return (
            f"is {output.dtype} {list(output.shape)}, its source {source.dtype} {list(source.shape)}, "
            "and no conversion between the two is known"
        )
    for start, stop in _row_tiles(source):
        ours, theirs = after.rows(output, start, stop), before.rows(source, start, stop)
        if not np.array_equal(ours, theirs):
            changed = int(np.count_nonzero(ours != theirs))
            zeros = not any(after.rows(output, a, b).any() for a, b in _row_tiles(output))
            what = "is all zeros, its source is not" if zeros else "differs from its source"
            return f"{what}: {changed:,} bytes in rows {start:,} to {stop - 1:,}, the first that differ"
    return ""


def compare_kept(copy: Copy, theirs: Mapping[str, Tensor], before: MappedReader, after: MappedReader) -> str:
    """compare_copy, but for an activation scale that became that of all weights that a runtime fuses. theirs: by name.

    The largest amax holds every one of them: the largest input_scale, the least input_global_scale.
    """
    wrong = compare_copy(copy, before, after)
    module, _, suffix = copy.output.name.rpartition(".")
    parent, _, leaf = module.rpartition(".")
    if not wrong or suffix not in _OF_ALL or copy.output.dtype != "F32":
        return wrong
    fused = next((leaves for leaves in _FUSED if leaf in leaves), ())
    partners = [theirs[name] for name in (f"{parent}.{other}.{suffix}" for other in fused) if name in theirs]
    numbers = [found for partner in partners if (found := numbers_of(partner, before)) is not None and found.size]
    if len(partners) < 2 or len(numbers) < len(partners):
        return wrong
    shared = _OF_ALL[suffix](float(found[0]) for found in numbers)
    return "" if after.scalar(copy.output) == shared else wrong


def _planes(weight: Weight, reader: MappedReader, start: int, stop: int) -> Planes:
    if weight.scales is None:
        raise ValueError(f"{weight.module} has no block scales")
    return Planes(
        reader.codes(weight.codes, start, stop),
        reader.codes(weight.scales, start, stop),
        steps_of(weight.format, _global_scale(weight, reader)),
        weight.format.group,
    )


def _global_scale(weight: Weight, reader: MappedReader) -> float:
    """weight_scale_2, or the reciprocal of compressed-tensors' weight_global_scale; 1 for MXFP4. Zero gives NaN."""
    if weight.global_scale is None:
        return 1.0
    value = reader.scalar(weight.global_scale)
    if not weight.reciprocal:
        return value
    return 1.0 / value if value else math.nan


def _row_bytes(weight: Weight) -> int:
    """Bytes of one row of values, or of codes and scales."""
    if weight.decoded is not None:
        return max(1, sum(part.nbytes for part in weight.decoded.parts.values()) // max(1, weight.rows))
    if not weight.packed:
        return weight.k * max(1, weight.codes.tensor.nbytes // max(1, weight.codes.tensor.elements))
    return weight.k // 2 + weight.k // weight.format.group


def _tiles(pair: Pair) -> Iterator[tuple[int, int]]:
    """Ranges of rows: larger ones where nothing need be decoded."""
    weight = pair.source
    by_codes = _same_kind(weight, pair.output)
    size, row = (_TILE_BYTES, weight.k // 2) if by_codes else (_TILE_VALUES, weight.k)
    grain = max((w.decoded.step for w in (weight, pair.output) if w.decoded is not None), default=1)
    step = max(1, size // max(1, row) // grain) * grain
    for start in range(0, weight.rows, step):
        yield start, min(start + step, weight.rows)


def _row_tiles(tensor: Tensor) -> Iterator[tuple[int, int]]:
    rows = tensor.shape[0] if tensor.shape else 1
    step = max(1, _TILE_BYTES * rows // max(1, tensor.nbytes))
    for start in range(0, rows, step):
        yield start, min(start + step, rows)
