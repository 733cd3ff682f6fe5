"""Are the tensors of a quantized weight what their format says? Shapes and dtypes, from headers; one message each.

A weight is told by dtype and the shape of its scale plane, never by element size alone: producers store nibbles as I8
beside FP8 weights of one byte, both with a sibling scale.
"""

from __future__ import annotations

from typing import Final

from requant.convert.shards import TensorInfo
from requant.kernels.formats import MXFP4_GROUP, NVFP4_GROUP
from requant.manifests.errors import SourceError

__all__ = ["FLOATS", "check_fp8", "check_int4", "check_mxfp4", "check_nvfp4", "check_turned_int4", "place"]

FLOATS: Final = ("BF16", "F16", "F32")
WORD: Final = 8
"""INT4 codes in an I32."""
KNOWN_BLOCKS: Final = ((128, 128), (32, 32))
"""FP8 blocks of DeepSeek-V3/V4 and V4.1: tried where no config says the size."""


def place(tensor: TensorInfo) -> str:
    """File and name, as messages give them."""
    return f"{tensor.file}: {tensor.name}"


def _packed_shape(codes: TensorInfo, number: str) -> tuple[int, int]:
    """(N, K) of FP4 codes [N, K/2]. F4 [N, K] counts elements."""
    if len(codes.shape) != 2 or 0 in codes.shape:
        raise SourceError(
            f"packed {number} weight has shape {list(codes.shape)}, expected [N, K/2], not empty",
            where=place(codes),
            hint="name the right source.layout in the manifest",
        )
    rows, cols = codes.shape
    return rows, cols if codes.dtype == "F4" else cols * 2


def _scales_of(codes: TensorInfo, scales: TensorInfo | None, name: str) -> TensorInfo:
    if scales is None:
        raise SourceError(
            f"has no scale tensor {name}",
            where=place(codes),
            hint="a packed weight without its scales cannot be read: is a shard missing, or the layout another?",
        )
    return scales


def check_mxfp4(
    codes: TensorInfo, scales: TensorInfo | None, scale_name: str, scale_dtypes: tuple[str, ...]
) -> tuple[int, int]:
    """(N, K) of a packed MXFP4 weight [N, K/2] with scales [N, K/32], or SourceError. F4 [N, K] counts elements."""
    rows, cols = _packed_shape(codes, "MXFP4")
    scales = _scales_of(codes, scales, scale_name)
    if cols % MXFP4_GROUP:
        raise SourceError(
            f"K = {cols} is not a multiple of {MXFP4_GROUP}",
            where=place(codes),
            hint="not MXFP4: name the right source.layout in the manifest",
        )
    if scales.dtype not in scale_dtypes:
        raise SourceError(
            f"scale dtype is {scales.dtype}, expected {' or '.join(scale_dtypes)}",
            where=place(scales),
            hint="an E4M3 scale plane would be NVFP4: name the right source.layout in the manifest",
        )
    if scales.shape != (rows, cols // MXFP4_GROUP):
        raise SourceError(
            f"scale plane is {list(scales.shape)}, expected {[rows, cols // MXFP4_GROUP]} for codes "
            f"{list(codes.shape)} (one scale per {MXFP4_GROUP} along K)",
            where=place(scales),
            hint="a padded, swizzled or per-16 plane is not MXFP4: re-export the checkpoint in linear layout",
        )
    return rows, cols


def check_nvfp4(
    codes: TensorInfo, scales: TensorInfo | None, scalar: TensorInfo | None, names: tuple[str, str]
) -> tuple[int, int]:
    """(N, K) of an NVFP4 weight [N, K/2], E4M3 scales [N, K/16], one F32. names: of the two, for messages."""
    rows, cols = _packed_shape(codes, "NVFP4")
    scales = _scales_of(codes, scales, names[0])
    if cols % NVFP4_GROUP:
        raise SourceError(f"K = {cols} is not a multiple of {NVFP4_GROUP}", where=place(codes), hint="not NVFP4")
    if scales.dtype != "F8_E4M3" or scales.shape != (rows, cols // NVFP4_GROUP):
        raise SourceError(
            f"scale plane is {scales.dtype} {list(scales.shape)}, expected F8_E4M3 {[rows, cols // NVFP4_GROUP]}",
            where=place(scales),
            hint="a padded or swizzled plane is a runtime's own: re-export the checkpoint in linear layout",
        )
    if scalar is None:
        raise SourceError(
            f"has E4M3 block scales and no global scale {names[1]}",
            where=place(codes),
            hint="not NVFP4 as modelopt, Quark or compressed-tensors write it, or a shard is missing",
        )
    if scalar.dtype != "F32" or scalar.nbytes != 4:
        raise SourceError(
            f"is {scalar.dtype} {list(scalar.shape)}, expected one F32", where=place(scalar), hint="export it again"
        )
    return rows, cols


def check_fp8(
    codes: TensorInfo, scales: TensorInfo | None, scale_name: str, block: tuple[int, int] | None
) -> tuple[int, int]:
    """The (h, w) of the blocks that share a scale, of an E4M3 weight [N, K]: (N, K) per tensor, (1, K) per channel.

    block: weight_block_size of the config, or None. SourceError for a grid that fits neither it nor a known size.
    """
    if len(codes.shape) != 2 or 0 in codes.shape:
        raise SourceError(
            f"F8_E4M3 weight has shape {list(codes.shape)}, expected [N, K], not empty",
            where=place(codes),
            hint="name the right source.layout in the manifest",
        )
    if scales is None:
        raise SourceError(
            f"F8_E4M3 weight has no scale tensor {scale_name}",
            where=place(codes),
            hint="read without its scale it would be wrong by orders of magnitude: is a shard missing?",
        )
    rows, cols = codes.shape
    if scales.dtype not in (*FLOATS, "F8_E8M0", "U8"):
        raise SourceError(
            f"scale dtype is {scales.dtype}, expected F32, BF16, F16 or F8_E8M0",
            where=place(scales),
            hint="name the right source.layout in the manifest",
        )
    shape = scales.shape if len(scales.shape) != 4 else (scales.shape[0], scales.shape[2])  # modelopt FP8_PB_WO
    if block is not None and shape == _grid(rows, cols, block):
        return block
    if shape in ((), (1,), (1, 1)) and (block is None or len(shape) < 2):
        return rows, cols
    if block is None and shape in ((rows,), (rows, 1)):
        return 1, cols
    if block is None and cols % MXFP4_GROUP == 0 and shape == (rows, cols // MXFP4_GROUP):
        return 1, MXFP4_GROUP
    fits = [] if block is not None else [known for known in KNOWN_BLOCKS if shape == _grid(rows, cols, known)]
    if len(fits) == 1:
        return fits[0]
    wanted = f"blocks of {list(block)} need {list(_grid(rows, cols, block))}" if block else "no known block size fits"
    raise SourceError(
        f"scale grid is {list(scales.shape)} for a weight {list(codes.shape)}: {wanted}",
        where=place(scales),
        hint="weight_block_size in config.json must be that of the weights",
    )


def _grid(rows: int, cols: int, block: tuple[int, int]) -> tuple[int, int]:
    return -(-rows // block[0]), -(-cols // block[1])


def check_int4(
    codes: TensorInfo, scales: TensorInfo | None, zeros: TensorInfo | None, group: int | None
) -> tuple[int, int]:
    """(N, K) of compressed-tensors INT4: I32 [N, K/8], scales [N, groups], zeros I32 [N/8, groups] or none.

    group: group_size of the config; None or -1 where it does not say or means all of K.
    """
    if len(codes.shape) != 2 or 0 in codes.shape:
        raise SourceError(f"packed INT4 weight has shape {list(codes.shape)}, expected [N, K/8]", where=place(codes))
    scales = _scales_of(codes, scales, codes.name.removesuffix("_packed") + "_scale")
    rows, cols = codes.shape[0], codes.shape[1] * WORD
    groups = scales.shape[1] if len(scales.shape) == 2 else 0
    wanted = group if group and group > 0 else cols // groups if groups else 0
    if scales.dtype not in FLOATS or scales.shape[:1] != (rows,) or not groups or -(-cols // wanted) != groups:
        raise SourceError(
            f"scale plane is {scales.dtype} {list(scales.shape)} for codes {list(codes.shape)} in groups of {wanted}",
            where=place(scales),
            hint="compressed-tensors packs INT4 as [N, K/8] with one scale per group along K; group_size is config's",
        )
    if zeros is not None and (zeros.dtype != "I32" or zeros.shape != (-(-rows // WORD), groups)):
        raise SourceError(
            f"zero points are {zeros.dtype} {list(zeros.shape)}, expected I32 {[-(-rows // WORD), groups]}",
            where=place(zeros),
        )
    return rows, cols


def check_turned_int4(
    codes: TensorInfo, scales: TensorInfo | None, zeros: TensorInfo | None, order: TensorInfo | None, awq: bool
) -> tuple[int, int]:
    """(N, K) of GPTQ (codes [K/8, N]) or AWQ (codes [K, N/8]): scales [groups, N], zeros I32 [groups, N/8]."""
    module = codes.name.removesuffix(".qweight")
    if codes.dtype != "I32" or len(codes.shape) != 2 or 0 in codes.shape:
        expected = "[K, N/8]" if awq else "[K/8, N]"
        raise SourceError(f"is {codes.dtype} {list(codes.shape)}, expected I32 {expected}", where=place(codes))
    scales = _scales_of(codes, scales, f"{module}.scales")
    zeros = _scales_of(codes, zeros, f"{module}.qzeros")
    cols, rows = (codes.shape[0], codes.shape[1] * WORD) if awq else (codes.shape[0] * WORD, codes.shape[1])
    groups = scales.shape[0] if len(scales.shape) == 2 else 0
    if scales.dtype not in FLOATS or scales.shape[1:] != (rows,) or not groups or cols % groups:
        raise SourceError(
            f"scales are {scales.dtype} {list(scales.shape)} for a weight of {rows} x {cols}",
            where=place(scales),
            hint="expected one scale per group and output feature, [K/group, N]",
        )
    if zeros.dtype != "I32" or zeros.shape != (groups, rows // WORD) or rows % WORD:
        raise SourceError(
            f"zero points are {zeros.dtype} {list(zeros.shape)}, expected I32 {[groups, rows // WORD]}",
            where=place(zeros),
        )
    if order is not None and (order.dtype != "I32" or order.shape != (cols,)):
        raise SourceError(f"is {order.dtype} {list(order.shape)}, expected I32 {[cols]}", where=place(order))
    return rows, cols
