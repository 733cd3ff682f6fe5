"""The oracle of the main job: MXFP4 -> NVFP4 in exact rational arithmetic, slow and plain.

Fractions throughout, so that equal means equal; kernels/repack.py is held against it block by block. The rule is in
`repack_oracle`'s docstring.
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
    E4M3_MAX_BYTE,
    E4M3_VALUES,
    E8M0_BIAS,
    E8M0_NAN_BYTE,
    MARLIN_WINDOW,
    e4m3_pow2_byte,
)
from requant.kernels.reference import pack_nibbles, unpack_nibbles

__all__ = ["RepackCounts", "RepackResult", "repack_oracle"]

Bytes = NDArray[np.uint8]

_SMALLEST_PLAIN_EXPONENT: Final = -126  # of a normal FP32 number
_DEAD_BYTE: Final = 0x08
"""2^-6, the smallest scale that no kernel flushes: what a block of zeros gets where its own scale does not fit."""
_CANDIDATES: Final = 4
"""m = k_max - 8 - j for j = 0..3: three doublings (0.5 -> 4) are the most that any nonzero code allows."""

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
