"""Run one unit of a plan: read its source ranges, compute, write at the planned offsets.

Memory is bounded by a tile, whatever the size of the weight: scale planes and codes pass through in row tiles, and a
group that needs its codes twice (once to decide, once to write) reads them twice.

| unit      | what happens                                                                              |
|-----------|-------------------------------------------------------------------------------------------|
| copy      | bytes, rows of bytes, constants                                                           |
| repack    | MXFP4 -> NVFP4 in integers (kernels/repack.py)                                            |
| relayout  | the same format under other names: codes copied, scales copied, widened or turned over      |
| share     | the same, with block scales moved by powers of two under one global scale (shared_scales.py) |
| encode    | anything -> floats in tiles -> MXFP4, NVFP4, FP8, BF16 (encode.py)                        |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from requant.convert.activation_scales import carried_scales
from requant.convert.decode import planes, scale_grid
from requant.convert.encode import encode_group
from requant.convert.files import copy_range, write_all
from requant.convert.layouts.base import Rows
from requant.convert.outputs import Accelerator, Places, scales_out, write_global, write_scalar, write_transposed
from requant.convert.plan import CopyUnit, GroupUnit, Member, OutTensor, Unit
from requant.convert.rows import TILE_BYTES, Opened, read_rows, read_scalar, row_tiles
from requant.convert.scalars import turned_over
from requant.convert.shards import TensorInfo
from requant.kernels.formats import E8M0_BIAS, E8M0_NAN_BYTE, NVFP4_GROUP
from requant.kernels.repack import (
    Choice,
    Counts,
    choose_exponent,
    find_nan_scale,
    global_scale,
    window_exponent,
    window_scales,
)
from requant.manifests.errors import SourceError

if TYPE_CHECKING:
    pass

__all__ = ["run_unit", "scale_tiles"]


def run_unit(plan: Places, unit: Unit, files: Opened, by: Accelerator | None = None) -> dict[str, Any]:
    """Do one unit; what it counted goes into the journal. SourceError on bad source bytes, OSError from the disk.

    by: what computes in place of this processor, for a unit that it takes.
    """
    if isinstance(unit, CopyUnit):
        for piece in unit.pieces:
            _copy(plan.tensors[piece.out], piece.source, files)
        return {}
    for out, scale in carried_scales(unit.members, unit.kind != "relayout", files):
        write_scalar(plan, out, scale, files)
    if any(member.weight.more.blocked for member in unit.members):
        by = None  # it reads planes
    if unit.kind == "repack":
        return _repack(plan, unit, files, by)
    if unit.kind in ("relayout", "share"):
        return _relayout(plan, unit, files)
    return encode_group(plan, unit, files, by)


def _copy(target: OutTensor, source: TensorInfo | Rows | bytes, files: Opened) -> None:
    fd = files.output(target.shard)
    if isinstance(source, bytes):
        write_all(fd, source, target.begin)
    elif isinstance(source, TensorInfo):
        _copy_bytes(source.file, source.begin, source.nbytes, fd, target.begin, files)
    else:
        _copy_rows(source, fd, target.begin, files)


def _copy_bytes(file: str, begin: int, nbytes: int, fd: int, begin_out: int, files: Opened) -> None:
    copy_range(files.source(file), fd, nbytes, begin_in=begin, begin_out=begin_out, file=file)


def _copy_rows(rows: Rows, fd: int, begin: int, files: Opened) -> None:
    """Rows of a source tensor, side by side in the output."""
    file = rows.tensor.file
    if rows.contiguous:
        _copy_bytes(file, rows.begin, rows.nbytes, fd, begin, files)
        return
    for first, tile in row_tiles(rows, files):
        write_all(fd, np.ascontiguousarray(tile), begin + first * rows.row_bytes)


# --- MXFP4 -> NVFP4 ---------------------------------------------------------------------------------------------------


def _repack(plan: Places, unit: GroupUnit, files: Opened, by: Accelerator | None) -> dict[str, Any]:
    low, high = _scale_range(unit, files)
    m = window_exponent(low, high)
    if m is not None:
        counts, spans = _repack_in_window(plan, unit, files, m), (low - E8M0_BIAS, high - E8M0_BIAS)
    else:
        if by is not None:
            choice, counts = by.repack(plan, unit, files)
        else:
            choice = _choose(unit, files)
            counts = _repack_by_halves(plan, unit, files, choice.m)
        m, spans = choice.m, (choice.k_min, choice.k_max)
    scalar = global_scale(m)
    for member in unit.members:
        write_global(plan, member, scalar, files)
    return {
        "group": unit.group,
        "m": m,
        "k": spans,
        "exact": counts.exact,
        "shifted": counts.shifted,
        "lossy": counts.lossy,
        "below_marlin": counts.below_marlin,
    }


def _planes(member: Member) -> Rows:
    scales = member.scales
    if scales is None:
        raise ValueError(f"{member.module} has no block scales")
    return scales


def _scale_range(unit: GroupUnit, files: Opened) -> tuple[int, int]:
    """Smallest and largest E8M0 byte of the group. SourceError names the first NaN scale."""
    low, high = E8M0_NAN_BYTE, 0
    for member in unit.members:
        for _, tile in scale_tiles(member, files):
            low, high = min(low, int(tile.min())), max(high, int(tile.max()))
    return low, high


def scale_tiles(member: Member, files: Opened) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """(first row, E8M0 bytes [n, K/32]) of a member's scale plane. SourceError names the first NaN scale."""
    if member.weight.more.blocked:
        tiles = ((first, scales) for first, _, scales in _code_tiles(member, files))
    else:
        tiles = row_tiles(_planes(member), files)
    for first, tile in tiles:
        if tile.max() == E8M0_NAN_BYTE:
            _refuse_nan(member, first, tile)
        yield first, tile


def _refuse_nan(member: Member, first: int, tile: NDArray[np.uint8]) -> None:
    hit = find_nan_scale(tile)
    if hit is not None:
        tensor = member.weight.scales or member.weight.codes
        row = member.start + (first + hit[0]) * member.step
        raise SourceError(
            f"E8M0 scale 255 (NaN) at row {row}, block {hit[1]}",
            where=f"{tensor.file}: {tensor.name}",
            hint="the source is corrupt: download the shard again, or report it to its publisher",
        )


def _repack_in_window(plan: Places, unit: GroupUnit, files: Opened, m: int) -> Counts:
    """Step 1: codes copied as bytes, each scale byte becomes two by arithmetic."""
    blocks = 0
    for member in unit.members:
        target = plan.tensors[scales_out(member)]
        fd = files.output(target.shard)
        if member.weight.more.blocked:
            _write_planes(plan, member, files, lambda tile: window_scales(tile, m))
        elif member.form.transposed:
            _transpose(plan, member, files, m)
        else:
            scales = _planes(member)
            for first, tile in row_tiles(scales, files):
                write_all(fd, window_scales(tile, m), target.begin + first * scales.row_bytes * 2)
            codes = plan.tensors[member.out_codes]
            _copy_rows(member.codes, files.output(codes.shard), codes.begin, files)
        blocks += member.form.rows * (member.form.cols // NVFP4_GROUP)
    return Counts(exact=blocks)


def _write_planes(
    plan: Places, member: Member, files: Opened, scales_of: Callable[[NDArray[np.uint8]], NDArray[np.uint8]]
) -> None:
    """Codes as they are, scales as scales_of makes them, of a source that holds them together."""
    out_codes, out_scales = plan.tensors[member.out_codes], plan.tensors[scales_out(member)]
    for first, codes, tile in _code_tiles(member, files):
        scales = scales_of(tile)
        write_all(files.output(out_codes.shard), codes, out_codes.begin + first * codes.shape[1])
        write_all(files.output(out_scales.shard), scales, out_scales.begin + first * scales.shape[1])


def _transpose(plan: Places, member: Member, files: Opened, m: int) -> None:
    """Stacked experts, planes written [K/.., N]: one expert at a time, codes and scales alike."""
    codes, scales = member.codes, _planes(member)
    out_codes, out_scales = plan.tensors[member.out_codes], plan.tensors[scales_out(member)]
    rows = member.form.rows // member.form.transposed
    for expert in range(member.form.transposed):
        plane = window_scales(read_rows(scales, files.source(scales.tensor.file), expert * rows, rows), m)
        write_transposed(plane, files.output(out_scales.shard), out_scales.begin + expert * plane.size)
        block = read_rows(codes, files.source(codes.tensor.file), expert * rows, rows)
        write_transposed(block, files.output(out_codes.shard), out_codes.begin + expert * block.size)


def _code_tiles(member: Member, files: Opened) -> Iterator[tuple[int, NDArray[np.uint8], NDArray[np.uint8]]]:
    """(first row, codes [n, K/2], scales [n, K/32]) in tiles; a transposed member goes expert by expert."""
    weight, codes = member.weight, member.codes
    per_tile = max(TILE_BYTES // (codes.row_bytes * codes.step), 1)
    if member.form.transposed:
        per_tile = member.form.rows // member.form.transposed
    if weight.more.rotary:
        head = weight.rows // weight.more.rotary
        per_tile = max(per_tile // head, 1) * head
    for first in range(0, member.form.rows, per_tile):
        count = min(per_tile, member.form.rows - first)
        yield first, *planes(weight, member.start + first * member.step, member.step, count, files)


def _choose(unit: GroupUnit, files: Opened) -> Choice:
    """Step 2's first pass: the census of halves over the whole group decides m."""
    from requant.kernels import repack_jit

    hist = np.zeros((256, 4, 4, 2), dtype=np.int64)
    for member in unit.members:
        for _, codes, scales in _code_tiles(member, files):
            repack_jit.half_census(codes, scales, hist)

    def lossy_cost(m: int) -> tuple[int, NDArray[np.int64]]:
        error = np.zeros(256, dtype=np.int64)
        below = 0
        for member in unit.members:
            for _, codes, scales in _code_tiles(member, files):
                below += repack_jit.lossy_error(codes, scales, m, error)
        return below, error

    return choose_exponent(hist, lossy_cost)


def _repack_by_halves(plan: Places, unit: GroupUnit, files: Opened, m: int) -> Counts:
    """Step 2's second pass: every 16-half as it is, exactly shifted, or re-encoded."""
    from requant.kernels import repack_jit

    counts = np.zeros(4, dtype=np.int64)
    for member in unit.members:
        out_codes, out_scales = plan.tensors[member.out_codes], plan.tensors[scales_out(member)]
        code_fd, scale_fd = files.output(out_codes.shard), files.output(out_scales.shard)
        for first, codes, scales in _code_tiles(member, files):
            new_codes = np.empty_like(codes)
            new_scales = np.empty((codes.shape[0], codes.shape[1] * 2 // NVFP4_GROUP), dtype=np.uint8)
            repack_jit.repack_tile(codes, scales, m, new_codes, new_scales, counts)
            code_begin = out_codes.begin + first * new_codes.shape[1]
            scale_begin = out_scales.begin + first * new_scales.shape[1]
            if member.form.transposed:
                write_transposed(new_codes, code_fd, code_begin)
                write_transposed(new_scales, scale_fd, scale_begin)
            else:
                write_all(code_fd, new_codes, code_begin)
                write_all(scale_fd, new_scales, scale_begin)
    return Counts(*(int(n) for n in counts))


# --- the same numbers under other names -------------------------------------------------------------------------------


def _relayout(plan: Places, unit: GroupUnit, files: Opened) -> dict[str, Any]:
    """Codes and block scales byte for byte; the global scale as it is, or turned over."""
    from requant.convert.shared_scales import shared_scale

    weights = 0
    shared = shared_scale(unit, files) if unit.kind == "share" else None
    for number, member in enumerate(unit.members):
        codes, plane = plan.tensors[member.out_codes], plan.tensors[scales_out(member)]
        if member.weight.more.blocked:
            _write_planes(plan, member, files, lambda tile: tile)
        elif member.form.transposed:
            _transpose_planes(plan, member, files)
        elif member.form.number == "fp8":
            _copy_rows(member.codes, files.output(codes.shard), codes.begin, files)
            grid = scale_grid(member.weight, files)
            write_all(files.output(plane.shard), grid.astype("<f4").tobytes(), plane.begin)
        else:
            _copy_rows(member.codes, files.output(codes.shard), codes.begin, files)
            if shared is None:
                _copy_rows(_planes(member), files.output(plane.shard), plane.begin, files)
            else:
                for first, tile in row_tiles(_planes(member), files):
                    moved = shared.tables[number][tile]
                    write_all(files.output(plane.shard), moved, plane.begin + first * tile.shape[1])
        if member.weight.more.blocked and member.out_global is not None:  # ggml's NVFP4 has no second scale
            write_scalar(plan, member.out_global, np.float32(1.0), files)
        elif member.weight.scalar is not None and member.out_global is not None:
            own = read_scalar(member.weight.scalar, files, member.start // member.weight.rows)
            scalar = own if shared is None else shared.stored
            turn = member.weight.more.reciprocal != member.form.reciprocal
            write_scalar(plan, member.out_global, turned_over(scalar) if turn else scalar, files)
        weights += member.form.rows * member.form.cols
    return {"group": unit.group, "copied": weights} | ({"shared": shared.moved} if shared else {})


def _transpose_planes(plan: Places, member: Member, files: Opened) -> None:
    """A stack's planes, expert by expert."""
    for rows, out in ((member.codes, member.out_codes), (_planes(member), scales_out(member))):
        target, per = plan.tensors[out], rows.n_rows // member.form.transposed
        for expert in range(member.form.transposed):
            block = read_rows(rows, files.source(rows.tensor.file), expert * per, per)
            write_transposed(block, files.output(target.shard), target.begin + expert * block.size)
