"""The Triton fallback of W4A16, dense and grouped: its numbers against float64, in the interpreter and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from requant.kernels import w4a16, w4a16_operands
from requant.kernels.formats import NumberFormat

PROGRAM = Path(__file__).with_name("w4a16_triton_program.py")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_bound_holds_dense_and_grouped(device: str) -> None:
    """Both formats, ragged N and K, scales per expert, weights per slot; bad ids, a NaN scale, a zero scale."""
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", str(PROGRAM), device],
        env={**os.environ, "TRITON_INTERPRET": "1" if device == "cpu" else "0"},
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

    for module in (w4a16, w4a16_operands):
        monkeypatch.setattr(module, "check_tensor", lambda *_: None)
    codes, scales = torch.zeros(2, 8, 16, dtype=torch.uint8), torch.zeros(2, 8, 2, dtype=torch.uint8)
    x = torch.zeros(3, 32, dtype=torch.bfloat16)
    routing = w4a16.MoeRouting(torch.zeros(4, dtype=torch.int32), 3, 1, 2, triton=True)
    with pytest.raises(ValueError, match="the routing was made for another path: give route_experts the same `path`"):
        w4a16.w4a16_moe(x, codes, scales, None, fmt=NumberFormat.NVFP4, routing=routing, path="cuda")
