"""Operands of the grouped W4A16 product that do not fit are refused before anything runs, dense and Triton alike."""

# ruff: noqa: C408  arguments read best as keywords
from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from requant.kernels import w4a16
from requant.kernels.formats import NumberFormat

EXPERTS, TOKENS, TOPK, N, K = 4, 3, 2, 8, 64


def on_cuda(tensor):
    """The tensor's metadata with a CUDA device, so that the checks behind the device check can be reached."""
    fields = ("dtype", "shape", "dim", "is_contiguous", "stride", "numel", "data_ptr")
    return SimpleNamespace(is_cuda=True, device="cuda:0", **{name: getattr(tensor, name) for name in fields})


def moe(path="cuda", **changes):
    given = {
        "x": torch.zeros(TOKENS, K, dtype=torch.bfloat16),
        "codes": torch.zeros(EXPERTS, N, K // 2, dtype=torch.uint8),
        "scales": torch.zeros(EXPERTS, N, K // 16, dtype=torch.uint8),
        "globals": torch.ones(EXPERTS),
        "ids": torch.zeros(TOKENS, TOPK, dtype=torch.int32),
        "weights": torch.ones(TOKENS, TOPK),
        "out": torch.zeros(TOKENS, TOPK, N, dtype=torch.bfloat16),
    } | changes
    made = {name: None if value is None else on_cuda(value) for name, value in given.items() if name != "options"}
    return w4a16.w4a16_moe(
        made["x"], made["codes"], made["scales"], made["globals"], made["ids"], weights=made["weights"],
        out=made["out"], fmt=NumberFormat.NVFP4, path=path, **given.get("options", {}),
    )  # fmt: skip


@pytest.mark.parametrize("path", ["cuda", "triton"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(ids=None), "needs expert_ids"),
        (dict(ids=torch.zeros(TOKENS, TOPK, dtype=torch.int64)), r"expert_ids is torch.int64: it must be torch.int32"),
        (dict(ids=torch.zeros(TOKENS * TOPK, dtype=torch.int32)), r"it must be \[tokens, experts per token\]"),
        (dict(ids=torch.zeros(TOPK, TOKENS, dtype=torch.int32).t()), "expert_ids has strides"),
        (dict(codes=torch.zeros(N, K // 2, dtype=torch.uint8)), r"it must be \[experts, N, K/2\]"),
        (dict(codes=torch.zeros(EXPERTS, N, 12, dtype=torch.uint8)), "K is 24 .* multiple of 16"),
        (dict(codes=torch.zeros(EXPERTS, N, K // 2)), "codes is torch.float32"),
        (dict(scales=torch.zeros(EXPERTS, N, K // 32, dtype=torch.uint8)), r"block_scales has shape \(4, 8, 2\)"),
        (dict(scales=torch.zeros(EXPERTS * 32 + 8, dtype=torch.uint8)[8:].view(EXPERTS, N, 4)), "8 bytes past"),
    ],
)  # fmt: skip
def test_operands_that_do_not_fit(path, changes, message):
    with pytest.raises(ValueError, match=message):
        moe(path, **changes)


@pytest.fixture
def routed(monkeypatch):
    """Routings without a GPU, for what is checked after them."""

    def route(ids, experts, *, check, path):
        assert path in ("cuda", "triton")
        return w4a16.MoeRouting(torch.zeros(4, dtype=torch.int32), TOKENS, TOPK, experts, triton=path == "triton")

    monkeypatch.setattr(w4a16, "route_experts", route)


@pytest.mark.usefixtures("routed")
@pytest.mark.parametrize("path", ["cuda", "triton"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(x=torch.zeros(TOKENS, K)), "x is torch.float32: it must be torch.bfloat16"),
        (dict(x=torch.zeros(TOKENS, 48, dtype=torch.bfloat16)), r"x has shape \(3, 48\): .* it must be \(3, 64\)"),
        (dict(options=dict(x_per_slot=True)), r"with x_per_slot=True it must be \(3, 2, 64\)"),
        (dict(globals=torch.ones(1)), r"global_scales has shape \(1,\): it must be \(4,\)"),
        (dict(globals=torch.ones(EXPERTS).double()), "global_scales is torch.float64"),
        (dict(weights=torch.ones(TOKENS, 1)), r"weights has shape \(3, 1\): it must be \(3, 2\)"),
        (dict(out=torch.zeros(TOKENS, N, dtype=torch.bfloat16)), r"out has shape \(3, 8\): it must be \(3, 2, 8\)"),
    ],
)
def test_operands_that_do_not_fit_the_routing(path, changes, message):
    with pytest.raises(ValueError, match=message):
        moe(path, **changes)


def test_a_routing_of_other_experts_is_refused():
    routing = w4a16.MoeRouting(torch.zeros(4, dtype=torch.int32), TOKENS, TOPK, EXPERTS + 1)
    with pytest.raises(ValueError, match="the routing is for 5 experts, the weight has 4"):
        moe(ids=None, options=dict(routing=routing))


def test_no_slots_is_an_empty_answer_and_no_launch():
    routing = w4a16.MoeRouting(torch.zeros(4, dtype=torch.int32), 0, TOPK, EXPERTS)
    empty = moe(
        x=torch.zeros(0, K, dtype=torch.bfloat16), ids=None, weights=None,
        out=torch.zeros(0, TOPK, N, dtype=torch.bfloat16), options=dict(routing=routing),
    )  # fmt: skip
    assert empty.shape == (0, TOPK, N)
