"""The Triton fallback of W4A16, dense and grouped, in Triton's interpreter: its numbers against float64, without a GPU.

The interpreter is chosen by the environment before Triton is imported, so it runs in its own Python. Outputs are FP32
here: it rounds to BF16 toward zero. On a GPU, test_w4a16_gpu.py runs the same kernels compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from requant.kernels import w4a16
from requant.kernels.formats import NumberFormat

PROGRAM = """
import itertools
import torch
from requant.kernels.formats import E2M1_VALUES, E4M3_VALUES, E8M0_VALUES, NumberFormat
from requant.kernels.triton import w4a16

torch.manual_seed(0)
def weight(fmt, *shape):
    *lead, n, k = shape
    low, high = (1, 0x7F) if fmt is NumberFormat.NVFP4 else (117, 137)
    codes = torch.randint(0, 256, (*lead, n, k // 2), dtype=torch.uint8)
    return codes, torch.randint(low, high, (*lead, n, k // fmt.group), dtype=torch.uint8)

def decode(fmt, codes, scales):
    table = torch.tensor(E4M3_VALUES if fmt is NumberFormat.NVFP4 else E8M0_VALUES, dtype=torch.float64)
    pairs = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    return torch.tensor(E2M1_VALUES, dtype=torch.float64)[pairs] * table[scales.long()].repeat_interleave(fmt.group, -1)

def check(y, x, w):
    x = x.double()
    exact, terms = x @ w.T, x.abs() @ w.abs().T
    assert ((y.double() - exact).abs() <= 2.0**-8 * exact.abs() + 2.0**-14 * terms).all()

for fmt, (n, k), m in itertools.product((NumberFormat.NVFP4, NumberFormat.MXFP4), ((40, 288), (33, 96)), (1, 17)):
    codes, scales = weight(fmt, n, k)
    x = torch.randn(m, k).bfloat16()
    y = w4a16.matmul(x, codes, scales, 0.37, fmt=fmt, out=torch.full((m, n), torch.nan))
    check(y, x, decode(fmt, codes, scales) * 0.37)

for fmt, tokens, per_slot in itertools.product((NumberFormat.NVFP4, NumberFormat.MXFP4), (1, 9, 40), (False, True)):
    experts, topk, n, k = 6, 2, 40, 160
    codes, scales = weight(fmt, experts, n, k)
    global_scales = torch.rand(experts) + 0.5 if fmt is NumberFormat.NVFP4 else None
    ids = torch.stack([torch.randperm(experts - 1)[:topk] for _ in range(tokens)]).int()  # one expert stays untouched
    weights = torch.rand(tokens, topk) if per_slot else None
    if tokens > 1:
        ids[0, 1], ids[1, 0] = experts, -1
    x = torch.randn(tokens, topk, k).bfloat16() if per_slot else torch.randn(tokens, k).bfloat16()
    out = torch.full((tokens, topk, n), 7.0)
    w4a16.moe(x, codes, scales, global_scales, w4a16.route(ids, experts), tokens * topk, fmt=fmt, weights=weights,
              x_per_slot=per_slot, out=out)
    for t, j in itertools.product(range(tokens), range(topk)):
        e = int(ids[t, j])
        if not 0 <= e < experts:
            assert out[t, j].isnan().all()
            continue
        w = decode(fmt, codes[e], scales[e]) * (1.0 if global_scales is None else global_scales[e].double())
        check(out[t, j][None], (x[t, j] if per_slot else x[t])[None], w * (1.0 if weights is None else weights[t, j]))

codes, scales = weight(NumberFormat.NVFP4, 3, 8, 32)
x, ids = torch.ones(3, 32).bfloat16(), torch.tensor([[0], [1], [2]]).int()
scales[2, 5, 1] = 0x7F
out = torch.zeros(3, 1, 8, dtype=torch.bfloat16)
w4a16.moe(x, codes, scales, torch.tensor([1.0, 0.0, 1.0]), w4a16.route(ids, 3), 3, fmt=NumberFormat.NVFP4, weights=None,
          x_per_slot=False, out=out)
assert out.isnan()[:, 0].tolist() == [[False] * 8, [True] * 8, [False] * 5 + [True] + [False] * 2]
print("right")
"""


def test_the_interpreter_keeps_the_bound_dense_and_grouped() -> None:
    """Both formats, ragged N and K, scales per expert, weights per slot; bad ids, a NaN scale, a zero scale."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.endswith("right\n"), done.stderr[-3000:]


def test_routing_lists_every_slot_once_in_tiles_of_one_expert() -> None:
    import torch
    from requant.kernels.triton.w4a16 import _most_tiles, route

    rng = np.random.default_rng(0)
    for slots, experts in ((1, 4), (90, 3), (64, 300), (200, 1)):
        ids = rng.integers(-1, experts + 1, (slots // 1, 1)).astype(np.int32)
        data = route(torch.from_numpy(ids), experts).tolist()
        order, tiles = data[:slots], np.array(data[slots:]).reshape(-1, 3)
        assert len(tiles) == _most_tiles(slots, experts)
        assert sorted(order) == list(range(slots))
        seen = []
        for expert, first, count in tiles:
            assert 0 <= count <= 16
            mine = [int(ids[slot, 0]) for slot in order[first : first + count]]
            assert all(i == expert or (expert == experts and not 0 <= i < experts) for i in mine)
            seen += order[first : first + count]
        assert seen == order


def test_a_routing_of_another_path_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(w4a16, "_check_tensor", lambda *_: None)
    codes, scales = torch.zeros(2, 8, 16, dtype=torch.uint8), torch.zeros(2, 8, 2, dtype=torch.uint8)
    x = torch.zeros(3, 32, dtype=torch.bfloat16)
    routing = w4a16.MoeRouting(torch.zeros(4, dtype=torch.int32), 3, 1, 2, triton=True)
    with pytest.raises(ValueError, match="the routing was made for another path: give route_experts the same `path`"):
        w4a16.w4a16_moe(x, codes, scales, None, fmt=NumberFormat.NVFP4, routing=routing, path="cuda")
