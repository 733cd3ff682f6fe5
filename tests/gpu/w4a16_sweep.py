"""Check and tune W4A16 on the GPU at hand: correctness first, then every sensible configuration of every shape.

Run on a machine with the GPU: `REQUANT_W4A16_LIBRARY=lib.so python tests/gpu/w4a16_sweep.py check dense moe --out DIR`.
The library is built with -DREQUANT_SWEEP for variants beyond the shipped ones, and without -DREQUANT_WGMMA for those of
`mma.sync` that SM90 does not need. Results go to DIR/*.json; the winners are
copied by hand into kernels/w4a16_h200.py.
"""

# ruff: noqa: B023, C408, E501  a script of measurements: configurations are keyword dicts, closures are called at once
from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parents[2]
DENSE = [(4096, 4096), (7168, 2048), (5120, 2944), (12288, 4096), (8192, 8192)]
MOE = [(256, 6, 4096, 4096), (256, 6, 4096, 2048), (128, 4, 5760, 2880), (128, 4, 2880, 2880)]
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
ROTATE_BYTES = 320e6
SMS = 132
SHARED = 227 * 1024
DEVICE = "cuda"


def load_library():
    import importlib.util

    spec = importlib.util.spec_from_file_location("w4a16_library", HERE / "kernels" / "w4a16_library.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LIB = load_library()
CDLL = LIB.load("90a")
CDLL.requant_read.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)


def variants():
    found = set()
    for i in range(CDLL.requant_w4a16_variants()):
        out = (ctypes.c_int * 10)()
        CDLL.requant_w4a16_variant(i, out)
        found.add(tuple(out))
    return found


ALL_VARIANTS = variants()
VARIANTS = {v for v in ALL_VARIANTS if v[8] == 0}


def stream():
    return torch.cuda.current_stream().cuda_stream


def alignment(fmt, k):
    pitch = k // (16 if fmt == 0 else 32)
    return 0 if pitch % 16 == 0 else 1 if pitch % 8 == 0 else 2 if pitch % 4 == 0 and k % 32 == 0 else 3


def random_weight(fmt, shape_n, k, experts=None, wide=False):
    lead = () if experts is None else (experts,)
    codes = torch.randint(0, 256, (*lead, shape_n, k // 2), dtype=torch.uint8, device=DEVICE)
    if fmt == 0:
        low, high = (1, 127) if wide else (0x30, 0x48)
        scales = torch.randint(low, high, (*lead, shape_n, k // 16), dtype=torch.uint8, device=DEVICE)
    else:
        low, high = (107, 147) if wide else (122, 130)
        scales = torch.randint(low, high, (*lead, shape_n, k // 32), dtype=torch.uint8, device=DEVICE)
    return codes, scales


def dequantize(fmt, codes, scales):
    table = torch.tensor(E2M1, dtype=torch.float64, device=DEVICE)
    values = table[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()]
    s = scales.view(torch.float8_e4m3fn).double() if fmt == 0 else torch.exp2(scales.double() - 127)
    return values * s.repeat_interleave(16 if fmt == 0 else 32, -1)


def random_x(m, k):
    """Dynamic range 2^20 and outlier channels."""
    x = torch.randn(m, k, device=DEVICE) * torch.exp2(torch.randint(-20, 1, (m, k), device=DEVICE).float())
    x[:, torch.randint(0, k, (max(1, k // 200),), device=DEVICE)] *= 64
    return x.bfloat16()


def call_of(fmt, x, codes, scales, y, gs, config, **grouped):
    c = LIB.Call()
    c.codes, c.block_scales, c.x, c.y = codes.data_ptr(), scales.data_ptr(), x.data_ptr(), y.data_ptr()
    c.global_scale = gs
    c.format, c.tokens, c.rows, c.k = fmt, x.shape[0], codes.shape[-2], codes.shape[-1] * 2
    c.alignment = alignment(fmt, c.k)
    c.experts = codes.shape[0] if codes.dim() == 3 else 1
    c.output_is_float = int(y.dtype == torch.float32)
    for name, value in {**config, **grouped}.items():
        setattr(c, name, value)
    return c


def run(c):
    return CDLL.requant_w4a16(ctypes.byref(c), stream())


def violation(y, ref, magnitude):
    """Largest |y - y64| over its bound 2^-8 |y64| + 2^-14 sum |w x|; inf for NaN."""
    ratio = (y.double() - ref).abs() / (2.0**-8 * ref.abs() + 2.0**-14 * magnitude + 1e-300)
    return float("inf") if torch.isnan(ratio).any() else ratio.max().item()


def timed(calls, target_calls=96, reps=5):
    """Median and spread of microseconds per call, from CUDA graph replays."""
    for c in calls[:2]:
        c()
    torch.cuda.synchronize()
    rounds = max(1, round(target_calls / len(calls)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for c in calls:
                c()
    graph.replay()
    times = []
    for _ in range(reps):
        start, stop = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / (rounds * len(calls)))
    return statistics.median(times), max(times) - min(times)


def read_ceiling():
    buffer = torch.randint(0, 256, (2_000_000_000,), dtype=torch.uint8, device=DEVICE)
    sink = torch.zeros(4, device=DEVICE)
    best = {}
    for blocks in (264, 528, 1056):
        f = lambda b=blocks: CDLL.requant_read(buffer.data_ptr(), buffer.numel(), sink.data_ptr(), b, stream())  # noqa: E731
        best[blocks] = buffer.numel() / timed([f], 4)[0] / 1e3
    return max(best.values()), best


def check():
    """Every compiled variant on awkward shapes, with the bound of the issue; twice, for equal bits."""
    bad, done = [], 0
    shapes = [
        (64, 512),
        (48, 2048),
        (40, 272),
        (7, 1040),
        (100, 2880),
        (16, 16),
        (130, 4096),
        (33, 2944),
        (64, 8192),
        (24, 288),
        (40, 640),
        (24, 1152),
    ]
    for fmt, (n, k) in itertools.product((0, 1), shapes):
        if k % (16 if fmt == 0 else 32):
            continue
        for m in (1, 2, 3, 5, 8, 13, 16, 17, 32, 33, 64):
            x = random_x(m, k)
            codes, scales = random_weight(fmt, n, k, wide=True)
            w = dequantize(fmt, codes, scales)
            ref, magnitude = x.double() @ w.T * 0.37, x.double().abs() @ w.abs().T * 0.37
            for v in VARIANTS:
                if v[0] != fmt or v[1] != alignment(fmt, k) or v[2] < m or (v[2] > 2 * m and v[2] > 1):
                    continue
                configs = (
                    [(1, 2, 1, 0), (2, 2, 1, 0), (4, 2, 2, 1), (3, 1, 4, 1)]
                    if v[2] <= 16
                    else [(2, 2, 1, 1), (1, 4, 2, 1)]
                )
                for wk, wr, cl, xs in configs:
                    config = dict(row_tiles=v[3], depth=v[4], column_warps=wk, row_warps=wr, cluster=cl, x_stages=xs)
                    groups = -(-n // (16 * v[3] * wr))
                    for blocks, early in {(groups, 0), (groups if cl > 1 else max(1, groups // 2), 1), (groups, 2)}:
                        y = torch.full((m, n), float("nan"), device=DEVICE, dtype=torch.float32)
                        y2 = torch.full((m, n), float("nan"), device=DEVICE, dtype=torch.bfloat16)
                        c = call_of(fmt, x, codes, scales, y, 0.37, config | dict(blocks=blocks, early_start=early))
                        rc = run(c)
                        c.y, c.output_is_float = y2.data_ptr(), 0
                        rc2 = run(c)
                        if rc in (-2, -3):
                            continue
                        done += 1
                        e = violation(y, ref, magnitude) if rc == 0 else rc
                        e2 = violation(y2, ref, magnitude) if rc2 == 0 else rc2
                        same = torch.equal(y.bfloat16(), y2)
                        if rc or rc2 or not e < 1 or not e2 < 1 or not same:
                            bad.append((fmt, n, k, m, v, wk, wr, cl, xs, blocks, early, rc, rc2, e, e2, same))
    print("CHECK dense", done, "cases", len(bad), "bad", flush=True)
    for b in bad[:12]:
        print("  BAD", b)
    check_moe()


def route(ids, experts):  # ids [tokens, topk]
    routing = torch.full((LIB.routing_ints(ids.numel(), experts),), -7, dtype=torch.int32, device=DEVICE)
    LIB.route(CDLL, ids.data_ptr(), ids.numel(), ids.shape[1], experts, routing.data_ptr(), stream())
    return routing


def grouped_configs(v):
    """A few ways to divide the work of a grouped variant, as fields of the call."""
    base = dict(row_tiles=v[3], depth=v[4], cluster=1, stream=v[8])
    if v[8] == 2:
        return [base | dict(column_warps=v[5] // 32 - 1, row_warps=1, blocks=b) for b in (132, 20, 7, 1)]
    if v[8]:
        return [base | dict(column_warps=1, row_warps=v[5] // 32, blocks=b) for b in (132, 20, 7, 1)]
    divisions = [(1, 2, 0, 7), (4, 2, 0, 30), (2, 4, 2, 264), (4, 1, 0, 60)]
    return [base | dict(column_warps=wk, row_warps=wr, x_stages=xs, blocks=b) for wk, wr, xs, b in divisions]


def check_moe():
    bad, done = [], 0
    for fmt, (e, topk, n, k), t in itertools.product(
        (0, 1),
        [
            (8, 2, 96, 512),
            (5, 3, 80, 2880),
            (40, 6, 72, 4096),
            (3, 3, 50, 272),
            (24, 6, 208, 2880),
            (30, 6, 48, 2944),
            (30, 6, 48, 2816),
        ],
        (1, 2, 7, 18, 40),
    ):
        if k % (16 if fmt == 0 else 32):
            continue
        codes, scales = random_weight(fmt, n, k, experts=e, wide=True)
        gs = torch.rand(e, device=DEVICE) + 0.5
        ids = torch.stack([torch.randperm(e, device=DEVICE)[:topk] for _ in range(t)]).int()
        if t == 7:
            ids[2, 0], ids[3, 1] = -1, e
        x = random_x(t, k)
        ref = torch.full((t, topk, n), float("nan"), dtype=torch.float64, device=DEVICE)
        magnitude = torch.zeros_like(ref)
        for ex in range(e):
            w = dequantize(fmt, codes[ex], scales[ex]) * gs[ex].double()
            rows, cols = torch.where(ids == ex)
            ref[rows, cols] = x[rows].double() @ w.T
            magnitude[rows, cols] = x[rows].double().abs() @ w.abs().T
        for v in ALL_VARIANTS:
            suits = v[9] == k if v[8] == 2 else v[1] == alignment(fmt, k)
            if v[0] != fmt or not suits or v[2] != 0 or (v[8] and t * topk > 2 * e):
                continue
            for config in grouped_configs(v):
                y = torch.full((t, topk, n), 123.0, device=DEVICE, dtype=torch.bfloat16)
                again = torch.full_like(y, 123.0)
                routing = route(ids, e)
                grouped = dict(slots=t * topk, routing=routing.data_ptr(), global_scales=gs.data_ptr())
                rc = run(call_of(fmt, x, codes, scales, y, 1.0, config, **grouped))
                run(call_of(fmt, x, codes, scales, again, 1.0, config, **grouped))
                if rc in (-2, -8):
                    continue
                done += 1
                nan_ok = torch.equal(torch.isnan(y), torch.isnan(ref))
                same = torch.equal(torch.nan_to_num(y), torch.nan_to_num(again))
                err = violation(torch.nan_to_num(y), torch.nan_to_num(ref), magnitude)
                if rc or not nan_ok or not same or not err < 1:
                    bad.append((fmt, e, topk, n, k, t, v, config, rc, nan_ok, same, err))
    print("CHECK moe", done, "cases", len(bad), "bad", flush=True)
    for b in bad[:12]:
        print("  BAD", b)


def shared_bytes(v, m_width, wk, wr, cl, stages, x_stages):
    rows = 16 * v[3] * wr
    slot = -(-16 * v[3] * (128 + (16 if v[0] == 0 else 8) + (4 if v[1] == 3 else 0)) // 128) * 128
    share = -(-stages // cl)
    most = -(-share // wk)
    xs = x_stages if 0 < x_stages < most else most
    if m_width <= 8:
        others = cl * -(-m_width // cl) * rows * 4 if cl > 1 else 0
        xb = min(xs * wk, share) * m_width * (512 + 4)
        return wk * wr * v[4] * slot + xb + wk * m_width * (rows + 4) * 4 + wk * wr * v[4] * 8 + others + 1100
    xb, sums = m_width * xs * wk * 512, wk * m_width * (rows + 4) * 4
    tail = max(xb, sums) if xs == most and m_width >= 16 else xb + sums
    return wk * wr * v[4] * slot + tail + 1152 + wk * 512


def dense_candidates(n, k, width, limit):
    stages = -(-k // 256)
    found = []
    for v in VARIANTS:
        if v[0] != 0 or v[1] != alignment(0, k) or v[2] != width:
            continue
        for cl, wk, wr in itertools.product((1, 2, 4, 8), (1, 2, 3, 4, 6, 8, 12, 16), range(1, 9)):
            share = -(-stages // cl)
            warps = wk * wr
            if wk > share or warps > v[5] // 32 or warps < 4 or wk > 15:
                continue
            most = -(-share // wk)
            for xs in (0, 1, 2, 4):
                if xs >= most or (width <= 8 and xs) or (xs and v[2] >= 16 and wk * xs > 8):
                    continue
                smem = shared_bytes(v, width, wk, wr, cl, stages, xs)
                if smem > SHARED:
                    continue
                groups = -(-n // (16 * v[3] * wr))
                fit = min(SHARED // (smem + 1024), 65536 // (v[6] * 32 * warps), 2048 // (warps * 32))
                if fit < 1:
                    continue
                ctas = groups * cl
                waves = -(-ctas // SMS)
                resident = min(fit, waves)
                used = stages * n / 16 / SMS  # stages per SM if perfectly even
                worst = -(-ctas // SMS) * most * wk * wr * v[3]
                efficiency = used / worst
                inflight = min(resident * warps * min(v[4] - 1, max(1, most)) * v[3], worst)
                score = efficiency * min(1.0, inflight / 20) * (1.0 if waves <= fit else 0.93)
                found.append(
                    (
                        score,
                        v,
                        dict(
                            row_tiles=v[3],
                            depth=v[4],
                            column_warps=wk,
                            row_warps=wr,
                            cluster=cl,
                            x_stages=xs,
                            blocks=groups,
                        ),
                    )
                )
    found.sort(key=lambda f: -f[0])
    return found[:limit]


def dense(ms, limit, budget_s):
    results, t0 = [], time.time()
    for n, k in DENSE:
        by = n * k * 9 / 16
        count = max(2, -(-int(ROTATE_BYTES) // int(by)))
        ws = [random_weight(0, n, k) for _ in range(count)]
        w = dequantize(0, *ws[0])
        for m in ms:
            x = torch.randn(m, k, device=DEVICE).bfloat16()
            ref, magnitude = x.double() @ w.T * 0.01, x.double().abs() @ w.abs().T * 0.01
            y = torch.empty(m, n, device=DEVICE, dtype=torch.bfloat16)
            rows = []
            for score, v, config in dense_candidates(n, k, m, limit):
                for early in (1, 2):
                    if time.time() - t0 > budget_s:
                        break
                    cfg = config | dict(early_start=early)
                    calls = [call_of(0, x, c, s, y, 0.01, cfg) for c, s in ws]
                    y.fill_(float("nan"))
                    rc = run(calls[0])
                    torch.cuda.synchronize()
                    if rc:
                        print("rc", rc, n, k, m, v, cfg)
                        continue
                    e = violation(y, ref, magnitude)
                    if not e < 1:
                        print("BAD", n, k, m, v, cfg, e)
                        continue
                    t, spread = timed([(lambda c=c: run(c)) for c in calls], 64, 3)
                    rows.append((t, spread, cfg, score))
                    results.append(dict(n=n, k=k, m=m, us=t, spread=spread, **cfg, score=score))
            for early in (1, 2):
                best = sorted((r for r in rows if r[2]["early_start"] == early), key=lambda r: r[0])[:2]
                for t, spread, cfg, score in best:
                    short = " ".join(f"{a}{b}" for a, b in zip("RDKWCXBE", cfg.values(), strict=True))
                    print(
                        f"{n}x{k} M={m} {t:6.2f} +-{spread:.2f} us {by / t / 1e3:5.0f} GB/s  {short}  s={score:.2f} of {len(rows)}",
                        flush=True,
                    )
        del ws, w
    return results


def moe(budget_s, cs=(1, 2, 4, 8, 16, 32)):
    results, t0 = [], time.time()
    for e, topk, n, k in MOE:
        codes, scales = random_weight(0, n, k, experts=e)
        gs = torch.rand(e, device=DEVICE) + 0.5
        align = alignment(0, k)
        stages = -(-k // 256)
        for t in cs:
            sets = []
            x = torch.randn(t, k, device=DEVICE).bfloat16()
            y = torch.empty(t, topk, n, device=DEVICE, dtype=torch.bfloat16)
            touched = 0
            for _ in range(8):
                ids = torch.stack([torch.randperm(e, device=DEVICE)[:topk] for _ in range(t)]).int()
                touched += ids.unique().numel() / 8
                sets.append((ids, route(ids, e)))
            by = touched * n * k * 9 / 16
            t_route, _ = timed(
                [
                    (lambda s=s: LIB.route(CDLL, s[0].data_ptr(), t * topk, topk, e, s[1].data_ptr(), stream()))
                    for s in sets
                ],
                32,
                3,
            )
            rows = []
            for v in VARIANTS:
                if v[0] != 0 or v[1] != align or v[2] != 0:
                    continue
                for wk, wr, per_sm, early in itertools.product(
                    (1, 2, 3, 4, 6, 8), (1, 2, 3, 4, 6, 8), (1, 2, 3, 4), (1,)
                ):
                    if wk > stages or wk * wr > 16 or wk * wr < 4 or time.time() - t0 > budget_s:
                        continue
                    most = -(-stages // wk)
                    slot = 16 * 144
                    xb = 2 * max(2 * most, 16) * wk * 512
                    smem = wk * wr * v[4] * slot + xb + wk * 16 * (16 * wr + 4) * 4 + 1200 + wk * 512
                    if (
                        per_sm * (smem + 1024) > 228 * 1024
                        or per_sm * wk * wr * 32 * v[6] > 65536
                        or per_sm * wk * wr < 8
                        or wk * wr * 32 > v[5]
                    ):
                        continue
                    cfg = dict(
                        row_tiles=1,
                        depth=v[4],
                        column_warps=wk,
                        row_warps=wr,
                        cluster=1,
                        x_stages=0,
                        blocks=SMS * per_sm,
                        early_start=early,
                    )
                    calls = [
                        call_of(
                            0,
                            x,
                            codes,
                            scales,
                            y,
                            1.0,
                            cfg,
                            slots=t * topk,
                            routing=r.data_ptr(),
                            global_scales=gs.data_ptr(),
                        )
                        for _, r in sets
                    ]
                    rc = run(calls[0])
                    if rc:
                        print("rc", rc, cfg)
                        continue
                    us, spread = timed([(lambda c=c: run(c)) for c in calls], 24, 3)
                    rows.append((us, spread, cfg))
                    results.append(dict(e=e, topk=topk, n=n, k=k, c=t, us=us, spread=spread, gbps=by / us / 1e3, **cfg))
            rows.sort(key=lambda r: r[0])
            for us, spread, cfg in rows[:3]:
                short = " ".join(f"{a}{b}" for a, b in zip("RDKWCXBE", cfg.values(), strict=True))
                print(
                    f"moe {e}/{topk} {n}x{k} C={t} {us:7.1f} +-{spread:.1f} us {by / us / 1e3:5.0f} GB/s {by / 1e6:.0f} MB route {t_route:.1f}  {short} of {len(rows)}",
                    flush=True,
                )
        del codes, scales
    return results


def profile():
    """A few launches for ncu to look at."""
    for n, k, m, cfg in [
        (8192, 8192, 1, dict(row_tiles=1, depth=3, column_warps=4, row_warps=4, cluster=1, blocks=128)),
        (8192, 8192, 16, dict(row_tiles=1, depth=3, column_warps=2, row_warps=8, cluster=2, blocks=64)),
        (8192, 8192, 64, dict(row_tiles=1, depth=3, column_warps=1, row_warps=8, cluster=2, blocks=64, x_stages=1)),
        (4096, 4096, 1, dict(row_tiles=1, depth=3, column_warps=8, row_warps=2, cluster=1, blocks=128)),
    ]:
        codes, scales = random_weight(0, n, k)
        x = torch.randn(m, k, device=DEVICE).bfloat16()
        y = torch.empty(m, n, device=DEVICE, dtype=torch.bfloat16)
        print("profile", n, k, m, run(call_of(0, x, codes, scales, y, 1.0, cfg)))
    e, topk, n, k, t = 256, 6, 4096, 4096, 8
    codes, scales = random_weight(0, n, k, experts=e)
    ids = torch.stack([torch.randperm(e, device=DEVICE)[:topk] for _ in range(t)]).int()
    routing = route(ids, e)
    x = torch.randn(t, k, device=DEVICE).bfloat16()
    y = torch.empty(t, topk, n, device=DEVICE, dtype=torch.bfloat16)
    cfg = dict(row_tiles=1, depth=3, column_warps=1, row_warps=8, cluster=1, blocks=264)
    print("profile moe", run(call_of(0, x, codes, scales, y, 1.0, cfg, slots=t * topk, routing=routing.data_ptr())))
    torch.cuda.synchronize()


def sanitize():
    """Every compiled variant once, on a small ragged problem: for compute-sanitizer."""
    by_alignment = {0: {0: 512, 1: 384, 2: 320, 3: 272}, 1: {0: 512, 1: 768, 2: 384, 3: 288}}
    count, refused, only = 0, 0, os.environ.get("ONLY_STREAMS")
    for fmt, align, width, row_tiles, depth, threads, _, _, stream_kernel, only_k in sorted(ALL_VARIANTS):
        if only and not stream_kernel:
            continue
        k, n, m = by_alignment[fmt][align], 40, max(1, width - 1) if width else 5
        while alignment(fmt, k) != align:
            k += 32
        k = only_k or k
        x = torch.randn(m, k, device=DEVICE).bfloat16()
        for wk, wr, cl, blocks in [(2, 1, 1, 2), (1, 2, 2, 2)][: 1 if os.environ.get("NO_CLUSTER") else 2]:
            cfg = dict(
                row_tiles=row_tiles, depth=depth, column_warps=wk, row_warps=wr, cluster=cl, x_stages=1, blocks=blocks
            )
            if width:
                if stream_kernel:  # a warp for each stage of K, a block for each row group
                    cfg |= dict(stream=3, column_warps=threads // 32, row_warps=1, cluster=1, x_stages=0)
                    cfg |= dict(blocks=-(-n // (16 * row_tiles)))
                codes, scales = random_weight(fmt, n, k)
                y = torch.empty(m, n, device=DEVICE, dtype=torch.bfloat16)
                rc = run(call_of(fmt, x, codes, scales, y, 1.0, cfg))
            elif cl == 1:
                if stream_kernel == 2:
                    cfg |= dict(stream=2, column_warps=threads // 32 - 1, row_warps=1)
                elif stream_kernel:
                    cfg |= dict(stream=1, column_warps=1, row_warps=threads // 32)
                codes, scales = random_weight(fmt, n, k, experts=5)
                ids = torch.tensor([[0, 1], [0, 2], [0, 5], [0, -1], [0, 1]], dtype=torch.int32, device=DEVICE)
                routing = route(ids, 5)
                y = torch.empty(m, 2, n, device=DEVICE, dtype=torch.bfloat16)
                rc = run(call_of(fmt, x, codes, scales, y, 1.0, cfg, slots=10, routing=routing.data_ptr()))
                for gating in (1, 2) if stream_kernel == 2 and rc == 0 else ():
                    codes, scales = random_weight(fmt, 48, k, experts=5)
                    bias = torch.randn(5, 48, device=DEVICE).bfloat16()
                    fused = dict(gating=gating, alpha=1.0, bias=bias.data_ptr(), early_start=1, settled=1)
                    y = torch.empty(m, 2, 24, device=DEVICE, dtype=torch.bfloat16)
                    given = cfg | fused | dict(slots=10, routing=routing.data_ptr())
                    rc = rc or run(call_of(fmt, x, codes, scales, y, 1.0, given))
            else:
                continue
            torch.cuda.synchronize()
            count += rc == 0
            if rc not in (0, -4):
                refused += 1
                print("rc", rc, fmt, align, width, cfg)
    print("SANITIZE launched", count)
    if refused:
        sys.exit(f"{refused} were not launched")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", nargs="+", choices=["check", "dense", "moe", "profile", "sanitize"])
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--ms", default="1,8,16,64,32,4,2")
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--budget", type=float, default=120)
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.steps[0] in ("profile", "sanitize"):
        {"profile": profile, "sanitize": sanitize}[args.steps[0]]()
        return
    ceiling, by_blocks = read_ceiling()
    print(
        torch.cuda.get_device_name(),
        f"read ceiling {ceiling:.0f} GB/s",
        {b: round(v) for b, v in by_blocks.items()},
        flush=True,
    )
    for step in args.steps:
        start = time.time()
        if step == "check":
            check()
        elif step == "dense":
            rows = dense([int(m) for m in args.ms.split(",")], args.limit, args.budget)
            Path(args.out, "dense.json").write_text(json.dumps(dict(ceiling=ceiling, rows=rows)))
        else:
            rows = moe(args.budget)
            Path(args.out, "moe.json").write_text(json.dumps(dict(ceiling=ceiling, rows=rows)))
        print(f"-- {step} took {time.time() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
