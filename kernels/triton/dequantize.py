"""FP4 weights as BF16, for products of many tokens: decoded once, they go through cuBLAS or torch's grouped product.

A number is code times block scale times global scale, rounded once. Memory is read and written once, in order.
"""

# pyright: basic, reportCallIssue=false
# Triton ships no types, and a launch takes options that its kernel does not declare.

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from requant.kernels.formats import NumberFormat
from requant.kernels.triton.w4a16 import e4m3, e8m0

if TYPE_CHECKING:
    from requant.kernels.w4a4_operands import Fp4Tensor
    from torch import Tensor

__all__ = ["to_bf16"]

_BLOCK = 256
"""Groups of a program."""


@triton.jit
def _value(code):
    """A 4-bit code (int32) -> its value in float32 times 2^-14: E2M1's bits are the top ones of a half's."""
    return (((code & 8) << 12) | ((code & 7) << 9)).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def dequantize(
    codes_ptr, scales_ptr, scale_ptr, out_ptr, groups, GROUP: tl.constexpr, NVFP4: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """BLOCK groups of one expert. codes [E, groups, GROUP / 2], scales [E, groups], out [E, groups, GROUP]. Grid
    (groups / BLOCK, E)."""
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.arange(0, GROUP // 2)
    there = group < groups
    at = tl.program_id(1).to(tl.int64) * groups + group
    raw = tl.load(scales_ptr + at, mask=there, other=0).to(tl.int32)
    step = e4m3(raw) * tl.load(scale_ptr + tl.program_id(1)) if NVFP4 else e8m0(raw)
    step = step[:, None]
    byte = tl.load(codes_ptr + at[:, None] * (GROUP // 2) + pair[None, :], mask=there[:, None], other=0).to(tl.int32)
    # 2^14 goes to the codes: the largest E8M0 scales times it would be infinite, and infinite times a zero NaN.
    both = tl.join(_value(byte & 15) * 16384.0 * step, _value(byte >> 4) * 16384.0 * step)
    out = tl.reshape(both.to(tl.bfloat16), (BLOCK, GROUP))
    tl.store(out_ptr + at[:, None] * GROUP + tl.arange(0, GROUP)[None, :], out, mask=there[:, None])


def to_bf16(weight: Fp4Tensor) -> Tensor:
    """The numbers of a weight [N, K] or of a stack [E, N, K] on a GPU, in BF16."""
    import torch

    codes, group = weight.codes, weight.format.group
    experts = codes.shape[0] if codes.dim() == 3 else 1
    groups = weight.scales.numel() // experts
    out = torch.empty((*codes.shape[:-1], weight.k), dtype=torch.bfloat16, device=codes.device)
    scale = codes if weight.global_scale is None else weight.global_scale
    dequantize[(triton.cdiv(groups, _BLOCK), experts)](
        codes, weight.scales, scale, out, groups, GROUP=group, NVFP4=weight.format is NumberFormat.NVFP4, BLOCK=_BLOCK,
        num_warps=4,
    )  # fmt: skip
    return out
