"""Slots sorted by torch operations, where they are more than the routing kernel's one block has shared memory for.

On a GPU: the same list as the kernel's, and the products of so long a routing against float64.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from requant.kernels import w4a16, w4a16_library
from requant.kernels import w4a16_configs as configs
from requant.kernels.formats import NumberFormat
from requant.kernels.reference_torch import dequantize, excess, products
from requant.kernels.w4a16_routing import sort_slots


def listed(ids, experts):
    """The list that csrc/w4a16_routing.cuh describes, written down plainly; tiles that do not exist are zeros."""
    flat = [e if 0 <= e < experts else experts for e in ids.flatten().tolist()]
    slots, most = len(flat), 4 if len(flat) <= 2 * experts else 16
    order = sorted(range(slots), key=lambda slot: flat[slot])
    tiles = []
    for expert in range(experts):
        mine = [at for at, slot in enumerate(order) if flat[slot] == expert]
        tiles += [[expert, mine[i], min(most, len(mine) - i), order[mine[i]]] for i in range(0, len(mine), most)]
    room = min(slots, experts + slots // most)
    table = [number for tile in tiles for number in tile]
    header = [len(tiles), sum(e < experts for e in flat), 0, 0]
    return header, table, 4 * room, [*order, *(slot // ids.shape[1] for slot in order)]


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 1, 1), (7, 3, 2), (40, 4, 5), (9, 2, 64), (300, 8, 16)])
@pytest.mark.parametrize("least", [0, -2])
def test_the_list_is_that_of_the_routing_kernel(tokens, top_k, experts, least):
    ids = torch.randint(least, experts - least, (tokens, top_k), generator=torch.Generator().manual_seed(tokens)).int()
    found = sort_slots(ids, experts).tolist()
    header, table, room, rest = listed(ids, experts)
    assert len(found) == w4a16_library.routing_ints(tokens * top_k, experts)
    assert found[:4] == header
    assert found[4 : 4 + len(table)] == table
    assert found[4 + room :] == rest


def test_slots_without_any_expert():
    found = sort_slots(torch.full((3, 2), 9, dtype=torch.int32), 4).tolist()
    assert (found[:4], found[-12:]) == ([0, 0, 0, 0], [0, 1, 2, 3, 4, 5, 0, 0, 1, 1, 2, 2])


@pytest.mark.parametrize(
    ("capability", "tokens", "by_torch"),
    [((9, 0), 7000, False), ((9, 0), 8192, True), ((8, 0), 5000, False), ((8, 0), 5300, True), ((12, 0), 3300, True)],
)
def test_more_slots_than_a_block_can_sort_are_not_an_error(monkeypatch, capability, tokens, by_torch):
    asked = []
    monkeypatch.setattr(w4a16, "check_tensor", lambda *_: None)
    monkeypatch.setattr(w4a16, "device_of", lambda _: (None, capability, 132))
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(w4a16_library, "route", lambda *given: asked.append(given[2:5]))
    ids = torch.arange(tokens * 8, dtype=torch.int32).reshape(tokens, 8) % 128
    routing = w4a16.route_experts(ids, 128, path="cuda")
    assert asked == ([] if by_torch else [(tokens * 8, 8, 128)])
    assert (routing.slots, routing.triton) == (tokens * 8, False)
    if by_torch:
        assert routing.data[:2].tolist() == [128 * -(-tokens * 8 // 128 // 16), tokens * 8]


# --- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 4, 128), (7, 3, 2), (64, 4, 32), (3000, 8, 16)])
def test_the_routing_kernel_and_torch_write_the_same_list(tokens, top_k, experts):
    ids = torch.randint(-1, experts + 1, (tokens, top_k), generator=torch.Generator().manual_seed(tokens)).int().cuda()
    header, table, room, rest = listed(ids.cpu(), experts)
    for data in (w4a16.route_experts(ids, experts, path="cuda").data, sort_slots(ids, experts)):
        found = data.tolist()
        assert found[:2] == header[:2]
        assert found[4 : 4 + len(table)] == table
        assert found[4 + room :] == rest


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["cuda", "triton"])
def test_more_slots_than_a_block_can_sort_give_every_slot_its_product(path):
    """8200 tokens of 8 experts: 65,600 slots are more than any chip's shared memory holds."""
    torch.manual_seed(0)
    fmt, tokens, top_k, experts, n, k = NumberFormat.NVFP4, 8200, 8, 32, 40, 160
    assert w4a16_library.routing_shared_bytes(tokens * top_k, experts) > configs.shared_limit((9, 0))
    codes = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randint(1, 0x7F, (experts, n, k // 16), dtype=torch.uint8, device="cuda")
    global_scales = torch.rand(experts, device="cuda") + 0.5
    ids = torch.randint(0, experts, (tokens, top_k), device="cuda").int()
    ids[5, 3], ids[8199, 7] = experts, -1
    x = torch.randn(tokens, k, device="cuda").bfloat16()
    out = torch.full((tokens, top_k, n), 7.0, dtype=torch.bfloat16, device="cuda")
    w4a16.w4a16_moe(x, codes, scales, global_scales, ids, fmt=fmt, out=out, path=path)
    assert out[5, 3].isnan().all()
    assert out[8199, 7].isnan().all()
    w = dequantize(fmt, codes, scales, global_scales)
    for expert in range(experts):
        token, slot = torch.where(ids == expert)
        assert excess(out[token, slot], *products(x[token], w[expert])) <= 1.0, expert
