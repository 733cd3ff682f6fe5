"""The oracle: every number format and conversion once more, slow and plain, so that it can be checked by eye.

What. Nibbles, MXFP4/NVFP4/FP8-block decoding to float64, the MXFP4 -> NVFP4 repack in exact rational arithmetic
(`repack_oracle`), the BF16 -> MXFP4 and BF16 -> NVFP4 encoders in modelopt's float32 arithmetic, and a float64 matmul.

Why float64 is exact for decoding. An E2M1 magnitude has at most 2 significant bits, an E4M3 scale at most 4, an FP32
global scale 24: their product has at most 30 of float64's 53 bits, and its exponent (from 2^-1 * 2^-9 * 2^-149 to
2^3 * 2^9 * 2^128) lies well inside float64's range. So `==` on decoded values is equality of the numbers, not of
approximations.

Layout. codes [N, K/2] uint8, low nibble = even K; block scales [N, K/group] uint8, never swizzled.

Nothing here is fast and nothing imports the fast paths: tests hold those against this file. numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cache, lru_cache
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from requant.kernels.formats import (
    E2M1_MAGNITUDES,
    E2M1_VALUES,
    E4M3_MAX,
    E4M3_MAX_BYTE,
    E4M3_VALUES,
    E8M0_BIAS,
    E8M0_NAN_BYTE,
    E8M0_VALUES,
    MARLIN_WINDOW,
    MXFP4_GROUP,
    NVFP4_GROUP,
    e4m3_pow2_byte,
)

__all__ = [
    "RepackCounts",
    "RepackResult",
    "dequantize_awq",
    "dequantize_fp8_block",
    "dequantize_gptq",
    "dequantize_mxfp4",
    "dequantize_nvfp4",
    "dequantize_packed_int4",
    "encode_e4m3",
    "encode_mxfp4",
    "encode_nvfp4",
    "matmul",
    "nvfp4_global_scale",
    "pack_nibbles",
    "repack_oracle",
    "unpack_nibbles",
    "unpack_words",
]

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]

_SMALLEST_PLAIN_EXPONENT: Final = -126  # of a normal FP32 number
_DEAD_BYTE: Final = 0x08
"""2^-6, the smallest scale that no kernel flushes: what a block of zeros gets where its own scale does not fit."""
_E2M1_BOUNDS: Final = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=np.float32)
"""Midpoints between neighbouring E2M1 magnitudes."""
_CANDIDATES: Final = 4
"""m = k_max - 8 - j for j = 0..3: three doublings (0.5 -> 4) are the most that any nonzero code allows."""


# --- nibbles and decoding -------------------------------------------------------------------------------------------


def unpack_nibbles(packed: Bytes) -> Bytes:
    """[..., K/2] bytes to [..., K] codes 0..15, low nibble first."""
    codes = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), dtype=np.uint8)
    codes[..., 0::2] = packed & 0x0F
    codes[..., 1::2] = packed >> 4
    return codes


def pack_nibbles(codes: Bytes) -> Bytes:
    """[..., K] codes 0..15 to [..., K/2] bytes, low nibble first; K must be even."""
    if codes.shape[-1] % 2:
        raise ValueError(f"an odd number of codes ({codes.shape[-1]}) cannot be packed two to a byte")
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8)


def dequantize_mxfp4(codes: Bytes, scales: Bytes) -> Floats:
    """MXFP4 to float64 [N, K], exact. codes [N, K/2], scales [N, K/32] E8M0 bytes; byte 255 decodes to NaN."""
    steps = E8M0_VALUES.astype(np.float64)[scales]
    return E2M1_VALUES.astype(np.float64)[unpack_nibbles(codes)] * np.repeat(steps, MXFP4_GROUP, axis=-1)


def dequantize_nvfp4(codes: Bytes, scales: Bytes, global_scale: float) -> Floats:
    """NVFP4 to float64 [N, K], exact. codes [N, K/2], scales [N, K/16] E4M3 bytes, global_scale = weight_scale_2."""
    steps = E4M3_VALUES.astype(np.float64)[scales] * np.float64(global_scale)
    return E2M1_VALUES.astype(np.float64)[unpack_nibbles(codes)] * np.repeat(steps, NVFP4_GROUP, axis=-1)


def dequantize_fp8_block(values: Bytes, scales: NDArray[np.generic], block: tuple[int, int]) -> Floats:
    """DeepSeek's FP8 to float64 [M, N], exact. values [M, N] E4M3 bytes; scales [ceil(M/bm), ceil(N/bn)].

    scales are E8M0 bytes when uint8, otherwise numbers. Ragged edges share the last scale of their row or column.
    """
    rows, cols = values.shape
    expected = (-(-rows // block[0]), -(-cols // block[1]))
    if scales.shape != expected:
        raise ValueError(
            f"scales {scales.shape} do not fit values {values.shape} in blocks {block}: expected {expected}"
        )
    grid = E8M0_VALUES[scales.astype(np.intp)] if scales.dtype == np.uint8 else scales
    steps = grid.astype(np.float64)
    steps = np.repeat(np.repeat(steps, block[0], axis=0), block[1], axis=1)[:rows, :cols]
    return E4M3_VALUES.astype(np.float64)[values] * steps


def unpack_words(words: NDArray[np.uint32]) -> Bytes:
    """[..., n] I32 words (as uint32) to [..., 8n] nibbles, the lowest first."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    nibbles = (words[..., None] >> shifts) & np.uint32(15)
    return nibbles.reshape(*words.shape[:-1], -1).astype(np.uint8)


def dequantize_packed_int4(
    words: NDArray[np.uint32], scales: Floats, zeros: NDArray[np.uint32] | None, columns: int
) -> Floats:
    """compressed-tensors' pack-quantized INT4 to float64 [N, K], exact.

    words [N, K/8]; scales [N, groups], as many equal groups as K holds; zeros [N/8, groups] or None for the middle, 8.
    """
    codes = unpack_words(words)[:, :columns].astype(np.float64)
    zero = (
        np.full(scales.shape, 8.0) if zeros is None else unpack_words(zeros.T).T[: scales.shape[0]].astype(np.float64)
    )
    group = -(-columns // scales.shape[1])
    spread = np.arange(columns) // group
    return (codes - zero[:, spread]) * scales.astype(np.float64)[:, spread]


def dequantize_gptq(
    words: NDArray[np.uint32], scales: Floats, zeros: NDArray[np.uint32], order: NDArray[np.int64], offset: int
) -> Floats:
    """GPTQ INT4 to float64 [N, K], exact. words [K/8, N], scales [G, N], zeros [G, N/8].

    order [K]: the group of each k. offset: added to the stored zero points, 1 in the first version of the format.
    """
    codes = unpack_words(words.T).astype(np.float64)
    zero = unpack_words(zeros).astype(np.float64) + offset
    return (codes - zero[order].T) * scales.astype(np.float64)[order].T


def dequantize_awq(words: NDArray[np.uint32], scales: Floats, zeros: NDArray[np.uint32]) -> Floats:
    """AWQ (GEMM) INT4 to float64 [N, K], exact. words [K, N/8], scales [G, N], zeros [G, N/8].

    In each word column 0..7 lies in nibble 0 4 1 5 2 6 3 7.
    """
    columns: NDArray[np.int64] = np.arange(scales.shape[1], dtype=np.int64)
    at: NDArray[np.int64] = columns - columns % 8 + np.array([0, 4, 1, 5, 2, 6, 3, 7], dtype=np.int64)[columns % 8]
    order: NDArray[np.int64] = np.arange(words.shape[0], dtype=np.int64) // (words.shape[0] // scales.shape[0])
    codes, zero = unpack_words(words)[:, at].astype(np.float64), unpack_words(zeros)[:, at].astype(np.float64)
    return (codes - zero[order]).T * scales.astype(np.float64)[order].T


def matmul(x: NDArray[np.floating], weight: Floats) -> Floats:
    """x [M, K] @ weight [N, K]^T in float64, [M, N]: what an FP4 kernel is measured against."""
    return x.astype(np.float64) @ weight.T


# --- BF16 -> FP4, as modelopt 0.47 does it ----------------------------------------------------------------------------


def encode_e4m3(values: NDArray[np.float32]) -> Bytes:
    """Non-negative values to the nearest E4M3 byte, ties to the even byte; clamped to [2^-9, 448] first.

    The clamp comes first because casts differ out of range: torch saturates, ml_dtypes gives NaN.
    """
    table = E4M3_VALUES[: E4M3_MAX_BYTE + 1].astype(np.float64)
    clamped = np.clip(values.astype(np.float64), table[1], E4M3_MAX)
    upper = np.clip(np.searchsorted(table, clamped), 1, E4M3_MAX_BYTE)
    below, above = clamped - table[upper - 1], table[upper] - clamped
    take_lower = (below < above) | ((below == above) & (upper % 2 == 1))
    return np.where(take_lower, upper - 1, upper).astype(np.uint8)


def _blocks(weight: NDArray[np.float32], group: int) -> NDArray[np.float32]:
    rows, k = weight.shape
    if k % group:
        raise ValueError(f"K = {k} is not a multiple of {group}")
    if not np.isfinite(weight).all():
        raise ValueError("the weight holds an infinity or a NaN, which E2M1 cannot express")
    return weight.astype(np.float32).reshape(rows, k // group, group)


def encode_mxfp4(weight: NDArray[np.float32]) -> tuple[Bytes, Bytes]:
    """BF16/F16/F32 values [N, K] to MXFP4 (codes [N, K/2], E8M0 [N, K/32]), byte for byte as modelopt.

    The exponent is the smallest e >= -127 with amax <= 6 * 2^e, read off the float's own exponent, which equals
    modelopt's ceil(log2(amax / 6)) for every BF16 and F16 amax and does not depend on a library's log2. Magnitudes on
    a midpoint round down; x <= 0 sets the sign, so an exact zero becomes 0x8.
    """
    blocks = _blocks(weight, MXFP4_GROUP)
    amax = np.abs(blocks).max(axis=-1)
    mantissa, exponent = np.frexp(amax)  # amax = mantissa * 2^exponent, mantissa in [0.5, 1); 6 = 0.75 * 2^3
    e = np.maximum(exponent - 3 + (mantissa > 0.75), -E8M0_BIAS)
    scales: Bytes = np.where(amax == 0, 0, e + E8M0_BIAS).astype(np.uint8)
    x: NDArray[np.float32] = blocks / E8M0_VALUES[scales][..., None]
    order = (np.abs(x)[..., None] > _E2M1_BOUNDS).sum(axis=-1)
    codes = (order | ((x <= 0) << 3)).astype(np.uint8)
    return pack_nibbles(codes.reshape(weight.shape)), scales


def nvfp4_global_scale(members: Sequence[NDArray[np.float32]]) -> np.float32:
    """The global scale that all weights of a fused group share: amax / (6 * 448), or 1 where all is zero."""
    amax = np.float32(max((float(np.abs(w).max()) for w in members if w.size), default=0.0))
    return amax / np.float32(6.0 * 448.0) if amax > 0 else np.float32(1.0)


def encode_nvfp4(weight: NDArray[np.float32], global_scale: np.float32) -> tuple[Bytes, Bytes]:
    """BF16/F16/F32 values [N, K] to NVFP4 (codes [N, K/2], E4M3 [N, K/16]), byte for byte as modelopt, all in float32.

    The codes are divided by the rounded scale that is stored; ties go to the even code; only x < 0 sets the sign, so
    -0.0 becomes 0x0 and a tiny negative becomes 0x8.
    """
    blocks = _blocks(weight, NVFP4_GROUP)
    scale = np.abs(blocks).max(axis=-1) / (np.float32(6.0) * global_scale)
    scales = encode_e4m3(np.where(scale == 0, np.float32(1.0), scale))
    x = blocks / (E4M3_VALUES[scales] * global_scale)[..., None]
    magnitude = np.abs(x)
    order = np.searchsorted(_E2M1_BOUNDS, magnitude) + np.isin(magnitude, _E2M1_BOUNDS[1::2])
    codes = (order | ((x < 0) << 3)).astype(np.uint8)
    return pack_nibbles(codes.reshape(weight.shape)), scales


# --- MXFP4 -> NVFP4, exact --------------------------------------------------------------------------------------------

_MAGNITUDES: Final = tuple(Fraction(float(v)) for v in E2M1_MAGNITUDES)
_SCALES: Final = tuple(Fraction(float(v)) for v in E4M3_VALUES[: E4M3_MAX_BYTE + 1])

Half = tuple[int, ...]
"""The 16 codes (0..15) of one NVFP4 block."""


class RepackCounts(NamedTuple):
    """What became of the 16-blocks of a fused group; exact + shifted + lossy is all of them.

    exact: codes unchanged and value equal (dead blocks too). shifted: codes changed, value equal. lossy: value changed.
    below_marlin: nonzero block scales under 2^-6, which Marlin flushes. Errors are in weight units, exact.
    """

    exact: int
    shifted: int
    lossy: int
    below_marlin: int
    max_error: Fraction
    squared_error: Fraction


class RepackResult(NamedTuple):
    """s2 = 2^m, then (codes [N, K/2], E4M3 scales [N, K/16]) per member, then the counts."""

    m: int
    members: list[tuple[Bytes, Bytes]]
    counts: RepackCounts


class _Choice(NamedTuple):
    """One 16-block under one m. Errors in units of 2^k of the block."""

    byte: int
    codes: Half
    lossy: bool
    max_error: Fraction
    squared_error: Fraction


@cache
def _rescale(magnitudes: frozenset[int], factor: Fraction) -> int:
    """How often every magnitude of the block can be multiplied by `factor` and stay an E2M1 value."""
    steps = 0
    values = {_MAGNITUDES[i] for i in magnitudes}
    while True:
        values = {v * factor for v in values}
        if not values <= set(_MAGNITUDES):
            return steps
        steps += 1


def _shift(half: Half, factor: Fraction) -> Half:
    """Multiply every value of a block exactly; the sign bit of each code stays, also on zero."""
    return tuple((c & 8) | _MAGNITUDES.index(_MAGNITUDES[c & 7] * factor) for c in half)


def _nearest(value: Fraction) -> int:
    """Index of the E2M1 magnitude nearest to value, ties to the even index."""
    return min(range(8), key=lambda i: (abs(_MAGNITUDES[i] - value), i % 2))


@cache
def _candidates(p: int) -> list[tuple[int, list[int], list[int]]]:
    """Every positive finite E4M3 byte, the nearest index for each magnitude * 2^p under it, and the error it makes.

    Errors are whole numbers in units of 2^(p-1): a scale is a multiple of 2^-9 > 2^p, a magnitude one of 1/2.
    """
    rows: list[tuple[int, list[int], list[int]]] = []
    for byte in range(1, E4M3_MAX_BYTE + 1):
        ratio = _SCALES[byte] / Fraction(2) ** p
        index = [_nearest(v / ratio) for v in _MAGNITUDES]
        errors = [2 * abs(_MAGNITUDES[i] * ratio - v) for i, v in zip(index, _MAGNITUDES, strict=True)]
        if any(e.denominator != 1 for e in errors):
            raise AssertionError(f"only halves with 2^p under 2^-9 are re-encoded, not p = {p}")
        rows.append((byte, index, [e.numerator for e in errors]))
    return rows


@lru_cache(maxsize=1 << 14)
def _reencode(half: Half, p: int) -> _Choice:
    """Least squares over all positive finite E4M3 scales for codes * 2^p, p < -9; ties go to the smallest byte."""
    counts = [sum(c & 7 == i for c in half) for i in range(8)]
    squares = [sum(n * e * e for n, e in zip(counts, errors, strict=True)) for _, _, errors in _candidates(p)]
    squared = min(squares)
    byte, index, errors = _candidates(p)[squares.index(squared)]
    codes = tuple((c & 8) | index[c & 7] for c in half)
    max_error = max(e for n, e in zip(counts, errors, strict=True) if n)
    if not any(c & 7 for c in codes):
        byte = _DEAD_BYTE
    return _Choice(byte, codes, True, Fraction(max_error, 2), Fraction(squared, 4))


@lru_cache(maxsize=1 << 14)
def _encode_half(half: Half, p: int) -> _Choice | None:
    """One 16-block whose 32-block is live and wants scale 2^p; None where p > 8 and it cannot be doubled enough."""
    exact = Fraction(0)
    magnitudes = frozenset(c & 7 for c in half) - {0}
    if not magnitudes:
        return _Choice(e4m3_pow2_byte(p) if -6 <= p <= 8 else _DEAD_BYTE, half, False, exact, exact)
    halvings = _rescale(magnitudes, Fraction(1, 2))
    if p > 8:
        if _rescale(magnitudes, Fraction(2)) < p - 8:
            return None
        target = 8
    elif p >= -6:
        target = p
    elif p + halvings >= -6:
        target = -6
    elif p >= -9:
        target = p
    elif p + halvings >= -9:
        target = -9
    else:
        return _reencode(half, p)
    return _Choice(e4m3_pow2_byte(target), _shift(half, Fraction(2) ** (p - target)), False, exact, exact)


def repack_oracle(members: Sequence[tuple[Bytes, Bytes]]) -> RepackResult:
    """MXFP4 -> NVFP4 for one fused group, in exact arithmetic: one s2 = 2^m for all members.

    members: (codes [N, K/2] uint8, E8M0 scales [N, K/32] uint8), N and K free per member. Raises ValueError for E8M0
    byte 255 and for shapes that do not fit.

    Step 1, span of k over all blocks <= 14 and 2^(k_max - 8) no FP32 subnormal: m = k_max - 8, scales 2^(k-m), codes
    untouched and never looked at.
    Step 2: k_max over live blocks, m from k_max - 8 - {0..3}; an m whose live blocks above 2^8 cannot be rescued by
    exact doubling is out, because to clamp the largest block costs more than any number of tiny ones. Among the rest:
    fewest lossy 16-blocks, fewest nonzero scales below 2^-6, least squared error, largest m.
    """
    for codes, scales in members:
        rows, half_k = codes.shape
        if half_k % 16 or scales.shape != (rows, half_k // 16):
            raise ValueError(
                f"E8M0 scales {scales.shape} do not fit codes {codes.shape}: expected {(rows, half_k // 16)}"
            )
        if (scales == E8M0_NAN_BYTE).any():
            row, block = (int(i[0]) for i in np.nonzero(scales == E8M0_NAN_BYTE))
            raise ValueError(f"E8M0 byte 255 (NaN) at row {row}, block {block}: the source is corrupt")

    exponents = [scales.astype(int) - E8M0_BIAS for _, scales in members]
    flat = [int(k) for ks in exponents for k in ks.ravel()]
    if flat and max(flat) - min(flat) <= MARLIN_WINDOW and max(flat) - 8 >= _SMALLEST_PLAIN_EXPONENT:
        return _step_one(members, exponents, max(flat) - 8)

    halves = [[tuple(int(c) for c in h) for h in unpack_nibbles(codes).reshape(-1, 16)] for codes, _ in members]
    pairs = [list(np.repeat(ks.ravel(), 2).tolist()) for ks in exponents]
    live_k = [
        k
        for hs, ks in zip(halves, pairs, strict=True)
        for i, k in enumerate(ks)
        if any(c & 7 for c in hs[i - i % 2] + hs[i - i % 2 + 1])
    ]
    if not live_k:
        dead = [
            (codes.copy(), np.full((codes.shape[0], codes.shape[1] // 8), _DEAD_BYTE, np.uint8)) for codes, _ in members
        ]
        total = sum(scales.size for _, scales in dead)
        return RepackResult(0, dead, RepackCounts(total, 0, 0, 0, Fraction(0), Fraction(0)))

    best: tuple[tuple[int, int, Fraction, int], int, list[list[_Choice]]] | None = None
    for m in range(max(live_k) - 8, max(live_k) - 8 - _CANDIDATES, -1):
        chosen = _encode_group(halves, pairs, m)
        if chosen is None:
            continue
        every = [(c, k) for cs, ks in zip(chosen, pairs, strict=True) for c, k in zip(cs, ks, strict=True)]
        score = (
            sum(c.lossy for c, _ in every),
            sum(0 < c.byte < _DEAD_BYTE for c, _ in every),
            sum((c.squared_error * Fraction(4) ** k for c, k in every if c.lossy), Fraction(0)),
            -m,
        )
        if best is None or score < best[0]:
            best = (score, m, chosen)
    if best is None:
        raise AssertionError("m = k_max - 8 needs no doubling")
    return _assemble(members, halves, pairs, best[1], best[2])


def _step_one(members: Sequence[tuple[Bytes, Bytes]], exponents: list[NDArray[np.int_]], m: int) -> RepackResult:
    out = [
        (codes.copy(), np.repeat(np.vectorize(e4m3_pow2_byte, otypes=[np.uint8])(ks - m), 2, axis=1))
        for (codes, _), ks in zip(members, exponents, strict=True)
    ]
    total = sum(scales.size for _, scales in out)
    return RepackResult(m, out, RepackCounts(total, 0, 0, 0, Fraction(0), Fraction(0)))


def _encode_group(halves: list[list[Half]], pairs: list[list[int]], m: int) -> list[list[_Choice]] | None:
    """Every 16-block under one m, or None where that m is not admissible."""
    group: list[list[_Choice]] = []
    for hs, ks in zip(halves, pairs, strict=True):
        out: list[_Choice] = []
        for i, (half, k) in enumerate(zip(hs, ks, strict=True)):
            if not any(c & 7 for c in hs[i - i % 2] + hs[i - i % 2 + 1]):
                out.append(_Choice(_DEAD_BYTE, half, False, Fraction(0), Fraction(0)))
                continue
            choice = _encode_half(half, k - m)
            if choice is None:
                return None
            out.append(choice)
        group.append(out)
    return group


def _assemble(
    members: Sequence[tuple[Bytes, Bytes]],
    halves: list[list[Half]],
    pairs: list[list[int]],
    m: int,
    chosen: list[list[_Choice]],
) -> RepackResult:
    out: list[tuple[Bytes, Bytes]] = []
    exact = shifted = lossy = below = 0
    max_error = squared = Fraction(0)
    for (codes, _), hs, ks, choices in zip(members, halves, pairs, chosen, strict=True):
        rows, half_k = codes.shape
        new_codes = np.array([c.codes for c in choices], dtype=np.uint8).reshape(rows, half_k * 2)
        new_scales = np.array([c.byte for c in choices], dtype=np.uint8).reshape(rows, half_k // 8)
        out.append((pack_nibbles(new_codes), new_scales))
        for half, k, choice in zip(hs, ks, choices, strict=True):
            lossy += choice.lossy
            shifted += not choice.lossy and choice.codes != half
            exact += not choice.lossy and choice.codes == half
            below += 0 < choice.byte < _DEAD_BYTE
            if choice.lossy:
                max_error = max(max_error, choice.max_error * Fraction(2) ** k)
                squared += choice.squared_error * Fraction(4) ** k
    return RepackResult(m, out, RepackCounts(exact, shifted, lossy, below, max_error, squared))
