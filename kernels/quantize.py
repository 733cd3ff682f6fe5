"""BF16, F16 and F32 weights to MXFP4 and NVFP4 on the CPU, byte for byte as modelopt 0.47 rounds.

MXFP4, blocks of 32 along K:
    e = the smallest exponent >= -127 with amax <= 6 * 2^e; code = how many of the bounds |w / 2^e| exceeds, so a tie
    goes down; sign bit for w / 2^e <= 0, so an exact zero becomes 0x8.
NVFP4, blocks of 16, all in FP32, with a global scale s2 = amax(fused group) / (6 * 448):
    s = e4m3(clamp(amax / (6 * s2), 2^-9, 448)), 1 for a block of zeros; code = round(w / (s * s2)) to E2M1, ties to
    even, saturating; sign bit for a quotient < 0, so zero becomes 0x0.
Bounds are the midpoints .25 .75 1.25 1.75 2.5 3.5 5.

How the block scale of NVFP4 is chosen (`ScaleChoice`):
    nearest        the above: what modelopt does
    four-over-six  the better, by squared error, of amax/6 and amax/4; s2 = amax / (6 * 256) leaves room for the second
                   (Cook et al. 2025, "Four over six")
    mse            the best, by squared error, of the E4M3 bytes from 3 below to 7 above that of amax/6
Both can weigh the squared error of each input channel (`importance`, the second moment of its activation). On equal
error amax/6 stays.

`sweep_global_scale` does for s2 what mse does for s: amax * f / (6 * 448) for f = 1 and the eighths from 12/8 to 23/8,
on a sample of the group. One octave is all there is, since E4M3 is a floating-point format; from 12/8 on the block that
holds the amax has room for a scale of amax/4. Weights that vary freely gain nothing (thousandths of a dB); weights that
once were MXFP4 lie on a grid that one of these hits, and come out without any error.

Inputs are [N, K], BF16 as uint16 bits. Any row range of a tensor may be given; the calls release the GIL, so a caller
gets threads by splitting rows. Out arrays are filled in place: nothing larger than a tile is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from requant.kernels import quantize_jit
from requant.kernels.formats import E2M1_MAX, E4M3_MAX, MXFP4_GROUP, NVFP4_GROUP

__all__ = [
    "NonFiniteError",
    "ScaleChoice",
    "amax",
    "bf16_to_mxfp4",
    "bf16_to_nvfp4",
    "nvfp4_global_scale",
    "sweep_global_scale",
]

Weight = NDArray[np.uint16] | NDArray[np.float16] | NDArray[np.float32]
ScaleChoice = Literal["nearest", "four-over-six", "mse"]

_CHOICES: Final[dict[ScaleChoice, int]] = {"nearest": 0, "four-over-six": 1, "mse": 2}
_ROOM: Final[dict[ScaleChoice, float]] = {"nearest": E4M3_MAX, "four-over-six": 256.0, "mse": E4M3_MAX}
"""Block scale of the block that holds the group's amax. 256 * 6 / 4 = 384 <= 448: four-over-six needs the room."""
_SWEEP: Final = tuple(np.float32(eighths / 8) for eighths in range(12, 24))
"""Of s2, in units of amax / (6 * 448). Those that put s2 on a power of two, where MXFP4's grid is hit, are 14/8 for an
amax of 6 or 3 * 2^k and 21/8 for 4 * 2^k."""
_WORTH: Final = 0.99
"""What part of the error a swept s2 may leave for it to be taken: a sample cannot tell smaller differences."""
_TILE: Final = 1 << 18
"""Elements converted at a time where the input has to be copied (F16, or not contiguous): 1 MiB of FP32."""


class NonFiniteError(ValueError):
    """A weight holds an infinity or a NaN, which no FP4 code can say."""

    def __init__(self, row: int, column: int) -> None:
        super().__init__(f"infinity or NaN at row {row}, column {column}")
        self.row = row
        self.column = column


def amax(w: Weight) -> float:
    """The largest |w| of a [N, K] weight, 0.0 for an empty one. NonFiniteError where one is an infinity or a NaN."""
    top = np.zeros(1, dtype=np.uint32)
    largest = 0
    for first, tile in _tiles(w):
        call = quantize_jit.bf16_amax if tile.dtype == np.uint16 else quantize_jit.f32_amax
        _finite(call(tile, _shift(tile), top), first, w.shape[1])
        largest = max(largest, int(top[0]))
    return float(np.uint32(largest).view(np.float32))


def nvfp4_global_scale(group_amax: float, scale: ScaleChoice = "nearest") -> np.float32:
    """weight_scale_2 of a fused group with this amax, in FP32 as modelopt: amax / (6 * 448), or 1 where all is zero.

    For four-over-six 256 stands for 448. Never zero: an amax that small gets FP32's smallest number.
    """
    if group_amax == 0:
        return np.float32(1.0)
    quotient = np.float32(group_amax) / np.float32(E2M1_MAX * _ROOM[scale])
    return max(quotient, np.finfo(np.float32).smallest_subnormal)


def sweep_global_scale(
    group_amax: float, sample: Sequence[tuple[Weight, NDArray[np.float32] | None]], scale: ScaleChoice = "mse"
) -> np.float32:
    """weight_scale_2 of a fused group with this amax: the one that leaves a sample of it the least squared error.

    sample: parts [n, K] of the group's weights with the importance of their channels [K], or None. The best on a
    quarter of the sample is tried on all of it, and taken if it saves a hundredth of what the amax's own leaves.
    ValueError, NonFiniteError as bf16_to_nvfp4.
    """
    first = nvfp4_global_scale(group_amax, scale)
    if group_amax == 0:
        return first
    with np.errstate(over="ignore"):
        swept = [(np.float32(group_amax) * factor) / np.float32(E2M1_MAX * _ROOM[scale]) for factor in _SWEEP]
    quarter = [(w[: max(len(w) // 4, 1)], importance) for w, importance in sample]
    ranked = [(_sampled_error(quarter, s2, scale), np.frexp(s2)[0] != 0.5, s2) for s2 in swept if first < s2 < np.inf]
    if not ranked:
        return first
    _, uneven, best = min(ranked)
    error = _sampled_error(sample, best, scale)
    if error == 0 and not uneven:  # others may be as good in FP32; only 2^m is exact to the last bit
        return best
    return best if error < _WORTH * _sampled_error(sample, first, scale) else first


def _sampled_error(
    sample: Sequence[tuple[Weight, NDArray[np.float32] | None]], s2: np.float32, scale: ScaleChoice
) -> float:
    total = 0.0
    for w, importance in sample:
        codes = np.empty((w.shape[0], w.shape[1] // 2), dtype=np.uint8)
        scales = np.empty((w.shape[0], w.shape[1] // NVFP4_GROUP), dtype=np.uint8)
        total += bf16_to_nvfp4(w, s2, codes, scales, scale, importance)
    return total


def bf16_to_mxfp4(w: Weight, out_codes: NDArray[np.uint8], out_scales: NDArray[np.uint8]) -> None:
    """w [N, K] -> codes uint8 [N, K/2], E8M0 bytes uint8 [N, K/32]. NonFiniteError; ValueError for shapes."""
    _check(w, out_codes, out_scales, MXFP4_GROUP)
    codes, scales = out_codes.reshape(-1), out_scales.reshape(-1)
    for first, tile in _tiles(w):
        at, end = first * w.shape[1], first * w.shape[1] + tile.size
        call = quantize_jit.bf16_mxfp4 if tile.dtype == np.uint16 else quantize_jit.f32_mxfp4
        bad = call(tile, _shift(tile), codes[at // 2 : end // 2], scales[at // MXFP4_GROUP : end // MXFP4_GROUP])
        _finite(bad, first, w.shape[1])


def bf16_to_nvfp4(
    w: Weight,
    global_scale: np.float32,
    out_codes: NDArray[np.uint8],
    out_scales: NDArray[np.uint8],
    scale: ScaleChoice = "nearest",
    importance: NDArray[np.float32] | None = None,
) -> float:
    """w [N, K] -> codes uint8 [N, K/2], E4M3 bytes uint8 [N, K/16], under the fused group's global scale.

    importance [K] float32 >= 0 weighs the squared error by input channel; it has no say in `nearest`. Returns that
    squared error where scales were searched for, 0 for `nearest`. NonFiniteError; ValueError for shapes and for a
    global scale that is not positive and finite.
    """
    _check(w, out_codes, out_scales, NVFP4_GROUP)
    if not (np.isfinite(global_scale) and global_scale > 0):
        raise ValueError(f"global scale {global_scale} is not a positive finite number")
    if importance is None:
        weights = np.empty(0, dtype=np.float32)
    elif importance.shape != (w.shape[1],) or not (np.isfinite(importance) & (importance >= 0)).all():
        raise ValueError(f"importance must be {w.shape[1]} finite numbers >= 0, one per input channel")
    else:
        weights = np.require(importance, np.float32, ["C", "A"])
    codes, scales = out_codes.reshape(-1), out_scales.reshape(-1)
    missed = np.zeros(1, dtype=np.float64)
    for first, tile in _tiles(w):
        at, end = first * w.shape[1], first * w.shape[1] + tile.size
        call = quantize_jit.bf16_nvfp4 if tile.dtype == np.uint16 else quantize_jit.f32_nvfp4
        bad = call(
            tile,
            _shift(tile),
            np.float32(global_scale),
            _CHOICES[scale],
            weights,
            codes[at // 2 : end // 2],
            scales[at // NVFP4_GROUP : end // NVFP4_GROUP],
            missed,
        )
        _finite(bad, first, w.shape[1])
    return float(missed[0]) * float(global_scale) ** 2


def _tiles(w: Weight) -> Iterator[tuple[int, NDArray[Any]]]:
    """(first row, flat uint16 BF16 or uint32 FP32 bits): all at once, or in tiles where they must be copied."""
    if w.ndim != 2 or w.dtype.name not in ("uint16", "float16", "float32"):
        raise ValueError(f"weight is {w.dtype} {w.shape}: expected [N, K] of uint16 (BF16 bits), float16 or float32")
    rows, columns = w.shape
    if w.size == 0:
        return
    ready = w.dtype != np.float16 and w.flags.c_contiguous and w.flags.aligned
    step = rows if ready else max(1, _TILE // columns)
    kept = np.uint16 if w.dtype == np.uint16 else np.float32
    for first in range(0, rows, step):
        tile = np.require(w[first : first + step], kept, ["C", "A"]).reshape(-1)
        yield first, tile if kept is np.uint16 else tile.view(np.uint32)


def _shift(tile: NDArray[Any]) -> int:
    return 16 if tile.dtype == np.uint16 else 0


def _finite(bad: int, first_row: int, columns: int) -> None:
    if bad >= 0:
        raise NonFiniteError(first_row + bad // columns, bad % columns)


def _check(w: Weight, codes: NDArray[np.uint8], scales: NDArray[np.uint8], group: int) -> None:
    """Shapes that fit, or ValueError: the compiled loops do not check bounds."""
    if w.ndim != 2 or w.shape[1] % group:
        raise ValueError(f"weight {w.shape}: expected [N, K] with K a multiple of {group}")
    rows, k = w.shape
    for name, out, shape in (("codes", codes, (rows, k // 2)), ("scales", scales, (rows, k // group))):
        if out.shape != shape or out.dtype != np.uint8 or not out.flags.c_contiguous:
            raise ValueError(f"{name} is {out.dtype} {out.shape}: expected uint8 {shape}, contiguous")
