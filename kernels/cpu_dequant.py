"""MXFP4, NVFP4 and FP8 blocks back to FP32 or BF16, on the CPU, any row range of a tensor at a time.

    value = (e2m1 * block scale) * global scale        the bracket is exact, so FP32 rounds once
    value = e4m3 * scale of the 128x128 block          (DeepSeek; 32x32, per channel, per tensor: other block shapes)

BF16 comes out as uint16 bits, rounded to nearest even from that FP32 number. A NaN scale byte makes NaN of its whole
block, also over zero codes; 0x8 stays -0.

How: two codes at a time by a 256-entry table of FP32 pairs, then one flat multiplication with the block scales spread
out. E4M3 is decoded by arithmetic, as a float with the same fields and another bias: a table would not vectorise.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from requant.kernels.formats import (
    E2M1_VALUES,
    E4M3_VALUES,
    E8M0_VALUES,
    NVFP4_GROUP,
    NumberFormat,
    PackedTensor,
)
from requant.kernels.jit import kernel

__all__ = ["dequantize", "dequantize_fp8_block", "dequantize_mxfp4", "dequantize_nvfp4"]

Bytes = NDArray[np.uint8]
Out = NDArray[np.float32] | NDArray[np.uint16]
"""[N, K], filled in place: float32, or uint16 for BF16 bits."""

_CHUNK: Final = 2048
"""Elements per chunk: FP32 values and scales of one stay in L1."""


def _pairs() -> NDArray[np.uint64]:
    """[256]: the two FP32 values of a byte of codes, the low nibble first in memory."""
    byte = np.arange(256)
    return np.stack([E2M1_VALUES[byte & 15], E2M1_VALUES[byte >> 4]], axis=1).view(np.uint64).reshape(256)


_PAIRS: Final = _pairs()


def dequantize(weight: PackedTensor, out: Out) -> None:
    """Decode a packed tensor into out [N, K], float32 or uint16 (BF16 bits)."""
    if weight.global_scale is not None:
        dequantize_nvfp4(weight.codes, weight.block_scales, weight.global_scale, out)
    else:
        dequantize_mxfp4(weight.codes, weight.block_scales, out)


def dequantize_nvfp4(
    codes: Bytes, scales: Bytes, global_scale: np.float32, out: Out, *, reciprocal: bool = False
) -> None:
    """codes [N, K/2], E4M3 bytes [N, K/16] -> out [N, K], float32 or uint16 (BF16 bits). ValueError for shapes.

    reciprocal: global_scale is compressed-tensors' 1/s2; block scales are divided by it first, as that library does.
    """
    if reciprocal:
        table = (E4M3_VALUES / np.float32(global_scale)).astype(np.float32)
        _decode(codes, scales, NumberFormat.NVFP4, np.float32(1.0), out, table)
    else:
        _decode(codes, scales, NumberFormat.NVFP4, np.float32(global_scale), out)


def dequantize_mxfp4(codes: Bytes, scales: Bytes, out: Out) -> None:
    """codes [N, K/2], E8M0 bytes [N, K/32] -> out [N, K], float32 or uint16 (BF16 bits). ValueError for shapes.

    FP32 holds every MXFP4 value under 2^128: only scales of 2^126 and 2^127 can overflow, to infinity.
    """
    _decode(codes, scales, NumberFormat.MXFP4, np.float32(1.0), out)


def dequantize_fp8_block(
    values: Bytes, scales: NDArray[np.float32] | Bytes, block: tuple[int, int], out: Out, first_row: int = 0
) -> None:
    """E4M3 bytes [N, K] times the scale of their block -> out [N, K], float32 or uint16 (BF16 bits).

    scales are those of the whole tensor, [ceil(rows/block[0]), ceil(K/block[1])], float32 or E8M0 bytes; values may be
    the rows from first_row on. Per channel is block (1, K), per tensor (rows, K). ValueError for shapes.
    """
    rows, columns = values.shape
    high, wide = block
    if high < 1 or wide < 1 or first_row < 0 or scales.ndim != 2:
        raise ValueError(f"block {block}, first row {first_row}, scales {scales.shape}: no such blocks")
    if scales.shape[0] * high < first_row + rows or scales.shape[1] != -(-columns // wide):
        raise ValueError(f"scales {scales.shape} do not cover rows {first_row} to {first_row + rows} of K = {columns}")
    _check_out(out, (rows, columns))
    grid: NDArray[Any] = E8M0_VALUES[scales.astype(np.intp)] if scales.dtype == np.uint8 else scales
    _fp8_block(_ready(values), np.require(grid, np.float32, ["C", "A"]), high, wide, first_row, *_targets(out))


def _decode(
    codes: Bytes,
    scales: Bytes,
    number: NumberFormat,
    factor: np.float32,
    out: Out,
    table: NDArray[np.float32] | None = None,
) -> None:
    rows, half_k = codes.shape
    if 2 * half_k % number.group or scales.shape != (rows, 2 * half_k // number.group):
        raise ValueError(f"{number}: codes {codes.shape} and block scales {scales.shape} do not fit")
    if codes.dtype != np.uint8 or scales.dtype != np.uint8:
        raise ValueError(f"{number}: codes are {codes.dtype}, block scales {scales.dtype}: expected uint8 bytes")
    _check_out(out, (rows, 2 * half_k))
    if table is None:
        table = E4M3_VALUES if number is NumberFormat.NVFP4 else E8M0_VALUES
    flat_codes, flat_scales = _ready(codes).reshape(-1), _ready(scales).reshape(-1)
    wide, narrow = _targets(out)
    _fp4(flat_codes, flat_scales, table, number.group // NVFP4_GROUP, factor, wide.reshape(-1), narrow.reshape(-1))


def _check_out(out: Out, shape: tuple[int, int]) -> None:
    if out.shape != shape or out.dtype.name not in ("float32", "uint16"):
        raise ValueError(f"out is {out.dtype} {out.shape}: expected float32 or uint16 {shape}")
    if not (out.flags.c_contiguous and out.flags.aligned):
        raise ValueError("out must be contiguous and aligned")


def _ready(array: Bytes) -> Bytes:
    return np.require(array, np.uint8, ["C"])


def _targets(out: Out) -> tuple[NDArray[np.uint32], NDArray[np.uint16]]:
    """(FP32 words, BF16 words): out as what it is, the other empty, so that one kernel does both."""
    if out.dtype == np.float32:
        return out.view(np.uint32), np.empty((0, 0), np.uint16)
    return np.empty((0, 0), np.uint32), out.view(np.uint16)


def _copy(words: NDArray[np.uint32], out: NDArray[np.uint32], count: int) -> None:
    for j in range(count):  # a slice assignment takes numba seconds to compile
        out[j] = words[j]


def _narrow(words: NDArray[np.uint32], out: NDArray[np.uint16], count: int) -> None:
    """FP32 to BF16, to nearest even; a NaN stays a quiet NaN."""
    for j in range(count):
        word = words[j]
        rounded = (word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        nan = (word & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        out[j] = (word >> np.uint32(16)) | np.uint32(0x40) if nan else rounded


def _double(source: NDArray[np.float32], out: NDArray[np.float32], count: int) -> None:
    """Each of the first count elements twice."""
    for j in range(count):
        out[2 * j] = source[j]
        out[2 * j + 1] = source[j]


@kernel(
    "const u8[:]",
    "const u8[:]",
    "const f32[:]",
    "i64",
    "f32",
    "u32[:]",
    "u16[:]",
    uses=(_copy, _narrow, _double),
)
def _fp4(
    codes: Bytes,
    scales: Bytes,
    table: NDArray[np.float32],
    sixteens: int,
    factor: Any,
    wide: NDArray[np.uint32],
    narrow: NDArray[np.uint16],
) -> None:
    """Flat blocks of 16 * sixteens elements to FP32 words, or to BF16 words if there is no room for FP32."""
    values = np.empty(_CHUNK, np.float32)
    pairs = values.view(np.uint64)
    words = values.view(np.uint32)
    s1, s2, s4 = (
        np.empty(_CHUNK // 16, np.float32),
        np.empty(_CHUNK // 8, np.float32),
        np.empty(_CHUNK // 4, np.float32),
    )
    s8, step = np.empty(_CHUNK // 2, np.float32), np.empty(_CHUNK, np.float32)
    for base in range(0, 2 * codes.shape[0], _CHUNK):
        size = min(_CHUNK, 2 * codes.shape[0] - base)
        source = codes[base // 2 : (base + size) // 2]
        first = base // 16 // sixteens
        for b in range(size // 16):
            s1[b] = table[scales[first + b // sixteens]]
        _double(s1, s2, size // 16)
        _double(s2, s4, size // 8)
        _double(s4, s8, size // 4)
        _double(s8, step, size // 2)
        for j in range(size // 2):
            pairs[j] = _PAIRS[source[j]]
        for j in range(size):
            values[j] = (values[j] * step[j]) * factor
        if wide.shape[0]:
            _copy(words, wide[base : base + size], size)
        else:
            _narrow(words, narrow[base : base + size], size)


@kernel("const u8[:,:]", "const f32[:,:]", "i64", "i64", "i64", "u32[:,:]", "u16[:,:]", uses=(_copy, _narrow))
def _fp8_block(
    source: Bytes,
    scales: NDArray[np.float32],
    high: int,
    broad: int,
    first_row: int,
    wide: NDArray[np.uint32],
    narrow: NDArray[np.uint16],
) -> None:
    words = np.empty(_CHUNK, np.uint32)
    values = words.view(np.float32)
    for n in range(source.shape[0]):
        row = source[n]
        start = 0
        while start < row.shape[0]:
            end = min(row.shape[0], (start // broad + 1) * broad, start + _CHUNK)
            part = row[start:end]
            scale = scales[(first_row + n) // high, start // broad]
            for j in range(end - start):
                # the same exponent and mantissa fields under FP32's bias: right from byte 8 on, 2^-7 * (1 + m/8) below
                words[j] = ((np.uint32(part[j]) & np.uint32(0x7F)) + np.uint32(960)) << np.uint32(20)
            for j in range(end - start):
                byte = part[j] & np.uint8(0x7F)
                value = values[j]
                small = (value + value) - np.float32(2.0**-6)  # m * 2^-9, exactly
                value = small if byte < np.uint8(8) else value
                value = np.float32(np.nan) if byte == np.uint8(0x7F) else value
                values[j] = value * (-scale if part[j] >= np.uint8(0x80) else scale)
            if wide.shape[0]:
                _copy(words, wide[n, start:end], end - start)
            else:
                _narrow(words, narrow[n, start:end], end - start)
            start = end
