"""BF16 and FP32 weights to MXFP4 and NVFP4: the compiled loops. The rules are in quantize.py; here is why so.

Layout. A weight [N, K] is a flat run of blocks, since K is a multiple of the block: rows do not matter. It is worked
off in chunks of 2048 elements that live in L1, one flat, branch-free loop per step, which LLVM turns into SIMD:

    widen to FP32 bits | pairwise maxima up to one per block | block scales | spread them back | divide, compare, pack

Why pairwise and not a loop over 16: LLVM unrolls an inner loop of constant length before it vectorises, and is left
with scalar code. The searches over scales (four-over-six, mse) work on the chunk transposed, [16, blocks], so that a
SIMD lane holds a block and no sum crosses lanes: the result does not depend on the vector width.

Bits. Input is uint16 (BF16) shifted by 16, or FP32 seen as uint32 shifted by 0: one code for both. On magnitudes
integer order is float order, and a block maximum from 0x7F800000 on means infinity or NaN. Division is division, never
a product with a reciprocal, and nothing is contracted or reordered, so the bytes are the same on every machine.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from requant.kernels.jit import kernel

__all__ = ["bf16_amax", "bf16_mxfp4", "bf16_nvfp4", "f32_amax", "f32_mxfp4", "f32_nvfp4"]

_CHUNK: Final = 2048
"""Elements per chunk: about 40 KB of buffers; a multiple of 32."""
_INFINITY: Final = 0x7F800000
_MAGNITUDE: Final = 0x7FFFFFFF
_BELOW, _ABOVE = -3, 7
"""The mse search: E4M3 bytes around that of amax/6. Nothing was ever best outside (normal, Laplace, t3, uniform blocks
of 16, full sweep): +7 takes amax to 3.3 instead of 6, -3 clips it at 7.9."""
_FOUR_OVER_SIX: Final = 1  # choice of scale; 0 is nearest
_MSE: Final = 2

Words = NDArray[np.uint32]
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def _widen(source: NDArray[Any], shift: int, out: Words) -> None:
    for j in range(source.shape[0]):
        out[j] = np.uint32(source[j]) << np.uint32(shift)


def _halve(source: Words, out: Words, count: int) -> None:
    """out[j] = the larger magnitude of a pair."""
    for j in range(count):
        out[j] = max(source[2 * j] & np.uint32(_MAGNITUDE), source[2 * j + 1] & np.uint32(_MAGNITUDE))


def _double(source: Words, out: Words, count: int) -> None:
    """Each of the first count elements twice."""
    for j in range(count):
        out[2 * j] = source[j]
        out[2 * j + 1] = source[j]


def _largest(words: Words, count: int) -> Any:
    top = np.uint32(0)
    for j in range(count):
        top = max(top, words[j])
    return top


def _first_nonfinite(words: Words, count: int) -> int:
    for j in range(count):
        if words[j] & np.uint32(_MAGNITUDE) >= np.uint32(_INFINITY):
            return j
    return -1


def _round_e4m3(value: Floats, value_bits: Words, out_bits: Words, byte: Bytes, count: int) -> None:
    """Nearest E4M3 byte, ties to even, after 0 became 1 and the rest was clamped to [2^-9, 448].

    value, and value_bits, the same memory seen as words, end as what they round to; out_bits is scratch.
    """
    for b in range(count):
        s = np.float32(1.0) if value[b] == np.float32(0.0) else value[b]
        value[b] = min(max(s, np.float32(2.0**-9)), np.float32(448.0))
    for b in range(count):
        word = value_bits[b]
        out_bits[b] = (word + np.uint32(0x7FFFF) + ((word >> np.uint32(20)) & np.uint32(1))) >> np.uint32(20)
    for b in range(count):
        subnormal = value[b] < np.float32(2.0**-6)
        multiple = (value[b] + np.float32(2.0**14)) - np.float32(2.0**14)  # FP32 steps by 2^-9 at 2^14
        small = np.uint32(multiple * np.float32(512.0))
        byte[b] = small if subnormal else out_bits[b] - np.uint32(960)  # 960: bias 127 - 7, times 8
    _e4m3_values(byte, value, value_bits, count)


def _e4m3_values(byte: Bytes, value: Floats, value_bits: Words, count: int) -> None:
    """Decode positive finite E4M3 bytes."""
    for b in range(count):
        small = np.float32(byte[b]) * np.float32(2.0**-9)
        value_bits[b] = (np.uint32(byte[b]) + np.uint32(960)) << np.uint32(20)
        value[b] = small if byte[b] < np.uint8(8) else value[b]


def _block_error(
    magnitudes: Floats, weights: Floats, scale: Floats, global_scale: Any, error: Floats, count: int
) -> None:
    """Squared error of each block under its scale, in units of the global scale squared.

    magnitudes and weights [16, blocks]. Rounding to E2M1 is rounding to a multiple of 1/2, 1 or 2, ties to even; FP32
    does that itself when a number with that step is added and taken away.
    """
    for b in range(count):
        error[b] = np.float32(0.0)
    for i in range(16):
        row, weight = magnitudes[i], weights[i]
        for b in range(count):
            x = row[b] / (scale[b] * global_scale)
            step = np.float32(1.5 * 2.0**22)  # FP32 steps by 1/2 there
            step = np.float32(1.5 * 2.0**23) if x >= np.float32(2.0) else step
            step = np.float32(1.5 * 2.0**24) if x >= np.float32(4.0) else step
            q = min((min(x, np.float32(8.0)) + step) - step, np.float32(6.0))
            miss = (q - x) * scale[b]
            error[b] += miss * miss * weight[b]


def _better(error: Floats, best: Floats, byte: Bytes, best_byte: Bytes, count: int) -> None:
    for b in range(count):
        take = error[b] < best[b]
        best[b] = error[b] if take else best[b]
        best_byte[b] = byte[b] if take else best_byte[b]


def _mxfp4(source: NDArray[Any], shift: int, codes: Bytes, scales: Bytes) -> int:
    """Flat weights to flat codes and E8M0 bytes; the index of the first infinity or NaN, or -1."""
    words = np.empty(_CHUNK, np.uint32)
    values = words.view(np.float32)
    l2, l4, l8 = np.empty(_CHUNK // 2, np.uint32), np.empty(_CHUNK // 4, np.uint32), np.empty(_CHUNK // 8, np.uint32)
    l16, top = np.empty(_CHUNK // 16, np.uint32), np.empty(_CHUNK // 32, np.uint32)
    factor = np.empty(_CHUNK, np.uint32)
    factors = factor.view(np.float32)
    code = np.empty(_CHUNK, np.uint8)
    pair = code.view(np.uint16)
    for base in range(0, source.shape[0], _CHUNK):
        size = min(_CHUNK, source.shape[0] - base)
        blocks = size // 32
        _widen(source[base : base + size], shift, words)
        _halve(words, l2, size // 2)
        _halve(l2, l4, size // 4)
        _halve(l4, l8, size // 8)
        _halve(l8, l16, size // 16)
        _halve(l16, top, blocks)
        if _largest(top, blocks) >= np.uint32(_INFINITY):
            return base + _first_nonfinite(words, size)
        out_scales = scales[base // 32 : base // 32 + blocks]
        for b in range(blocks):
            # the smallest e with amax <= 6 * 2^e = 1.5 * 2^(e+2): the float's exponent - 2, one more above 1.5
            e = (top[b] >> np.uint32(23)) + ((top[b] & np.uint32(0x7FFFFF)) > np.uint32(0x400000))
            byte = max(e, 2) - 2
            out_scales[b] = byte
            top[b] = (254 - byte) << 23  # 2^-e, always normal: exact
        _double(top, l16, blocks)
        _double(l16, l8, size // 16)
        _double(l8, l4, size // 8)
        _double(l4, l2, size // 4)
        _double(l2, factor, size // 2)
        for j in range(size):
            x = values[j] * factors[j]
            a = abs(x)
            order = (
                np.uint32(a > np.float32(0.25))
                + np.uint32(a > np.float32(0.75))
                + np.uint32(a > np.float32(1.25))
                + np.uint32(a > np.float32(1.75))
                + np.uint32(a > np.float32(2.5))
                + np.uint32(a > np.float32(3.5))
                + np.uint32(a > np.float32(5.0))
            )
            code[j] = order + (np.uint32(x <= np.float32(0.0)) << np.uint32(3))
        out = codes[base // 2 : (base + size) // 2]
        for j in range(size // 2):
            out[j] = pair[j] | (pair[j] >> 4)
    return -1


def _nvfp4(
    source: NDArray[Any],
    shift: int,
    global_scale: Any,
    choice: int,
    importance: Floats,
    codes: Bytes,
    scales: Bytes,
    missed: NDArray[np.float64],
) -> int:
    """Flat weights to flat codes and E4M3 bytes; the index of the first infinity or NaN, or -1.

    importance [K] weighs the squared error of column k, or is empty; choice: 0 nearest, 1 four-over-six, 2 mse.
    missed [1]: raised by the squared error of the scales that a search chose, in units of the global scale squared.
    """
    words = np.empty(_CHUNK, np.uint32)
    values = words.view(np.float32)
    l2, l4, l8 = np.empty(_CHUNK // 2, np.uint32), np.empty(_CHUNK // 4, np.uint32), np.empty(_CHUNK // 8, np.uint32)
    top = np.empty(_CHUNK // 16, np.uint32)
    amax = top.view(np.float32)
    scale = np.empty(_CHUNK // 16, np.float32)
    scale_bits = scale.view(np.uint32)
    scratch = np.empty(_CHUNK // 16, np.uint32)
    divisor = np.empty(_CHUNK, np.uint32)
    divisors = divisor.view(np.float32)
    code = np.empty(_CHUNK, np.uint8)
    pair = code.view(np.uint16)
    byte = np.empty(_CHUNK // 16, np.uint8)
    turned = np.empty((16, _CHUNK // 16), np.float32)
    weights = np.ones((16, _CHUNK // 16), np.float32)
    error, best = np.empty(_CHUNK // 16, np.float32), np.empty(_CHUNK // 16, np.float32)
    for base in range(0, source.shape[0], _CHUNK):
        size = min(_CHUNK, source.shape[0] - base)
        blocks = size // 16
        _widen(source[base : base + size], shift, words)
        _halve(words, l2, size // 2)
        _halve(l2, l4, size // 4)
        _halve(l4, l8, size // 8)
        _halve(l8, top, blocks)
        if _largest(top, blocks) >= np.uint32(_INFINITY):
            return base + _first_nonfinite(words, size)
        for b in range(blocks):
            scale[b] = amax[b] / (np.float32(6.0) * global_scale)
        out_scales = scales[base // 16 : base // 16 + blocks]
        _round_e4m3(scale, scale_bits, scratch, out_scales, blocks)
        if choice:
            for b in range(blocks):
                for i in range(16):
                    turned[i, b] = abs(values[16 * b + i])
            if importance.shape[0]:
                for b in range(blocks):
                    column = (base + 16 * b) % importance.shape[0]
                    for i in range(16):
                        weights[i, b] = importance[column + i]
            _block_error(turned, weights, scale, global_scale, best, blocks)
            if choice == _FOUR_OVER_SIX:
                for b in range(blocks):
                    scale[b] = amax[b] / (np.float32(4.0) * global_scale)
                _round_e4m3(scale, scale_bits, scratch, byte, blocks)
                _block_error(turned, weights, scale, global_scale, error, blocks)
                _better(error, best, byte, out_scales, blocks)
            else:
                for b in range(blocks):
                    scratch[b] = out_scales[b]
                for step in range(_BELOW, _ABOVE + 1):
                    if step:
                        for b in range(blocks):
                            byte[b] = min(max(np.int32(scratch[b]) + step, 1), 0x7E)
                        _e4m3_values(byte, scale, scale_bits, blocks)
                        _block_error(turned, weights, scale, global_scale, error, blocks)
                        _better(error, best, byte, out_scales, blocks)
            for b in range(blocks):
                missed[0] += np.float64(best[b])
            _e4m3_values(out_scales, scale, scale_bits, blocks)
        for b in range(blocks):
            scale[b] = scale[b] * global_scale
        _double(scale_bits, l8, blocks)
        _double(l8, l4, size // 8)
        _double(l4, l2, size // 4)
        _double(l2, divisor, size // 2)
        for j in range(size):
            x = values[j] / divisors[j]
            a = abs(x)
            order = (  # ties to the even code: the bounds under an even code are included
                np.uint32(a > np.float32(0.25))
                + np.uint32(a >= np.float32(0.75))
                + np.uint32(a > np.float32(1.25))
                + np.uint32(a >= np.float32(1.75))
                + np.uint32(a > np.float32(2.5))
                + np.uint32(a >= np.float32(3.5))
                + np.uint32(a > np.float32(5.0))
            )
            code[j] = order + (np.uint32(x < np.float32(0.0)) << np.uint32(3))
        out = codes[base // 2 : (base + size) // 2]
        for j in range(size // 2):
            out[j] = pair[j] | (pair[j] >> 4)
    return -1


def _amax(source: NDArray[Any], shift: int, out: Words) -> int:
    """out[0] = bits of the largest magnitude; the index of the first infinity or NaN, or -1."""
    words = np.empty(_CHUNK, np.uint32)
    top = np.uint32(0)
    for base in range(0, source.shape[0], _CHUNK):
        size = min(_CHUNK, source.shape[0] - base)
        _widen(source[base : base + size], shift, words)
        here = np.uint32(0)
        for j in range(size):
            here = max(here, words[j] & np.uint32(_MAGNITUDE))
        if here >= np.uint32(_INFINITY):
            return base + _first_nonfinite(words, size)
        top = max(top, here)
    out[0] = top
    return -1


_SHARED = (_widen, _halve, _double, _largest, _first_nonfinite)
_SEARCH = (_e4m3_values, _round_e4m3, _block_error, _better)

bf16_mxfp4 = kernel("const u16[:]", "i64", "u8[:]", "u8[:]", uses=_SHARED)(_mxfp4)
f32_mxfp4 = kernel("const u32[:]", "i64", "u8[:]", "u8[:]", uses=_SHARED)(_mxfp4)
_NVFP4: Final = ("i64", "f32", "i64", "const f32[:]", "u8[:]", "u8[:]", "f64[:]")
bf16_nvfp4 = kernel("const u16[:]", *_NVFP4, uses=(*_SHARED, *_SEARCH))(_nvfp4)
f32_nvfp4 = kernel("const u32[:]", *_NVFP4, uses=(*_SHARED, *_SEARCH))(_nvfp4)
bf16_amax = kernel("const u16[:]", "i64", "u32[:]", uses=_SHARED)(_amax)
f32_amax = kernel("const u32[:]", "i64", "u32[:]", uses=_SHARED)(_amax)
