"""W4A4 as the oracle has it: activations rounded to FP4 on the fly by reference.py's encoders, the product in float64.

A W4A4 kernel multiplies the rounded activations, so it is judged by their product (bounds.py); what the rounding itself
costs is another question. NVFP4's global scale is the checkpoint's static `input_scale`, or amax / (6 * 448) of each
token or of the whole tensor, over finite values. A block with a NaN or an infinity is NaN, and so is its row of y.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from requant.kernels import reference
from requant.kernels.formats import NumberFormat, PackedTensor

__all__ = ["decode", "matmul", "round_activations"]

Floats = NDArray[np.float64]
Granularity = Literal["token", "tensor"]


def decode(weight: PackedTensor) -> Floats:
    """The weight's numbers, exact, float64 [N, K]."""
    if weight.global_scale is None:
        return reference.dequantize_mxfp4(weight.codes, weight.block_scales)
    return reference.dequantize_nvfp4(weight.codes, weight.block_scales, float(weight.global_scale))


def round_activations(
    x: NDArray[np.float32], fmt: NumberFormat, *, input_scale: float | None = None, granularity: Granularity = "token"
) -> Floats:
    """x [M, K] as FP4 activations, float64. ValueError for K that is no multiple of the group, and for a bad scale."""
    if fmt not in (NumberFormat.NVFP4, NumberFormat.MXFP4):
        raise ValueError(f"{fmt} is no FP4 format")
    if input_scale is not None and (fmt is NumberFormat.MXFP4 or not (math.isfinite(input_scale) and input_scale > 0)):
        raise ValueError(f"input_scale {input_scale} for {fmt}: NVFP4 has one, finite and positive")
    finite = np.where(np.isfinite(x), x, np.float32(0)).astype(np.float32)
    if fmt is NumberFormat.MXFP4:
        rounded = reference.dequantize_mxfp4(*reference.encode_mxfp4(finite))
    else:
        parts = [finite] if granularity == "tensor" or input_scale is not None else [row[None] for row in finite]
        given = None if input_scale is None else np.float32(input_scale)
        rounded = np.concatenate([_nvfp4(part, given) for part in parts]) if parts else np.zeros(x.shape)
    bad = ~np.isfinite(x).reshape(x.shape[0], x.shape[1] // fmt.group, fmt.group).all(axis=-1)
    rounded[np.repeat(bad, fmt.group, axis=1)] = np.nan
    return rounded


def matmul(
    x: NDArray[np.float32],
    weight: PackedTensor,
    *,
    input_scale: float | None = None,
    granularity: Granularity = "token",
) -> Floats:
    """y [M, N] of x [M, K], rounded to the weight's own format, and the weight [N, K]."""
    rounded = round_activations(x, weight.format, input_scale=input_scale, granularity=granularity)
    return reference.matmul(rounded, decode(weight))


def _nvfp4(x: NDArray[np.float32], given: np.float32 | None) -> Floats:
    scale = reference.nvfp4_global_scale([x]) if given is None else given
    return reference.dequantize_nvfp4(*reference.encode_nvfp4(x, scale), float(scale))
