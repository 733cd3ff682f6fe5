"""Check and tune the wgmma kernel of W4A16 on the GPU at hand, with the harness of w4a16_sweep.py.

`REQUANT_W4A16_LIBRARY=lib.so python tests/gpu/w4a16_wgmma_sweep.py check dense --out DIR`. Winners are copied by hand into
kernels/w4a16_wgmma_configs.py.
"""

# ruff: noqa: C408, E501  a script of measurements: configurations are keyword dicts, closures are called at once
from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))  # python -P leaves it out
import w4a16_sweep as sweep

SHAPES = [(64, 512), (48, 2048), (100, 2880), (130, 4096), (33, 2944), (200, 8192), (24, 320), (40, 640), (71, 1984)]
SHAPES += [(256, 1152), (16, 64), (520, 1024)]
DIVISIONS = [(1, 1, 1), (1, 2, 2), (2, 1, 2), (2, 2, 1), (3, 1, 3), (1, 4, 1), (2, 2, 3), (4, 1, 4), (1, 1, 8)]


def fields(row_groups, k_groups, cluster, n, depth, x_depth, early=1):
    return dict(
        wgmma=1,
        row_warps=row_groups,
        column_warps=k_groups,
        cluster=cluster,
        blocks=-(-n // (64 * row_groups)),
        depth=depth,
        x_stages=x_depth,
        early_start=early,
    )


def shared_bytes(width, row_groups, k_groups, cluster, depth, x_depth):
    participants, groups, finishes = cluster * k_groups, row_groups * k_groups, 2
    while participants * finishes < width:
        finishes *= 2
    sums = groups * participants * finishes * 68 * 4
    rings = k_groups * x_depth * (128 if width == 64 else 256) * width * 2 + groups * depth * 64 * 144
    return 1280 + (max(rings, sums) if rings + sums + 1280 > sweep.SHARED else rings + sums)


def check():
    """Every way to divide the work, both formats, wide ranges of scales: the bound, twice the same bits, every start."""
    bad, done = [], 0
    for fmt, (n, k) in itertools.product((0, 1), SHAPES):
        if k // (16, 32)[fmt] % 4:
            continue
        for m in (1, 8, 13, 16, 17, 32, 33, 64):
            x = sweep.random_x(m, k)
            codes, scales = sweep.random_weight(fmt, n, k, wide=True)
            if m == 13 and fmt == 0:
                scales |= (torch.rand(scales.shape, device="cuda") < 0.05).byte() * 128  # negative ones
                scales[(scales & 127) == 127] = 0x7E
            w = sweep.dequantize(fmt, codes, scales)
            exact, magnitude = x.double() @ w.T * 0.37, x.double().abs() @ w.abs().T * 0.37
            for division, rest in itertools.product(DIVISIONS, ((2, 2, 0), (3, 2, 1), (1, 3, 2))):
                y, again = (torch.full((m, n), float("nan"), device="cuda") for _ in range(2))
                rounded = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
                config = fields(*division, n, *rest)
                codes_of = [
                    sweep.run(sweep.call_of(fmt, x, codes, scales, out, 0.37, config)) for out in (y, again, rounded)
                ]
                if codes_of == [-2] * 3:
                    continue
                done += 1
                error = sweep.violation(y, exact, magnitude) if not any(codes_of) else codes_of
                if (
                    any(codes_of)
                    or not error < 1
                    or not torch.equal(y, again)
                    or not torch.equal(y.bfloat16(), rounded)
                ):
                    bad.append((fmt, n, k, m, division, rest, error))
    print("CHECK wgmma", done, "cases", len(bad), "bad", flush=True)
    for b in bad[:12]:
        print("  BAD", b)


def candidates(n, k, width, limit):
    """Divisions that keep all multiprocessors busy, with rings for one, two or three blocks on each."""
    stages, found = -(-k // 256), []
    for row_groups, k_groups, cluster in itertools.product((1, 2, 3, 4), (1, 2, 4), range(1, 9)):
        groups, participants = row_groups * k_groups, cluster * k_groups
        if groups > 4 or participants > min(stages, 16):
            continue
        most, blocks = -(-stages // participants), -(-n // (64 * row_groups)) * cluster
        for per_sm, room in ((1, sweep.SHARED), (2, 115712), (3, 76000)):
            if per_sm * k_groups * (row_groups * 160 + (64 if width == 32 else 32)) * 80 > 65536:
                continue
            rings = [
                (min(depth, 6) * groups * 2 + x_depth * k_groups * width / 32, depth, x_depth)
                for depth, x_depth in itertools.product(range(1, 9), (2, 3, 4, 6, 8))
                if min(2, most) <= depth <= most
                and x_depth <= max(2, most * (2 if width == 64 else 1))
                and shared_bytes(width, row_groups, k_groups, cluster, depth, x_depth) <= room
            ]
            if not rings:
                continue
            waves = -(-blocks // (sweep.SMS * per_sm * (0.9 if cluster > 2 else 1)))
            busiest = groups * most * -(-blocks // sweep.SMS)
            score = stages * n / 64 / sweep.SMS / busiest * (1 if waves == 1 else 0.8)
            score -= blocks * width * (k / cluster) * 2 / 4e9
            found.append((score, fields(row_groups, k_groups, cluster, n, *max(rings)[1:])))
    found.sort(key=lambda f: -f[0])
    return found[:limit]


def dense(ms, limit, budget_s):
    results, t0 = [], time.time()
    for n, k in sweep.DENSE:
        size = n * k * 9 / 16
        weights = [sweep.random_weight(0, n, k) for _ in range(max(2, -(-int(sweep.ROTATE_BYTES) // int(size))))]
        w = sweep.dequantize(0, *weights[0])
        for m in ms:
            x = torch.randn(m, k, device="cuda").bfloat16()
            y = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
            exact, magnitude = x.double() @ w.T * 0.01, x.double().abs() @ w.abs().T * 0.01
            rows = []
            for score, config in candidates(n, k, max(m, 8), limit):
                if time.time() - t0 > budget_s:
                    break
                calls = [sweep.call_of(0, x, c, s, y, 0.01, config) for c, s in weights]
                y.fill_(float("nan"))
                code = sweep.run(calls[0])
                if code or not sweep.violation(y, exact, magnitude) < 1:
                    print("BAD", n, k, m, config, code)
                    continue
                us, spread = sweep.timed([(lambda c=c: sweep.run(c)) for c in calls], 64, 3)
                rows.append((us, spread, config))
                results.append(dict(n=n, k=k, m=m, us=us, spread=spread, score=score, **config))
            rows.sort(key=lambda r: r[0])
            for us, spread, c in rows[:4]:
                print(
                    f"{n}x{k} M={m} {us:6.2f} +-{spread:.2f} us  R{c['row_warps']} K{c['column_warps']} C{c['cluster']} "
                    f"B{c['blocks']} D{c['depth']} X{c['x_stages']} of {len(rows)}",
                    flush=True,
                )
        del weights, w
    return results


def sanitize():
    """Every variant and copy width once, on small ragged problems: for compute-sanitizer."""
    count = refused = 0
    for fmt, m, k in itertools.product((0, 1), (8, 16, 32, 64), (512, 384, 320, 128)):
        if k // (16, 32)[fmt] % 4:
            continue
        codes, scales = sweep.random_weight(fmt, 40, k)
        x = torch.randn(m - 1, k, device="cuda").bfloat16()
        y = torch.empty(m - 1, 40, device="cuda", dtype=torch.bfloat16)
        for cluster in (1,) if os.environ.get("NO_CLUSTER") else (1, 2):
            code = sweep.run(sweep.call_of(fmt, x, codes, scales, y, 1.0, fields(1, 2, cluster, 40, 2, 2)))
            torch.cuda.synchronize()
            count += code == 0
            if code:
                refused += 1
                print("rc", code, fmt, m, k, cluster)
    print("SANITIZE launched", count)
    if refused:
        sys.exit(f"{refused} were not launched")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", nargs="+", choices=["check", "dense", "sanitize"])
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--ms", default="16,32,64")
    parser.add_argument("--limit", type=int, default=40)
    parser.add_argument("--budget", type=float, default=60)
    args = parser.parse_args()
    torch.manual_seed(0)
    for step in args.steps:
        if step == "dense":
            rows = dense([int(m) for m in args.ms.split(",")], args.limit, args.budget)
            Path(args.out, "wgmma.json").write_text(json.dumps(rows))
        else:
            {"check": check, "sanitize": sanitize}[step]()


if __name__ == "__main__":
    main()
