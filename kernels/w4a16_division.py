"""How one launch of W4A16 divides its work among clusters, blocks and warps: the numbers that a launch takes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final

__all__ = ["DEPTH", "Config"]

DEPTH: Final = 3
"""Ring stages of the variants that exist for every width, format and alignment."""


@dataclass(frozen=True, slots=True)
class Config:
    """How one launch divides the work.

    row_tiles, depth: the compiled variant (16-row tiles per warp, ring stages). column_warps x row_warps warps to
    a block. cluster: blocks that split K (1, 2, 4, 8; SM90 on). x_stages: stages of x per column warp in shared memory
    at a time, 0 for all. blocks: blocks (times cluster) in the grid. stream: 0 is csrc/w4a16_dense.cuh (dense, up to
    8 tokens) or csrc/w4a16_core.cuh; 1 (grouped only) csrc/w4a16_stream.cuh: row_warps warps, one block to a
    multiprocessor; 2 (grouped, K of SPLITS) csrc/w4a16_split.cuh: column_warps warps that share each tile's K;
    3 (dense, one token) csrc/w4a16_dense_resident.cuh: a column warp for each stage of K, depth and row_warps are 1.
    """

    column_warps: int
    row_warps: int
    blocks: int
    cluster: int = 1
    x_stages: int = 0
    row_tiles: int = 1
    depth: int = DEPTH
    stream: int = 0

    def launch_fields(self) -> dict[str, int]:
        """Fields of RequantCall (csrc/w4a16.cu)."""
        return asdict(self)
