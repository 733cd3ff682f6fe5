"""BF16, F16 and F32 weights to E4M3 under a scale per tensor, per channel or per block, on the CPU.

    scale = amax(block) / 448        FP32; 1 where the block is all zeros
    code  = e4m3(w / scale)          ties to even, saturating; the sign stays, on zero too

Blocks are [high, wide] elements; per channel is (1, K), per tensor (N, K), DeepSeek (128, 128), with smaller blocks at
ragged edges. modelopt divides a BF16 tensor by a 0-d scale, so that its quotient is rounded to BF16 before it becomes
E4M3; `quotient` asks for that ("bf16", "f16"), and then the bytes are modelopt 0.47's. Anything else divides in FP32.

Inputs are [n, K], BF16 as uint16 bits; any row range of a tensor may be given, with the row it starts at. The calls
release the GIL and allocate nothing larger than a chunk. How: integer order is float order for magnitudes, rounding to
three mantissa bits is an integer addition, and rounding a subnormal is adding and taking away 2^14, where FP32 steps by
2^-9. All loops are flat and branch-free.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from requant.kernels.formats import E4M3_MAX, E4M3_VALUES, E8M0_VALUES
from requant.kernels.jit import kernel
from requant.kernels.quantize import NonFiniteError, Weight

__all__ = ["Quotient", "block_amax", "encode_fp8", "encoded_amax", "fp8_scales"]

Quotient = Literal["f32", "bf16", "f16"]
Words = NDArray[np.uint32]
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_CHUNK: Final = 2048
_INFINITY: Final = 0x7F800000
_MAGNITUDE: Final = 0x7FFFFFFF


def block_amax(w: Weight, block: tuple[int, int], out: Floats, first_row: int = 0) -> None:
    """Raise out [rows of blocks, ceil(K/wide)] to the largest |w| of each block; out is that of the whole tensor.

    w [n, K] holds the rows from first_row on. NonFiniteError; ValueError for shapes.
    """
    _check(w, block, out, first_row)
    source, shift = _words(w)
    call = _bf16_amax if source.dtype == np.uint16 else _f32_amax
    _finite(call(source, shift, block[0], block[1], first_row, out.view(np.uint32)), w.shape[1])


def fp8_scales(amax: Floats) -> Floats:
    """amax of each block -> its scale, amax / 448 in FP32; 1 for blocks of zeros, never zero."""
    scales = amax.astype(np.float32) / np.float32(E4M3_MAX)
    scales = np.maximum(scales, np.finfo(np.float32).smallest_subnormal)
    return np.where(amax == 0, np.float32(1.0), scales).astype(np.float32)


def encode_fp8(
    w: Weight, scales: Floats, block: tuple[int, int], out: Bytes, first_row: int = 0, quotient: Quotient = "f32"
) -> None:
    """w [n, K] -> E4M3 bytes uint8 [n, K] under the scales of the whole tensor, [rows of blocks, ceil(K/wide)].

    quotient: what w / scale is rounded to before it becomes E4M3. NonFiniteError; ValueError for shapes.
    """
    _check(w, block, scales, first_row)
    if out.shape != w.shape or out.dtype != np.uint8 or not out.flags.c_contiguous:
        raise ValueError(f"out is {out.dtype} {out.shape}: expected uint8 {w.shape}, contiguous")
    if quotient == "f16":  # numba knows no F16: numpy divides and rounds, and the scale is one from here on
        rows: NDArray[np.int64] = (first_row + np.arange(w.shape[0], dtype=np.int64)) // block[0]
        divisors = np.repeat(scales[rows], block[1], axis=1)[:, : w.shape[1]]
        source, shift = _words(w)
        values = (source.astype(np.uint32) << np.uint32(shift)).view(np.float32)
        w, scales = (values / divisors).astype(np.float16).astype(np.float32), np.ones_like(scales)
    source, shift = _words(w)
    call = _bf16_encode if source.dtype == np.uint16 else _f32_encode
    narrow = 1 if quotient == "bf16" else 0
    grid = np.require(scales, np.float32, ["C", "A"])
    _finite(call(source, shift, grid, block[0], block[1], first_row, narrow, out), w.shape[1])


def encoded_amax(values: Bytes, scales: NDArray[Any], block: tuple[int, int], first_row: int = 0) -> float:
    """The largest |w| of E4M3 bytes [n, K] under the scales of the whole tensor (float32, or E8M0 bytes), undecoded.

    Order of the bytes is order of the magnitudes, and a product rounded to FP32 keeps it: the same number as decoding
    everything would give. NonFiniteError for a NaN byte.
    """
    grid: Floats = E8M0_VALUES[scales.astype(np.intp)] if scales.dtype == np.uint8 else scales
    if values.dtype != np.uint8 or values.ndim != 2:
        raise ValueError(f"values are {values.dtype} {values.shape}: expected E4M3 bytes [n, K]")
    high, wide = block
    rows, columns = values.shape
    if grid.shape[0] * high < first_row + rows or grid.shape[1] != -(-columns // wide):
        raise ValueError(f"scales {grid.shape} do not cover rows {first_row} to {first_row + rows} of K = {columns}")
    out = np.zeros(1, dtype=np.float32)
    ready = np.require(values, np.uint8, ["C"])
    _finite(
        _encoded_amax(ready, np.require(grid, np.float32, ["C", "A"]), E4M3_VALUES, *block, first_row, out), columns
    )
    return float(out[0])


def _check(w: Weight, block: tuple[int, int], grid: Floats, first_row: int) -> None:
    if w.ndim != 2 or w.dtype.name not in ("uint16", "float16", "float32"):
        raise ValueError(f"weight is {w.dtype} {w.shape}: expected [n, K] of uint16 (BF16 bits), float16 or float32")
    high, wide = block
    if high < 1 or wide < 1 or first_row < 0 or grid.ndim != 2 or grid.dtype != np.float32:
        raise ValueError(f"block {block}, first row {first_row}, scales {grid.dtype} {grid.shape}: no such blocks")
    rows, columns = w.shape
    if grid.shape[0] * high < first_row + rows or grid.shape[1] != -(-columns // wide):
        raise ValueError(f"scales {grid.shape} do not cover rows {first_row} to {first_row + rows} of K = {columns}")


def _words(w: Weight) -> tuple[NDArray[Any], int]:
    """[n, K] uint16 or uint32, and how far to shift it to be FP32 bits."""
    if w.dtype == np.uint16:
        return np.require(w, np.uint16, ["C", "A"]), 16
    return np.require(w, np.float32, ["C", "A"]).view(np.uint32), 0


def _finite(bad: int, columns: int) -> None:
    if bad >= 0:
        raise NonFiniteError(bad // columns, bad % columns)


def _first_nonfinite(words: Words, count: int) -> int:
    for j in range(count):
        if words[j] & np.uint32(_MAGNITUDE) >= np.uint32(_INFINITY):
            return j
    return -1


def _amax(source: NDArray[Any], shift: int, high: int, wide: int, first_row: int, out: Words) -> int:
    words = np.empty(_CHUNK, np.uint32)
    for n in range(source.shape[0]):
        row = source[n]
        start = 0
        while start < row.shape[0]:
            end = min(row.shape[0], (start // wide + 1) * wide, start + _CHUNK)
            part = row[start:end]
            top = np.uint32(0)
            for j in range(end - start):
                words[j] = np.uint32(part[j]) << np.uint32(shift)
                top = max(top, words[j] & np.uint32(_MAGNITUDE))
            if top >= np.uint32(_INFINITY):
                return n * row.shape[0] + start + _first_nonfinite(words, end - start)
            at = (first_row + n) // high
            out[at, start // wide] = max(out[at, start // wide], top)
            start = end
    return -1


def _encode(
    source: NDArray[Any],
    shift: int,
    scales: Floats,
    high: int,
    wide: int,
    first_row: int,
    narrow: int,
    out: Bytes,
) -> int:
    words = np.empty(_CHUNK, np.uint32)
    values = words.view(np.float32)
    for n in range(source.shape[0]):
        row = source[n]
        start = 0
        while start < row.shape[0]:
            end = min(row.shape[0], (start // wide + 1) * wide, start + _CHUNK)
            part = row[start:end]
            into = out[n, start:end]
            scale = scales[(first_row + n) // high, start // wide]
            top = np.uint32(0)
            for j in range(end - start):
                word = np.uint32(part[j]) << np.uint32(shift)
                words[j] = word
                into[j] = np.uint8((word >> np.uint32(24)) & np.uint32(0x80))
                top = max(top, word & np.uint32(_MAGNITUDE))
            if top >= np.uint32(_INFINITY):
                return n * row.shape[0] + start + _first_nonfinite(words, end - start)
            for j in range(end - start):
                values[j] = abs(values[j]) / scale
            if narrow:
                for j in range(end - start):
                    word = words[j]
                    word = word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))
                    words[j] = word & np.uint32(0xFFFF0000)
            for j in range(end - start):
                value = min(values[j], np.float32(448.0))
                multiple = (value + np.float32(2.0**14)) - np.float32(2.0**14)  # FP32 steps by 2^-9 at 2^14
                small = np.uint32(multiple * np.float32(512.0))
                values[j] = value
                word = words[j]
                large = (word + np.uint32(0x7FFFF) + ((word >> np.uint32(20)) & np.uint32(1))) >> np.uint32(20)
                byte = small if value < np.float32(2.0**-6) else large - np.uint32(960)  # 960: bias 127 - 7, times 8
                into[j] |= np.uint8(byte)
            start = end
    return -1


_bf16_amax = kernel("const u16[:,:]", "i64", "i64", "i64", "i64", "u32[:,:]", uses=(_first_nonfinite,))(_amax)
_f32_amax = kernel("const u32[:,:]", "i64", "i64", "i64", "i64", "u32[:,:]", uses=(_first_nonfinite,))(_amax)
_ENCODE: Final = ("i64", "const f32[:,:]", "i64", "i64", "i64", "i64", "u8[:,:]")
_bf16_encode = kernel("const u16[:,:]", *_ENCODE, uses=(_first_nonfinite,))(_encode)
_f32_encode = kernel("const u32[:,:]", *_ENCODE, uses=(_first_nonfinite,))(_encode)


@kernel("const u8[:,:]", "const f32[:,:]", "const f32[:]", "i64", "i64", "i64", "f32[:]")
def _encoded_amax(
    values: Bytes, scales: Floats, table: Floats, high: int, wide: int, first_row: int, out: Floats
) -> int:
    largest = np.float32(0.0)
    for n in range(values.shape[0]):
        row = values[n]
        for start in range(0, row.shape[0], wide):
            part = row[start : min(start + wide, row.shape[0])]
            top = np.uint8(0)
            for j in range(part.shape[0]):
                top = max(top, part[j] & np.uint8(0x7F))
            if top == np.uint8(0x7F):
                for j in range(part.shape[0]):
                    if part[j] & np.uint8(0x7F) == np.uint8(0x7F):
                        return n * row.shape[0] + start + j
            largest = max(largest, table[top] * scales[(first_row + n) // high, start // wide])
    out[0] = largest
    return -1
