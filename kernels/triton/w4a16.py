"""W4A16 in Triton: the fallback where there is no nvcc. Right on any GPU that Triton knows, and
simple rather than fast: plain arithmetic decodes, and weights are read once per 16 tokens (`moe`: of an expert).

Block scales are decoded by hand (tl.dot_scaled crashes or is wrong for E4M3 scales below Triton 3.8) and multiplied in
FP32; the product with a code is exact in BF16 for NVFP4, so `tl.dot` in BF16 with FP32 accumulation loses nothing. An
E8M0 scale is a power of two, exact as well. Even and odd k are two dot products: a byte holds one of each.
"""

# pyright: basic, reportCallIssue=false
# Triton ships no types, and a launch takes options that its kernel does not declare.

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from requant.kernels.formats import NumberFormat

if TYPE_CHECKING:
    from torch import Tensor

OPERAND = tl.float32 if os.environ.get("TRITON_INTERPRET", "0") == "1" else tl.bfloat16
"""What tl.dot is given, BF16 numbers either way: the interpreter of Triton 3.7 multiplies BF16 as integers."""
BLOCK_N = 32
BLOCK_K = 256
BLOCK_M = 16
"""tl.dot's smallest side."""


@triton.jit
def _e2m1(code):
    """A 4-bit code (int32) -> its value in float32."""
    exponent = (code >> 1) & 3
    mantissa = (code & 1).to(tl.float32)
    # exponent 0: 0 or 0.5; else (1 + mantissa / 2) * 2^(exponent - 1)
    magnitude = tl.where(
        exponent == 0,
        0.5 * mantissa,
        (1.0 + 0.5 * mantissa) * (1 << tl.where(exponent == 0, 0, exponent - 1)).to(tl.float32),
    )
    return tl.where((code & 8) != 0, -magnitude, magnitude)


@triton.jit
def e4m3(byte):
    """An E4M3 byte (int32) -> float32; 0x7F and 0xFF are NaN."""
    exponent = (byte >> 3) & 15
    mantissa = byte & 7
    normal = (((exponent + 120) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
    magnitude = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal)  # subnormals: m * 2^-9
    magnitude = tl.where((byte & 0x7F) == 0x7F, float("nan"), magnitude)
    return tl.where((byte & 0x80) != 0, -magnitude, magnitude)


@triton.jit
def e8m0(byte):
    """An E8M0 byte (int32) -> float32; 0 is 2^-127, 255 is NaN."""
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
    value = bits.to(tl.float32, bitcast=True)
    return tl.where(byte == 255, float("nan"), value)


@triton.jit
def _products(
    x_ptr, x_rows, there, codes_ptr, scales_ptr, rows, n_total, k_total, GROUP: tl.constexpr, NVFP4: tl.constexpr,
    OPERAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """FP32 [BLOCK_M, BLOCK_N]: rows of x (`x_rows`, where `there`) times rows of a weight, without the global scale."""
    half_k = k_total // 2
    groups = k_total // GROUP
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, half_k, BLOCK_K // 2):
        pairs = start + tl.arange(0, BLOCK_K // 2)
        inside = (rows < n_total)[:, None] & (pairs < half_k)[None, :]
        row_base = rows.to(tl.int64)[:, None]
        byte = tl.load(codes_ptr + row_base * half_k + pairs[None, :], mask=inside, other=0).to(tl.int32)
        at = row_base * groups + (pairs * 2 // GROUP)[None, :]
        raw = tl.load(scales_ptr + at, mask=inside, other=0).to(tl.int32)
        scale = e4m3(raw) if NVFP4 else e8m0(raw)
        even = (_e2m1(byte & 15) * scale).to(tl.bfloat16).to(OPERAND)
        odd = (_e2m1(byte >> 4) * scale).to(tl.bfloat16).to(OPERAND)
        x_at = x_ptr + x_rows.to(tl.int64)[:, None] * k_total + 2 * pairs[None, :]
        x_inside = there[:, None] & (pairs < half_k)[None, :]
        x_even = tl.load(x_at, mask=x_inside, other=0.0).to(OPERAND)
        x_odd = tl.load(x_at + 1, mask=x_inside, other=0.0).to(OPERAND)
        total = tl.dot(x_even, tl.trans(even), total)
        total = tl.dot(x_odd, tl.trans(odd), total)
    return total


@triton.jit
def w4a16_triton_kernel(
    x_ptr, codes_ptr, scales_ptr, scale_ptr, y_ptr, m_total, n_total, k_total, GROUP: tl.constexpr, NVFP4: tl.constexpr,
    OPERAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y[M, N] for one block of rows and 16 tokens."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = tokens < m_total
    total = _products(
        x_ptr, tokens, there, codes_ptr, scales_ptr, rows, n_total, k_total, GROUP, NVFP4, OPERAND,
        BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    global_scale = tl.load(scale_ptr)
    global_scale = tl.where(global_scale > 0.0, global_scale, float("nan"))
    y_at = y_ptr + tokens.to(tl.int64)[:, None] * n_total + rows[None, :]
    out = (total * global_scale).to(y_ptr.dtype.element_ty)
    tl.store(y_at, out, mask=there[:, None] & (rows < n_total)[None, :])


@triton.jit
def w4a16_grouped_kernel(
    x_ptr, codes_ptr, scales_ptr, scale_ptr, weights_ptr, tiles_ptr, slots_ptr, y_ptr, experts, slots_per_row, n_total,
    k_total, HAS_SCALES: tl.constexpr, HAS_WEIGHTS: tl.constexpr, GROUP: tl.constexpr, NVFP4: tl.constexpr,
    OPERAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y[slot, N] for one block of rows and up to 16 slots of one expert; NaN for the expert that does not exist."""
    tile = tiles_ptr + 3 * tl.program_id(1)
    expert, first, count = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if count > 0:
        rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        lanes = tl.arange(0, BLOCK_M)
        there = lanes < count
        slots = tl.load(slots_ptr + first + lanes, mask=there, other=0)
        exists = expert < experts
        of = tl.where(exists, expert, 0).to(tl.int64)
        half_k = k_total // 2
        total = _products(
            x_ptr, slots // slots_per_row, there, codes_ptr + of * n_total * half_k,
            scales_ptr + of * n_total * (k_total // GROUP), rows, n_total, k_total, GROUP, NVFP4, OPERAND,
            BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        factor = tl.load(scale_ptr + of) if HAS_SCALES else 1.0
        factor = tl.where((factor > 0.0) & exists, factor, float("nan"))
        out = total * factor
        if HAS_WEIGHTS:
            out = out * tl.load(weights_ptr + slots, mask=there, other=0.0)[:, None]
        y_at = y_ptr + slots.to(tl.int64)[:, None] * n_total + rows[None, :]
        tl.store(y_at, out.to(y_ptr.dtype.element_ty), mask=there[:, None] & (rows < n_total)[None, :])


def matmul(
    x: Tensor, codes: Tensor, block_scales: Tensor, global_scale: float | Tensor, *, fmt: NumberFormat, out: Tensor
) -> Tensor:
    """out = global_scale * x @ dequantize(codes, block_scales)^T; arguments as w4a16_matmul has checked them."""
    import torch

    m, k = x.shape
    n = codes.shape[0]
    scale = torch.as_tensor(global_scale, dtype=torch.float32, device=x.device).reshape(1)
    grid = (triton.cdiv(n, BLOCK_N), triton.cdiv(m, BLOCK_M))
    w4a16_triton_kernel[grid](
        x, codes, block_scales.view(torch.uint8), scale, out, m, n, k, GROUP=fmt.group, NVFP4=fmt is NumberFormat.NVFP4,
        OPERAND=OPERAND, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=4,
    )  # fmt: skip
    return out


def route(expert_ids: Tensor, experts: int) -> Tensor:
    """Slots sorted by expert, stably, for `moe`: int32, the slots and then tiles {expert, first, count} of at most 16.

    Ids out of range go to expert number `experts`. Only torch operations, and nothing is read back.
    """
    import torch

    ids = expert_ids.reshape(-1).to(torch.int64)
    ids = torch.where((ids >= 0) & (ids < experts), ids, experts)
    order = torch.argsort(ids, stable=True)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device).scatter_add_(0, ids, torch.ones_like(ids))
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    ends = tiles.cumsum(0)
    number = torch.arange(_most_tiles(ids.numel(), experts), device=ids.device)
    expert = torch.searchsorted(ends, number, right=True).clamp_(max=experts)
    within = BLOCK_M * (number - (ends - tiles)[expert])
    first = (counts.cumsum(0) - counts)[expert] + within
    count = torch.where(number < ends[-1], (counts[expert] - within).clamp(0, BLOCK_M), 0)
    return torch.cat([order, torch.stack([expert, first, count], 1).reshape(-1)]).int()


def _most_tiles(slots: int, experts: int) -> int:
    """Tiles that any routing of so many slots can have."""
    return min(slots, experts + 1 + slots // BLOCK_M)


def moe(
    x: Tensor, codes: Tensor, block_scales: Tensor, global_scales: Tensor | None, routing: Tensor, slots: int, *,
    fmt: NumberFormat, weights: Tensor | None, x_per_slot: bool, out: Tensor,
) -> Tensor:  # fmt: skip
    """out [T, topk, N], one grouped GEMM; routing from `route`, all else as w4a16_moe has checked it."""
    import torch

    experts, n, half_k = codes.shape
    nothing = routing  # a pointer that is not read
    grid = (triton.cdiv(n, BLOCK_N), _most_tiles(slots, experts))
    w4a16_grouped_kernel[grid](
        x, codes, block_scales.view(torch.uint8), nothing if global_scales is None else global_scales,
        nothing if weights is None else weights, routing[slots:], routing, out, experts,
        1 if x_per_slot else out.shape[1], n, 2 * half_k, HAS_SCALES=global_scales is not None,
        HAS_WEIGHTS=weights is not None, GROUP=fmt.group, NVFP4=fmt is NumberFormat.NVFP4, OPERAND=OPERAND,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=4,
    )  # fmt: skip
    return out
