"""How a converted weight is named and cut up in the output.

A writing layout turns one source weight into parts: rows of the source, the output tensors' names, dtypes and shapes,
and the key of the fused group whose members share a global scale. It knows no offsets and no numbers. A large checkpoint
has a million output tensors and a dozen kinds of them, so what depends on the shape alone is made once and shared.

| layout             | NVFP4                                                                                  |
|--------------------|----------------------------------------------------------------------------------------|
| modelopt           | `X.weight` U8 [N, K/2], `.weight_scale` E4M3 [N, K/16], `.weight_scale_2`, `.input_scale` F32 [] |
| modelopt, stacked  | `X` U8 [E, K/2, N], `X_weight_scale` E4M3 [E, K/16, N], `X_weight_scale_2`, `X_input_scale` F32 []: what modelopt writes for gpt-oss |
| modelopt-experts   | the stack cut into `...experts.E.{gate,up,down}_proj`, rows de-interleaved, biases too  |
| compressed-tensors | `X.weight_packed`, `.weight_scale`, `.weight_global_scale` = 1/s2, `.input_global_scale` = 1/input_scale, F32 [1] |

Gate and up stay under their own names: which of them a kernel wants first is the runtime's affair, not the file's.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Final, NamedTuple

from requant.convert.layouts.base import Rows, SourceWeight
from requant.convert.shards import nbytes_of
from requant.kernels.formats import MXFP4_GROUP, NVFP4_GROUP
from requant.manifests.errors import UsageError

__all__ = ["FUSED_SETS", "Bias", "Form", "Leaf", "Part", "fuse_key", "leaf_of", "parts_of"]

FUSED_SETS: Final[tuple[tuple[str, ...], ...]] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
"""Modules that vLLM 0.32 and SGLang 0.5.23 load into one tensor (packed_modules_mapping), so one global scale."""

_SET_OF: Final = {leaf: "+".join(group) for group in FUSED_SETS for leaf in group}


def fuse_key(module: str) -> str:
    """The name of the fused group of `module`: equal for modules that must share a global scale."""
    parent, dot, leaf = module.rpartition(".")
    return f"{parent}{dot}{_SET_OF.get(leaf, leaf)}"


class Leaf(NamedTuple):
    """An output tensor but for its module: the name is module + suffix. Shared by all modules of one shape."""

    suffix: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@lru_cache(maxsize=4096)  # many modules, few shapes
def leaf_of(suffix: str, dtype: str, shape: tuple[int, ...]) -> Leaf:
    """The leaf with its size."""
    return Leaf(suffix, dtype, shape, nbytes_of(dtype, shape))


class Form(NamedTuple):
    """What every weight of one shape becomes: [rows N, cols K] and its output tensors.

    transposed: experts of a stack whose planes are written [E, K/2, N]; 0 for the ordinary [N, K/2]. reciprocal:
    scalars are written as 1/x.
    """

    rows: int
    cols: int
    codes: Leaf
    scales: Leaf
    global_scale: Leaf | None
    input_scale: Leaf | None
    reciprocal: bool = False
    transposed: int = 0


class Bias(NamedTuple):
    """A stacked bias's share of one part: elements of the source tensor, as rows of one element."""

    source: Rows
    leaf: Leaf


class Part(NamedTuple):
    """One output weight: its module, fused group and form, and the source rows of its codes (or plain values) and
    scales (None for a plain source)."""

    module: str
    group: str
    form: Form
    codes: Rows
    scales: Rows | None
    bias: Bias | None = None


def parts_of(weight: SourceWeight, target: str, layout: str, with_input_scale: bool) -> Iterator[Part]:
    """The output weights of `weight` under target format `nvfp4` or `mxfp4` and writing layout `layout`."""
    if weight.experts and layout == "modelopt":
        yield _stacked(weight, target, with_input_scale)
    elif weight.experts and layout == "modelopt-experts":
        yield from _per_expert(weight, target, with_input_scale)
    elif weight.experts:
        raise UsageError(
            f"target.layout {layout} cannot hold stacked experts",
            where=weight.module,
            hint="use layout modelopt-experts (one module per expert) or modelopt (stacked, as modelopt writes it)",
        )
    else:
        form = _form(weight.rows, weight.cols, target, layout == "compressed-tensors", with_input_scale)
        yield Part(weight.module, fuse_key(weight.module), form, *_rows(weight, 0, 1, weight.rows))


def _rows(weight: SourceWeight, start: int, step: int, count: int) -> tuple[Rows, Rows | None]:
    """Source rows of codes (or plain values) and scales."""
    total = weight.rows * max(weight.experts, 1)
    codes = Rows(weight.codes, weight.codes.nbytes // total, start, step, count)
    if weight.scales is None:
        return codes, None
    return codes, Rows(weight.scales, weight.scales.nbytes // total, start, step, count)


@lru_cache(maxsize=4096)
def _form(rows: int, cols: int, target: str, compressed: bool, with_input_scale: bool) -> Form:
    """An ordinary weight under compressed-tensors' names, or modelopt's."""
    nvfp4 = target == "nvfp4"
    plane = (rows, cols // (NVFP4_GROUP if nvfp4 else MXFP4_GROUP))
    scalar: tuple[int, ...] = (1,) if compressed else ()
    return Form(
        rows=rows,
        cols=cols,
        codes=leaf_of(".weight_packed" if compressed else ".weight", "U8", (rows, cols // 2)),
        scales=leaf_of(".weight_scale", "F8_E4M3" if nvfp4 else "U8", plane),
        global_scale=leaf_of(".weight_global_scale" if compressed else ".weight_scale_2", "F32", scalar)
        if nvfp4
        else None,
        input_scale=leaf_of(".input_global_scale" if compressed else ".input_scale", "F32", scalar)
        if nvfp4 and with_input_scale
        else None,
        reciprocal=compressed,
    )


def _stacked(weight: SourceWeight, target: str, with_input_scale: bool) -> Part:
    """gpt-oss as modelopt 0.47 exports it: planes transposed to [E, K/.., N], one scalar for all experts."""
    if target != "nvfp4":
        raise UsageError("only NVFP4 is written in the stacked layout", where=weight.module, hint="keep this weight")
    experts, rows, cols, module = weight.experts, weight.rows, weight.cols, weight.module
    bias = None
    if weight.bias is not None:
        leaf = leaf_of(weight.bias.name.removeprefix(module), weight.bias.dtype, weight.bias.shape)
        bias = Bias(Rows(weight.bias, weight.bias.nbytes, 0, 1, 1), leaf)
    form = Form(
        rows=experts * rows,
        cols=cols,
        codes=leaf_of("", "U8", (experts, cols // 2, rows)),
        scales=leaf_of("_weight_scale", "F8_E4M3", (experts, cols // NVFP4_GROUP, rows)),
        global_scale=leaf_of("_weight_scale_2", "F32", ()),
        input_scale=leaf_of("_input_scale", "F32", ()) if with_input_scale else None,
        transposed=experts,
    )
    return Part(module, module, form, *_rows(weight, 0, 1, experts * rows), bias)


def _per_expert(weight: SourceWeight, target: str, with_input_scale: bool) -> Iterator[Part]:
    """The stack cut into modules; of interleaved rows the even ones are gate, the odd ones up."""
    base = weight.module.rpartition(".")[0]
    leaves = ("gate_proj", "up_proj") if weight.interleaved else (weight.module.rpartition(".")[2],)
    step, per_leaf = len(leaves), weight.rows // len(leaves)
    form = _form(per_leaf, weight.cols, target, False, with_input_scale)
    for expert in range(weight.experts):
        for offset, leaf in enumerate(leaves):
            start = expert * weight.rows + offset
            module = f"{base}.{expert}.{leaf}"
            bias = None
            if weight.bias is not None:
                element = weight.bias.nbytes // (weight.experts * weight.rows)
                source = Rows(weight.bias, element, start, step, per_leaf)
                bias = Bias(source, leaf_of(".bias", weight.bias.dtype, (per_leaf,)))
            yield Part(module, fuse_key(module), form, *_rows(weight, start, step, per_leaf), bias)
