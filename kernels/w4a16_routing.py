"""The list of csrc/w4a16_routing.cuh by torch operations, for more slots than its one block sorts in shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from requant.kernels import w4a16_library as lib

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["sort_slots"]


def sort_slots(expert_ids: Tensor, experts: int) -> Tensor:
    """expert_ids [T, topk] -> what `requant_w4a16_route` writes, int32 [routing_ints]; nothing is read back."""
    import torch

    per_token = expert_ids.shape[1]
    ids = expert_ids.reshape(-1).to(torch.int64)
    slots, tile = ids.numel(), lib.tile_tokens(ids.numel(), experts)
    room = (lib.routing_ints(slots, experts) - lib.ROUTING_HEADER - 2 * slots) // 4
    ids = torch.where((ids >= 0) & (ids < experts), ids, experts)
    order = torch.argsort(ids, stable=True)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device).scatter_add_(0, ids, torch.ones_like(ids))
    begins = counts.cumsum(0) - counts
    ends = ((counts[:experts] + tile - 1) // tile).cumsum(0)  # of each expert's tiles
    number = torch.arange(room, device=ids.device)
    there = number < ends[-1]
    expert = torch.searchsorted(ends, number, right=True).clamp_(max=experts - 1)
    before = torch.where(expert > 0, ends[(expert - 1).clamp_(min=0)], 0)
    within = torch.where(there, tile * (number - before), 0)
    first = torch.where(there, begins[expert] + within, 0)
    count = torch.where(there, (counts[expert] - within).clamp_(max=tile), 0)
    tiles = torch.stack([expert, first, count, order[first]], 1).reshape(-1)
    header = torch.stack([ends[-1], slots - counts[experts], *torch.zeros_like(counts[:1]).expand(2)])
    return torch.cat([header, tiles, order, order // per_token]).int()
