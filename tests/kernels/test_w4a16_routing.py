"""Slots sorted by torch operations, where they are more than the routing kernel's one block has shared memory for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from requant.kernels import w4a16, w4a16_library
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
    monkeypatch.setattr(w4a16, "_check_tensor", lambda *_: None)
    monkeypatch.setattr(w4a16, "_device", lambda _: (None, capability, 132))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(w4a16_library, "route", lambda *given: asked.append(given[2:5]))
    ids = torch.arange(tokens * 8, dtype=torch.int32).reshape(tokens, 8) % 128
    routing = w4a16.route_experts(ids, 128, path="cuda")
    assert asked == ([] if by_torch else [(tokens * 8, 8, 128)])
    assert (routing.slots, routing.triton) == (tokens * 8, False)
    if by_torch:
        assert routing.data[:2].tolist() == [128 * -(-tokens * 8 // 128 // 16), tokens * 8]
