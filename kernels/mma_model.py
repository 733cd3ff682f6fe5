"""Bit model of the SM120 block-scaled FP4 tensor core instruction, in integers.

`mma.sync.m16n8k64 ... kind::mxf4nvf4` (NVFP4) and `kind::mxf4` (MXFP4) add, for one output, 64 products of E2M1 codes
to an FP32 accumulator. How they round is known by measurement (MMA-Sim, arXiv 2511.10909). This file writes it out:

1. The 64 products fall into four groups of 16. A group's dot is exact.
2. It is multiplied by the integer significands of its two block scales, exactly; the scale exponents add up.
3. The accumulator and the four groups are aligned to the largest exponent among the accumulator and the *scales*
   (not the products; a zero E4M3 scale has no exponent) and cut, toward zero, to 35 fraction bits.
4. The five terms are added exactly and the sum is cut, toward zero, to FP32; past the largest FP32 it is infinite.

A NaN scale or accumulator gives 0x7FFFFFFF. The sign bit of an E4M3 scale is ignored: the PTX type is ue4m3. An
infinite accumulator stays. A sum of zero is +0.

`kernels/csrc/fp4_mma.cuh` says the same in C++ and is held against this file, which is held against
`tests/goldens/fp4_mma`. `matmul` chains the model along K as the W4A4 kernel does, so that whole tiles compare bit for
bit. numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from requant.kernels.formats import (
    E2M1_VALUES,
    E4M3_NAN_BYTE,
    E8M0_BIAS,
    E8M0_NAN_BYTE,
    MXFP4_GROUP,
    NVFP4_GROUP,
    NumberFormat,
)

__all__ = ["MMA_K", "fp4_mma", "matmul"]

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

MMA_K: Final = 64
"""Codes along K that one instruction consumes."""
_GROUPS: Final = 4
"""Exact dots per instruction, of 16 products each."""
_FRACTION_BITS: Final = 35
"""Fraction bits kept below the largest exponent."""
_PRODUCT_FRACTION_BITS: Final = 8
"""A dot counts quarters (two E2M1 halves), two significands count eighths each: 2 + 3 + 3 bits."""
_FP32_FRACTION_BITS: Final = 23
_FP32_EMIN: Final = -126
_FP32_EMAX: Final = 127
_NAN_BITS: Final = 0x7FFFFFFF
_INFINITY_BITS: Final = 0x7F800000
_E2M1_HALVES: Final = (E2M1_VALUES * 2).astype(np.float32)
"""Value of a code in halves, a small integer: float32 matmuls of them are exact."""


@dataclass(frozen=True, slots=True)
class _Scale:
    """Block scales [..., 4] as eighths / 8 * 2^exponent, one per group of 16."""

    eighths: Ints
    exponent: Ints
    nan: NDArray[np.bool_]


def _decode_scales(scales: Bytes, fmt: NumberFormat) -> _Scale:
    """E4M3 [..., 4] or E8M0 [..., 2] bytes; an E8M0 scale serves two groups."""
    if fmt is NumberFormat.NVFP4:
        magnitude = scales.astype(np.int64) & 0x7F
        field, mantissa = magnitude >> 3, magnitude & 7
        eighths = np.where(field > 0, 8 + mantissa, mantissa)
        exponent = np.where(eighths == 0, _FP32_EMIN, np.maximum(field, 1) - 7)
        return _Scale(eighths, exponent, magnitude == E4M3_NAN_BYTE)
    per_group = np.repeat(scales.astype(np.int64), 2, axis=-1)
    return _Scale(np.full_like(per_group, 8), per_group - E8M0_BIAS, per_group == E8M0_NAN_BYTE)


def _shift(value: Ints, left: Ints) -> Ints:
    """value * 2^left, cut toward zero; left <= 27 by construction, so nothing overflows."""
    magnitude = np.abs(value)
    shifted = np.where(left >= 0, magnitude << np.maximum(left, 0), magnitude >> np.clip(-left, 0, 62))
    return np.where(value < 0, -shifted, shifted)


def _to_fp32_bits(total: Ints, exponent: Ints) -> NDArray[np.uint32]:
    """total * 2^(exponent - 35) to FP32 bits, cut toward zero."""
    magnitude = np.abs(total)
    high = magnitude >> 32  # the leading bit, in two halves that float64 holds exactly
    top = np.where(high > 0, np.frexp(high.astype(np.float64))[1] + 31, np.frexp(magnitude.astype(np.float64))[1] - 1)
    leading = top + exponent - _FRACTION_BITS
    # The unit of the result: 2^-23 of its own binade, or of the smallest binade for subnormals.
    unit = np.maximum(leading, _FP32_EMIN) - _FP32_FRACTION_BITS
    significand = _shift(magnitude, exponent - _FRACTION_BITS - unit)
    biased = np.where(leading >= _FP32_EMIN, (leading + 126) << 23, 0)  # the significand's leading one adds the last 1
    bits = np.where(leading > _FP32_EMAX, _INFINITY_BITS, biased + significand)
    return np.where(total == 0, 0, bits | np.where(total < 0, 1 << 31, 0)).astype(np.uint32)


def _accumulate(dots: Ints, a: _Scale, b: _Scale, c: Floats) -> Floats:
    """One instruction's rounding: exact dots [..., 4] in quarters, scales broadcast to them, c [...]."""
    bits = c.view(np.uint32).astype(np.int64)
    field, fraction = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    c_significand = np.where(field > 0, fraction | 0x800000, fraction)
    c_exponent = np.where(field > 0, field - 127, _FP32_EMIN)
    products = dots * a.eighths * b.eighths
    exponents = a.exponent + b.exponent
    largest = np.maximum(exponents.max(axis=-1), c_exponent)
    c_term = _shift(
        np.where(bits >> 31 == 1, -c_significand, c_significand),
        c_exponent - largest + (_FRACTION_BITS - _FP32_FRACTION_BITS),
    )
    terms = _shift(products, exponents - largest[..., None] + (_FRACTION_BITS - _PRODUCT_FRACTION_BITS))
    result = _to_fp32_bits(c_term + terms.sum(axis=-1), largest)
    result = np.where(np.isinf(c), c.view(np.uint32), result)
    nan = np.isnan(c) | (a.nan | b.nan).any(axis=-1)
    return np.where(nan, _NAN_BITS, result).astype(np.uint32).view(np.float32)


def _halves(codes: Bytes) -> Floats:
    """[..., K/2] bytes to [..., K] values in halves, low nibble first."""
    pairs = np.stack([codes & 15, codes >> 4], axis=-1)
    return _E2M1_HALVES[pairs].reshape(*codes.shape[:-1], codes.shape[-1] * 2)


def fp4_mma(a: Bytes, b: Bytes, scale_a: Bytes, scale_b: Bytes, c: Floats, *, fmt: NumberFormat) -> Floats:
    """d = a . b + c for n single outputs, each rounded as one instruction does.

    a, b uint8 [n, 32] codes; scales uint8 [n, 4] E4M3 (NVFP4) or [n, 2] E8M0 (MXFP4); c float32 [n]; d float32 [n].
    """
    products = (_halves(a) * _halves(b)).reshape(*c.shape, _GROUPS, 16)
    dots = products.sum(axis=-1).astype(np.int64)
    return _accumulate(dots, _decode_scales(scale_a, fmt), _decode_scales(scale_b, fmt), c)


def _pad_k(packed: Bytes, columns: int) -> Bytes:
    return np.pad(packed, ((0, 0), (0, columns - packed.shape[1])))


def matmul(
    a: Bytes, scale_a: Bytes, b: Bytes, scale_b: Bytes, *, fmt: NumberFormat, k_range: tuple[int, int] | None = None
) -> Floats:
    """a [M, K/2] . b [N, K/2]^T -> float32 [M, N]: the instruction chained along K from a zero accumulator.

    scales [rows, K/16] E4M3 or [rows, K/32] E8M0. K is padded to 64 with code 0 and scale byte 0, as the kernel pads.
    k_range: the part of (padded) K to sum, in multiples of 64; all of it by default.
    """
    steps = -(-a.shape[1] * 2 // MMA_K)
    per_step = MMA_K // (NVFP4_GROUP if fmt is NumberFormat.NVFP4 else MXFP4_GROUP)
    values_a, values_b = (_halves(_pad_k(codes, steps * MMA_K // 2)) for codes in (a, b))
    scale_a, scale_b = (_pad_k(scales, steps * per_step) for scales in (scale_a, scale_b))
    first, last = (0, steps) if k_range is None else (k_range[0] // MMA_K, min(k_range[1] // MMA_K, steps))
    out = np.zeros((a.shape[0], b.shape[0]), dtype=np.float32)
    for step in range(first, last):
        codes, scales = slice(step * MMA_K, (step + 1) * MMA_K), slice(step * per_step, (step + 1) * per_step)
        group_a = values_a[:, codes].reshape(-1, _GROUPS, 16).transpose(1, 0, 2)
        group_b = values_b[:, codes].reshape(-1, _GROUPS, 16).transpose(1, 2, 0)
        dots = np.moveaxis(group_a @ group_b, 0, -1).astype(np.int64)  # [M, N, 4]
        row = _decode_scales(scale_a[:, None, scales], fmt)
        column = _decode_scales(scale_b[None, :, scales], fmt)
        out = _accumulate(dots, row, column, out)
    return out
