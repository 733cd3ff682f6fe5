"""The small kernels of one decode step, fused so that a layer is eight launches: Triton, few tokens, any GPU.

| kernel        | what it joins                                                                        |
|---------------|--------------------------------------------------------------------------------------|
| `add_norm`    | residual + output of the layer before (expert outputs weighted, biases), RMSNorm; of  |
|               | the first layer the embedding's rows                                                  |
| `choose`      | the same, router logits, top-k with weights, and the sort of slots by expert          |
| `gate`        | bias, SwiGLU (or gpt-oss's clamped form, rows interleaved)                            |
| `attend`      | bias, QK-norm, rotary embedding, writing the cache, attention with gpt-oss's sinks   |
| `largest`     | each stream's next token from its logits, and its position                            |

A transformers layer does the same in some sixty launches of 2 us each, more than its weights take to read. All sums
are FP32 in a fixed order; inputs and outputs are BF16 (or FP32, as the tensors say). The residual stream is FP32.

`choose`, `attend` and `largest` spread their work over many programs and finish it in the last of them to arrive, which
a counter tells (and sets back to zero): the order of arrival decides who adds up, never in which order.

`PDL`: programmatic dependent launch (SM90 and later): a kernel may take its place while the one before it still runs.
Each waits for that one and only then lets the next start, so that all but the one before have ended when a kernel
starts: what those wrote is read before the wait (past the L1 cache, which knows nothing of it). `add_norm` alone lets
the next start at once, a product that reads nothing but weights before it waits.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false
# Triton ships no types, and a launch takes options that its kernel does not declare.

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["add_norm", "arrived_last", "attend", "choose", "gate", "largest"]

ROUTING_HEADER = tl.constexpr(4)
"""kRoutingHeader; csrc/w4a16_routing.cuh describes the list that `choose` writes."""


@triton.jit
def _enter(PDL: tl.constexpr):
    """Wait for the kernel before, then let the next one take its place."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def _residual(
    h_ptr, weights_ptr, ids_ptr, bias_ptr, token, column, inside, width,
    SLOTS: tl.constexpr, WEIGHTED: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """One token's residual [width] and its biases: what does not come from the kernel before."""
    h = tl.load(h_ptr + token * width + column, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    if BIAS:
        for slot in tl.static_range(SLOTS):
            at = token * SLOTS + slot
            row = tl.load(ids_ptr + at, cache_modifier=".cg").to(tl.int64) if WEIGHTED else 0
            bias = tl.load(bias_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
            h += bias * tl.load(weights_ptr + at, cache_modifier=".cg") if WEIGHTED else bias
    return h


@triton.jit
def _plus_outputs(
    h, y_ptr, weights_ptr, token, column, inside, width, SLOTS: tl.constexpr, WEIGHTED: tl.constexpr
):  # fmt: skip
    """h plus what the layer before gave: the sum of weight * y over its slots."""
    for slot in tl.static_range(SLOTS):
        at = token * SLOTS + slot
        y = tl.load(y_ptr + at.to(tl.int64) * width + column, mask=inside, other=0.0).to(tl.float32)
        h += y * tl.load(weights_ptr + at, cache_modifier=".cg") if WEIGHTED else y
    return h


@triton.jit
def add_norm(
    h_ptr, y_ptr, weights_ptr, ids_ptr, bias_ptr, norm_ptr, rows_ptr, h_out_ptr, x_ptr, width, eps,
    SLOTS: tl.constexpr, WEIGHTED: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """h_out = h + y, x = RMSNorm(h_out) * norm. Grid (tokens,). ROWS: h is the embedding, rows the tokens. Without ADD
    (and y) h may be of the kernel before."""
    token = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    if PDL:
        gdc_launch_dependents()
    norm = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        h = _residual(h_ptr, weights_ptr, ids_ptr, bias_ptr, token, column, inside, width, SLOTS, WEIGHTED, BIAS)
        if PDL:
            gdc_wait()
        h = _plus_outputs(h, y_ptr, weights_ptr, token, column, inside, width, SLOTS, WEIGHTED)
    else:
        if PDL:
            gdc_wait()
        row = tl.load(rows_ptr + token) if ROWS else token
        h = tl.load(h_ptr + row.to(tl.int64) * width + column, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(h * h) / width + eps)
    tl.store(h_out_ptr + token * width + column, h, mask=inside)
    tl.store(x_ptr + token * width + column, (h * scale * norm).to(x_ptr.dtype.element_ty), mask=inside)


@triton.jit
def arrived_last(counter_ptr, programs):
    """Whether this program is the last of `programs` to come here; what the others stored before is then visible."""
    tl.debug_barrier()
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == programs - 1
    if last:
        tl.store(counter_ptr, 0)
    return last


@triton.jit(do_not_specialize=["tokens", "max_tiles"])
def choose(
    h_ptr, y_ptr, bias_ptr, norm_ptr, router_ptr, router_bias_ptr, h_out_ptr, x_ptr, logits_ptr, ids_ptr, weights_ptr,
    routing_ptr, counter_ptr, width, eps, tokens, experts, max_tiles,
    BIAS: tl.constexpr, ROUTER_BIAS: tl.constexpr, NORMALIZE: tl.constexpr, ROUTE: tl.constexpr, TOP_K: tl.constexpr,
    PLACES: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    RANKED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """After attention: h_out, its norm x, and each token's experts. Grid (tokens, experts / ROWS).

    Each program computes the norm again (the row is in the cache) and the logits of ROWS experts; the first of a token
    writes h_out and x, its last (with ROUTE, the last of all) picks: the TOP_K largest logits of each token, the lower
    expert first where two are equal (NaN last), weighted by softmax over those, or over all without NORMALIZE. ROUTE:
    also writes the routing of csrc/w4a16_routing.cuh, TILE tokens a tile. RANKED: every expert's rank at once, and not
    one largest after the other, which is less to compute for many. TOKENS, EXPERTS, PLACES: tokens, experts,
    TOP_K up to powers of two.
    """
    token, part = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < width
    expert = part * ROWS + tl.arange(0, ROWS)
    norm = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
    router = tl.load(
        router_ptr + expert[:, None] * width + column[None, :],
        mask=(expert < experts)[:, None] & inside[None, :],
        other=0.0,
    ).to(tl.float32)
    router_bias = tl.zeros((ROWS,), tl.float32)
    if ROUTER_BIAS:
        router_bias = tl.load(router_bias_ptr + expert, mask=expert < experts, other=0.0).to(tl.float32)
    h = _residual(h_ptr, y_ptr, y_ptr, bias_ptr, token, column, inside, width, 1, False, BIAS)
    _enter(PDL)
    h = _plus_outputs(h, y_ptr, y_ptr, token, column, inside, width, 1, False)
    scale = 1.0 / tl.sqrt(tl.sum(h * h) / width + eps)
    x = (h * scale * norm).to(x_ptr.dtype.element_ty)
    if part == 0:
        tl.store(h_out_ptr + token * width + column, h, mask=inside)
        tl.store(x_ptr + token * width + column, x, mask=inside)
    logits = tl.sum(router * x.to(tl.float32)[None, :], axis=1) + router_bias
    tl.store(logits_ptr + token * experts + expert, logits, mask=expert < experts)
    if ROUTE:
        if arrived_last(counter_ptr, tl.num_programs(0) * tl.num_programs(1)):
            _pick(
                logits_ptr, ids_ptr, weights_ptr, routing_ptr, tokens, experts, max_tiles, NORMALIZE, ROUTE, TOP_K,
                PLACES, TOKENS, EXPERTS, TILE, RANKED,
            )  # fmt: skip
    elif arrived_last(counter_ptr + token, tl.num_programs(1)):
        slot = token * TOP_K
        _pick(
            logits_ptr + token * experts, ids_ptr + slot, weights_ptr + slot, routing_ptr, 1, experts, max_tiles,
            NORMALIZE, ROUTE, TOP_K, PLACES, 1, EXPERTS, TILE, RANKED,
        )  # fmt: skip


@triton.jit
def _pick(
    logits_ptr, ids_ptr, weights_ptr, routing_ptr, tokens, experts, max_tiles, NORMALIZE: tl.constexpr,
    ROUTE: tl.constexpr, TOP_K: tl.constexpr, PLACES: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
    TILE: tl.constexpr, RANKED: tl.constexpr,
):  # fmt: skip
    """Logits [tokens, experts] -> ids and weights [tokens, TOP_K], and the routing."""
    token, expert, place = tl.arange(0, TOKENS)[:, None], tl.arange(0, EXPERTS)[None, :], tl.arange(0, PLACES)[None, :]
    there = (token < tokens) & (expert < experts)
    left = tl.load(logits_ptr + token * experts + expert, mask=there, other=float("-inf"), cache_modifier=".cg")
    left = tl.where(token < tokens, left, 0.0)  # rows that do not exist: finite, and not stored
    score = tl.where(left >= float("-inf"), left, float("-inf"))  # NaN last
    most = tl.max(score, 1)[:, None]
    ids = tl.zeros((TOKENS, PLACES), tl.int32)
    values = tl.full((TOKENS, PLACES), float("-inf"), tl.float32)
    if RANKED:  # each expert's rank at once
        expert_a = tl.arange(0, EXPERTS)[None, :, None]
        expert_b = tl.arange(0, EXPERTS)[None, None, :]
        a, b = score[:, :, None], score[:, None, :]
        rank = tl.sum(((b > a) | ((b == a) & (expert_b < expert_a))).to(tl.int32), 2)
        here = rank[:, None, :] == tl.arange(0, PLACES)[None, :, None]
        ids = tl.sum(tl.where(here, expert_b, 0), 2)
        values = tl.where(place < TOP_K, tl.sum(tl.where(here, left[:, None, :], 0.0), 2), values)
    else:
        taken = score > float("inf")
        for now in tl.static_range(TOP_K):
            best = tl.max(score, 1)[:, None]
            index = tl.min(tl.where((score == best) & (taken == 0), expert, EXPERTS), 1)[:, None]
            taken = taken | (expert == index)
            ids = tl.where(place == now, index, ids)
            values = tl.where(place == now, tl.sum(tl.where(expert == index, left, 0.0), 1)[:, None], values)
            score = tl.where(expert == index, float("-inf"), score)
    weights = tl.exp(values - most)
    whole = tl.sum(weights if NORMALIZE else tl.exp(left - most), 1)[:, None]
    live = (token < tokens) & (place < TOP_K)
    tl.store(ids_ptr + token * TOP_K + place, ids, mask=live)
    tl.store(weights_ptr + token * TOP_K + place, weights / whole, mask=live)
    if ROUTE:
        _route(routing_ptr, tl.where(live, ids, EXPERTS), tokens, max_tiles, TOP_K, PLACES, TOKENS, EXPERTS, TILE)


@triton.jit
def _route(
    routing_ptr, ids, tokens, max_tiles, TOP_K: tl.constexpr, PLACES: tl.constexpr, TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """ids [TOKENS, PLACES], EXPERTS where there is no slot -> the routing: slots by expert, stably, and their tiles."""
    COUNT: tl.constexpr = TOKENS * PLACES
    key = tl.reshape(ids, (COUNT,))
    entry = tl.arange(0, COUNT)
    live = key < EXPERTS
    token, slot = entry // PLACES, entry // PLACES * TOP_K + entry % PLACES
    same = key[None, :] == key[:, None]
    earlier = same & (entry[None, :] < entry[:, None])
    counts = tl.where(key[None, :] < key[:, None], 1 << 20, tl.where(same, 1, 0) + tl.where(earlier, 1 << 10, 0))
    three = tl.sum(counts, 1)  # slots of experts before, of this one before, and of this one: fewer than 1024 each
    rank = (three >> 10) & 1023
    position = rank + (three >> 20)
    first = live & (rank % TILE == 0)
    before = tl.where(first, position, COUNT)
    tile = tl.sum((before[None, :] < position[:, None]).to(tl.int32), 1)
    count = tl.minimum((three & 1023) - rank, TILE)
    at = routing_ptr + ROUTING_HEADER + 4 * tile
    tl.store(at, key, mask=first)
    tl.store(at + 1, position, mask=first)
    tl.store(at + 2, count, mask=first)
    tl.store(at + 3, slot, mask=first)
    listed = routing_ptr + ROUTING_HEADER + 4 * max_tiles
    tl.store(listed + position, slot, mask=live)
    tl.store(listed + tokens * TOP_K + position, token, mask=live)
    tl.store(routing_ptr, tl.sum(first.to(tl.int32)))
    tl.store(routing_ptr + 1, tokens * TOP_K)


@triton.jit
def _gate_up(row_ptr, width, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr):
    """This program's part of gate and of up, FP32."""
    if INTERLEAVED:
        pair = tl.program_id(1) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
        both = tl.load(row_ptr + pair, mask=pair < 2 * width, other=0.0).to(tl.float32)
        gated, up = tl.split(tl.reshape(both, (BLOCK, 2)))
    else:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        gated = tl.load(row_ptr + column, mask=column < width, other=0.0).to(tl.float32)
        up = tl.load(row_ptr + width + column, mask=column < width, other=0.0).to(tl.float32)
    return gated, up


@triton.jit
def gate(
    both_ptr, ids_ptr, bias_ptr, out_ptr, width, limit, alpha,
    BIAS: tl.constexpr, EXPERTS: tl.constexpr, INTERLEAVED: tl.constexpr, CLAMPED: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """act(gate) * up of rows [2 * width] -> [width]. EXPERTS: ids say which bias. CLAMPED: gpt-oss's form. Grid (slots,
    width / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    _enter(PDL)
    gated, up = _gate_up(both_ptr + row * 2 * width, width, INTERLEAVED, BLOCK)
    if BIAS:
        expert = tl.load(ids_ptr + row).to(tl.int64) if EXPERTS else 0
        gate_bias, up_bias = _gate_up(bias_ptr + expert * 2 * width, width, INTERLEAVED, BLOCK)
        gated += gate_bias
        up += up_bias
    if CLAMPED:
        gated = tl.minimum(gated, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        out = (up + 1.0) * gated / (1.0 + tl.exp(-gated * alpha))
    else:
        out = gated / (1.0 + tl.exp(-gated)) * up
    tl.store(out_ptr + row * width + column, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _halves(ptr, row, lane, HALF: tl.constexpr, live):
    """Rows of [.., 2 * HALF] as their two halves, FP32."""
    first = tl.load(ptr + row + lane, mask=live, other=0.0).to(tl.float32)
    return first, tl.load(ptr + row + HALF + lane, mask=live, other=0.0).to(tl.float32)


@triton.jit
def attend(
    qkv_ptr, bias_ptr, q_norm_ptr, k_norm_ptr, sinks_ptr, cos_ptr, sin_ptr, position_ptr, k_cache_ptr, v_cache_ptr,
    part_ptr, state_ptr, out_ptr, counter_ptr, scale, eps, capacity, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr,
    BIAS: tl.constexpr, QK_NORM: tl.constexpr, SINKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token's query heads of one KV head over one part of its cache. Grid (tokens * KV_HEADS, SPLITS).

    qkv [tokens, (HEADS + 2 KV_HEADS) * D], caches [tokens, KV_HEADS, capacity, D], out [tokens, HEADS * D]; D = 2 *
    HALF. GROUP: query heads of a KV head, rounded up to 16 (tl.dot's smallest side). window 0: none. The first part
    also holds the new token, whose key and value it writes at the token's position. part [SPLITS, tokens, HEADS, D] and
    state [SPLITS, tokens, HEADS, 2] (largest logit, sum), FP32, are what the last program adds up.

    Positions and the cache before them come from earlier steps, so they are read before the wait.
    """
    D: tl.constexpr = 2 * HALF
    PER: tl.constexpr = HEADS // KV_HEADS
    token, kv_head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    split = tl.program_id(1)
    tokens = tl.num_programs(0) // KV_HEADS
    lane = tl.arange(0, HALF)
    wide = tl.arange(0, D)
    member = tl.arange(0, GROUP)
    position = tl.load(position_ptr + token, cache_modifier=".cg")
    first = tl.maximum(0, position - window + 1) if window > 0 else 0
    each = tl.cdiv(tl.cdiv(position - first, SPLITS), BLOCK) * BLOCK
    begin = first + split * each
    end = tl.minimum(position, begin + each)
    cos = tl.load(cos_ptr + position * HALF + lane)
    sin = tl.load(sin_ptr + position * HALF + lane)
    cache = (token * KV_HEADS + kv_head).to(tl.int64) * capacity * D
    key = begin + tl.arange(0, BLOCK)
    k_row = cache + key[:, None] * D + lane[None, :]
    there = (key < end)[:, None]
    k1 = tl.load(k_cache_ptr + k_row, mask=there, other=0.0, cache_modifier=".cg")
    k2 = tl.load(k_cache_ptr + k_row + HALF, mask=there, other=0.0, cache_modifier=".cg")
    v_row = cache + key[:, None] * D + wide[None, :]
    v = tl.load(v_cache_ptr + v_row, mask=there, other=0.0, cache_modifier=".cg")
    _enter(PDL)

    row = token.to(tl.int64) * (HEADS + 2 * KV_HEADS) * D
    head = kv_head * PER + member
    live = member < PER
    q_at = (head * D)[:, None]
    q1, q2 = _halves(qkv_ptr + row, q_at, lane[None, :], HALF, live[:, None])
    if BIAS:
        b1, b2 = _halves(bias_ptr, q_at, lane[None, :], HALF, live[:, None])
        q1 += b1
        q2 += b2
    if QK_NORM:
        n1, n2 = _halves(q_norm_ptr, 0, lane, HALF, lane < HALF)
        size = 1.0 / tl.sqrt((tl.sum(q1 * q1, 1) + tl.sum(q2 * q2, 1)) / D + eps)
        q1 *= size[:, None] * n1[None, :]
        q2 *= size[:, None] * n2[None, :]
    r1 = (q1 * cos[None, :] - q2 * sin[None, :]) * scale
    r2 = (q2 * cos[None, :] + q1 * sin[None, :]) * scale

    most = tl.full((GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    out = tl.zeros((GROUP, D), tl.float32)
    if split == 0:
        k_at = (HEADS + kv_head) * D
        v_at = (HEADS + KV_HEADS + kv_head) * D
        key1, key2 = _halves(qkv_ptr + row, k_at, lane, HALF, lane < HALF)
        value = tl.load(qkv_ptr + row + v_at + wide).to(tl.float32)
        if BIAS:
            c1, c2 = _halves(bias_ptr, k_at, lane, HALF, lane < HALF)
            key1 += c1
            key2 += c2
            value += tl.load(bias_ptr + v_at + wide).to(tl.float32)
        if QK_NORM:
            g1, g2 = _halves(k_norm_ptr, 0, lane, HALF, lane < HALF)
            length = 1.0 / tl.sqrt((tl.sum(key1 * key1) + tl.sum(key2 * key2)) / D + eps)
            key1 *= length * g1
            key2 *= length * g2
        new1 = (key1 * cos - key2 * sin).to(k_cache_ptr.dtype.element_ty)
        new2 = (key2 * cos + key1 * sin).to(k_cache_ptr.dtype.element_ty)
        new_value = value.to(v_cache_ptr.dtype.element_ty)
        tl.store(k_cache_ptr + cache + position * D + lane, new1)
        tl.store(k_cache_ptr + cache + position * D + HALF + lane, new2)
        tl.store(v_cache_ptr + cache + position * D + wide, new_value)
        most = tl.sum(r1 * new1.to(tl.float32)[None, :], 1) + tl.sum(r2 * new2.to(tl.float32)[None, :], 1)
        total += 1.0
        out += new_value.to(tl.float32)[None, :]
    r1 = r1.to(k_cache_ptr.dtype.element_ty)
    r2 = r2.to(k_cache_ptr.dtype.element_ty)
    for start in range(begin, end, BLOCK):
        logits = tl.dot(r1, tl.trans(k1)) + tl.dot(r2, tl.trans(k2))
        logits = tl.where((key < end)[None, :], logits, float("-inf"))
        now = tl.maximum(most, tl.max(logits, 1))
        kept = tl.exp(most - now)
        p = tl.exp(logits - now[:, None])
        total = total * kept + tl.sum(p, 1)
        out = out * kept[:, None] + tl.dot(p.to(v.dtype), v)
        most = now
        key = start + BLOCK + tl.arange(0, BLOCK)
        there = (key < end)[:, None]
        k_row = cache + key[:, None] * D + lane[None, :]
        k1 = tl.load(k_cache_ptr + k_row, mask=there, other=0.0, cache_modifier=".cg")
        k2 = tl.load(k_cache_ptr + k_row + HALF, mask=there, other=0.0, cache_modifier=".cg")
        v_row = cache + key[:, None] * D + wide[None, :]
        v = tl.load(v_cache_ptr + v_row, mask=there, other=0.0, cache_modifier=".cg")
    if SPLITS == 1:
        _finish(most, total, out, sinks_ptr, out_ptr, token, head, live, wide, HEADS, D, SINKS)
    else:
        rows = tokens * HEADS
        at = token * HEADS + head
        tl.store(part_ptr + (split * rows + at).to(tl.int64)[:, None] * D + wide[None, :], out, mask=live[:, None])
        tl.store(state_ptr + (split * rows + at) * 2, most, mask=live)
        tl.store(state_ptr + (split * rows + at) * 2 + 1, total, mask=live)
        if arrived_last(counter_ptr + tl.program_id(0), SPLITS):
            _merge(
                part_ptr, state_ptr, sinks_ptr, out_ptr, token, head, at, live, wide, rows, HEADS, D, SPLITS, GROUP,
                SINKS,
            )  # fmt: skip


@triton.jit
def _merge(
    part_ptr, state_ptr, sinks_ptr, out_ptr, token, head, at, live, wide, rows,
    HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, GROUP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """The parts of a KV head's query heads, in the order of the parts.

    The sum is not tl.sum's: with the product before it fused into the last addition, two lanes that add the same two
    terms differ in the last bit, and which of them the layout conversion keeps would be chance.
    """
    split = tl.arange(0, SPLITS)
    states = state_ptr + (split[:, None] * rows + at[None, :]) * 2
    most_all = tl.load(states, mask=live[None, :], other=0.0, cache_modifier=".cg")
    best = tl.max(most_all, 0)
    whole = tl.zeros((GROUP,), tl.float32)
    out = tl.zeros((GROUP, D), tl.float32)
    for s in tl.static_range(SPLITS):
        state = state_ptr + (s * rows + at) * 2
        share = tl.exp(tl.load(state, mask=live, other=0.0, cache_modifier=".cg") - best)
        whole += tl.load(state + 1, mask=live, other=0.0, cache_modifier=".cg") * share
        from_part = part_ptr + (s * rows + at).to(tl.int64)[:, None] * D + wide[None, :]
        part = tl.load(from_part, mask=live[:, None], other=0.0, cache_modifier=".cg")
        out += part * share[:, None]
    _finish(best, whole, out, sinks_ptr, out_ptr, token, head, live, wide, HEADS, D, SINKS)


@triton.jit
def _finish(
    most, total, out, sinks_ptr, out_ptr, token, head, live, wide,
    HEADS: tl.constexpr, D: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Divide by the sum, a sink's share counted, and store."""
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=live, other=0.0).to(tl.float32)
        best = tl.maximum(most, sink)
        out *= tl.exp(most - best)[:, None]
        total = total * tl.exp(most - best) + tl.exp(sink - best)
    to = out_ptr + (token * HEADS + head).to(tl.int64)[:, None] * D + wide[None, :]
    tl.store(to, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=live[:, None])


@triton.jit
def largest(
    logits_ptr, tokens_ptr, position_ptr, value_ptr, index_ptr, counter_ptr, vocabulary,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """tokens = the index of each stream's largest logit (the lowest of equal ones), positions + 1. Grid (C, PARTS).

    A part is BLOCK logits; value and index [C, PARTS] are what the last program of a stream chooses from.
    """
    stream, part = tl.program_id(0), tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    _enter(PDL)
    row = logits_ptr + stream.to(tl.int64) * vocabulary
    logits = tl.load(row + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
    best = tl.max(logits, 0)
    tl.store(value_ptr + stream * PARTS + part, best)
    tl.store(index_ptr + stream * PARTS + part, tl.min(tl.where(logits == best, at, vocabulary - 1), 0))
    if arrived_last(counter_ptr + stream, PARTS):
        each = stream * PARTS + tl.arange(0, PARTS)
        values = tl.load(value_ptr + each, cache_modifier=".cg")
        index = tl.load(index_ptr + each, cache_modifier=".cg")
        chosen = tl.min(tl.where(values == tl.max(values, 0), index, vocabulary - 1), 0)
        chosen = tl.minimum(chosen, vocabulary - 1)
        tl.store(tokens_ptr + stream, chosen.to(tokens_ptr.dtype.element_ty))
        tl.store(position_ptr + stream, tl.load(position_ptr + stream) + 1)
