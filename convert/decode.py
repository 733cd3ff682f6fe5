"""Any source weight as tiles of rows in floating point: the one path from every format to every format.

    float_tiles(weight, start, step, n, files)       (first row, [count, K])

Plain weights come as they are stored (BF16 as its bits, F16, F32), all others in FP32, in tiles of about a million
weights, whatever the size of the tensor. The product of a code and its scale is exact in FP32 for INT4, MXFP4 and FP8
under F16, BF16 or power-of-two scales, and rounded once under an FP32 scale. Under compressed-tensors' reciprocal
global scale the block scale is divided by it first, as that library does, so that the numbers are those it computes.

`to_bf16` rounds such a tile to BF16, to nearest even.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray
from requant.convert.ggml import LARGEST_SCALE, planes_of
from requant.convert.layouts.base import Rows, SourceWeight
from requant.convert.rows import Opened, read_panel, read_rows, read_scalar, read_whole
from requant.convert.shards import TensorInfo
from requant.manifests.errors import SourceError

if TYPE_CHECKING:
    from requant.kernels.quantize import Weight

__all__ = ["amax_tiles", "code_rows", "float_tiles", "planes", "scale_grid", "scale_rows", "source_nbytes", "to_bf16"]

TILE_WEIGHTS: Final = 1 << 20
"""Weights decoded at a time: 4 MB of FP32."""
PANEL_WEIGHTS: Final = 4194304
"""Of a matrix that lies [K, N]: every line is a read of its own, and one of kilobytes costs as much as one of a few
hundred bytes. 8 MB of BF16."""
_STORED: Final = {"BF16": np.dtype("<u2"), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}
"""How the quantizers take each dtype: BF16 as its bits."""

Tile = tuple[int, "Weight"]


def code_rows(weight: SourceWeight, start: int, step: int, n: int) -> Rows:
    """The selected rows of the tensor of codes (or values), where it holds them as rows."""
    return Rows(weight.codes, weight.codes.nbytes // (weight.rows * max(weight.experts, 1)), start, step, n)


def scale_rows(weight: SourceWeight, start: int, step: int, n: int) -> Rows | None:
    """The selected rows of the block scales of an FP4 weight."""
    if weight.scales is None or weight.format not in ("mxfp4", "nvfp4"):
        return None
    return Rows(weight.scales, weight.scales.nbytes // (weight.rows * max(weight.experts, 1)), start, step, n)


def source_nbytes(weight: SourceWeight, n: int) -> int:
    """Bytes of source that n rows take, scales included."""
    total = weight.codes.nbytes
    for tensor in (weight.scales, weight.more.zeros):
        if tensor is not None:
            total += tensor.nbytes
    return total * n // (weight.rows * max(weight.experts, 1))


def float_tiles(weight: SourceWeight, start: int, step: int, n: int, files: Opened) -> Iterator[Tile]:
    """(first row, [count, K]) over n rows from `start`. A tile never crosses from one expert of a stack into the next.

    SourceError for scales that are no scales. Values that are not finite are the taker's to refuse.
    """
    if weight.format == "plain":
        per_tile = max((PANEL_WEIGHTS if weight.more.turned else TILE_WEIGHTS) // (weight.cols * step), 1)
    else:
        per_tile = max(TILE_WEIGHTS // weight.cols, 1)
    if weight.format in ("gptq", "awq"):
        per_tile = max(per_tile // 8, 1) * 8
    if weight.more.rotary:
        head = weight.rows // weight.more.rotary
        per_tile = max(per_tile // head, 1) * head
    read = _READERS[weight.format]
    for base in range(0, n, _rows_of_expert(weight, start, step, n)):
        stop = min(base + _rows_of_expert(weight, start, step, n), n)
        for first in range(base, stop, per_tile):
            count = min(per_tile, stop - first)
            yield first, read(weight, start + first * step, step, count, files)


def amax_tiles(
    weight: SourceWeight, start: int, step: int, n: int, files: Opened
) -> Iterator[tuple[int, Callable[[], float]]]:
    """(first row, what gives the tile's largest |w|, or NonFiniteError), over n rows from `start`.

    FP8 is not decoded for it: the largest byte of a block under its scale is the block's amax.
    """
    from requant.kernels.fp8 import encoded_amax
    from requant.kernels.quantize import amax

    if weight.format == "fp8":
        high, wide = weight.more.block
        per_tile = max(TILE_WEIGHTS * 2 // weight.cols, 1)
        for first in range(0, n, per_tile):
            count, at = min(per_tile, n - first), start + first
            values = read_rows(code_rows(weight, at, 1, count), files.source(weight.codes.file), 0, count)
            top, last = at // high, -(-(at + count) // high)
            grid = _grid(weight, files, top, last, -(-weight.cols // wide))
            yield first, partial(encoded_amax, values, grid, (high, wide), at - top * high)
    else:
        for first, tile in float_tiles(weight, start, step, n, files):
            yield first, partial(amax, tile)


def to_bf16(tile: NDArray[Any]) -> NDArray[np.uint16]:
    """BF16 bits, to nearest even, of a tile. NonFiniteError for a NaN, an infinity, or what BF16 cannot hold."""
    from requant.kernels.quantize import NonFiniteError

    if tile.dtype == np.uint16:
        bits = tile
    else:
        words = np.ascontiguousarray(tile, dtype=np.float32).view(np.uint32)
        odd = (words >> np.uint32(16)) & np.uint32(1)
        with np.errstate(over="ignore"):
            bits = ((words + (np.uint32(0x7FFF) + odd)) >> np.uint32(16)).astype(np.uint16)
        if not np.isfinite(tile).all():
            bits = np.where(np.isfinite(tile), bits, np.uint16(0x7F80))
    bad = (bits & np.uint16(0x7F80)) == np.uint16(0x7F80)
    if bad.any():
        row, column = (int(i[0]) for i in np.nonzero(bad))
        raise NonFiniteError(row, column)
    return bits


def _rows_of_expert(weight: SourceWeight, start: int, step: int, n: int) -> int:
    """How many of the selected rows lie in one expert: all, unless the whole stack is selected."""
    if not weight.experts or (start % weight.rows) + (n - 1) * step < weight.rows:
        return n
    return weight.rows


# --- one reader per format: rows at, at + step, ... of the stacked experts --------------------------------------------


def _plain(weight: SourceWeight, at: int, step: int, count: int, files: Opened) -> Weight:
    dtype: np.dtype[Any] = _STORED[weight.codes.dtype]
    if not weight.more.turned:
        rows = code_rows(weight, at, step, count)
        raw = read_rows(rows, files.source(weight.codes.file), 0, count)
        return _unrotated(weight, np.ascontiguousarray(raw).view(dtype))
    expert, row = divmod(at, weight.rows)
    size, span = dtype.itemsize, (count - 1) * step + 1
    panel = read_panel(
        weight.codes, files, weight.cols, weight.rows * size, (row * size, (row + span) * size), expert * weight.cols
    )
    return np.ascontiguousarray(panel.view(dtype)[:, ::step].T)


def _unrotated(weight: SourceWeight, tile: NDArray[Any]) -> Any:
    """Undo llama.cpp's rotary order: row 2i + s of a head is row s * d/2 + i of the model."""
    if not weight.more.rotary:
        return tile
    head = weight.rows // weight.more.rotary
    wide = tile.shape[1]
    return np.ascontiguousarray(tile.reshape(-1, head // 2, 2, wide).swapaxes(1, 2).reshape(-1, wide))


def _mxfp4(weight: SourceWeight, at: int, step: int, count: int, files: Opened) -> Weight:
    from requant.kernels.cpu_dequant import dequantize_mxfp4

    codes, scales = planes(weight, at, step, count, files)
    out = np.empty((count, weight.cols), dtype=np.float32)
    dequantize_mxfp4(codes, scales, out)
    return out


def _nvfp4(weight: SourceWeight, at: int, step: int, count: int, files: Opened) -> Weight:
    from requant.kernels.cpu_dequant import dequantize_nvfp4

    codes, scales = planes(weight, at, step, count, files)
    out = np.empty((count, weight.cols), dtype=np.float32)
    scalar = np.float32(1.0)
    if not weight.more.blocked:
        scalar = read_scalar(_needed(weight, weight.scalar), files, at // weight.rows)
    dequantize_nvfp4(codes, scales, scalar, out, reciprocal=weight.more.reciprocal)
    return out


def planes(
    weight: SourceWeight, at: int, step: int, count: int, files: Opened
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Codes [count, K/2] and block scales [count, K/group] of an FP4 weight, whole heads of one in rotary order.

    SourceError for a block scale of ggml's NVFP4 that is none.
    """
    codes = read_rows(code_rows(weight, at, step, count), files.source(weight.codes.file), 0, count)
    if weight.more.blocked:
        blocked, scales = (_unrotated(weight, part) for part in planes_of(codes, weight.format))
        if weight.format == "nvfp4" and scales.max(initial=0) > LARGEST_SCALE:
            row, block = (int(i[0]) for i in np.nonzero(scales > LARGEST_SCALE))
            raise _bad_scale(weight.codes, f"E4M3 scale {scales[row, block]}", at + row * step, block)
        return blocked, scales
    plane = scale_rows(weight, at, step, count)
    if plane is None:
        raise ValueError(f"{weight.module} has no block scales")
    scales = read_rows(plane, files.source(plane.tensor.file), 0, count)
    return np.ascontiguousarray(codes), np.ascontiguousarray(scales)


def _fp8(weight: SourceWeight, at: int, step: int, count: int, files: Opened) -> Weight:
    from requant.kernels.cpu_dequant import dequantize_fp8_block

    if step != 1:
        raise ValueError(f"{weight.module}: FP8 rows are read without gaps")
    values = read_rows(code_rows(weight, at, step, count), files.source(weight.codes.file), 0, count)
    high, wide = weight.more.block
    out = np.empty((count, weight.cols), dtype=np.float32)
    first, last = at // high, -(-(at + count) // high)
    grid = _grid(weight, files, first, last, -(-weight.cols // wide))
    dequantize_fp8_block(values, grid, (high, wide), out, at - first * high)
    return out


def _grid(weight: SourceWeight, files: Opened, first: int, last: int, across: int) -> NDArray[Any]:
    """Rows [first, last) of the scale grid: float32, or E8M0 bytes."""
    scales = _needed(weight, weight.scales)
    lines = -(-weight.rows // weight.more.block[0])
    rows = Rows(scales, scales.nbytes // lines, first, 1, last - first)
    raw = read_rows(rows, files.source(scales.file), 0, last - first)
    if scales.dtype in ("F8_E8M0", "U8"):
        if raw.max(initial=0) == 255:
            line, column = (int(i[0]) for i in np.nonzero(raw == 255))
            raise _bad_scale(scales, "E8M0 scale 255 (NaN)", first + line, column)
        return raw
    grid = _floats(raw, scales).reshape(last - first, across)
    if not (np.isfinite(grid) & (grid >= 0)).all():
        line, column = (int(i[0]) for i in np.nonzero(~(np.isfinite(grid) & (grid >= 0))))
        raise _bad_scale(scales, f"scale {grid[line, column]!r}", first + line, column)
    return grid


def scale_grid(weight: SourceWeight, files: Opened) -> NDArray[np.float32]:
    """All scales of an FP8 weight as float32, exact. SourceError for one that is no scale."""
    from requant.kernels.formats import E8M0_VALUES

    high, wide = weight.more.block
    grid = _grid(weight, files, 0, -(-weight.rows // high), -(-weight.cols // wide))
    return E8M0_VALUES[grid.astype(np.intp)] if grid.dtype == np.uint8 else grid


def _bad_scale(tensor: TensorInfo, what: str, line: int, column: int) -> SourceError:
    return SourceError(
        f"{what} at row {line}, column {column}",
        where=f"{tensor.file}: {tensor.name}",
        hint="the source is corrupt: download the shard again, or report it to its publisher",
    )


def _int4(weight: SourceWeight, at: int, step: int, count: int, files: Opened) -> Weight:
    """compressed-tensors: [N, K/8] words; zero points packed along N; the true shape stands in weight_shape."""
    from requant.kernels.int4 import decode_packed, unpack_zero_rows

    for shape in weight.more.extra:
        stated = read_whole(shape, files).view("<i8" if shape.dtype == "I64" else "<i4")
        if tuple(int(v) for v in stated) != (weight.rows, weight.cols):
            raise SourceError(
                f"says {[int(v) for v in stated]}, the packed weight holds {[weight.rows, weight.cols]}",
                where=f"{shape.file}: {shape.name}",
                hint="weights padded to whole words cannot be read",
            )
    words = read_rows(code_rows(weight, at, step, count), files.source(weight.codes.file), 0, count)
    plane = _needed(weight, weight.scales)
    rows = Rows(plane, plane.nbytes // weight.rows, at, step, count)
    scales = _floats(read_rows(rows, files.source(plane.file), 0, count), plane)
    groups = plane.shape[1]
    zeros = np.full(scales.shape, 8, dtype=np.float32)
    if weight.more.zeros is not None:
        first, last = at // 8, -(-(at + (count - 1) * step + 1) // 8)  # eight rows to a line of words
        lines = Rows(weight.more.zeros, groups * 4, first, 1, last - first)
        packed = read_rows(lines, files.source(weight.more.zeros.file), 0, last - first)
        unpacked = unpack_zero_rows(np.ascontiguousarray(packed).view("<u4"))
        zeros = unpacked[at - first * 8 :][: (count - 1) * step + 1 : step]
    group = -(-weight.cols // groups)
    if weight.more.order is not None:
        order = _order(weight, files, groups)
        scales, zeros, group = scales[:, order], zeros[:, order], 1
    out = np.empty((count, weight.cols), dtype=np.float32)
    decode_packed(np.ascontiguousarray(words).view("<u4"), scales, zeros, group, out)
    return out


def _turned_int4(weight: SourceWeight, at: int, step: int, count: int, files: Opened) -> Weight:
    """GPTQ and AWQ: a panel of output features out of a matrix that lies [K, N]."""
    from requant.kernels.int4 import decode_awq, decode_gptq, unpack_columns

    awq = weight.format == "awq"
    wide = -(-count // 8) * 8  # zero points come eight to a word
    plane, packed = _needed(weight, weight.scales), _needed(weight, weight.more.zeros)
    groups, item = plane.shape[0], _STORED[plane.dtype].itemsize
    order = _order(weight, files, groups)
    scales = _floats(read_panel(plane, files, groups, weight.rows * item, (at * item, (at + count) * item)), plane)
    zero_words = read_panel(packed, files, groups, weight.rows // 2, (at // 2, (at + wide) // 2))
    zeros = unpack_columns(zero_words.view("<u4"), awq)[:, :count] + np.float32(weight.more.offset)
    out = np.empty((count, weight.cols), dtype=np.float32)
    if awq:
        words = read_panel(weight.codes, files, weight.cols, weight.rows // 2, (at // 2, (at + wide) // 2))
        decode_awq(words.view("<u4"), scales, zeros, order, out)
    else:
        words = read_panel(weight.codes, files, weight.cols // 8, weight.rows * 4, (at * 4, (at + count) * 4))
        decode_gptq(words.view("<u4"), scales, zeros, order, out)
    return out


def _gguf(weight: SourceWeight, at: int, step: int, count: int, files: Opened) -> Weight:
    """ggml's blocks, by the package gguf."""
    from gguf import GGMLQuantizationType, quants

    rows = code_rows(weight, at, step, count)
    raw = np.ascontiguousarray(read_rows(rows, files.source(weight.codes.file), 0, count))
    kind = GGMLQuantizationType[weight.codes.dtype.partition(":")[2]]
    return _unrotated(weight, np.asarray(quants.dequantize(raw, kind), dtype=np.float32))


def _order(weight: SourceWeight, files: Opened, groups: int) -> NDArray[np.int64]:
    """[K]: the group of each input channel. SourceError for one that does not exist."""
    tensor = weight.more.order
    if tensor is None:
        return np.arange(weight.cols, dtype=np.int64) // (weight.cols // groups)
    order = read_whole(tensor, files).view("<i4").astype(np.int64)
    if order.size and not (int(order.min()) >= 0 and int(order.max()) < groups):
        raise SourceError(
            f"names group {int(order.max())} or {int(order.min())} of {groups}",
            where=f"{tensor.file}: {tensor.name}",
            hint="the source is corrupt: download the shard again",
        )
    return order


def _floats(raw: NDArray[np.uint8], tensor: TensorInfo) -> NDArray[np.float32]:
    """Scales of any float dtype as float32, exact."""
    values = np.ascontiguousarray(raw).view(_STORED[tensor.dtype])
    if tensor.dtype == "BF16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32)


def _needed(weight: SourceWeight, tensor: TensorInfo | None) -> TensorInfo:
    if tensor is None:
        raise ValueError(f"{weight.module} lacks a tensor of its format, {weight.format}")
    return tensor


_READERS: Final = {
    "plain": _plain,
    "mxfp4": _mxfp4,
    "nvfp4": _nvfp4,
    "fp8": _fp8,
    "int4": _int4,
    "gptq": _turned_int4,
    "awq": _turned_int4,
    "gguf": _gguf,
}
