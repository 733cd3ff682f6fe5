"""x @ weight^T for a packed FP4 weight on a machine without a GPU: decode a tile of rows, multiply it with BLAS.

The weight is FP4, the activation FP32, the product FP32: every element obeys |y - y64| <= 2^-8 |y64| + 2^-14 sum |w x|
with room to spare, since decoding rounds once and BLAS accumulates in FP32. For right numbers, not for decode speed.

A tile holds as many rows as fit in 32 MB of FP32. Threads decode strips of it, then BLAS multiplies with threads of its
own: the two never run at once, so they do not fight for cores.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray
from requant.kernels.cpu_dequant import dequantize
from requant.kernels.formats import PackedTensor

__all__ = ["cpu_matmul"]

_TILE: Final = 8 << 20
"""Weights decoded at a time: 32 MB of FP32, large enough for BLAS to be efficient."""
_STRIP: Final = 1 << 18
"""A thread is not worth starting for fewer weights: 0.2 ms of decoding."""


def cpu_matmul(x: NDArray[np.float32], weight: PackedTensor, threads: int | None = None) -> NDArray[np.float32]:
    """x [M, K] float32 times weight [N, K] transposed -> [M, N] float32; M may be 0.

    threads decode (default: the cores this process may use). Infinity and NaN in x, and NaN scale bytes, propagate as
    IEEE arithmetic has it. ValueError for a wrong dtype or shape, for K that is no multiple of the format's group, and
    for a global scale that is not positive and finite.
    """
    n, k = weight.codes.shape[0], weight.codes.shape[1] * 2
    if x.ndim != 2 or x.dtype != np.float32:
        raise ValueError(f"x is {x.dtype} {x.shape}: expected float32 [M, K]")
    if x.shape[1] != k:
        raise ValueError(f"x {x.shape} and weight [{n}, {k}] do not share K")
    if k % weight.format.group:
        raise ValueError(f"K = {k} is not a multiple of {weight.format}'s group of {weight.format.group}")
    scale = weight.global_scale
    if scale is not None and not (np.isfinite(scale) and scale > 0):
        raise ValueError(f"global scale {scale} is not a positive finite number")
    y = np.zeros((x.shape[0], n), dtype=np.float32)
    if 0 in (*y.shape, k):
        return y
    step = min(n, max(1, _TILE // k))
    tile = np.empty((step, k), dtype=np.float32)
    workers = max(1, min(threads or _cores(), step * k // _STRIP))
    with ThreadPoolExecutor(workers) as pool:
        for first in range(0, n, step):
            rows = min(step, n - first)
            edges = [rows * i // workers for i in range(workers + 1)]
            strips = [(_rows(weight, first + a, first + b), tile[a:b]) for a, b in pairwise(edges)]
            for strip in [pool.submit(dequantize, packed, out) for packed, out in strips]:
                strip.result()
            with np.errstate(invalid="ignore", over="ignore"):
                np.matmul(x, tile[:rows].T, out=y[:, first : first + rows])
    return y


def _rows(weight: PackedTensor, first: int, end: int) -> PackedTensor:
    return PackedTensor(weight.format, weight.codes[first:end], weight.block_scales[first:end], weight.global_scale)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
