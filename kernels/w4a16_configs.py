"""Which configuration W4A16 runs: a table of measured winners, and a rule for every other shape.

A configuration divides the work; it never changes which bytes are read, and the kernel is right under any of them. The
table (w4a16_h200.py) was measured on an H200. The rule is for any card: as many
blocks as row groups, K split among warps first, and never more shared memory than a block may have.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from requant.kernels import w4a16_wgmma_configs as wgmma
from requant.kernels.formats import NumberFormat
from requant.kernels.w4a16_division import Config
from requant.kernels.w4a16_h200 import H200_DENSE

__all__ = ["MAX_TOKENS", "WIDTHS", "Config", "alignment", "choose", "choose_grouped", "shared_bytes", "width_for"]

STAGE_K: Final = 256
"""kStageK of csrc/w4a16_types.cuh: k of one ring stage."""
TILE_ROWS: Final = 16
WIDTHS: Final = (1, 2, 4, 8, 16, 32, 64)
"""Token widths that are compiled in; M is rounded up to one."""
MAX_TOKENS: Final = WIDTHS[-1]
DENSE_WIDTH: Final = 8
"""kDenseTokens of csrc/w4a16_types.cuh: dense layers up to this width run csrc/w4a16_dense.cuh."""
GROUPED_WIDTH: Final = 16
"""kGroupedTileTokens of csrc/w4a16_types.cuh."""
STREAM_TOKENS: Final = 4
"""kStreamTokens of csrc/w4a16_types.cuh."""
SCALE_STAGES: Final = 4
"""kScaleStages of csrc/w4a16_stream_copies.cuh."""
SCALE16, SCALE8, SCALE4, GENERAL = range(4)
"""enum Alignment of csrc/w4a16_types.cuh."""
LONG_ROWS: Final = 1024
"""Rows for each multiprocessor from which on one block stays on each and walks them: an output head. 201088 x 2880 on
an H200: 97 us at M = 1 and 117 at M = 8, where blocks that come and go took 147 and 245."""
MAX_BLOCKS: Final = 65535
"""Of a grid's y: with more row groups than that, blocks take several in turn."""


def alignment(fmt: NumberFormat, k: int) -> int:
    """How far rows of block scales and codes are aligned in memory, as enum Alignment."""
    pitch = k // fmt.group
    for value, multiple in ((SCALE16, 16), (SCALE8, 8), (SCALE4, 4)):
        if pitch % multiple == 0 and k % 32 == 0:
            return value
    return GENERAL


def width_for(tokens: int) -> int:
    """The narrowest compiled width that holds `tokens` (1 .. 64) tokens."""
    return next(w for w in WIDTHS if w >= tokens)


def _ceil(value: int, by: int) -> int:
    return (value + by - 1) // by


def _up(value: int, multiple: int) -> int:
    return _ceil(value, multiple) * multiple


def shared_bytes(fmt: NumberFormat, k: int, width: int, config: Config, *, grouped: bool = False) -> int:
    """Shared memory per block, as csrc/w4a16.cu lays it out (it refuses a launch that does not fit)."""
    rows = TILE_ROWS * config.row_tiles
    scales = STAGE_K // fmt.group + (4 if alignment(fmt, k) == GENERAL else 0)
    slot = _up(rows * (STAGE_K // 2 + scales), 128)
    warps = config.column_warps * config.row_warps
    if width <= DENSE_WIDTH and not grouped:
        return warps * config.depth * slot + _dense_tail_bytes(k, width, config)
    most = _ceil(_ceil(_ceil(k, STAGE_K), config.cluster), config.column_warps)
    stages = config.x_stages if 0 < config.x_stages < most else most
    x_one = config.column_warps * STAGE_K * 2
    x = 2 * max(2 * stages, width) * x_one if grouped else width * stages * x_one
    sums = config.column_warps * width * (config.row_warps * rows + 4) * 4
    shares_space = not grouped and stages == most and width >= GROUPED_WIDTH
    start = _up(warps * config.depth * slot, 128)
    end = start + (max(x, sums) if shares_space else x + sums) + 2 * config.column_warps * MAX_TOKENS * 4
    return _up(end, 16) + 1024


def _dense_tail_bytes(k: int, width: int, config: Config) -> int:
    """What csrc/w4a16_dense.cuh has behind the ring: x, zeros, scales of x, the warps' sums, barriers, others' sums."""
    share, chunk = _ceil(_ceil(k, STAGE_K), config.cluster), config.x_stages * config.column_warps
    stages = chunk if 0 < chunk < share else share
    rows = config.row_warps * config.row_tiles * TILE_ROWS
    x, restore = stages * width * STAGE_K * 2, _up(stages * width * 4, 16)
    sums = config.column_warps * width * (rows + 4) * 4
    others = config.cluster * _ceil(width, config.cluster) * rows * 4 if config.cluster > 1 else 0
    barriers = _up((config.column_warps * config.row_warps * config.depth + 1) * 8, 16)
    return x + 1024 + restore + sums + barriers + others


def stream_shared_bytes(fmt: NumberFormat, k: int, config: Config) -> int:
    """Shared memory per block of a stream, as csrc/w4a16_stream_launch.cuh lays it out."""
    slots, stages, rows = config.row_warps * config.depth, _ceil(k, STAGE_K), TILE_ROWS * config.row_tiles
    scales = SCALE_STAGES * STAGE_K // fmt.group + (0 if alignment(fmt, k) == SCALE16 else 16)
    rings = slots * rows * (STAGE_K // 2 + scales)
    pieces = config.row_warps * 2 * STREAM_TOKENS * rows * 4
    return rings + STREAM_TOKENS * stages * STAGE_K * 2 + pieces + 2 * STREAM_TOKENS * 4 + 1024 + slots * 8


def split_shared_bytes(fmt: NumberFormat, k: int, config: Config) -> int:
    """Shared memory per block of csrc/w4a16_split.cuh: for each slot a tile, the warps' sums and two barriers."""
    row, scales = k // 2, k // fmt.group
    if row % 64 != 32:  # padded, long rows in two parts
        row, scales = row + (32 if row < STAGE_K * 8 else 64), scales + 16
    return config.depth * (TILE_ROWS * (row + scales) + config.column_warps * 512 + 16)


def shared_limit(capability: tuple[int, int]) -> int:
    """Most shared memory a block can have: 227 KB on SM90 and SM100, 163 on SM80 and SM87, 99 elsewhere."""
    if capability[0] in (9, 10):
        return 227 * 1024
    return 163 * 1024 if capability in ((8, 0), (8, 7)) else 99 * 1024


def row_groups(n: int, config_rows: int) -> int:
    """Units of one weight."""
    return _ceil(n, config_rows)


def choose(
    fmt: NumberFormat, tokens: int, n: int, k: int, *, capability: tuple[int, int] = (9, 0), processors: int = 132
) -> Config | wgmma.WgmmaConfig:
    """The configuration for a dense layer with `tokens` <= 64 tokens, and with its type the kernel."""
    if wgmma.applies(fmt, tokens, k, capability):
        return wgmma.choose(fmt, tokens, n, k, processors=processors)
    width = width_for(tokens)
    if fmt is NumberFormat.NVFP4 and capability == (9, 0):
        measured = H200_DENSE.get((n, k), {}).get(width)
        if measured is not None:
            return measured
    limit, stages = shared_limit(capability), _ceil(k, STAGE_K)
    stays = Config(1, 16, processors)
    if width < GROUPED_WIDTH and n >= LONG_ROWS * processors and shared_bytes(fmt, k, width, stays) <= limit:
        return stays
    splits = ((4, 2), (2, 4), (2, 2), (1, 4), (1, 2)) if width < GROUPED_WIDTH else ((2, 4), (2, 2), (1, 4), (1, 2))
    clusters = (1, 2) if capability[0] == 9 and width >= GROUPED_WIDTH else (1,)
    for x_stages in (0, 4, 2, 1):
        for cluster in reversed(clusters):
            for column_warps, row_warps in splits:
                if column_warps * cluster > stages and (column_warps, row_warps) != splits[-1]:
                    continue
                blocks = row_groups(n, TILE_ROWS * row_warps)
                if blocks > MAX_BLOCKS and cluster > 1:
                    continue  # a cluster's blocks do one row group each
                blocks = min(blocks, MAX_BLOCKS)
                config = Config(column_warps, row_warps, blocks, cluster, x_stages)
                if shared_bytes(fmt, k, width, config) <= limit:
                    return config
    raise ValueError(f"no configuration of {limit} bytes of shared memory for M={tokens}, N={n}, K={k}")


RESIDENT: Final = 3
"""Config.stream of csrc/w4a16_dense_resident.cuh."""
LONG_STREAM: Final = Config(1, 8, 0, row_tiles=2, depth=3, stream=1)
SHORT_STREAM: Final = Config(1, 12, 0, depth=4, stream=1)
"""The streams that are compiled in (SHORT_STREAM for SCALE16 only); `blocks` is the card's."""


SPLIT: Final = 2
"""Config.stream of csrc/w4a16_split.cuh."""
SPLITS: Final = {
    2048: Config(8, 1, 0, depth=4, stream=SPLIT),
    2880: Config(15, 1, 0, depth=4, stream=SPLIT),
    4096: Config(16, 1, 0, depth=3, stream=SPLIT),
}
"""K -> the kernel of csrc/w4a16_split.cuh that is compiled in for it, in both formats; `blocks` is the card's."""


def choose_grouped(
    fmt: NumberFormat,
    slots: int,
    n: int,
    k: int,
    *,
    experts: int,
    capability: tuple[int, int] = (9, 0),
    processors: int = 132,
) -> Config:
    """The configuration for a grouped GEMM: a stream where there is one, else blocks that each walk units of rows.

    A stream needs the bulk copy engine (SM90 on) and few tokens per expert on average (tile_tokens of
    w4a16_library.py): it passes over an expert's weights once for every four of them. First csrc/w4a16_split.cuh, where
    K is one of SPLITS and an expert's block scales are whole 16-byte pieces; it was measured from 5 tiles a
    multiprocessor on. Else csrc/w4a16_stream.cuh: below 16 tiles a multiprocessor its start costs more than it saves;
    from 128 on, two row tiles per warp beat more warps. The limits are those of sweeps on an H200.
    """
    at, tiles = alignment(fmt, k), slots * row_groups(n, TILE_ROWS)
    split = SPLITS.get(k)
    if (
        split is not None
        and capability >= (9, 0)
        and slots <= 2 * experts
        and n * (k // fmt.group) % 16 == 0
        and tiles >= 4 * processors
        and split_shared_bytes(fmt, k, split) <= shared_limit(capability)
    ):
        return replace(split, blocks=processors)
    # Its 16-byte pieces reach past the end of a row of block scales; below 512 k also past the tensor's, if N % 32 > 0.
    whole_pieces = at == SCALE16 or (at != GENERAL and k >= 512 and n * (k // fmt.group) % 16 == 0)
    if capability >= (9, 0) and slots <= 2 * experts and whole_pieces and tiles >= 16 * processors:
        stream = SHORT_STREAM if at == SCALE16 and tiles < 128 * processors else LONG_STREAM
        for config in (replace(stream, blocks=processors), replace(LONG_STREAM, blocks=processors)):
            if stream_shared_bytes(fmt, k, config) <= shared_limit(capability):
                return config
    return _choose_blocks(fmt, slots, n, k, capability, processors)


def _choose_blocks(
    fmt: NumberFormat, slots: int, n: int, k: int, capability: tuple[int, int], processors: int
) -> Config:
    """Blocks that stay, one or two to a multiprocessor, each walking units.

    Eight row warps are fastest once every block has a few units; with fewer, smaller units spread better. The limits
    are those of the sweep on an H200, as fractions of the blocks that are resident at once.
    """
    limit, resident = shared_limit(capability), 2 * processors
    units = slots * row_groups(n, TILE_ROWS * 8)
    if units >= 2 * resident:
        preferred = (1, 8, 2)
    elif 5 * units >= 2 * resident:
        preferred = (1, 6, 2)
    else:
        preferred = (2, 6, 1)
    for column_warps, row_warps, per_processor in (preferred, (1, 8, 2), (1, 4, 2), (1, 4, 1), (1, 2, 1)):
        config = Config(column_warps, row_warps, processors * per_processor)
        used = shared_bytes(fmt, k, GROUPED_WIDTH, config, grouped=True)
        if used <= limit and per_processor * (used + 1024) <= limit + 1024:
            return config
    for x_stages in (4, 2, 1):  # a K so long that two tokens of it do not fit
        config = Config(1, 2, processors, x_stages=x_stages)
        if shared_bytes(fmt, k, GROUPED_WIDTH, config, grouped=True) <= limit:
            return config
    raise ValueError(f"no configuration of {limit} bytes of shared memory for N={n}, K={k}")
