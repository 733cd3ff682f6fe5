"""Attention over a whole prompt, for the prefill: two launches where plain torch takes some forty.

| kernel   | what it joins                                                                    |
|----------|----------------------------------------------------------------------------------|
| `keys`   | bias, QK-norm and rotary embedding of the keys; keys and values into the cache    |
| `prompt` | the same of the queries, causal attention with a window and sinks                 |

Sums are FP32; products are on tensor cores in the dtype of the cache. Layouts are decode.py's.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false
# Triton ships no types, and a launch takes options that its kernel does not declare.

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["keys", "prompt"]


@triton.jit
def _turned(
    qkv_ptr, bias_ptr, norm_ptr, cos_ptr, sin_ptr, row, at, token, live, lane, eps,
    HALF: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Heads at `at` of rows `row` [R] of qkv: bias, norm, rotary embedding. Both halves [R, HALF], FP32."""
    first = row[:, None] + at[:, None] + lane[None, :]
    x1 = tl.load(qkv_ptr + first, mask=live[:, None], other=0.0).to(tl.float32)
    x2 = tl.load(qkv_ptr + first + HALF, mask=live[:, None], other=0.0).to(tl.float32)
    if BIAS:
        of = at[:, None] + lane[None, :]
        x1 += tl.load(bias_ptr + of, mask=live[:, None], other=0.0).to(tl.float32)
        x2 += tl.load(bias_ptr + of + HALF, mask=live[:, None], other=0.0).to(tl.float32)
    if NORM:
        size = 1.0 / tl.sqrt((tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)) / (2 * HALF) + eps)
        x1 *= size[:, None] * tl.load(norm_ptr + lane).to(tl.float32)[None, :]
        x2 *= size[:, None] * tl.load(norm_ptr + HALF + lane).to(tl.float32)[None, :]
    angle = token[:, None] * HALF + lane[None, :]
    cos = tl.load(cos_ptr + angle, mask=live[:, None], other=0.0)
    sin = tl.load(sin_ptr + angle, mask=live[:, None], other=0.0)
    return x1 * cos - x2 * sin, x2 * cos + x1 * sin


@triton.jit
def keys(
    qkv_ptr, bias_ptr, norm_ptr, cos_ptr, sin_ptr, stream_ptr, k_cache_ptr, v_cache_ptr, count, capacity, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Keys and values of BLOCK tokens and one KV head, into the cache [C, KV_HEADS, capacity, 2 HALF] of `stream` [1].

    qkv [count, (HEADS + 2 KV_HEADS) * 2 HALF]. Grid (count / BLOCK, KV_HEADS).
    """
    D: tl.constexpr = 2 * HALF
    head = tl.program_id(1)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = token < count
    lane, wide = tl.arange(0, HALF), tl.arange(0, D)
    row = token.to(tl.int64) * (HEADS + 2 * KV_HEADS) * D
    at = tl.zeros((BLOCK,), tl.int64) + (HEADS + head) * D
    k1, k2 = _turned(
        qkv_ptr, bias_ptr, norm_ptr, cos_ptr, sin_ptr, row, at, token, live, lane, eps, HALF, BIAS, NORM
    )  # fmt: skip
    cache = ((tl.load(stream_ptr) * KV_HEADS + head) * capacity + token.to(tl.int64)) * D
    to = cache[:, None] + lane[None, :]
    tl.store(k_cache_ptr + to, k1.to(k_cache_ptr.dtype.element_ty), mask=live[:, None])
    tl.store(k_cache_ptr + to + HALF, k2.to(k_cache_ptr.dtype.element_ty), mask=live[:, None])
    of = (HEADS + KV_HEADS + head) * D + wide
    v = tl.load(qkv_ptr + row[:, None] + of[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    if BIAS:
        v += tl.load(bias_ptr + of).to(tl.float32)[None, :]
    tl.store(v_cache_ptr + cache[:, None] + wide[None, :], v.to(v_cache_ptr.dtype.element_ty), mask=live[:, None])


@triton.jit
def prompt(
    qkv_ptr, bias_ptr, norm_ptr, sinks_ptr, cos_ptr, sin_ptr, stream_ptr, k_cache_ptr, v_cache_ptr, out_ptr, count,
    capacity, window, scale, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
    SINKS: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Attention of BLOCK queries of one head to the keys before them. out [count, HEADS * 2 HALF]. window 0: none.

    Grid (count / BLOCK, HEADS). Keys and values are the cache's, which `keys` has filled.
    """
    D: tl.constexpr = 2 * HALF
    head, begin = tl.program_id(1), tl.program_id(0) * BLOCK
    token = begin + tl.arange(0, BLOCK)
    live = token < count
    lane, wide = tl.arange(0, HALF), tl.arange(0, D)
    row = token.to(tl.int64) * (HEADS + 2 * KV_HEADS) * D
    at = tl.zeros((BLOCK,), tl.int64) + head * D
    q1, q2 = _turned(
        qkv_ptr, bias_ptr, norm_ptr, cos_ptr, sin_ptr, row, at, token, live, lane, eps, HALF, BIAS, NORM
    )  # fmt: skip
    q1 = (q1 * scale).to(k_cache_ptr.dtype.element_ty)
    q2 = (q2 * scale).to(k_cache_ptr.dtype.element_ty)
    cache = (tl.load(stream_ptr) * KV_HEADS + head // (HEADS // KV_HEADS)) * capacity * D
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    if SINKS:
        most = tl.zeros((BLOCK,), tl.float32) + tl.load(sinks_ptr + head).to(tl.float32)
        total += 1.0
    out = tl.zeros((BLOCK, D), tl.float32)
    first = tl.maximum(0, begin - window + 1) // KEYS * KEYS if window > 0 else 0
    for start in range(first, tl.minimum(begin + BLOCK, count), KEYS):
        key = start + tl.arange(0, KEYS)
        there = key < count
        from_key = cache + key.to(tl.int64)[:, None] * D
        k1 = tl.load(k_cache_ptr + from_key + lane[None, :], mask=there[:, None], other=0.0)
        k2 = tl.load(k_cache_ptr + from_key + HALF + lane[None, :], mask=there[:, None], other=0.0)
        v = tl.load(v_cache_ptr + from_key + wide[None, :], mask=there[:, None], other=0.0)
        logits = tl.dot(q1, tl.trans(k1)) + tl.dot(q2, tl.trans(k2))
        seen = key[None, :] <= token[:, None]
        if window > 0:
            seen = seen & (key[None, :] > token[:, None] - window)
        logits = tl.where(seen, logits, float("-inf"))
        now = tl.maximum(most, tl.max(logits, 1))
        at_least = tl.where(now == float("-inf"), 0.0, now)  # nothing seen yet
        kept = tl.exp(most - at_least)
        p = tl.exp(logits - at_least[:, None])
        total = total * kept + tl.sum(p, 1)
        out = out * kept[:, None] + tl.dot(p.to(v.dtype), v)
        most = now
    to = token.to(tl.int64)[:, None] * HEADS * D + (head * D + wide)[None, :]
    tl.store(out_ptr + to, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=live[:, None])
