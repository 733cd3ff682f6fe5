"""What w4a16_moe does beside the product: bias, gated activation, and reading before the kernel before has ended."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from requant.kernels import w4a16
from requant.kernels import w4a16_configs as configs
from requant.kernels.formats import NumberFormat
from requant.kernels.reference_torch import dequantize, excess

pytestmark = pytest.mark.gpu

FORMATS = [NumberFormat.NVFP4, NumberFormat.MXFP4]
SHAPES = [(24, 6, 208, 2880), (12, 2, 32, 2880), (40, 6, 80, 4096), (30, 6, 48, 2048)]
"""Experts, experts per token, N, K."""
GATES = [w4a16.GatedActivation(), w4a16.GatedActivation(interleaved=True, limit=7.0, alpha=1.702)]


def random_weight(fmt, *shape):
    """Codes, and block scales about 1."""
    import torch

    *lead, n, k = shape
    low, high = (0x28, 0x48) if fmt is NumberFormat.NVFP4 else (122, 130)
    codes = torch.randint(0, 256, (*lead, n, k // 2), dtype=torch.uint8, device="cuda")
    return codes, torch.randint(low, high, (*lead, n, k // fmt.group), dtype=torch.uint8, device="cuda")


def random_ids(experts, topk, tokens):
    """From three tokens on with an expert that all want, and two that do not exist."""
    import torch

    ids = torch.stack([torch.randperm(experts, device="cuda")[:topk] for _ in range(tokens)]).int()
    if tokens > 2:
        ids[:, 0] = 5
        ids[1, 1], ids[2, 1] = -1, experts
    return ids


def gated(both, gate):
    import torch

    first, up = (both[..., ::2], both[..., 1::2]) if gate.interleaved else both.chunk(2, -1)
    if gate.limit is None:
        return torch.nn.functional.silu(first) * up
    first, up = first.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
    return (up + 1) * first * torch.sigmoid(gate.alpha * first)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_bias_and_activation_are_those_of_the_product_before_any_rounding(fmt, gate):
    import torch

    torch.manual_seed(2)
    for (experts, topk, n, k), tokens in product(SHAPES, (1, 2, 3, 8)):
        codes, scales = random_weight(fmt, experts, n, k)
        gs = (torch.rand(experts, device="cuda") + 0.5) * 0.01
        bias = (torch.randn(experts, n, device="cuda") * 3).bfloat16()
        ids = random_ids(experts, topk, tokens)
        known = (ids >= 0) & (ids < experts)
        of = ids.clamp(0, experts - 1).long()
        x = torch.randn(tokens, k, device="cuda").bfloat16()
        w = (dequantize(fmt, codes, scales) * gs.double()[:, None, None])[of]
        both = torch.einsum("tk,tsnk->tsn", x.double(), w) + bias[of].double()
        magnitude = torch.einsum("tk,tsnk->tsn", x.double().abs(), w.abs())
        both.requires_grad_()
        exact = gated(both, gate)
        # What an error of the product within its bound may do, to first order, and the activation's own.
        moved = torch.autograd.grad(exact.sum(), both)[0].abs() * magnitude
        first, up = (moved[..., ::2], moved[..., 1::2]) if gate.interleaved else moved.chunk(2, -1)
        exact = exact.detach()
        for blocks in (132, 20, 7):
            config = replace(configs.SPLITS[k], blocks=blocks)
            given = {"fmt": fmt, "config": config, "bias": bias}
            outs = [torch.full((tokens, topk, n // 2), 123.0, dtype=torch.bfloat16, device="cuda") for _ in "12"]
            for settled, out in enumerate(outs):
                given |= {"settled": bool(settled), "out": out}
                w4a16.w4a16_moe(x, codes, scales, gs, ids, **given, activation=gate)
            y = outs[0]
            assert torch.equal(y[known], outs[1][known])
            assert y[~known].isnan().all()
            assert excess(y[known], exact[known], (first + up + exact.abs())[known]) <= 1.0, config
            plain = w4a16.w4a16_moe(x, codes, scales, gs, ids, fmt=fmt, config=config, bias=bias)
            assert excess(plain[known], both.detach()[known], magnitude[known]) <= 1.0, config


@pytest.mark.parametrize("gate", GATES)
def test_the_clamp_of_an_activation_hides_no_nan(gate):
    import torch

    torch.manual_seed(3)
    codes, scales = random_weight(NumberFormat.NVFP4, 4, 64, 2880)
    ids = torch.tensor([[0, 1], [2, 1]], dtype=torch.int32, device="cuda")
    x = torch.randn(2, 2880, device="cuda").bfloat16()
    gs = torch.full((4,), 0.01, device="cuda")
    given = {"fmt": NumberFormat.NVFP4, "activation": gate, "config": replace(configs.SPLITS[2880], blocks=4)}
    clean = w4a16.w4a16_moe(x, codes, scales, gs, ids, **given)
    assert clean.isfinite().all()
    bad = x.clone()
    bad[1, 900] = float("nan")
    y = w4a16.w4a16_moe(bad, codes, scales, gs, ids, **given)
    assert y[1].isnan().all()
    assert torch.equal(y[0], clean[0])
    for value in (0.0, -1.0, float("nan")):
        y = w4a16.w4a16_moe(x, codes, scales, gs.index_fill(0, ids[0, 1].long(), value), ids, **given)
        assert y[:, 1].isnan().all()
        assert torch.equal(y[:, 0], clean[:, 0])


def decoded(routings, x, weights, *, settled):
    """gate_up with its activation, and down, for every routing in turn, all through one buffer."""
    import torch

    (up, up_scales), (down, down_scales), gs = weights
    shared = replace(routings[0], data=routings[0].data.clone())
    given = {"fmt": NumberFormat.NVFP4, "routing": shared, "config": replace(configs.SPLITS[2880], blocks=132)}
    gate = w4a16.GatedActivation(interleaved=True)
    outs = []
    for routing in routings:
        shared.data.copy_(routing.data)
        inner = w4a16.w4a16_moe(x, up, up_scales, gs, **given, activation=gate)
        outs.append(w4a16.w4a16_moe(inner, down, down_scales, gs, **given, x_per_slot=True, settled=settled))
    return torch.stack(outs)


def test_a_settled_call_in_a_chain_reads_the_routing_of_its_own_layer():
    """As in a decode step, one buffer holds each layer's routing in turn: what a block reads early must be its own."""
    import torch

    torch.manual_seed(4)
    experts, topk, k = 32, 4, 2880
    weights = [random_weight(NumberFormat.NVFP4, experts, n, k) for n in (2 * k, k)]
    weights.append(torch.full((experts,), 0.002, device="cuda"))
    for tokens in (1, 2):
        routings = [w4a16.route_experts(random_ids(experts, topk, tokens), experts) for _ in range(24)]
        x = torch.randn(tokens, k, device="cuda").bfloat16()
        calm = decoded(routings, x, weights, settled=False)
        decoded(routings, x, weights, settled=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = decoded(routings, x, weights, settled=True)
        for _ in range(5):
            captured.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(captured, calm)


def test_bias_and_activation_are_refused_where_another_kernel_would_run():
    import torch

    fmt = NumberFormat.NVFP4
    assert w4a16.fuses(fmt, 4, 5760, 2880, experts=128)
    assert not w4a16.fuses(fmt, 4, 5760, 2944, experts=128)
    codes, scales = random_weight(fmt, 8, 64, 512)
    ids = torch.zeros(3, 2, dtype=torch.int32, device="cuda")
    x = torch.randn(3, 512, device="cuda").bfloat16()
    with pytest.raises(ValueError, match="ask `fuses` before"):
        w4a16.w4a16_moe(x, codes, scales, None, ids, fmt=fmt, activation=w4a16.GatedActivation())
    with pytest.raises(ValueError, match=r"bias has shape \(8, 32\): it must be \(8, 64\)"):
        w4a16.w4a16_moe(x, codes, scales, None, ids, fmt=fmt, bias=torch.zeros(8, 32, device="cuda").bfloat16())
