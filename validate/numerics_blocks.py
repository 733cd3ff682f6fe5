"""What became of the 16-blocks of one tile: exact, shifted, lossy. Pure arithmetic on arrays, no file in sight.

The proof without decoding: where the code bytes are the same and the block scales are the same numbers, all weights are
the same numbers. Eight bytes of codes are one 16-block, so a comparison of uint64 words is the mask of changed blocks,
and one look-up table says which E4M3 byte equals which E8M0 byte under the tensor's global scale. Only blocks that
differ in either are decoded.

Decoding to float64 is exact: a code has at most 2 significant bits, an E4M3 scale 4, an FP32 global scale 24, together
30 of 53, and the exponents (2^-159 to 2^140) are far from float64's ends. So `==` is equality of the numbers. Only the
size of an error (a difference of two exact numbers, and its square) is rounded, in the 16th digit.

A block is
- exact: same codes, same value (a block of zeros may have any scale);
- shifted: same value, other codes (halved or doubled with the scale doubled or halved);
- zero_sign: same value, but the sign of a zero was lost (0x8 is -0; modelopt's cast through BF16 writes 0x0);
- lossy: another value.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray
from requant.kernels.formats import (
    E2M1_MAGNITUDES,
    E2M1_VALUES,
    E4M3_POW2_MAX,
    E4M3_POW2_MIN,
    E4M3_VALUES,
    E8M0_VALUES,
    NVFP4_GROUP,
    NumberFormat,
)
from requant.kernels.reference import unpack_nibbles

__all__ = [
    "BLOCK",
    "Planes",
    "Tally",
    "bf16_spacing",
    "compare_codes",
    "compare_rounded",
    "compare_values",
    "decode",
    "e4m3_spacing",
    "live_blocks",
    "signal_energy",
    "steps_of",
]

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

BLOCK: Final = NVFP4_GROUP
"""Everything is counted in blocks of 16 along K, MXFP4 too, so that the counts can be added and compared."""
_CHUNK: Final = 1 << 13
"""Blocks decoded at a time: 2^17 weights, 1 MB per float64 array."""
_CODE: Final = E2M1_VALUES.astype(np.float64)
_SQUARE_OF_BYTE: Final = (_CODE[unpack_nibbles(np.arange(256, dtype=np.uint8)[:, None])] ** 2).sum(axis=1)
"""Sum of the squares of the two codes in a byte."""
OCTAVES: Final = E4M3_POW2_MAX - E4M3_POW2_MIN + 1
"""18: from 2^-9, the smallest subnormal, to 2^8, below which 448 lies."""
_MARLIN_MIN_BYTE: Final = 0x08
"""E4M3 byte of 2^-6, the smallest normal: Marlin flushes what lies below."""
_OCTAVE_STARTS: Final = (1, 2, 4, *range(_MARLIN_MIN_BYTE, 0x79, 8), 0x7F)
"""First E4M3 byte of each octave from 2^-9 on: three of subnormals, then eight bytes each; NaN ends them."""
_HALVINGS: Final = np.array([99, 0, 1, 0, 2, 1, 3, 2])
"""How often a magnitude code halves exactly: 6 -> 3 -> 1.5, 4 -> 2 -> 1 -> 0.5."""
_DOUBLINGS: Final = np.array([99, 3, 2, 2, 1, 1, 0, 0])
_MIDPOINTS: Final = (E2M1_MAGNITUDES[1:].astype(np.float64) + E2M1_MAGNITUDES[:-1]) / 2
_HALF_AND_ROOM: Final = 0.5 * (1 + 2.0**-4)
"""Half a spacing; E4M3's is 2^-3 to 2^-4 of the number, and a BF16 quotient before it is off by up to 2^-9 of it."""
_SLACK: Final = 1e-6
"""An encoder that works in float32 may tip a value this close (relatively) to a midpoint either way."""
_LOW: Final = np.concatenate([[0.0], _MIDPOINTS]) * (1 - _SLACK)
_HIGH: Final = np.concatenate([_MIDPOINTS, [np.inf]]) * (1 + _SLACK)


@dataclass(slots=True)
class Tally:
    """Counts of 16-blocks (blocks32, lossy32: of 32-blocks) and errors of one tensor, in weight units.

    changed: weights with another value. zero_signs: zeros whose sign was lost, in weights. misrounded: weights whose
    code is not the nearest under the scale that is stored. avoidable: lossy blocks that the same global scale could
    have held exactly. nan: blocks with a NaN scale, counted as lossy and left out of the errors. signal: sum of the
    squares of the source. octaves: how many of the output's E4M3 block scales lie in [2^e, 2^(e+1)), e from -9 to 8.
    """

    blocks: int = 0
    exact: int = 0
    shifted: int = 0
    zero_sign: int = 0
    lossy: int = 0
    blocks32: int = 0
    lossy32: int = 0
    changed: int = 0
    zero_signs: int = 0
    below_marlin: int = 0
    avoidable: int = 0
    misrounded: int = 0
    nan: int = 0
    max_error: float = 0.0
    squared_error: float = 0.0
    signal: float = 0.0
    octaves: list[int] = field(default_factory=lambda: [0] * OCTAVES)

    def add(self, other: Tally) -> None:
        """Add another tally to this one."""
        for each in fields(self):
            if each.name == "octaves":
                continue
            a, b = getattr(self, each.name), getattr(other, each.name)
            setattr(self, each.name, max(a, b) if each.name == "max_error" else a + b)
        self.octaves = [a + b for a, b in zip(self.octaves, other.octaves, strict=True)]

    @property
    def lossless(self) -> bool:
        """Every weight kept its value, and every zero its sign."""
        return self.lossy == 0 and self.zero_sign == 0


@dataclass(frozen=True, slots=True)
class Planes:
    """A tile: codes [R, K/2], scale bytes [R, K/group], and the float64 value of each scale byte, global included."""

    codes: Bytes
    scales: Bytes
    steps: Floats
    group: int


def steps_of(number_format: NumberFormat, global_scale: float = 1.0) -> Floats:
    """[256] float64: what one unit of a code is worth under each scale byte; NaN bytes stay NaN."""
    if number_format is NumberFormat.MXFP4:
        return E8M0_VALUES.astype(np.float64)
    return E4M3_VALUES.astype(np.float64) * global_scale


def compare_codes(source: Planes, output: Planes, tally: Tally) -> None:
    """Two FP4 tiles of the same weights; see the classes above."""
    rows, half_k = source.codes.shape
    blocks = half_k * 2 // BLOCK
    changed = source.codes.view(np.uint64) != output.codes.view(np.uint64)
    rescaled = _rescaled(source, output)
    _count_tile(output, rows, half_k * 2, tally)
    if not changed.any() and not rescaled.any():
        tally.exact += rows * blocks
        return
    differs = changed | _per_block(rescaled, blocks)
    tally.exact += differs.size - int(np.count_nonzero(differs))
    lost = np.zeros_like(differs)
    at = np.nonzero(differs)
    for begin in range(0, len(at[0]), _CHUNK):
        r, b = at[0][begin : begin + _CHUNK], at[1][begin : begin + _CHUNK]
        lost[r, b] = _compare_blocks(source, output, r, b, tally)
    _count_32(lost, tally)


def compare_values(values: Floats, output: Planes, tally: Tally) -> None:
    """A tile of plain source values [R, K] against its FP4 encoding. Only values count: an encoder may sign zeros."""
    rows, k = values.shape
    _count_tile(output, rows, k, tally)
    codes = unpack_nibbles(output.codes)
    steps = np.repeat(output.steps[output.scales], output.group, axis=1)
    nan = np.isnan(steps)
    if nan.any():
        tally.nan += int(np.count_nonzero(nan)) // BLOCK
        values, steps = np.where(nan, 0.0, values), np.where(nan, 0.0, steps)
    error = values - _CODE[codes] * steps
    lost = ((error != 0) | nan).reshape(rows, k // BLOCK, BLOCK).any(axis=-1)
    lossy = int(np.count_nonzero(lost))
    tally.lossy += lossy
    tally.changed += int(np.count_nonzero((error != 0) | nan))
    tally.exact += lost.size - lossy
    tally.misrounded += _misrounded(values, codes, steps)
    tally.max_error = max(tally.max_error, float(np.abs(error).max(initial=0.0)))
    tally.squared_error += float(np.square(error).sum())
    tally.signal += float(np.square(values).sum())
    _count_32(lost, tally)


def decode(planes: Planes) -> Floats:
    """An FP4 tile as float64 [R, K]."""
    return _CODE[unpack_nibbles(planes.codes)] * np.repeat(planes.steps[planes.scales], planes.group, axis=1)


def compare_rounded(values: Floats, output: Floats, spacing: Floats, tally: Tally) -> None:
    """A tile of source values [R, K] against floats it was rounded to, whose neighbours lie `spacing` apart.

    Counted in blocks of 16 along K, the last one shorter. misrounded: further off than half a spacing, with room for an
    encoder that rounds twice (FP32, or BF16 in front of E4M3).
    """
    rows, k = values.shape
    blocks = -(-k // BLOCK)
    nan = np.isnan(values) | np.isnan(output)
    error = np.where(nan, 0.0, values - output)
    wrong = (error != 0) | nan
    lost = np.zeros((rows, blocks * BLOCK), dtype=np.bool_)
    lost[:, :k] = wrong
    lossy = int(np.count_nonzero(lost.reshape(rows, blocks, BLOCK).any(axis=-1)))
    tally.blocks += rows * blocks
    tally.lossy += lossy
    tally.exact += rows * blocks - lossy
    tally.nan += int(np.count_nonzero(nan))
    tally.changed += int(np.count_nonzero(wrong))
    tally.misrounded += int(np.count_nonzero(np.abs(error) > spacing * _HALF_AND_ROOM))
    tally.max_error = max(tally.max_error, float(np.abs(error).max(initial=0.0)))
    tally.squared_error += float(np.square(error).sum())
    tally.signal += float(np.square(np.where(nan, 0.0, values)).sum())


def bf16_spacing(values: Floats) -> Floats:
    """Distance between BF16 numbers around each value: 2^-7 of its power of two, 2^-133 at the small end."""
    _, exponent = np.frexp(np.abs(values))
    return np.ldexp(1.0, np.maximum(exponent - 8, -133))


def e4m3_spacing(values: Floats, steps: Floats) -> Floats:
    """Distance between the numbers that E4M3 codes under these scales give, around each value; the last is 448."""
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.abs(np.where(steps != 0, values / steps, 0.0))
    _, exponent = np.frexp(ratio)
    return np.ldexp(1.0, np.clip(exponent - 4, -9, 5)) * steps


def live_blocks(codes: Bytes, group: int) -> Mask:
    """[R, K/group]: blocks of `group` weights (16 or 32) with at least one nonzero magnitude."""
    words = (codes.view(np.uint64) & np.uint64(0x7777777777777777)) != 0
    return words if group == BLOCK else words.reshape(words.shape[0], -1, group // BLOCK).any(axis=-1)


def signal_energy(planes: Planes) -> float:
    """Sum of the squares of all weights of a tile; blocks with a NaN scale count nothing."""
    rows = planes.codes.shape[0]
    squares = _SQUARE_OF_BYTE[planes.codes].reshape(rows, -1, planes.group // 2).sum(axis=-1)
    return float(np.nansum(squares * np.square(planes.steps[planes.scales])))


def _count_tile(output: Planes, rows: int, k: int, tally: Tally) -> None:
    tally.blocks += rows * k // BLOCK
    tally.blocks32 += rows * k // 32 if k % 32 == 0 else 0
    if output.group == NVFP4_GROUP:
        _count_octaves(output.scales, tally)


def _count_octaves(scales: Bytes, tally: Tally) -> None:
    """Threshold by threshold, between the smallest and the largest byte alone: cheaper than counting each byte."""
    if not scales.size:
        return
    low, high = int(scales.min()), int(scales.max())
    above = scales.size if low >= _OCTAVE_STARTS[0] else int(np.count_nonzero(scales))
    for octave, end in enumerate(_OCTAVE_STARTS[1:]):
        if end <= low or not above:
            continue
        beyond = int(np.count_nonzero(scales >= end)) if high >= end else 0
        tally.octaves[octave] += above - beyond
        if end <= _MARLIN_MIN_BYTE:
            tally.below_marlin += above - beyond
        above = beyond


def _count_32(lost: Mask, tally: Tally) -> None:
    if lost.shape[1] % 2 == 0:
        tally.lossy32 += int(np.count_nonzero(lost.reshape(lost.shape[0], -1, 2).any(axis=-1)))


def _rescaled(source: Planes, output: Planes) -> Mask:
    """Blocks whose scale is another number; [R, K/32] for MXFP4 -> NVFP4, [R, K/16] otherwise."""
    if source.group == 2 * output.group and output.scales.shape[1] % 2 == 0:
        table = _pairs(source.steps.tobytes(), output.steps.tobytes())
        return output.scales.view(np.uint16) != table[source.scales]
    wanted = np.repeat(source.steps[source.scales], source.group // BLOCK, axis=1)
    return wanted != np.repeat(output.steps[output.scales], output.group // BLOCK, axis=1)


@lru_cache(maxsize=256)
def _pairs(source_steps: bytes, output_steps: bytes) -> NDArray[np.uint16]:
    """[256]: the output scale byte that equals each source scale byte, twice; 0xFFFF (two NaN) where none does."""
    source, output = np.frombuffer(source_steps), np.frombuffer(output_steps)
    byte_of = {float(value): byte for byte, value in enumerate(output) if value > 0}
    return np.array([byte_of.get(float(value), 0xFF) * 0x0101 for value in source], dtype=np.uint16)


def _per_block(mask: Mask, blocks: int) -> Mask:
    return mask if mask.shape[1] == blocks else np.repeat(mask, blocks // mask.shape[1], axis=1)


def _compare_blocks(source: Planes, output: Planes, r: NDArray[np.intp], b: NDArray[np.intp], tally: Tally) -> Mask:
    """Decode the blocks (r, b) of both sides and count them; which of them are lossy."""
    rows = source.codes.shape[0]
    before = unpack_nibbles(source.codes.reshape(rows, -1, BLOCK // 2)[r, b])
    after = unpack_nibbles(output.codes.reshape(rows, -1, BLOCK // 2)[r, b])
    step_before = source.steps[source.scales[r, b * BLOCK // source.group]][:, None]
    step_after = output.steps[output.scales[r, b * BLOCK // output.group]][:, None]
    nan = (np.isnan(step_before) | np.isnan(step_after))[:, 0]
    tally.nan += int(np.count_nonzero(nan))
    was, now = _CODE[before] * step_before, _CODE[after] * step_after
    equal = (was == now).all(axis=1)
    sign_lost = (((before ^ after) & 8) != 0) & (now == 0)
    tally.zero_signs += int(np.count_nonzero(sign_lost))
    unsigned = equal & sign_lost.any(axis=1)
    same_codes = (before == after).all(axis=1)
    tally.zero_sign += int(np.count_nonzero(unsigned))
    tally.exact += int(np.count_nonzero(equal & same_codes))
    tally.shifted += int(np.count_nonzero(equal & ~same_codes & ~unsigned))
    lossy = ~equal
    if lossy.any():
        tally.lossy += int(np.count_nonzero(lossy))
        tally.changed += int(np.count_nonzero(was[lossy] != now[lossy]))
        counted = lossy & ~nan
        error = np.abs(was[counted] - now[counted])
        tally.max_error = max(tally.max_error, float(error.max(initial=0.0)))
        tally.squared_error += float(np.square(error).sum())
        tally.misrounded += _misrounded(was[counted], after[counted], np.broadcast_to(step_after, was.shape)[counted])
        if source.group == 2 * output.group:
            tally.avoidable += _avoidable(before[counted], step_before[counted, 0], output.steps)
    return lossy


def _misrounded(values: Floats, codes: Bytes, steps: Floats) -> int:
    """Weights for which another code under the same scale lies clearly nearer; a scale of zero is not judged here."""
    judged = steps != 0
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.abs(values) / np.abs(steps)
    magnitude = codes & 7
    wrong = (ratio < _LOW[magnitude]) | (ratio > _HIGH[magnitude])
    wrong |= (values != 0) & (magnitude != 0) & ((values < 0) != ((codes & 8) != 0))
    return int(np.count_nonzero(wrong & judged))


def _avoidable(codes: Bytes, steps: Floats, output_steps: Floats) -> int:
    """Blocks codes * step that a power-of-two scale byte of the output holds exactly, codes shifted if need be."""
    unit, exponent_of_unit = np.frexp(output_steps[1])  # the step of byte 1, 2^-9 times the global scale
    mantissa, exponent = np.frexp(steps)
    p = exponent - exponent_of_unit + E4M3_POW2_MIN
    magnitude = codes & 7
    halvings = np.where(magnitude > 0, _HALVINGS[magnitude], 99).min(axis=1)
    doublings = np.where(magnitude > 0, _DOUBLINGS[magnitude], 99).min(axis=1)
    fits = (p + halvings >= E4M3_POW2_MIN) & (p - doublings <= E4M3_POW2_MAX)
    return int(np.count_nonzero(fits & (mantissa == unit)))
