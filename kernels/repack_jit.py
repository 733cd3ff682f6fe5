"""MXFP4 -> NVFP4, step 2: the loops over the codes. Exact integer arithmetic throughout; no policy.

For an NVFP4 global scale 2^m, a 32-block with E8M0 byte e wants the block scale 2^p, p = (e - 127) - m. E4M3 holds 2^p
for p in [-9, 8], and Marlin keeps it for p in [-6, 8]. Each half (16 elements, 8 bytes of codes) is settled alone:

| half                                 | codes              | scale byte               | counted as |
|--------------------------------------|--------------------|--------------------------|------------|
| whole 32-block zero                  | kept               | 0x08 (2^-6)              | exact      |
| zero half of a live block            | kept               | 2^p in [-6, 8], else 0x08| exact      |
| -6 <= p <= 8                         | kept               | 2^p                      | exact      |
| p > 8                                | doubled p - 8 times| 2^8                      | shifted    |
| p < -6 and halves -6 - p times       | halved             | 2^-6                     | shifted    |
| -9 <= p < -6                         | kept               | 2^p                      | exact      |
| p < -9 and halves -9 - p times       | halved             | 2^-9                     | shifted    |
| the rest                             | nearest            | least squared error      | lossy      |

What a half allows depends only on which magnitudes occur in it: an 8-bit set, the OR over its bytes of a 256-entry
table. A second 256-entry table turns the set into (times it halves, times it doubles).

`half_census` counts what a tensor holds, so that m can be chosen from 8192 numbers; `lossy_error` prices an m;
`repack_tile` applies it. All take C-contiguous arrays, any row range of a tensor, and release the GIL.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from requant.kernels.formats import E8M0_BIAS, MXFP4_GROUP
from requant.kernels.jit import kernel

__all__ = ["half_census", "lossy_error", "repack_tile"]

U8 = NDArray[np.uint8]
I64 = NDArray[np.int64]

_TWICE: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12], dtype=np.int64)
"""2|value| of an E2M1 magnitude code: the codes as integers."""
_HALVINGS = (99, 0, 1, 0, 2, 1, 3, 2)
_DOUBLINGS = (99, 3, 2, 2, 1, 1, 0, 0)
_DEAD_BYTE: Final = 0x08
"""Block scale of a half whose scale is free: 2^-6, E4M3's smallest normal, which Marlin keeps."""
_KEEP, _SHIFT, _LOSSY, _IMPOSSIBLE = 0, 1, 2, 3


def _magnitude_sets() -> U8:
    """[256]: the set of magnitude codes in one byte of codes, bit i for code i."""
    byte = np.arange(256)
    return ((1 << (byte & 7)) | (1 << (byte >> 4 & 7))).astype(np.uint8)


def _limits(times: tuple[int, ...]) -> NDArray[np.int64]:
    """[256]: how often every magnitude in a set can be shifted exactly; 0 for sets without a nonzero magnitude."""
    return np.array([min((t for i, t in enumerate(times) if i and s >> i & 1), default=0) for s in range(256)])


def _shifted_bytes() -> U8:
    """[7, 256]: a byte of codes times 2^(row - 3), signs kept; only read where both codes shift exactly."""
    table = np.zeros((7, 256), dtype=np.uint8)
    index = {int(v): i for i, v in enumerate(_TWICE)}
    for row in range(7):
        code = [index.get(int(v) << row >> 3, 0) for v in _TWICE]
        for byte in range(256):
            table[row, byte] = byte & 0x88 | code[byte >> 4 & 7] << 4 | code[byte & 7]
    return table


def _fits() -> tuple[U8, NDArray[np.int64]]:
    """What becomes of a byte of codes in a lossy half whose scale is 2^-9: [6, 256] new bytes, and squared errors.

    In half steps of its source a code is _TWICE[c]; scale byte b, under p = -9 - shift, offers _TWICE[q] * b << shift.
    Code by code the error under b = 1 is the least that any b gives, so no other need be tried (test_repack_jit.py
    tries all). Row `shift`; row 0, and from shift 5 on: every code becomes zero.
    """
    fitted, missed = np.zeros((_FITS + 1, 256), dtype=np.uint8), np.zeros((_FITS + 1, 256), dtype=np.int64)
    for row in range(_FITS + 1):
        new = _nearest_codes(1 << row) if 0 < row < _FITS else [0] * 8
        miss = [(int(v) - int(_TWICE[q]) * (1 << row)) ** 2 for v, q in zip(_TWICE, new, strict=True)]
        for byte in range(256):
            low, high = byte & 7, byte >> 4 & 7
            fitted[row, byte] = byte & 0x88 | new[high] << 4 | new[low]
            missed[row, byte] = miss[low] + miss[high]
    return fitted, missed


def _nearest_codes(step: int) -> list[int]:
    """Per magnitude code the one that comes nearest to it in multiples of `step`; a tie goes to the even code."""
    return [min(range(8), key=lambda q: (abs(int(_TWICE[q]) * step - int(v)), q & 1)) for v in _TWICE]


_FITS: Final = 5
"""From this shift on the smallest value of the scale 2^-9 is too large for any code."""
_FITTED, _MISSES = _fits()
_SETS: Final = _magnitude_sets()
_HALVES: Final = _limits(_HALVINGS)
_DOUBLES: Final = _limits(_DOUBLINGS)
_SHIFTED: Final = _shifted_bytes()


def half_census(codes: U8, scales: U8, hist: I64) -> None:
    """Count the 16-element halves by (E8M0 byte, exact halvings, exact doublings, live).

    codes uint8 [N, K/2], scales uint8 [N, K/32]; hist int64 [256, 4, 4, 2] is added to. A half without a nonzero
    magnitude counts at [byte, 0, 0, 0]. Byte 255 (NaN) is counted like any other: the caller refuses it.
    """
    _check(codes, scales)
    if hist.shape != (256, 4, 4, 2) or hist.dtype != np.int64 or not hist.flags.c_contiguous:
        raise ValueError(f"hist is {hist.dtype} {hist.shape}: expected int64 (256, 4, 4, 2), contiguous")
    _half_census(codes, scales, hist.reshape(256, 32))


def lossy_error(codes: U8, scales: U8, m: int, err: I64) -> int:
    """Add to err int64 [256], per E8M0 byte, the squared error that `repack_tile` with this m makes in lossy halves.

    Returns how many of those halves keep a nonzero scale below 2^-6. The unit for byte e is 2^(2(e - 128)): a code's
    value is an integer in units of half the source's block scale, and a lossy block's new values are multiples of that
    unit too. ValueError where a half would need a scale over 2^8.
    """
    _check(codes, scales)
    if err.shape != (256,) or err.dtype != np.int64:
        raise ValueError(f"err is {err.dtype} {err.shape}: expected int64 (256,)")
    impossible, below = _lossy_error(codes, scales, m, err)
    if impossible:
        raise ValueError(_TOO_SMALL.format(m=m))
    return below


def repack_tile(codes: U8, scales: U8, m: int, out_codes: U8, out_scales: U8, counts: I64) -> None:
    """Rewrite MXFP4 rows as NVFP4 under the global scale 2^m, by the table at the head of this file.

    codes uint8 [N, K/2], scales uint8 [N, K/32] -> out_codes uint8 [N, K/2], out_scales E4M3 bytes uint8 [N, K/16].
    counts int64 [4] is added to, in halves: exact, shifted, lossy, and (apart) nonzero scales below 2^-6. ValueError
    where a half would need a scale over 2^8 that doubling cannot avoid: m is too small.
    """
    rows, blocks = _check(codes, scales)
    for name, out, shape in (("out_codes", out_codes, codes.shape), ("out_scales", out_scales, (rows, 2 * blocks))):
        if out.shape != shape or out.dtype != np.uint8 or not out.flags.c_contiguous:
            raise ValueError(f"{name} is {out.dtype} {out.shape}: expected uint8 {shape}, contiguous")
    if counts.shape != (4,) or counts.dtype != np.int64:
        raise ValueError(f"counts is {counts.dtype} {counts.shape}: expected int64 (4,)")
    if _repack_tile(codes, scales, m, out_codes, out_scales, counts):
        raise ValueError(_TOO_SMALL.format(m=m))


_TOO_SMALL = "global scale 2^{m} is too small: a live block needs a block scale above 2^8 and its codes do not double"


def _check(codes: U8, scales: U8) -> tuple[int, int]:
    """Rows and 32-blocks per row, or ValueError: the compiled loops do not check bounds."""
    for name, array in (("codes", codes), ("scales", scales)):
        if array.dtype != np.uint8 or array.ndim != 2 or not array.flags.c_contiguous:
            raise ValueError(f"{name} is {array.dtype} {array.shape}: expected uint8 [rows, columns], contiguous")
    rows, blocks = scales.shape
    if codes.shape != (rows, blocks * MXFP4_GROUP // 2):
        raise ValueError(f"codes {codes.shape} and scales {scales.shape} do not fit: 16 bytes of codes per scale")
    return rows, blocks


def _set_of(codes: U8, row: int, start: int) -> Any:
    """The set of magnitudes in the 8 bytes from start."""
    found = _SETS[codes[row, start]]
    for i in range(1, 8):
        found |= _SETS[codes[row, start + i]]
    return found


def _settle(p: int, found: int) -> tuple[int, int, int]:
    """For a live half: (kind, exponent of its scale, log2 of what its codes are multiplied by)."""
    halves = _HALVES[found]
    if p > 8:
        return (_SHIFT if p - 8 <= _DOUBLES[found] else _IMPOSSIBLE), 8, p - 8
    if p >= -6:
        return _KEEP, p, 0
    if p + halves >= -6:
        return _SHIFT, -6, p + 6
    if p >= -9:
        return _KEEP, p, 0
    if p + halves >= -9:
        return _SHIFT, -9, p + 9
    return _LOSSY, 0, 0


def _pow2_byte(p: int) -> int:
    """The E4M3 byte of 2^p, -9 <= p <= 8 (formats.e4m3_pow2_byte, compiled)."""
    return (p + 7) << 3 if p >= -6 else 1 << (p + 9)


def _fit(codes: U8, row: int, start: int, p: int) -> tuple[int, int, int]:
    """Least squares for a lossy half, p < -9: (E4M3 byte, squared error in half source steps, row of _FITTED).

    The byte is 0x01 (2^-9), or 0x08 where nothing is gained over all-zero codes: see _fits.
    """
    shift = min(-9 - p, _FITS)
    error = zeros = 0
    for i in range(start, start + 8):
        error += _MISSES[shift, codes[row, i]]
        zeros += _MISSES[0, codes[row, i]]
    if error < zeros:
        return 1, error, shift
    return _DEAD_BYTE, zeros, 0


@kernel("const u8[:,:]", "const u8[:,:]", "i64[:,:]", uses=(_set_of,))
def _half_census(codes: U8, scales: U8, hist: I64) -> None:
    for n in range(scales.shape[0]):
        for b in range(scales.shape[1]):
            for half in range(2):
                found = _set_of(codes, n, 16 * b + 8 * half)
                live = 1 if found > 1 else 0
                hist[scales[n, b], _HALVES[found] * 8 + _DOUBLES[found] * 2 + live] += 1


@kernel("const u8[:,:]", "const u8[:,:]", "i64", "i64[:]", uses=(_set_of, _settle, _fit))
def _lossy_error(codes: U8, scales: U8, m: int, err: I64) -> tuple[int, int]:
    impossible = 0
    below = 0
    for n in range(scales.shape[0]):
        for b in range(scales.shape[1]):
            p = int(scales[n, b]) - E8M0_BIAS - m
            if -9 <= p <= 8:
                continue
            for half in range(2):
                start = 16 * b + 8 * half
                found = _set_of(codes, n, start)
                if found > 1:
                    kind = _settle(p, found)[0]
                    if kind == _LOSSY:
                        byte, miss, _ = _fit(codes, n, start, p)
                        err[scales[n, b]] += miss
                        below += byte < 8
                    elif kind == _IMPOSSIBLE:
                        impossible += 1
    return impossible, below


@kernel(
    "const u8[:,:]",
    "const u8[:,:]",
    "i64",
    "u8[:,:]",
    "u8[:,:]",
    "i64[:]",
    uses=(_set_of, _settle, _pow2_byte, _fit),
)
def _repack_tile(codes: U8, scales: U8, m: int, out_codes: U8, out_scales: U8, counts: I64) -> int:
    impossible = 0
    for n in range(scales.shape[0]):
        out_codes[n] = codes[n]
        for b in range(scales.shape[1]):
            p = int(scales[n, b]) - E8M0_BIAS - m
            first = _set_of(codes, n, 16 * b)
            second = _set_of(codes, n, 16 * b + 8)
            for half in range(2):
                start = 16 * b + 8 * half
                found = second if half else first
                if found <= 1:
                    dead_block = (first | second) <= 1
                    out_scales[n, 2 * b + half] = _pow2_byte(p) if -6 <= p <= 8 and not dead_block else _DEAD_BYTE
                    counts[0] += 1
                    continue
                kind, exponent, shift = _settle(p, found)
                if kind == _LOSSY:
                    byte, _, fitted = _fit(codes, n, start, p)
                    for i in range(start, start + 8):
                        out_codes[n, i] = _FITTED[fitted, codes[n, i]]
                elif kind == _IMPOSSIBLE:
                    impossible += 1
                    continue
                else:
                    byte = _pow2_byte(exponent)
                    if kind == _SHIFT:
                        for i in range(start, start + 8):
                            out_codes[n, i] = _SHIFTED[shift + 3, codes[n, i]]
                out_scales[n, 2 * b + half] = byte
                counts[kind] += 1
                counts[3] += byte < 8
    return impossible
