"""W4A16 as its public functions dispatch it, at the shapes that it was made for: for compute-sanitizer.

    compute-sanitizer --tool memcheck python3 -P tests/gpu/w4a16_dispatched.py
    NO_CLUSTER=1 compute-sanitizer --tool racecheck python3 -P tests/gpu/w4a16_dispatched.py

Whatever kernel is chosen, now or later, is met here; w4a16_sweep.py goes through compiled variants on tiny problems.
Outputs are poisoned, and some rows of each are held to float64 on the CPU. NO_CLUSTER leaves out what a cluster runs
(tests/gpu/cluster_race.cu says why). The last line counts launches by the kernel's configuration.
"""

from __future__ import annotations

import os
from collections import Counter

import torch
from requant.kernels import w4a16, w4a16_configs
from requant.kernels.formats import NumberFormat
from requant.kernels.reference_torch import dequantize, excess, products

NVFP4, MXFP4 = NumberFormat.NVFP4, NumberFormat.MXFP4
DENSE = [(4096, 4096), (7168, 2048), (5120, 2944), (12288, 4096), (8192, 8192)]
MOE = [(6, 4096, 4096), (6, 4096, 2048), (4, 5760, 2880), (4, 2880, 2880)]  # of each token; 24 experts in all
TOKENS, CONCURRENCY, EXPERTS = (1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 16), 24
NO_CLUSTER = bool(os.environ.get("NO_CLUSTER"))
ROWS = slice(-24, None)
"""Rows of y that are judged: the last, where tails are."""
DEVICE = "cuda"


def weight(fmt, *shape):
    """Bytes that repeat: torch's random numbers are slow under the tool."""
    *lead, n, k = shape
    low, high = (0x28, 0x48) if fmt is NVFP4 else (120, 130)
    made = []
    for columns, least, end in ((k // 2, 0, 256), (k // fmt.group, low, high)):
        count = n * columns
        for size in lead:
            count *= size
        piece = torch.randint(least, end, (min(count, 1_000_003),), dtype=torch.uint8)
        made.append(piece.repeat(-(-count // len(piece)))[:count].reshape(*lead, n, columns).to(DEVICE))
    return made


def say(launched, config):
    stream, cluster = getattr(config, "stream", 0), getattr(config, "cluster", 1)
    launched[f"{type(config).__name__} stream {stream} cluster {cluster}"] += 1


def dense(launched):
    ragged = [(fmt, shape) for shape in ((33, 2944), (200, 2880), (72, 272)) for fmt in (NVFP4, MXFP4)]
    for fmt, (n, k) in [*((NVFP4, shape) for shape in DENSE), (MXFP4, DENSE[0]), *ragged]:
        if k % fmt.group:
            continue
        codes, scales = weight(fmt, n, k)
        numbers = dequantize(fmt, codes[ROWS].cpu(), scales[ROWS].cpu(), 0.37)
        for m in TOKENS:
            config = w4a16_configs.choose(fmt, m, n, k)
            if NO_CLUSTER and getattr(config, "cluster", 1) > 1:
                continue
            x = torch.randn(m, k).bfloat16()
            out = torch.full((m, n), torch.nan, dtype=torch.bfloat16, device=DEVICE)
            w4a16.w4a16_matmul(x.to(DEVICE), codes, scales, 0.37, fmt=fmt, out=out, path="cuda")
            found = excess(out.cpu()[:, ROWS], *products(x, numbers))
            assert found <= 1, (fmt, n, k, m, found)
            say(launched, config)


def experts(launched):
    for fmt, (top_k, n, k) in ((fmt, shape) for shape in MOE for fmt in (NVFP4, MXFP4)):
        if fmt is MXFP4 and n == 4096:
            continue  # one shape of each kind of K
        codes, scales = weight(fmt, EXPERTS, n, k)
        factors = torch.rand(EXPERTS) + 0.5 if fmt is NVFP4 else None
        for c in CONCURRENCY:
            ids = torch.stack([torch.randperm(EXPERTS)[:top_k] for _ in range(c)]).int()
            x = torch.randn(c, k).bfloat16()
            out = torch.full((c, top_k, n), torch.nan, dtype=torch.bfloat16, device=DEVICE)
            given = None if factors is None else factors.to(DEVICE)
            w4a16.w4a16_moe(x.to(DEVICE), codes, scales, given, ids.to(DEVICE), fmt=fmt, out=out, path="cuda")
            y = out.cpu()
            assert not y.isnan().any(), (fmt, n, k, c)
            for token, slot in {(0, 0), (c - 1, top_k - 1)}:
                e = int(ids[token, slot])
                factor = None if factors is None else factors[e]
                numbers = dequantize(fmt, codes[e, ROWS].cpu(), scales[e, ROWS].cpu(), factor)
                found = excess(y[token, slot, ROWS][None], *products(x[token][None], numbers))
                assert found <= 1, (fmt, n, k, c, found)
            say(launched, w4a16_configs.choose_grouped(fmt, c * top_k, n, k, experts=EXPERTS))


def main():
    torch.manual_seed(0)
    launched = Counter()
    dense(launched)
    experts(launched)
    print(", ".join(f"{count} x {name}" for name, count in sorted(launched.items())))
    print(f"launched {launched.total()}, all right")


if __name__ == "__main__":
    main()
