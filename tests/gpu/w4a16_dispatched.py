"""W4A16 as its public functions dispatch it, at the shapes that it was made for: for compute-sanitizer.

    compute-sanitizer --tool memcheck python3 -P tests/gpu/w4a16_dispatched.py dense ragged experts fused
    NO_CLUSTER=1 compute-sanitizer --tool racecheck python3 -P tests/gpu/w4a16_dispatched.py experts

Whatever kernel is chosen, now or later, is met here; w4a16_sweep.py goes through compiled variants on tiny problems.
Outputs are poisoned, and some rows of each are held to float64 on the CPU. NO_CLUSTER is for racecheck: it leaves out
what a cluster runs (tests/gpu/cluster_race.cu says why), and, since the tool looks at a block's shared memory and takes
27 s for 96 slots of 4096 rows, a quarter of an expert's rows are enough where they have the same configuration, and two
tokens are left out, which have that of four.

Parts run one by one as well, beside one another: each launch is told with the seconds so far, and the last lines count
them by configuration.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter

import torch
from requant.kernels import w4a16, w4a16_configs
from requant.kernels.formats import NumberFormat
from requant.kernels.reference_torch import dequantize, excess, products

NVFP4, MXFP4 = NumberFormat.NVFP4, NumberFormat.MXFP4
DENSE = [(4096, 4096), (7168, 2048), (5120, 2944), (12288, 4096), (8192, 8192), (5120, 2880), (2880, 4096)]
MOE = [(6, 4096, 4096), (6, 4096, 2048), (4, 5760, 2880), (4, 2880, 2880)]  # of each token; 24 experts in all
NO_CLUSTER = bool(os.environ.get("NO_CLUSTER"))
TOKENS, CONCURRENCY, EXPERTS = (1, 2, 4, 8, 16, 32, 64), (1, 4, 16) if NO_CLUSTER else (1, 2, 4, 16), 24
ROWS = slice(-24, None)
"""Rows of y that are judged: the last, where tails are."""
RAGGED = [(33, 2944), (200, 2880), (72, 272)]
FUSED = [
    (4, 5760, 2880, w4a16.GatedActivation(interleaved=True, limit=7.0, alpha=1.702)),
    (6, 4096, 4096, w4a16.GatedActivation()),
]
DEVICE = "cuda"
BEGIN = time.perf_counter()


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


def say(launched, config, *what):
    stream, cluster = getattr(config, "stream", 0), getattr(config, "cluster", 1)
    launched[f"{type(config).__name__} stream {stream} cluster {cluster}"] += 1
    print(f"{time.perf_counter() - BEGIN:.1f} s", *what, config, flush=True)


def products_of(launched, cases):
    """Dense products of these (format, (N, K)) at every width."""
    for fmt, (n, k) in cases:
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
            say(launched, config, fmt, (n, k), m)


def dense(launched):
    products_of(launched, [*((NVFP4, shape) for shape in DENSE), (MXFP4, DENSE[0])])


def ragged(launched):
    products_of(launched, [(fmt, shape) for shape in RAGGED for fmt in (NVFP4, MXFP4)])


def rows_of(fmt, slots, n, k):
    """How many rows of an expert are multiplied."""
    fewer = n // 4 // 16 * 16
    chosen = [w4a16_configs.choose_grouped(fmt, slots, rows, k, experts=EXPERTS) for rows in (n, fewer)]
    return fewer if NO_CLUSTER and chosen[0] == chosen[1] else n


def routed(c, top_k, k):
    """Ids and activations of c tokens."""
    return torch.stack([torch.randperm(EXPERTS)[:top_k] for _ in range(c)]).int(), torch.randn(c, k).bfloat16()


def judged(fmt, codes, scales, factors, ids, x):
    """The first token's first slot and the last one's last: where it stands, its product in float64 and its terms."""
    for token, slot in {(0, 0), (len(x) - 1, ids.shape[1] - 1)}:
        e = int(ids[token, slot])
        factor = None if factors is None else factors[e]
        numbers = dequantize(fmt, codes[e, ROWS].cpu(), scales[e, ROWS].cpu(), factor)
        yield token, slot, e, *products(x[token][None], numbers)


def experts(launched):
    for fmt, (top_k, n, k) in ((fmt, shape) for shape in MOE for fmt in (NVFP4, MXFP4)):
        if fmt is MXFP4 and n == 4096:
            continue  # one shape of each kind of K
        whole = weight(fmt, EXPERTS, n, k)
        factors = torch.rand(EXPERTS) + 0.5 if fmt is NVFP4 else None
        given = None if factors is None else factors.to(DEVICE)
        for c in CONCURRENCY:
            n = rows_of(fmt, c * top_k, whole[0].shape[1], k)  # noqa: PLW2901
            codes, scales = (part[:, :n].contiguous() for part in whole)
            ids, x = routed(c, top_k, k)
            out = torch.full((c, top_k, n), torch.nan, dtype=torch.bfloat16, device=DEVICE)
            w4a16.w4a16_moe(x.to(DEVICE), codes, scales, given, ids.to(DEVICE), fmt=fmt, out=out, path="cuda")
            y = out.cpu()
            assert not y.isnan().any(), (fmt, n, k, c)
            for token, slot, _, *exact in judged(fmt, codes, scales, factors, ids, x):
                found = excess(y[token, slot, ROWS][None], *exact)
                assert found <= 1, (fmt, n, k, c, found)
            say(launched, w4a16_configs.choose_grouped(fmt, c * top_k, n, k, experts=EXPERTS), fmt, (n, k), c)


def fused(launched):
    """Bias and gate in the product's own launch, and a bias alone."""
    for fmt, (top_k, n, k, gate) in ((fmt, shape) for shape in FUSED for fmt in (NVFP4, MXFP4)):
        whole, biases = weight(fmt, EXPERTS, n, k), torch.randn(EXPERTS, n).bfloat16()
        factors = (torch.rand(EXPERTS) + 0.5) * 0.01
        for c, activation in ((1, gate), (1, None), (8, gate), (8, None)):
            n = rows_of(fmt, c * top_k, whole[0].shape[1], k)  # noqa: PLW2901
            codes, scales, bias = (part[:, :n].contiguous() for part in (*whole, biases))
            config = w4a16_configs.choose_grouped(fmt, c * top_k, n, k, experts=EXPERTS)
            if not w4a16.fuses(fmt, c * top_k, n, k, experts=EXPERTS):
                continue
            ids, x = routed(c, top_k, k)
            width = n if activation is None else n // 2
            out = torch.full((c, top_k, width), torch.nan, dtype=torch.bfloat16, device=DEVICE)
            w4a16.w4a16_moe(
                x.to(DEVICE), codes, scales, factors.to(DEVICE), ids.to(DEVICE), fmt=fmt, out=out, path="cuda",
                bias=bias.to(DEVICE), activation=activation,
            )  # fmt: skip
            y = out.cpu()
            assert not y.isnan().any(), (fmt, n, k, c, activation)
            if activation is None:
                for token, slot, e, exact, terms in judged(fmt, codes, scales, factors, ids, x):
                    found = excess(y[token, slot, ROWS][None], exact + bias[e, ROWS].double(), terms)
                    assert found <= 1, (fmt, n, k, c, found)
            elif activation.interleaved:  # the last rows hold gates and their ups
                for token, slot, e, exact, _ in judged(fmt, codes, scales, factors, ids, x):
                    both, limit = exact[0] + bias[e, ROWS].double(), activation.limit
                    first, up = both[::2].clamp(max=limit), both[1::2].clamp(-limit, limit)
                    wanted = (up + 1) * first * torch.sigmoid(activation.alpha * first)
                    torch.testing.assert_close(y[token, slot, -12:].double(), wanted, rtol=0.02, atol=0.02)
            say(launched, config, fmt, (n, k), c, activation)


PARTS = {part.__name__: part for part in (dense, ragged, experts, fused)}


def main():
    torch.manual_seed(0)
    launched = Counter()
    for name in sys.argv[1:] or PARTS:
        PARTS[name](launched)
    print(", ".join(f"{count} x {name}" for name, count in sorted(launched.items())))
    print(f"launched {launched.total()}, all right")


if __name__ == "__main__":
    main()
