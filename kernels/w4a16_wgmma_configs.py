"""Which configuration the wgmma kernel of W4A16 runs (csrc/w4a16_wgmma.cuh, SM90): a rule, and what was measured.

A configuration divides the work and never changes which bytes are read. The kernel is right under any that
`shared_bytes` says fits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Final

from requant.kernels.formats import NumberFormat

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["WIDTHS", "WgmmaConfig", "applies", "choose", "shared_bytes"]

WIDTHS: Final = (8, 16, 32, 64)
"""Token widths that are compiled in."""
LEAST_TOKENS: Final = 9
"""Below, mma.sync takes less time (docs/kernels-w4a16.md)."""
STAGE_K: Final = 256
"""kStageK of csrc/w4a16_types.cuh."""
TILE_ROWS: Final = 64
"""kWgRows of csrc/w4a16_wgmma_types.cuh: rows of one warpgroup."""
MAX_GROUPS: Final = 4
"""kWgMaxGroups: warpgroups of a block."""
MAX_DEPTH: Final = 8
"""kWgMaxDepth: stages of a ring."""
SUMS_PITCH: Final = 68
"""kSumsPitch: floats from token to token where sums meet."""
MAX_BLOCKS: Final = 65535
"""Of a grid's y."""
MAX_ROWS: Final = MAX_BLOCKS * TILE_ROWS * MAX_GROUPS
"""Most rows of a layer: every warpgroup has one tile."""
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


def applies(fmt: NumberFormat, tokens: int, k: int, capability: tuple[int, int]) -> bool:
    """Whether the wgmma kernel runs a dense layer: SM90, enough tokens, and K such that x falls into pieces of 64 and
    rows of block scales start at multiples of 4 bytes."""
    return capability == (9, 0) and tokens >= LEAST_TOKENS and k % 64 == 0 and k // fmt.group % 4 == 0


def _ceil(value: int, by: int) -> int:
    return (value + by - 1) // by


def width_for(tokens: int) -> int:
    """The narrowest compiled width that holds `tokens` (1 .. 64) tokens."""
    return next(w for w in WIDTHS if w >= tokens)


def x_stage_k(width: int) -> int:
    """k of one stage of x (kXBlocks of csrc/w4a16_wgmma_types.cuh)."""
    return 128 if width == 64 else 256


def shared_bytes(fmt: NumberFormat, width: int, config: WgmmaConfig) -> int:
    """Shared memory per block, as csrc/w4a16_wgmma_launch.cuh lays it out (it refuses a launch that does not fit)."""
    groups, participants = config.row_groups * config.k_groups, config.cluster * config.k_groups
    finishes = 2  # tokens whose sums one participant adds up
    while participants * finishes < width:
        finishes *= 2
    sums = groups * participants * finishes * SUMS_PITCH * 4
    x = config.k_groups * config.x_depth * x_stage_k(width) * width * 2
    rings = x + groups * config.depth * TILE_ROWS * (STAGE_K // 2 + STAGE_K // fmt.group)
    barriers = 5 * MAX_GROUPS * MAX_DEPTH * 8
    return barriers + (max(rings, sums) if rings + sums + barriers > SHARED_LIMIT else rings + sums)


# --- the rule -------------------------------------------------------------------------------------------------------
# Cycles, from clock marks on an H200 (kernels/NOTES.md).
STAGE_CYCLES, TILE_CYCLES = 1300, 700
"""A multiprocessor's for one stage of its warpgroups: latency, and for each warpgroup a tile (64 rows x 256 k)."""
MEETING_CYCLES: Final = 800
"""Of the blocks of a cluster, for every doubling of it."""
X_BYTES_PER_CYCLE: Final = 6000
"""What L2 delivers of x, all multiprocessors together, beside the weights."""
CLUSTERS: Final = {1: 132, 2: 66, 3: 39, 4: 30}
"""Clusters that an H200 runs at once with one block on a multiprocessor: larger ones leave gaps."""
REGISTERS: Final = {8: 56, 16: 64, 32: 64, 64: 80}
"""Per thread, by width."""


def _resident(fmt: NumberFormat, width: int, config: WgmmaConfig) -> int:
    """Blocks that a multiprocessor holds at once."""
    threads = config.k_groups * (config.row_groups * 160 + (64 if width == 32 else 32))  # kXWarps
    by_memory = (SHARED_LIMIT + 1024) // (shared_bytes(fmt, width, config) + 1024)
    return min(by_memory, 65536 // (REGISTERS[width] * threads), 2048 // threads)


def _estimate(config: WgmmaConfig, fmt: NumberFormat, width: int, k: int, processors: int) -> float:
    """Cycles of a launch."""
    groups, participants = config.row_groups * config.k_groups, config.cluster * config.k_groups
    most = _ceil(_ceil(k, STAGE_K), participants)
    resident = _resident(fmt, width, config)
    at_once = CLUSTERS[config.cluster] * processors / CLUSTERS[1]
    waves, together = math.ceil(config.blocks / (at_once * resident)), min(resident, math.ceil(config.blocks / at_once))
    consumed = waves * most * (STAGE_CYCLES + TILE_CYCLES * groups * together)
    x_bytes = config.blocks * width * k * 2
    return consumed + MEETING_CYCLES * math.log2(config.cluster) + x_bytes / X_BYTES_PER_CYCLE


def _candidates(fmt: NumberFormat, width: int, n: int, k: int) -> Iterator[WgmmaConfig]:
    """Every division that fits, with the deepest rings for one, two and three blocks on a multiprocessor."""
    stages = _ceil(k, STAGE_K)
    for row_groups, k_groups, cluster in product((1, 2, 3, 4), (1, 2, 4), CLUSTERS):
        participants = cluster * k_groups
        if row_groups * k_groups > MAX_GROUPS or participants > min(stages, 16):
            continue
        most, blocks = _ceil(stages, participants), _ceil(n, TILE_ROWS * row_groups)
        if blocks > MAX_BLOCKS:
            continue
        for share in (1, 2, 3):
            for depth, x_depth in product(range(min(MAX_DEPTH, most), 0, -1), (4, 3, 2)):
                config = WgmmaConfig(row_groups, k_groups, blocks, cluster, depth, x_depth)
                if share * (shared_bytes(fmt, width, config) + 1024) <= SHARED_LIMIT + 1024:
                    yield config
                    break


@cache
def choose(fmt: NumberFormat, tokens: int, n: int, k: int, *, processors: int = 132) -> WgmmaConfig:
    """The configuration for a dense layer with `tokens` <= 64 tokens: the table's, or the least estimated time."""
    if n > MAX_ROWS:
        raise ValueError(f"N is {n}: with {tokens} tokens it may be {MAX_ROWS} at most, what one grid covers")
    width = width_for(tokens)
    measured = H200_DENSE.get((n, k), {}).get(width)
    if measured is not None and fmt is NumberFormat.NVFP4:
        return measured
    return min(_candidates(fmt, width, n, k), key=lambda c: _estimate(c, fmt, width, k, processors))


H200_DENSE: Final[dict[tuple[int, int], dict[int, WgmmaConfig]]] = {
    (4096, 4096): {
        16: WgmmaConfig(1, 2, 64, cluster=2, depth=3, x_depth=3),
        32: WgmmaConfig(1, 2, 64, cluster=2, depth=4, x_depth=4),
        64: WgmmaConfig(1, 2, 64, cluster=2, depth=4, x_depth=4),
    },
    (7168, 2048): {
        16: WgmmaConfig(1, 4, 112, depth=2, x_depth=2),
        32: WgmmaConfig(1, 2, 112, depth=4, x_depth=4),
        64: WgmmaConfig(1, 4, 112, depth=2, x_depth=2),
    },
    (5120, 2944): {
        16: WgmmaConfig(3, 1, 27, cluster=4, depth=3, x_depth=3),
        32: WgmmaConfig(3, 1, 27, cluster=4, depth=3, x_depth=3),
        64: WgmmaConfig(1, 4, 80, depth=2, x_depth=2),
    },
    (12288, 4096): {
        16: WgmmaConfig(3, 1, 64, cluster=2, depth=6, x_depth=6),
        32: WgmmaConfig(1, 1, 192, cluster=2, depth=3, x_depth=2),
        64: WgmmaConfig(1, 1, 192, cluster=2, depth=2, x_depth=2),
    },
    (8192, 8192): {
        16: WgmmaConfig(1, 2, 128, cluster=2, depth=3, x_depth=3),
        32: WgmmaConfig(1, 4, 128, depth=2, x_depth=2),
        64: WgmmaConfig(1, 4, 128, depth=2, x_depth=2),
    },
}
"""(N, K) -> width -> the fastest of tests/gpu/w4a16_wgmma_sweep.py on an H200."""
