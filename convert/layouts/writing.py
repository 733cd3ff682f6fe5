"""How a converted weight is named and cut up in the output.

A writing layout turns one source weight into parts: rows of the source, the output tensors' names, dtypes and shapes,
and the key of the fused group whose members share a global scale. It knows no offsets and no numbers. A large
checkpoint has many weights and few shapes, so what depends on the shape alone (`Form`) is made once and shared.

| layout             | NVFP4                                                                                  |
|--------------------|----------------------------------------------------------------------------------------|
| modelopt           | `X.weight` U8 [N, K/2], `.weight_scale` E4M3 [N, K/16], `.weight_scale_2`, `.input_scale` F32 [] |
| modelopt, stacked  | `X` U8 [E, K/2, N], `X_weight_scale` E4M3 [E, K/16, N], `X_weight_scale_2`, `X_input_scale` F32 []: what modelopt writes for gpt-oss |
| modelopt-experts   | the stack cut into `...experts.E.{gate,up,down}_proj`, rows de-interleaved, biases too  |
| compressed-tensors | `X.weight_packed`, `.weight_scale`, `.weight_global_scale` = 1/s2, `.input_global_scale` = 1/input_scale, F32 [1] |

MXFP4 is the same with U8 E8M0 scales [N, K/32] and no scalars. FP8 is `X.weight` E4M3 [N, K] with

| layout             | per tensor                          | per channel               | per 128x128 block          |
|--------------------|-------------------------------------|---------------------------|----------------------------|
| modelopt           | `.weight_scale`, `.input_scale` F32 [] | `.weight_scale` F32 [N] | `.weight_scale` F32 [N/128, 1, K/128, 1] |
| compressed-tensors | `.weight_scale` F32 [1]             | `.weight_scale` F32 [N, 1] | `.weight_scale` F32 grid  |
| deepseek-v3        | -                                   | -                         | `.weight_scale_inv` F32 grid |

compressed-tensors' first two also take a static `.input_scale` F32 [1]. Grids are divided up.

BF16 is `X.weight`; gpt-oss's stack becomes `X` [E, K, N], as its unquantized checkpoints have it. Other stacked experts
are cut into modules in every layout, as their producers' quantized exports are.

Gate and up stay under their own names: which of them a kernel wants first is the runtime's affair, not the file's.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Final, NamedTuple

from requant.convert.layouts.base import Rows, SourceWeight
from requant.convert.shards import nbytes_of
from requant.kernels.formats import MXFP4_GROUP, NVFP4_GROUP
from requant.manifests.errors import UsageError

__all__ = [
    "FP8_BLOCK",
    "FUSED_SETS",
    "STRICT_LEAVES",
    "Bias",
    "Form",
    "Leaf",
    "Part",
    "fuse_key",
    "leaf_of",
    "parts_of",
]

FUSED_SETS: Final[tuple[tuple[str, ...], ...]] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
"""Modules that vLLM 0.32 and SGLang 0.5.23 load into one tensor (packed_modules_mapping), so one global scale."""

STRICT_SETS: Final = FUSED_SETS[:4]
"""Those that every runtime fuses; the linear-attention projections are fused by some."""
STRICT_LEAVES: Final = frozenset(leaf for fused in STRICT_SETS for leaf in fused)

_SET_OF: Final = {leaf: "+".join(group) for group in FUSED_SETS for leaf in group}

FP8_BLOCK: Final = (128, 128)
"""weight_block_size of DeepSeek-V3 and of every kernel for block-scaled FP8 linear layers."""


def fuse_key(module: str) -> str:
    """The name of the fused group of `module`: equal for modules that must share a global scale."""
    parent, dot, leaf = module.rpartition(".")
    fused = _SET_OF.get(leaf)
    return f"{parent}{dot}{fused}" if fused else module


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
    """What every weight of one shape becomes: format, [rows N, cols K], its output tensors.

    reciprocal: scalars are written as 1/x. transposed: experts of a stack whose planes are written [E, K/.., N]; 0 for
    the ordinary [N, K/..]. block: (h, w) of an FP8 scale.
    """

    number: str
    rows: int
    cols: int
    codes: Leaf
    scales: Leaf | None = None
    global_scale: Leaf | None = None
    input_scale: Leaf | None = None
    reciprocal: bool = False
    transposed: int = 0
    block: tuple[int, int] = (0, 0)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and block scales."""
        return self.codes.nbytes + (self.scales.nbytes if self.scales else 0)


class Bias(NamedTuple):
    """A stacked bias's share of one part: elements of the source tensor, as rows of one element."""

    source: Rows
    leaf: Leaf


class Part(NamedTuple):
    """One output weight: rows start, start + step, ... of a source weight, its experts stacked, in a form.

    group: equal for parts that share a global scale.
    """

    module: str
    group: str
    form: Form
    weight: SourceWeight
    start: int = 0
    step: int = 1
    bias: Bias | None = None


def _granularity(layout: str, wanted: str | None) -> str:
    """What one FP8 scale covers under a layout: tensor, channel or block."""
    return wanted or {"modelopt": "tensor", "deepseek-v3": "block"}.get(layout, "channel")


def parts_of(
    weight: SourceWeight, target: str, layout: str, with_input_scale: bool, granularity: str | None = None
) -> Iterable[Part]:
    """The output weights of `weight` under a target format (nvfp4, mxfp4, fp8, bf16) and a writing layout."""
    stacked = weight.experts and not weight.more.split
    if stacked and (target == "bf16" or layout == "modelopt"):
        return (_stacked(weight, target, with_input_scale),)
    if stacked and layout != "modelopt-experts":
        raise UsageError(
            f"target.layout {layout} cannot hold stacked experts",
            where=weight.module,
            hint="use layout modelopt-experts (one module per expert) or modelopt (stacked, as modelopt writes it)",
        )
    if weight.experts:
        return _per_expert(weight, target, layout, with_input_scale, granularity)
    form = _form(weight.rows, weight.cols, target, layout, with_input_scale, granularity)
    return (Part(weight.module, fuse_key(weight.module) if form.global_scale else weight.module, form, weight),)


@lru_cache(maxsize=4096)
def _form(rows: int, cols: int, target: str, layout: str, with_input_scale: bool, granularity: str | None) -> Form:
    """An ordinary weight under a layout's names."""
    compressed = layout == "compressed-tensors"
    if target == "bf16":
        return Form("bf16", rows, cols, leaf_of(".weight", "BF16", (rows, cols)))
    if target == "fp8":
        return _fp8_form(rows, cols, layout, with_input_scale, _granularity(layout, granularity))
    packed = leaf_of(".weight_packed" if compressed else ".weight", "U8", (rows, cols // 2))
    if target == "mxfp4":
        scales = leaf_of(".weight_scale", "U8", (rows, cols // MXFP4_GROUP))
        return Form("mxfp4", rows, cols, packed, scales, reciprocal=compressed)
    one: tuple[int, ...] = (1,) if compressed else ()
    return Form(
        "nvfp4",
        rows,
        cols,
        packed,
        leaf_of(".weight_scale", "F8_E4M3", (rows, cols // NVFP4_GROUP)),
        leaf_of(".weight_global_scale" if compressed else ".weight_scale_2", "F32", one),
        leaf_of(".input_global_scale" if compressed else ".input_scale", "F32", one) if with_input_scale else None,
        reciprocal=compressed,
    )


def _fp8_form(rows: int, cols: int, layout: str, with_input_scale: bool, granularity: str) -> Form:
    codes = leaf_of(".weight", "F8_E4M3", (rows, cols))
    grid = (-(-rows // FP8_BLOCK[0]), -(-cols // FP8_BLOCK[1]))
    blocks = {"tensor": (rows, cols), "channel": (1, cols), "block": FP8_BLOCK}
    shapes: dict[tuple[str, str], tuple[int, ...]] = {
        ("modelopt", "tensor"): (),
        ("modelopt", "channel"): (rows,),
        ("modelopt", "block"): (grid[0], 1, grid[1], 1),
        ("compressed-tensors", "tensor"): (1,),
        ("compressed-tensors", "channel"): (rows, 1),
        ("compressed-tensors", "block"): grid,
        ("deepseek-v3", "block"): grid,
    }
    shape = shapes.get((layout, granularity))
    if shape is None:
        choices = [g for name, g in shapes if name == layout]
        raise UsageError(
            f"target.layout {layout} has no FP8 with one scale per {granularity}",
            where="layers",
            hint=f"it takes granularity: {' or '.join(choices) or 'none'}",
        )
    scales = leaf_of(".weight_scale_inv" if layout == "deepseek-v3" else ".weight_scale", "F32", shape)
    one = {("modelopt", "tensor"): (), ("compressed-tensors", "tensor"): (1,), ("compressed-tensors", "channel"): (1,)}
    static = one.get((layout, granularity)) if with_input_scale else None
    own_input = None if static is None else leaf_of(".input_scale", "F32", static)
    return Form("fp8", rows, cols, codes, scales, input_scale=own_input, block=blocks[granularity])


def _stacked(weight: SourceWeight, target: str, with_input_scale: bool) -> Part:
    """gpt-oss as modelopt 0.47 exports it: planes transposed to [E, K/.., N], one scalar for all experts."""
    if target not in ("nvfp4", "bf16"):
        raise UsageError("only NVFP4 is written in the stacked layout", where=weight.module, hint="keep this weight")
    experts, rows, cols, module = weight.experts, weight.rows, weight.cols, weight.module
    bias = None
    if weight.bias is not None:
        source = Rows(weight.bias, weight.bias.nbytes, 0, 1, 1)
        leaf = leaf_of(weight.bias.name.removeprefix(module), weight.bias.dtype, weight.bias.shape)
        bias = Bias(source, leaf)
    if target == "bf16":
        form = Form("bf16", experts * rows, cols, leaf_of("", "BF16", (experts, cols, rows)), transposed=experts)
        return Part(module, module, form, weight, bias=bias)
    form = Form(
        "nvfp4",
        experts * rows,
        cols,
        leaf_of("", "U8", (experts, cols // 2, rows)),
        leaf_of("_weight_scale", "F8_E4M3", (experts, cols // NVFP4_GROUP, rows)),
        leaf_of("_weight_scale_2", "F32", ()),
        leaf_of("_input_scale", "F32", ()) if with_input_scale else None,
        transposed=experts,
    )
    return Part(module, module, form, weight, bias=bias)


def _per_expert(
    weight: SourceWeight, target: str, layout: str, with_input_scale: bool, granularity: str | None
) -> Iterator[Part]:
    """The stack cut into modules: even rows gate and odd rows up (interleaved), or one half each."""
    base, _, name = weight.module.rpartition(".")
    both = weight.interleaved or (weight.more.split and name == "gate_up_proj")
    leaves = ("gate_proj", "up_proj") if both else (name,)
    step, per_leaf = (2 if weight.interleaved else 1), weight.rows // len(leaves)
    naming = "modelopt" if layout == "modelopt-experts" else layout
    form = _form(per_leaf, weight.cols, target, naming, with_input_scale, granularity)
    for expert in range(weight.experts):
        for number, leaf in enumerate(leaves):
            start = expert * weight.rows + (number if weight.interleaved else number * per_leaf)
            module = f"{base}.{expert}.{leaf}"
            bias = None
            if weight.bias is not None:
                element = weight.bias.nbytes // (weight.experts * weight.rows)
                source = Rows(weight.bias, element, start, step, per_leaf)
                bias = Bias(source, leaf_of(".bias", weight.bias.dtype, (per_leaf,)))
            yield Part(module, fuse_key(module) if form.global_scale else module, form, weight, start, step, bias)
