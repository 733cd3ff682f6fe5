"""The oracle: every number format and conversion once more, slow and plain, so that it can be checked by eye.

What. Nibbles, MXFP4/NVFP4/FP8-block decoding to float64, the BF16 -> MXFP4 and BF16 -> NVFP4 encoders in modelopt's
float32 arithmetic, and a float64 matmul. The repack: reference_repack.py; W4A4: reference_w4a4.py; tensors on a GPU:
reference_torch.py.

Why float64 is exact for decoding. An E2M1 magnitude has at most 2 significant bits, an E4M3 scale at most 4, an FP32
global scale 24: their product has at most 30 of float64's 53 bits, and its exponent (from 2^-1 * 2^-9 * 2^-149 to
2^3 * 2^9 * 2^128) lies well inside float64's range. So `==` on decoded values is equality of the numbers, not of
approximations.

Layout. codes [N, K/2] uint8, low nibble = even K; block scales [N, K/group] uint8, never swizzled.

Nothing here is fast and nothing imports the fast paths: tests hold those against this file. numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from requant.kernels.formats import (
    E2M1_VALUES,
    E4M3_MAX,
    E4M3_MAX_BYTE,
    E4M3_VALUES,
    E8M0_BIAS,
    E8M0_VALUES,
    MXFP4_GROUP,
    NVFP4_GROUP,
)

__all__ = [
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
    "unpack_nibbles",
    "unpack_words",
]

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]

_E2M1_BOUNDS: Final = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=np.float32)
"""Midpoints between neighbouring E2M1 magnitudes."""


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
