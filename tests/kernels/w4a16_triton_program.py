"""The Triton kernels of W4A16, dense and grouped, against float64: `cpu` in Triton's interpreter, `cuda` compiled.

Run by test_w4a16_triton.py in a Python of its own (the interpreter is chosen by the environment before Triton is
imported), and under compute-sanitizer by tests/gpu/sanitize.sh. Outputs are FP32: the interpreter rounds to BF16 toward
zero. Further arguments choose among dense, grouped and broken.
"""

import itertools
import sys

import torch
from requant.kernels.formats import NumberFormat
from requant.kernels.reference_torch import dequantize, excess, products
from requant.kernels.triton import w4a16

FORMATS = (NumberFormat.NVFP4, NumberFormat.MXFP4)
DEVICE = sys.argv[1]
"""Operands are made and outputs judged on the CPU: torch's own kernels are slow under compute-sanitizer."""


def weight(fmt, *shape):
    *lead, n, k = shape
    low, high = (1, 0x7F) if fmt is NumberFormat.NVFP4 else (117, 137)
    codes = torch.randint(0, 256, (*lead, n, k // 2), dtype=torch.uint8)
    return codes, torch.randint(low, high, (*lead, n, k // fmt.group), dtype=torch.uint8)


def there(*tensors):
    return [None if tensor is None else tensor.to(DEVICE) for tensor in tensors]


def dense():
    for fmt, (n, k), m in itertools.product(FORMATS, ((40, 288), (33, 96)), (1, 17)):
        codes, scales = weight(fmt, n, k)
        x = torch.randn(m, k).bfloat16()
        (out,) = there(torch.full((m, n), torch.nan))
        w4a16.matmul(*there(x, codes, scales), 0.37, fmt=fmt, out=out)
        assert excess(out, *products(x, dequantize(fmt, codes, scales, 0.37))) <= 1.0


def grouped():
    for fmt, tokens, per_slot in itertools.product(FORMATS, (1, 9, 40), (False, True)):
        experts, topk, n, k = 6, 2, 40, 160
        codes, scales = weight(fmt, experts, n, k)
        global_scales = torch.rand(experts) + 0.5 if fmt is NumberFormat.NVFP4 else None
        ids = torch.stack([torch.randperm(experts - 1)[:topk] for _ in range(tokens)]).int()  # one is never touched
        weights = torch.rand(tokens, topk) if per_slot else None
        if tokens > 1:
            ids[0, 1], ids[1, 0] = experts, -1
        x = torch.randn(tokens, topk, k).bfloat16() if per_slot else torch.randn(tokens, k).bfloat16()
        out, routing, factors = there(torch.full((tokens, topk, n), 7.0), w4a16.route(ids, experts), weights)
        w4a16.moe(
            *there(x, codes, scales, global_scales), routing, tokens * topk, fmt=fmt, weights=factors,
            x_per_slot=per_slot, out=out,
        )  # fmt: skip
        out, w = out.cpu(), dequantize(fmt, codes, scales, global_scales)
        for t, j in itertools.product(range(tokens), range(topk)):
            e = int(ids[t, j])
            if not 0 <= e < experts:
                assert out[t, j].isnan().all()
                continue
            exact, terms = products((x[t, j] if per_slot else x[t])[None], w[e])
            factor = 1.0 if weights is None else weights[t, j].double()
            assert excess(out[t, j][None], exact * factor, terms * factor) <= 1.0


def broken():
    """A NaN block scale, and a global scale of zero."""
    codes, scales = weight(NumberFormat.NVFP4, 3, 8, 32)
    x, ids = torch.ones(3, 32).bfloat16(), torch.tensor([[0], [1], [2]]).int()
    scales[2, 5, 1] = 0x7F
    out, routing = there(torch.zeros(3, 1, 8, dtype=torch.bfloat16), w4a16.route(ids, 3))
    w4a16.moe(
        *there(x, codes, scales, torch.tensor([1.0, 0.0, 1.0])), routing, 3, fmt=NumberFormat.NVFP4, weights=None,
        x_per_slot=False, out=out,
    )  # fmt: skip
    assert out.isnan()[:, 0].tolist() == [[False] * 8, [True] * 8, [False] * 5 + [True] + [False] * 2]


torch.manual_seed(0)
for part in (dense, grouped, broken):
    if part.__name__ in (sys.argv[2:] or part.__name__):
        part()
print("right")
