"""Contract, tensors: every module complete, every part of the dtype and shape that loaders take for granted.

Headers only; no tensor is read here. vLLM 0.32 loads MoE checkpoints without weight_scale or weight_scale_2, with
scales typed U8 or E8M0 and with group-32 shapes, and serves garbage without a word, so these rules are stricter than
any loader.
"""

from __future__ import annotations

from collections.abc import Mapping

from requant.kernels.formats import MXFP4_GROUP, NVFP4_GROUP
from requant.validate.collector import Collector
from requant.validate.declared import Dialect
from requant.validate.modules import Kind, Module, expert_of
from requant.validate.opened import Tensor, as_object
from requant.validate.output_view import OutputView, config_int

__all__ = ["check_experts", "check_modules"]

CONVERT_AGAIN = "convert again from the source"


def check_modules(view: OutputView, found: Collector) -> None:
    """Kind by kind: parts, dtypes, shapes, leftovers."""
    block = _fp8_block(view)
    for module in view.modules.values():
        if module.kind is Kind.NVFP4:
            _check_nvfp4(module, found)
        elif module.kind is Kind.MXFP4:
            _check_mxfp4(view, module, found)
        elif module.kind is Kind.FP8:
            _check_fp8(module, block, found)
        elif module.kind is Kind.ORPHAN:
            parts = ", ".join(sorted(module.parts))
            found.error("scale-without-weight", f"has {parts} and no weight", where=module.name, hint=CONVERT_AGAIN)
        elif module.kind is Kind.UNSCALED:
            message = "holds packed bytes and no scale: nothing can tell its values"
            found.error("packed-without-scale", message, where=module.name, hint=CONVERT_AGAIN)
        elif module.kind is Kind.INT4:
            message = "is INT4 still: a source's weight that no rule converted, or its leftovers"
            found.error("packed-int32", message, where=module.name, hint=CONVERT_AGAIN)
        elif module.kind is Kind.INTEGER and "weight" in module.parts:
            message = f"weight is {module.parts['weight'].dtype}: kernel tiles saved after a runtime repacked them?"
            hint = "convert from the published files, not from a runtime's saved state"
            found.error("packed-int32", message, where=module.name, hint=hint)
        elif module.kind is Kind.PLAIN and module.weight is not None:
            _check_leftovers(module, frozenset(), found)


def _check_nvfp4(module: Module, found: Collector) -> None:
    weight, scale, name = module.weight, module.block_scale, module.name
    if weight is None:
        return
    if weight.dtype != "U8":
        message = f"codes are {weight.dtype}, loaders take U8 with two codes per byte"
        found.error("codes-dtype", message, where=weight.name, hint="write the packed bytes as U8")
    if module.k % NVFP4_GROUP:
        message = f"K = {module.k} is no multiple of {NVFP4_GROUP}"
        found.error("k-not-multiple-of-16", message, where=name, hint="leave this module plain")
    if scale is None:
        found.error("block-scale-missing", "has no weight_scale", where=name, hint=CONVERT_AGAIN)
    else:
        _check_nvfp4_scale(module, scale, found)
    if module.global_scale is None:
        part = "weight_global_scale" if module.compressed_tensors else "weight_scale_2"
        hint = "vLLM and SGLang load such experts and serve garbage; convert again"
        found.error("global-scale-missing", f"has no {part}", where=name, hint=hint)
    if ("weight_packed" in module.parts and {"weight_scale_2", "input_scale"} & module.parts.keys()) or (
        "weight" in module.parts and {"weight_global_scale", "input_global_scale"} & module.parts.keys()
    ):
        message = "mixes modelopt's and compressed-tensors' names: one global scale is the other's reciprocal"
        found.error("mixed-dialect", message, where=name, hint="write one layout")
    for scalar in (module.global_scale, module.input_scale):
        if scalar is not None:
            _check_scalar(module, scalar, found)
    _check_leftovers(module, frozenset({"weight_scale"}), found)


def _check_nvfp4_scale(module: Module, scale: Tensor, found: Collector) -> None:
    if scale.dtype in ("U8", "F8_E8M0"):
        message = f"block scales are {scale.dtype}, NVFP4's are F8_E4M3: MXFP4 scales read as NVFP4 give garbage"
        found.error("scale-is-e8m0", message, where=scale.name, hint="convert this module or leave it declared MXFP4")
    elif scale.dtype != "F8_E4M3":
        found.error("scale-dtype", f"block scales are {scale.dtype}, not F8_E4M3", where=scale.name, hint=CONVERT_AGAIN)
    expected = module.scale_shape(NVFP4_GROUP)
    if scale.shape == expected:
        return
    if scale.shape == module.scale_shape(MXFP4_GROUP):
        message = f"block scales are {list(scale.shape)}: one per 32 along K (MXFP4), NVFP4 has one per 16"
        found.error("scale-group-32", message, where=scale.name, hint="each MXFP4 scale becomes two NVFP4 scales")
    elif not module.stacked and scale.shape == _swizzled(module):
        message = f"block scales are {list(scale.shape)}: a kernel's padded, swizzled plane, expected {list(expected)}"
        found.error("scale-swizzled", message, where=scale.name, hint="checkpoints hold linear [N, K/16] scales")
    else:
        message = f"block scales are {list(scale.shape)}, expected {list(expected)}"
        found.error("scale-shape", message, where=scale.name, hint=CONVERT_AGAIN)


def _swizzled(module: Module) -> tuple[int, ...]:
    """The 128x4-tiled plane that cuBLAS and CUTLASS take: rows to 128, columns to 4."""
    return (-(-module.n // 128) * 128, -(-(module.k // NVFP4_GROUP) // 4) * 4)


def _check_scalar(module: Module, scalar: Tensor, found: Collector) -> None:
    if scalar.dtype != "F32":
        found.error("scalar-dtype", f"is {scalar.dtype}, loaders take F32", where=scalar.name, hint=CONVERT_AGAIN)
    allowed: list[tuple[int, ...]] = [(1,)] if module.compressed_tensors else [()]
    if module.stacked and module.weight is not None:
        allowed.append(module.weight.shape[:1])  # one per expert, as some fused exports write it
    if scalar.shape not in allowed:
        expected = "[1]" if module.compressed_tensors else "[] (a scalar)"
        message = f"has shape {list(scalar.shape)}, expected {expected}"
        found.error("scalar-shape", message, where=scalar.name, hint=CONVERT_AGAIN)


def _check_mxfp4(view: OutputView, module: Module, found: Collector) -> None:
    weight, scale = module.weight, module.block_scale
    if weight is None or scale is None:
        return
    if module.k % MXFP4_GROUP:
        message = f"K = {module.k} is no multiple of {MXFP4_GROUP}"
        found.error("k-not-multiple-of-32", message, where=module.name, hint="leave this module plain")
    expected = module.scale_shape(MXFP4_GROUP)
    if scale.shape != expected:
        message = f"block scales are {list(scale.shape)}, expected {list(expected)}"
        found.error("scale-shape", message, where=scale.name, hint=CONVERT_AGAIN)
    declared = view.declared
    if declared is not None and declared.kind is Kind.MXFP4 and (weight.dtype, scale.dtype) != ("U8", "U8"):
        message = f"is {weight.dtype} with {scale.dtype} scales, loaders of this layout take U8 and U8"
        found.error("codes-dtype", message, where=module.name, hint=CONVERT_AGAIN)
    own = "weight_scale" if "weight_scale" in module.parts else "scale" if "scale" in module.parts else "scales"
    _check_leftovers(module, frozenset({own}), found)


def _check_fp8(module: Module, block: tuple[int, int] | None, found: Collector) -> None:
    scale, weight = module.block_scale, module.weight
    if scale is None or weight is None:
        message = "is FP8 and has no scale: its values would be read raw, hundreds of times too large"
        found.error("fp8-scale-missing", message, where=module.name, hint=CONVERT_AGAIN)
        return
    if block is not None and len(scale.shape) == 2 and len(weight.shape) == 2 and scale.shape[1] > 1:
        expected = (-(-weight.shape[0] // block[0]), -(-weight.shape[1] // block[1]))
        if scale.shape != expected:
            message = f"scale grid is {list(scale.shape)}, blocks of {list(block)} need {list(expected)}"
            found.error("fp8-scale-shape", message, where=scale.name, hint="check weight_block_size")


def _fp8_block(view: OutputView) -> tuple[int, int] | None:
    raw = as_object((view.folder.config or {}).get("quantization_config")) or {}
    match raw.get("weight_block_size"):
        case [int(rows), int(columns)]:
            return rows, columns
        case _:
            return None


def _check_leftovers(module: Module, own: frozenset[str], found: Collector) -> None:
    """Scales of the source format that the conversion should have consumed."""
    candidates = {"weight_scale", "weight_scale_inv", "scales", "blocks"} - own
    if module.kind is Kind.PLAIN:
        candidates |= {"weight_scale_2", "weight_global_scale", "input_scale", "input_global_scale"}
    leftovers = [
        part for part in sorted(candidates) if part in module.parts and module.parts[part] is not module.weight
    ]
    extra = module.parts.get("scale")
    if extra is not None and "scale" not in own and (extra.dtype == "F8_E8M0" or len(extra.shape) > 1):
        leftovers.append("scale")
    for part in leftovers:
        message = f"a {module.kind.value} module still carries {part}, a scale of another format"
        found.error("leftover-source-scale", message, where=module.parts[part].name, hint=CONVERT_AGAIN)


def check_experts(view: OutputView, found: Collector) -> None:
    """All experts of a layer carry the same tensors, none is missing, and the config agrees on their number."""
    experts: dict[str, dict[int, set[str]]] = {}
    for name in view.folder.tensors:
        expert = expert_of(name)
        if expert is not None:
            experts.setdefault(expert[0], {}).setdefault(expert[1], set()).add(expert[2])
    number = config_int(view.folder.config, "n_routed_experts", "num_experts", "num_local_experts")
    for parent, members in experts.items():
        _check_expert_keys(parent, members, found)
        count = max(members) + 1
        if len(members) != count:
            missing = sorted(set(range(count)) - members.keys())
            message = f"experts {_some(missing)} are missing"
            found.error("expert-missing", message, where=parent, hint=CONVERT_AGAIN)
        elif number is not None and count != number:
            message = f"{count} experts, the config says {number}"
            found.error("expert-count", message, where=parent, hint="restore the experts or correct config.json")
    if any(
        module.stacked and module.kind is Kind.PLAIN and "weight" in module.parts for module in view.modules.values()
    ):
        _warn_plain_stacks(view, found)


def _check_expert_keys(parent: str, members: Mapping[int, set[str]], found: Collector) -> None:
    wanted = set[str]().union(*members.values())
    for index, own in members.items():
        if own != wanted:
            message = f"expert {index} lacks {_some(sorted(wanted - own))}, which its siblings have"
            hint = "loaders fill such gaps with uninitialised memory; convert again"
            found.error("expert-keys-differ", message, where=f"{parent}.{index}", hint=hint)


def _warn_plain_stacks(view: OutputView, found: Collector) -> None:
    declared = view.declared
    if declared is None or declared.dialect is Dialect.OTHER:
        return
    for module in view.modules.values():
        if module.stacked and module.kind is Kind.PLAIN and (weight := module.parts.get("weight")) is not None:
            message = f"stacked experts {list(weight.shape)} {weight.dtype} were left plain"
            hint = "most of the model's weights are experts: add a layer rule that matches them"
            found.warning("stacked-experts-left-plain", message, where=weight.name, hint=hint)


def _some(items: list[str] | list[int], limit: int = 5) -> str:
    head = ", ".join(str(item) for item in items[:limit])
    return head if len(items) <= limit else f"{head} and {len(items) - limit} more"
