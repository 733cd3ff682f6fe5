"""Floats in tiles (decode.py) -> MXFP4, NVFP4, FP8, BF16: the units of a plan whose numbers are rounded.

A group that needs its weights twice (once for the amax, once to write) reads them twice; memory holds a tile.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from requant.convert.decode import amax_tiles, float_tiles, to_bf16
from requant.convert.files import write_all
from requant.convert.outputs import Accelerator, Places, scales_out, write_global, write_transposed
from requant.convert.plan import GroupUnit, Member
from requant.convert.rows import Opened
from requant.manifests.errors import SourceError

if TYPE_CHECKING:
    from requant.kernels.fp8 import Quotient
    from requant.kernels.quantize import ScaleChoice, Weight

__all__ = ["encode_group", "quantizer_choice"]


def encode_group(plan: Places, unit: GroupUnit, files: Opened, by: Accelerator | None) -> dict[str, Any]:
    """A fused group by way of floats: for NVFP4 first the amax that its members share."""
    from requant.convert.global_scales import shared_global_scale

    choice = quantizer_choice(unit.scale)
    number = unit.members[0].form.number
    s2 = by.encode(plan, unit, files) if by is not None else None
    written = s2 is not None
    if number == "nvfp4" and s2 is None:
        s2 = shared_global_scale(unit, _group_amax(unit, files), choice, files)
    weights = 0
    for member in unit.members:
        if written:
            pass
        elif number == "bf16":
            _write_bf16(plan, member, files)
        elif number == "fp8":
            _write_fp8(plan, member, files)
        else:
            _write_fp4(plan, member, s2, choice, unit, files)
        if s2 is not None:
            write_global(plan, member, s2, files)
        weights += member.form.rows * member.form.cols
    return {"group": unit.group, "weights": weights}


def _float_tiles(member: Member, files: Opened) -> Iterator[tuple[int, Weight]]:
    """(first row, values [n, K]) of a member; whole experts where its planes are written transposed."""
    tiles = float_tiles(member.weight, member.start, member.step, member.form.rows, files)
    return _whole_experts(member, tiles) if member.form.transposed else tiles


def _whole_experts(member: Member, tiles: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    """Tiles put together to one per expert."""
    per = member.form.rows // member.form.transposed
    parts: list[NDArray[Any]] = []
    for first, tile in tiles:
        parts.append(tile)
        if (first + len(tile)) % per == 0:
            yield first + len(tile) - per, np.concatenate(parts)
            parts = []


def _write_fp4(
    plan: Places, member: Member, s2: np.float32 | None, choice: ScaleChoice, unit: GroupUnit, files: Opened
) -> None:
    from requant.kernels.quantize import bf16_to_mxfp4, bf16_to_nvfp4

    importance, compensate = None, None
    if unit.calibration:
        from requant.convert.compensate import compensator, importance_of

        importance = importance_of(unit, member)
        compensate = compensator(unit, member)
    form, out_codes, out_scales = member.form, plan.tensors[member.out_codes], plan.tensors[scales_out(member)]
    code_fd, scale_fd = files.output(out_codes.shard), files.output(out_scales.shard)
    for first, tile in _float_tiles(member, files):
        codes = np.empty((tile.shape[0], form.cols // 2), dtype=np.uint8)
        scales = np.empty((tile.shape[0], out_scales.nbytes // form.rows), dtype=np.uint8)
        with _named(member, first):
            if s2 is None:
                bf16_to_mxfp4(tile, codes, scales)
            else:
                bf16_to_nvfp4(tile, s2, codes, scales, choice, importance)
        if compensate is not None:
            compensate(tile, scales, s2, codes)
        code_begin, scale_begin = out_codes.begin + first * codes.shape[1], out_scales.begin + first * scales.shape[1]
        if form.transposed:
            write_transposed(codes, code_fd, code_begin)
            write_transposed(scales, scale_fd, scale_begin)
        else:
            write_all(code_fd, codes, code_begin)
            write_all(scale_fd, scales, scale_begin)


def _write_bf16(plan: Places, member: Member, files: Opened) -> None:
    target, form = plan.tensors[member.out_codes], member.form
    fd = files.output(target.shard)
    bits = _bf16_tiles(member, files)
    for first, tile in _whole_experts(member, bits) if form.transposed else bits:
        write_all(fd, np.ascontiguousarray(tile.T if form.transposed else tile), target.begin + first * form.cols * 2)


def _bf16_tiles(member: Member, files: Opened) -> Iterator[tuple[int, NDArray[np.uint16]]]:
    for first, tile in float_tiles(member.weight, member.start, member.step, member.form.rows, files):
        with _named(member, first):
            bits = to_bf16(tile)
        yield first, bits


def _write_fp8(plan: Places, member: Member, files: Opened) -> None:
    """amax of every block first, then the codes."""
    from requant.kernels.fp8 import block_amax, encode_fp8, fp8_scales

    form, out_codes, out_scales = member.form, plan.tensors[member.out_codes], plan.tensors[scales_out(member)]
    high, wide = form.block
    grid = np.zeros((-(-form.rows // high), -(-form.cols // wide)), dtype=np.float32)
    for first, tile in _float_tiles(member, files):
        with _named(member, first):
            block_amax(tile, form.block, grid, first)
    scales = fp8_scales(grid)
    # modelopt divides a BF16 tensor by a 0-d scale: torch rounds that quotient to the tensor's own type
    scalar = out_scales.shape in ((), (1,))
    plain = member.weight.codes.dtype if member.weight.format == "plain" and scalar else ""
    narrow: dict[str, Quotient] = {"BF16": "bf16", "F16": "f16"}
    fd = files.output(out_codes.shard)
    for first, tile in _float_tiles(member, files):
        codes = np.empty(tile.shape, dtype=np.uint8)
        with _named(member, first):
            encode_fp8(tile, scales, form.block, codes, first, narrow.get(plain, "f32"))
        write_all(fd, codes, out_codes.begin + first * form.cols)
    write_all(files.output(out_scales.shard), scales.astype("<f4").tobytes(), out_scales.begin)


def _group_amax(unit: GroupUnit, files: Opened) -> float:
    largest = 0.0
    for member in unit.members:
        for first, measure in amax_tiles(member.weight, member.start, member.step, member.form.rows, files):
            with _named(member, first):
                largest = max(largest, measure())
    return largest


def quantizer_choice(scale: str) -> ScaleChoice:
    """A manifest's scale choice as the quantizers know it."""
    choices: dict[str, ScaleChoice] = {"mse": "mse", "weighted": "mse", "four-over-six": "four-over-six"}
    return choices.get(scale, "nearest")


@contextmanager
def _named(member: Member, first: int) -> Generator[None]:
    """Give a NaN or infinity that a quantizer met its place in the source."""
    from requant.kernels.quantize import NonFiniteError

    try:
        yield
    except NonFiniteError as error:
        tensor = member.weight.codes
        raise SourceError(
            f"value at row {member.start + (first + error.row) * member.step}, column {error.column} is NaN, infinite "
            f"or too large for {member.form.number.upper()}",
            where=f"{tensor.file}: {tensor.name}",
            hint="no code stands for it: the source is corrupt, or this layer must be kept",
        ) from error
