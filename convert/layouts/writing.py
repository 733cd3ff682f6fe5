"""How a converted weight is named and cut up in the output.

A writing layout turns one source weight into parts: rows of the source, the output tensors' names, dtypes and shapes,
and the key of the fused group whose members share a global scale. It knows no offsets and no numbers.

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
from typing import Final, NamedTuple

from requant.convert.layouts.base import Rows, SourceWeight
from requant.kernels.formats import MXFP4_GROUP, NVFP4_GROUP
from requant.manifests.errors import UsageError

__all__ = ["FUSED_SETS", "Bias", "Part", "fuse_key", "parts_of"]

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


class Output(NamedTuple):
    """Name, dtype and shape of an output tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Bias(NamedTuple):
    """A stacked bias's share of one part: elements of the source tensor, as rows of one element."""

    source: Rows
    output: Output


class Part(NamedTuple):
    """One output weight. codes/scales: source rows (scales None for a plain source). transposed: experts of a stack
    whose planes are written [E, K/2, N]; 0 for the ordinary [N, K/2]. reciprocal: scalars are written as 1/x."""

    module: str
    group: str
    rows: int
    cols: int
    codes: Rows
    scales: Rows | None
    out_codes: Output
    out_scales: Output
    out_global: Output | None
    out_input: Output | None
    reciprocal: bool = False
    transposed: int = 0
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
        rows, cols = weight.rows, weight.cols
        yield _part(
            weight.module,
            rows,
            cols,
            _rows(weight, 0, 1, rows),
            target=target,
            naming="compressed-tensors" if layout == "compressed-tensors" else "modelopt",
            with_input_scale=with_input_scale,
        )


def _rows(weight: SourceWeight, start: int, step: int, count: int) -> tuple[Rows, Rows | None]:
    """Source rows of codes (or plain values) and scales."""
    total = weight.rows * max(weight.experts, 1)
    codes = Rows(weight.codes, weight.codes.nbytes // total, start, step, count)
    if weight.scales is None:
        return codes, None
    return codes, Rows(weight.scales, weight.scales.nbytes // total, start, step, count)


def _part(
    module: str,
    rows: int,
    cols: int,
    planes: tuple[Rows, Rows | None],
    *,
    target: str,
    naming: str,
    with_input_scale: bool,
    bias: Bias | None = None,
) -> Part:
    nvfp4 = target == "nvfp4"
    compressed = naming == "compressed-tensors"
    packed = f"{module}.weight_packed" if compressed else f"{module}.weight"
    plane = (rows, cols // (NVFP4_GROUP if nvfp4 else MXFP4_GROUP))
    scalar: tuple[int, ...] = (1,) if compressed else ()
    global_name = "weight_global_scale" if compressed else "weight_scale_2"
    input_name = "input_global_scale" if compressed else "input_scale"
    return Part(
        module=module,
        group=fuse_key(module),
        rows=rows,
        cols=cols,
        codes=planes[0],
        scales=planes[1],
        out_codes=Output(packed, "U8", (rows, cols // 2)),
        out_scales=Output(f"{module}.weight_scale", "F8_E4M3" if nvfp4 else "U8", plane),
        out_global=Output(f"{module}.{global_name}", "F32", scalar) if nvfp4 else None,
        out_input=Output(f"{module}.{input_name}", "F32", scalar) if nvfp4 and with_input_scale else None,
        reciprocal=compressed,
        bias=bias,
    )


def _stacked(weight: SourceWeight, target: str, with_input_scale: bool) -> Part:
    """gpt-oss as modelopt 0.47 exports it: planes transposed to [E, K/.., N], one scalar for all experts."""
    if target != "nvfp4":
        raise UsageError("only NVFP4 is written in the stacked layout", where=weight.module, hint="keep this weight")
    experts, rows, cols, module = weight.experts, weight.rows, weight.cols, weight.module
    codes, scales = _rows(weight, 0, 1, experts * rows)
    bias = None
    if weight.bias is not None:
        source = Rows(weight.bias, weight.bias.nbytes, 0, 1, 1)
        bias = Bias(source, Output(weight.bias.name, weight.bias.dtype, weight.bias.shape))
    return Part(
        module=module,
        group=module,
        rows=experts * rows,
        cols=cols,
        codes=codes,
        scales=scales,
        out_codes=Output(module, "U8", (experts, cols // 2, rows)),
        out_scales=Output(f"{module}_weight_scale", "F8_E4M3", (experts, cols // NVFP4_GROUP, rows)),
        out_global=Output(f"{module}_weight_scale_2", "F32", ()),
        out_input=Output(f"{module}_input_scale", "F32", ()) if with_input_scale else None,
        transposed=experts,
        bias=bias,
    )


def _per_expert(weight: SourceWeight, target: str, with_input_scale: bool) -> Iterator[Part]:
    """The stack cut into modules; of interleaved rows the even ones are gate, the odd ones up."""
    base = weight.module.rpartition(".")[0]
    leaves = ("gate_proj", "up_proj") if weight.interleaved else (weight.module.rpartition(".")[2],)
    step, per_leaf = len(leaves), weight.rows // len(leaves)
    for expert in range(weight.experts):
        for offset, leaf in enumerate(leaves):
            start = expert * weight.rows + offset
            module = f"{base}.{expert}.{leaf}"
            bias = None
            if weight.bias is not None:
                element = weight.bias.nbytes // (weight.experts * weight.rows)
                output = Output(f"{module}.bias", weight.bias.dtype, (per_leaf,))
                bias = Bias(Rows(weight.bias, element, start, step, per_leaf), output)
            yield _part(
                module,
                per_leaf,
                weight.cols,
                _rows(weight, start, step, per_leaf),
                target=target,
                naming="modelopt",
                with_input_scale=with_input_scale,
                bias=bias,
            )
