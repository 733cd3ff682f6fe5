"""Which configuration the wgmma kernel of W4A16 runs (csrc/w4a16_wgmma.cuh, SM90): a rule, and what was measured.

A configuration divides the work and never changes which bytes are read. The kernel is right under any that
`shared_bytes` says fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Final

from requant.kernels.formats import NumberFormat

__all__ = ["WIDTHS", "WgmmaConfig", "applies", "choose", "shared_bytes"]

WIDTHS: Final = (8, 16, 32, 64)
"""Token widths that are compiled in."""
LEAST_TOKENS: Final = 9
"""Below, mma.sync takes less time (docs/kernels-w4a16.md)."""
STAGE_K: Final = 256
"""kStageK of csrc/w4a16_types.cuh."""
TILE_ROWS: Final = 64
"""kWgRows of csrc/w4a16_wgmma.cuh: rows of one warpgroup."""
MAX_GROUPS: Final = 4
"""kWgMaxGroups: warpgroups of a block."""
MAX_DEPTH: Final = 8
"""kWgMaxDepth: stages of a ring."""
SHARED_LIMIT: Final = 227 * 1024
"""Most shared memory of an SM90 block."""


@dataclass(frozen=True, slots=True)
class WgmmaConfig:
    """How one launch divides the work.

    row_groups x k_groups warpgroups to a block, each with 64 rows and a share of K; cluster: blocks that split K once
    more; blocks: blocks (times cluster) in the grid; depth, x_depth: stages of the rings of weights and of x.
    """

    row_groups: int
    k_groups: int
    blocks: int
    cluster: int = 1
    depth: int = 4
    x_depth: int = 2

    def launch_fields(self) -> dict[str, int]:
        """Fields of RequantCall (csrc/w4a16.cu)."""
        return {
            "wgmma": 1,
            "row_warps": self.row_groups,
            "column_warps": self.k_groups,
            "cluster": self.cluster,
            "depth": self.depth,
            "x_stages": self.x_depth,
            "blocks": self.blocks,
        }


def applies(tokens: int, k: int, capability: tuple[int, int]) -> bool:
    """Whether the wgmma kernel runs a dense layer: SM90, enough tokens, rows of codes that start at 16 bytes."""
    return capability == (9, 0) and tokens >= LEAST_TOKENS and k % 32 == 0


def _ceil(value: int, by: int) -> int:
    return (value + by - 1) // by


def width_for(tokens: int) -> int:
    """The narrowest compiled width that holds `tokens` (1 .. 64) tokens."""
    return next(w for w in WIDTHS if w >= tokens)


def shared_bytes(fmt: NumberFormat, width: int, config: WgmmaConfig) -> int:
    """Shared memory per block, as csrc/w4a16_wgmma_launch.cuh lays it out (it refuses a launch that does not fit)."""
    groups, participants = config.row_groups * config.k_groups, config.cluster * config.k_groups
    units = _ceil(width // 4, participants)
    x = config.k_groups * config.x_depth * width * STAGE_K * 2
    weights = groups * config.depth * TILE_ROWS * (STAGE_K // 2 + STAGE_K // fmt.group)
    sums = groups * participants * units * 128 * 8 if participants > 1 else 0
    return x + weights + sums + 4 * MAX_GROUPS * MAX_DEPTH * 8
