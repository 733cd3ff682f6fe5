"""BF16 products of few tokens: what cuBLAS is not made for, and the baseline that FP4 is measured against.

`skinny` is y = x W^T for one weight, `grouped` the same for the experts of an MoE layer. Both read each weight once,
16 tokens at a time, and are bound by that reading. `vector` is for one token: no tensor cores, many loads in flight.
FP32 sums. `PDL`: decode.py; each lets the next kernel start when the one before has ended, not earlier.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false
# Triton ships no types, and a launch takes options that its kernel does not declare.

from __future__ import annotations

import triton
import triton.language as tl
from requant.kernels.triton.decode import arrived_last
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["grouped", "skinny", "vector"]


@triton.jit
def vector(
    x_ptr, w_ptr, y_ptr, n_total,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TAIL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[N] of one token by plain multiplication. Grid (N / BLOCK_N,). K is known to the compiler, which unrolls the
    loop and has all loads of a thread in flight at once. Weights are not written by the kernel before this one, so the
    first BLOCK_K + TAIL of each row (all of them, where that is K or more) are on their way before it waits."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    there = (row < n_total)[:, None]
    base = w_ptr + row.to(tl.int64)[:, None] * K
    w = tl.load(base + lane[None, :], mask=there & (lane < K)[None, :], other=0.0)
    if TAIL > 0:
        last = BLOCK_K + tl.arange(0, TAIL)
        w_last = tl.load(base + last[None, :], mask=there & (last < K)[None, :], other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = w.to(tl.float32) * tl.load(x_ptr + lane, mask=lane < K, other=0.0).to(tl.float32)[None, :]
    for start in tl.static_range(BLOCK_K + TAIL, K, BLOCK_K):
        k = start + lane
        w = tl.load(base + k[None, :], mask=there & (k < K)[None, :], other=0.0)
        total += w.to(tl.float32) * tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
    y = tl.sum(total, 1)
    if TAIL > 0:
        x_last = tl.load(x_ptr + last, mask=last < K, other=0.0).to(tl.float32)
        y += tl.sum(w_last.to(tl.float32) * x_last[None, :], 1)
    tl.store(y_ptr + row, y.to(y_ptr.dtype.element_ty), mask=row < n_total)


@triton.jit(do_not_specialize=["m_total"])
def skinny(
    x_ptr, w_ptr, y_ptr, part_ptr, counter_ptr, m_total, n_total, k_total, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr, EVEN: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[M, N], weights in the M slot of the tensor cores. Grid (N / BLOCK_N, M / BLOCK_M, SPLITS). EVEN: without masks.

    With SPLITS > 1 each program takes a part of K, and the last of a block adds up part [SPLITS, M, N] FP32 in order.
    """
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    lane = tl.arange(0, BLOCK_K)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    each = tl.cdiv(tl.cdiv(k_total, BLOCK_K), SPLITS) * BLOCK_K
    begin = tl.program_id(2) * each
    for start in tl.range(begin, tl.minimum(begin + each, k_total), BLOCK_K, num_stages=STAGES):
        k = start + lane
        at = w_ptr + row.to(tl.int64)[:, None] * k_total + k[None, :]
        x_at = x_ptr + token[None, :] * k_total + k[:, None]
        if EVEN:
            w = tl.load(at)
            x = tl.load(x_at, mask=(token < m_total)[None, :], other=0.0)
        else:
            w = tl.load(at, mask=(row < n_total)[:, None] & (k < k_total)[None, :], other=0.0)
            x = tl.load(x_at, mask=(token < m_total)[None, :] & (k < k_total)[:, None], other=0.0)
        total = tl.dot(w, x, total)
    to = token[None, :] * n_total + row[:, None]
    inside = (token < m_total)[None, :] & (row < n_total)[:, None]
    last = True
    if SPLITS > 1:
        tl.store(part_ptr + tl.program_id(2) * m_total * n_total + to, total, mask=inside)
        last = arrived_last(counter_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), SPLITS)
        if last:
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for part in tl.static_range(SPLITS):
                from_part = part_ptr + part * m_total * n_total + to
                total += tl.load(from_part, mask=inside, other=0.0, cache_modifier=".cg")
    if last:
        tl.store(y_ptr + to, total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["slots"])
def grouped(
    x_ptr, w_ptr, ids_ptr, y_ptr, slots, n_total, k_total, TOP_K: tl.constexpr, PER_SLOT: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[slots, N] with the expert's weight of each slot. ids [slots]; x [slots / TOP_K, K], or [slots, K] (PER_SLOT).

    Grid (N / BLOCK_N, experts). Each program finds the slots of its expert in the list (SLOTS: a power of two that
    holds all of them), 16 at a time, and reads nothing if there are none.
    """
    expert = tl.program_id(1)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    slot = tl.arange(0, SLOTS)
    place = tl.arange(0, 16)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    mine = (tl.load(ids_ptr + slot, mask=slot < slots, other=-1) == expert).to(tl.int32)
    rank = tl.cumsum(mine, 0) - 1
    count = tl.sum(mine)
    base = w_ptr + (expert.to(tl.int64) * n_total + row)[:, None] * k_total
    for begin in range(0, count, 16):
        chosen = (rank[None, :] == (begin + place)[:, None]) & (mine[None, :] > 0)
        at_slot = tl.sum(tl.where(chosen, slot[None, :], 0), 1)
        live = begin + place < count
        x_row = at_slot if PER_SLOT else at_slot // TOP_K
        total = tl.zeros((BLOCK_N, 16), tl.float32)
        for start in tl.range(0, k_total, BLOCK_K, num_stages=STAGES):
            k = start + lane
            w = tl.load(base + k[None, :], mask=(row < n_total)[:, None] & (k < k_total)[None, :], other=0.0)
            x_at = x_ptr + x_row[None, :] * k_total + k[:, None]
            x = tl.load(x_at, mask=live[None, :] & (k < k_total)[:, None], other=0.0)
            total = tl.dot(w, x, total)
        y_at = y_ptr + at_slot[None, :] * n_total + row[:, None]
        tl.store(y_at, total.to(y_ptr.dtype.element_ty), mask=live[None, :] & (row < n_total)[:, None])
