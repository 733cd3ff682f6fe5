"""INT4 weights back to FP32 on the CPU: compressed-tensors' pack-quantized, GPTQ and AWQ.

    value = (nibble - zero) * scale         exact in FP32: 5 bits times the 11 of F16 or the 8 of BF16

| producer            | codes, eight to an I32             | zeros                                      | scales    |
|---------------------|------------------------------------|--------------------------------------------|-----------|
| compressed-tensors  | [N, K/8], low nibble = lowest k    | 8, or [N/8, K/g], low nibble = lowest n    | [N, K/g]  |
| GPTQ                | [K/8, N], low nibble = lowest k    | [K/g, N/8], stored less one (v2: as it is) | [K/g, N]  |
| AWQ (GEMM)          | [K, N/8], nibble i = column ORDER[i] | [K/g, N/8], columns as in the codes      | [K/g, N]  |

Nibbles are unsigned; compressed-tensors adds 8 to its signed codes and zeros before it packs, so the difference is the
same. GPTQ with activation order says the group of each k in g_idx; elsewhere it is k // g.

(compressed-tensors 0.20 compressors/pack_quantized; AutoGPTQ 0.7 qlinear_cuda_old; AutoAWQ 0.2 utils/packing_utils.)
All calls take any rows (or columns, where the matrix lies turned) of a tensor and release the GIL.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from requant.kernels.jit import kernel

__all__ = ["AWQ_NIBBLE", "decode_awq", "decode_gptq", "decode_packed", "unpack_columns", "unpack_zero_rows"]

Words = NDArray[np.uint32]
Floats = NDArray[np.float32]

_LINE: Final = 16
"""I32 words in a cache line."""
AWQ_NIBBLE: Final = np.array([0, 4, 1, 5, 2, 6, 3, 7], dtype=np.int64)
"""Which nibble of a word holds column 0..7 (the reverse of AutoAWQ's packing order 0 2 4 6 1 3 5 7)."""


def decode_packed(words: Words, scales: Floats, zeros: Floats, group: int, out: Floats) -> None:
    """words [n, K/8], scales and zeros [n, ceil(K/group)] -> out [n, K] float32. ValueError for shapes."""
    n, k = out.shape
    groups = -(-k // group)
    if words.shape != (n, -(-k // 8)) or scales.shape != (n, groups) or zeros.shape != (n, groups):
        raise ValueError(f"words {words.shape}, scales {scales.shape}, zeros {zeros.shape} do not fit out {out.shape}")
    _packed(_ready(words), _floats(scales), _floats(zeros), group, out)


def decode_gptq(words: Words, scales: Floats, zeros: Floats, order: NDArray[np.int64], out: Floats) -> None:
    """words [K/8, n], scales and zeros [groups, n], groups of each k [K] -> out [n, K]. ValueError for shapes."""
    n, k = out.shape
    if words.shape != (k // 8, n) or scales.shape != zeros.shape or scales.shape[1] != n or order.shape != (k,):
        raise ValueError(f"words {words.shape}, scales {scales.shape}, order {order.shape} do not fit out {out.shape}")
    _check_order(order, scales.shape[0])
    _gptq(_ready(words), _floats(scales), _floats(zeros), np.ascontiguousarray(order), out)


def decode_awq(words: Words, scales: Floats, zeros: Floats, order: NDArray[np.int64], out: Floats) -> None:
    """words [K, n/8], scales and zeros [groups, n], groups of each k [K] -> out [n, K]. ValueError for shapes."""
    n, k = out.shape
    if words.shape != (k, n // 8) or n % 8 or scales.shape != zeros.shape or order.shape != (k,):
        raise ValueError(f"words {words.shape}, scales {scales.shape}, order {order.shape} do not fit out {out.shape}")
    _check_order(order, scales.shape[0])
    _awq(_ready(words), _floats(scales), _floats(zeros), np.ascontiguousarray(order), AWQ_NIBBLE, out)


def unpack_columns(words: Words, awq: bool) -> Floats:
    """Zero points packed along N: [groups, n/8] -> [groups, n] float32 nibbles."""
    shifts = (AWQ_NIBBLE if awq else np.arange(8)).astype(np.uint32) * np.uint32(4)
    nibbles = (words[:, :, None] >> shifts) & np.uint32(15)
    return nibbles.reshape(words.shape[0], -1).astype(np.float32)


def unpack_zero_rows(words: Words) -> Floats:
    """Zero points packed along the first axis: [n/8, groups] -> [n, groups] float32 nibbles."""
    nibbles = (words[:, None, :] >> (np.arange(8, dtype=np.uint32) * np.uint32(4))[None, :, None]) & np.uint32(15)
    return nibbles.reshape(-1, words.shape[1]).astype(np.float32)


def _check_order(order: NDArray[np.int64], groups: int) -> None:
    if order.size and (int(order.min()) < 0 or int(order.max()) >= groups):
        raise ValueError(f"a weight belongs to group {int(order.max())} or {int(order.min())} of {groups}")


def _ready(words: Words) -> Words:
    return np.require(words, np.uint32, ["C", "A"])


def _floats(values: Floats) -> Floats:
    return np.require(values, np.float32, ["C", "A"])


@kernel("const u32[:,:]", "const f32[:,:]", "const f32[:,:]", "i64", "f32[:,:]")
def _packed(words: Words, scales: Floats, zeros: Floats, group: int, out: Floats) -> None:
    for n in range(out.shape[0]):
        row, into = words[n], out[n]
        for g in range(scales.shape[1]):
            scale, zero = scales[n, g], zeros[n, g]
            for k in range(g * group, min((g + 1) * group, out.shape[1])):
                nibble = (row[k >> 3] >> np.uint32((k & 7) * 4)) & np.uint32(15)
                into[k] = (np.float32(nibble) - zero) * scale


@kernel("const u32[:,:]", "const f32[:,:]", "const f32[:,:]", "const i64[:]", "f32[:,:]")
def _gptq(words: Words, scales: Floats, zeros: Floats, order: NDArray[np.int64], out: Floats) -> None:
    for base in range(0, out.shape[0], _LINE):  # a cache line of words at a time: rows of out are far apart
        end = min(base + _LINE, out.shape[0])
        for high in range(words.shape[0]):
            row = words[high]
            for n in range(base, end):
                word, into = row[n], out[n]
                for low in range(8):
                    k = high * 8 + low
                    g = order[k]
                    nibble = (word >> np.uint32(low * 4)) & np.uint32(15)
                    into[k] = (np.float32(nibble) - zeros[g, n]) * scales[g, n]


@kernel("const u32[:,:]", "const f32[:,:]", "const f32[:,:]", "const i64[:]", "const i64[:]", "f32[:,:]")
def _awq(
    words: Words, scales: Floats, zeros: Floats, order: NDArray[np.int64], nibble: NDArray[Any], out: Floats
) -> None:
    for high in range(words.shape[1]):  # eight rows of out are written side by side along k
        for k in range(words.shape[0]):
            word, g = words[k, high], order[k]
            for low in range(8):
                n = high * 8 + low
                code = (word >> np.uint32(nibble[low] * 4)) & np.uint32(15)
                out[n, k] = (np.float32(code) - zeros[g, n]) * scales[g, n]
