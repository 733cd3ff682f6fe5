"""What becomes of each weight, after the rules have spoken: target format, scale choice; and what must be refused.

Three things the rules alone do not see:

- what a target's metadata can say: one format, or NVFP4 beside FP8 (modelopt's MIXED_PRECISION), or DeepSeek-V4's
  hybrid; weights that would stay packed in another format are refused, never copied unseen;
- what a runtime loads as one module: q/k/v, gate/up, all experts of a layer. If one of them has a K that the format's
  group does not divide, all of them stay plain;
- weights that stay plain where a rule names no more than a pattern (rules.PROTECTED): plain ones are kept, packed ones
  become BF16.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, NoReturn

from requant.convert.checkpoint import Catalogue
from requant.convert.layouts.base import SourceWeight
from requant.convert.layouts.writing import STRICT_LEAVES, fuse_key
from requant.convert.rules import PRODUCERS_OWN, Decision
from requant.kernels.formats import NumberFormat
from requant.manifests.errors import SourceError, UsageError
from requant.manifests.schema import LayerRule, Manifest

__all__ = ["CONVERSIONS", "Conversion", "is_copy", "settle"]

_ROUNDING: Final = ("nearest", "four-over-six", "mse", "weighted")
_FLOATING: Final = ("plain", "fp8", "int4", "gptq", "awq", "gguf")
"""Source formats that FP4 has to round."""

CONVERSIONS: Final[Mapping[tuple[str, str], tuple[str, ...]]] = {
    ("mxfp4", "nvfp4"): ("lossless",),
    ("nvfp4", "nvfp4"): ("lossless",),
    ("mxfp4", "mxfp4"): ("lossless", "nearest"),
    ("nvfp4", "mxfp4"): ("nearest",),
    **{(source, "mxfp4"): ("nearest",) for source in _FLOATING},
    **{(source, "nvfp4"): _ROUNDING for source in _FLOATING},
    **{(source, "fp8"): ("nearest",) for source in (*_FLOATING, "mxfp4", "nvfp4")},
    ("fp8", "fp8"): ("lossless", "nearest"),
    **{(source, "bf16"): ("lossless",) for source in (*_FLOATING, "mxfp4", "nvfp4")},
}
"""(source format, target format) -> the scale choices there are. The same format on both sides, FP8 with the same
blocks, is copied and not computed."""

_EXPERT: Final = re.compile(r"^(?P<parent>.*\bexperts)\.(?:\d+\..+|gate_up_proj|down_proj)$")
_EMBEDDING: Final = re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings|embed)$")


class Conversion(NamedTuple):
    """A weight that is converted. target: nvfp4, mxfp4, fp8 or bf16. rule: index in the manifest."""

    weight: SourceWeight
    target: str
    scale: str
    granularity: str | None
    rule: int
    rounding: str = "nearest"


def is_copy(conversion: Conversion) -> bool:
    """BF16 that is to become BF16 is copied."""
    weight = conversion.weight
    stored = weight.format == "plain" and weight.codes.dtype == "BF16" and not weight.more.rotary
    return conversion.target == "bf16" and stored


def settle(
    manifest: Manifest,
    layout: str,
    catalogue: Catalogue,
    weights: Sequence[SourceWeight],
    decisions: dict[str, Decision],
) -> list[Conversion]:
    """The weights to convert; what has to stay plain is written back into `decisions` with the reason.

    UsageError for what the target cannot hold, SourceError for what the source mixes.
    """
    _refuse_layout(manifest, layout, decisions)
    settled: list[Conversion | None] = []  # side by side with the weights
    narrow: list[SourceWeight] = []
    groups = {number.value: number.group or 1 for number in NumberFormat}
    tied = bool(catalogue.config.get("tie_word_embeddings"))
    for weight in weights:
        module, number, _, cols = weight[:4]
        decision = decisions[module]
        to = decision.to
        if to in ("drop", "keep"):
            if to == "keep":
                _refuse_kept_packed(weight, manifest, layout)
            settled.append(None)
            continue
        rule = manifest.layers[decision.rule]
        scale = rule.scale if to == rule.to else "lossless"
        if scale not in CONVERSIONS.get((number, to), ()):
            _refuse_unsupported(weight, to, scale, _place(decision, rule, weight))
        if tied:
            _refuse_tied(weight, to, _place(decision, rule, weight))
        if not cols or not weight.rows:
            raise SourceError(
                f"is empty ({weight.rows} x {cols})",
                where=f"{weight.codes.file}: {weight.codes.name}",
                hint="there is nothing to convert: is the checkpoint complete? A rule with to: keep copies the tensor",
            )
        if cols % groups[to]:
            _refuse_narrow(weight, to, rule, _place(decision, rule, weight))
            narrow.append(weight)
        granularity = rule.granularity if to == "fp8" else None
        settled.append(Conversion(weight, to, scale, granularity, decision.rule, rule.rounding))
    if narrow:
        settled = _keep_families(manifest, narrow, settled, decisions)
    _refuse_split(weights, settled, decisions, gguf=catalogue.shards[0].file.endswith(".gguf"))
    made = [conversion for conversion in settled if conversion is not None]
    _refuse_formats(manifest, made)
    return made


def _refuse_layout(manifest: Manifest, layout: str, decisions: Mapping[str, Decision]) -> None:
    """What a writing layout cannot say at all."""
    target = manifest.target
    if layout == "deepseek-v4" and target.format != "bf16":
        if target.layout != "modelopt":
            raise UsageError(
                f"target.layout {target.layout} cannot hold DeepSeek-V4's FP8 blocks",
                where="target.layout",
                hint="use layout modelopt: it writes the DeepSeek-V4 hybrid that vLLM and SGLang load",
            )
        if target.format != "nvfp4":
            raise UsageError(
                f"beside DeepSeek-V4's FP8 blocks runtimes read NVFP4 experts only, not {target.format}",
                where="target.format",
                hint="use format nvfp4 (its input_scale may be the constant 1.0), or bf16 for everything",
            )
        others = sorted({d.to for d in decisions.values()} - {"keep", "drop", "nvfp4"})
        if others:
            raise UsageError(
                f"the DeepSeek-V4 hybrid cannot hold {', '.join(others)} beside its FP8 blocks",
                where="layers",
                hint="let the rules say nvfp4, keep or drop, or set target.format bf16 for everything",
            )


def _refuse_formats(manifest: Manifest, conversions: Iterable[Conversion]) -> None:
    """Two quantized formats in one output: only modelopt's MIXED_PRECISION of NVFP4 and FP8 says so."""
    made = {c.target for c in conversions} - {"bf16"}
    grains = {c.granularity or "" for c in conversions if c.target == "fp8"}
    target = manifest.target
    if len(grains) > 1:
        raise UsageError(
            "FP8 layers of different granularity cannot be described together",
            where="layers",
            hint="say the same granularity in all rules with to: fp8",
        )
    if len(made) < 2:
        return
    if made != {"nvfp4", "fp8"} or target.layout != "modelopt" or target.format != "nvfp4":
        raise UsageError(
            f"{' beside '.join(sorted(made))} is more than one format, which this target cannot say",
            where="layers",
            hint="mixed formats: nvfp4 and fp8 under target.format nvfp4 (not w4a16) and layout modelopt",
        )
    if grains - {"", "tensor"}:
        raise UsageError(
            "beside NVFP4, FP8 has one scale per tensor", where="layers", hint="delete granularity from the rule"
        )


def _refuse_unsupported(weight: SourceWeight, target: str, scale: str, where: str) -> NoReturn:
    choices = CONVERSIONS.get((weight.format, target))
    if choices is not None and weight.format in PRODUCERS_OWN and target == "nvfp4":
        raise SourceError(
            f"is {weight.format.upper()} already, and scale: {scale} would quantize it a second time",
            where=where,
            hint="scale: lossless moves it to nvfp4 as it is, to the last bit where the numbers allow",
        )
    if choices is None:
        raise UsageError(
            f"{weight.format} -> {target} is not a conversion this version makes",
            where=where,
            hint="docs/formats.md lists them; keep this layer, or narrow the rule",
        )
    raise UsageError(
        f"scale: {scale} is not available for {weight.format} -> {target}",
        where=where,
        hint=f"use scale: {' or '.join(choices)}",
    )


def _refuse_kept_packed(weight: SourceWeight, manifest: Manifest, layout: str) -> None:
    """Outside the DeepSeek-V4 hybrid no target metadata can say `these layers are still in the source's format`."""
    hybrid = layout == "deepseek-v4" and manifest.target.format != "bf16"
    if weight.more.rotary:
        raise UsageError(
            "has its rows in llama.cpp's order, and a copy would keep them so",
            where=weight.module,
            hint="let a rule with `to: bf16` match this module: it puts them back",
        )
    if weight.format == "plain" or hybrid:
        return
    target = manifest.target.format
    raise UsageError(
        f"would stay {weight.format.upper()} in a {target} checkpoint, which its metadata cannot express",
        where=weight.module,
        hint=f"convert all packed weights: let a rule with `to: {target.removesuffix('-w4a16')}` or `to: bf16` match "
        "this module",
    )


def _place(decision: Decision, rule: LayerRule, weight: SourceWeight) -> str:
    """The rule and the weight, as messages give them."""
    return f"layers.{decision.rule} (match: {rule.match}): {weight.module}"


def _refuse_tied(weight: SourceWeight, target: str, where: str) -> None:
    if target != "bf16" and _EMBEDDING.search(weight.module):
        raise UsageError(
            "is the embedding and, tied to it, the output head: no runtime reads that quantized",
            where=where,
            hint="keep it",
        )


def _refuse_narrow(weight: SourceWeight, target: str, rule: LayerRule, where: str) -> None:
    if rule.match == weight.module:
        group = NumberFormat(target).group
        raise SourceError(
            f"K = {weight.cols} is not a multiple of {group}, the group of {target}",
            where=where,
            hint="keep this layer, or choose a format whose group divides K",
        )


def _families(module: str) -> tuple[str, ...]:
    """What runtimes load as one: the fused set of a module, and all experts of its layer."""
    expert = _EXPERT.match(module)
    return (fuse_key(module), expert["parent"]) if expert else (fuse_key(module),)


def _keep_families(
    manifest: Manifest,
    narrow: Sequence[SourceWeight],
    settled: Sequence[Conversion | None],
    decisions: dict[str, Decision],
) -> list[Conversion | None]:
    """A family of which one member's K does not fit stays plain as a whole."""
    lost = {family for weight in narrow for family in _families(weight.module)}
    own = {weight.module for weight in narrow}
    left: list[Conversion | None] = []
    for conversion in settled:
        group = NumberFormat(conversion.target).group if conversion else 0
        if conversion is None or not group or lost.isdisjoint(_families(conversion.weight.module)):
            left.append(conversion)
            continue
        module, rule = conversion.weight.module, manifest.layers[conversion.rule]
        if rule.match == module and module not in own:
            raise SourceError(
                f"cannot be {conversion.target}: a weight that runtimes load together with it has a K that is not a "
                f"multiple of {group}",
                where=f"layers.{conversion.rule} (match: {rule.match})",
                hint="keep the whole family",
            )
        note = f"K is not a multiple of {group}: kept plain"
        if module not in own:
            note = f"fused with a weight whose K is not a multiple of {group}: kept plain"
        if conversion.weight.format == "plain":
            decisions[module] = Decision("keep", conversion.rule, note)
            left.append(None)
        else:
            decisions[module] = Decision("bf16", conversion.rule, note)
            left.append(conversion._replace(target="bf16", scale="lossless", granularity=None))
    return left


def _refuse_split(
    weights: Sequence[SourceWeight],
    settled: Sequence[Conversion | None],
    decisions: Mapping[str, Decision],
    *,
    gguf: bool,
) -> None:
    """Weights that every runtime fuses must end in one format, made from one format by one choice of scales."""
    first: dict[str, tuple[SourceWeight, tuple[str, ...]]] = {}
    for weight, conversion in zip(weights, settled, strict=True):
        module = weight[0]
        if module.rpartition(".")[2] not in STRICT_LEAVES or (conversion is None and decisions[module].to == "drop"):
            continue
        fate = _fate(weight, conversion, gguf)
        one, theirs = first.setdefault(fuse_key(module), (weight, fate))
        if fate == theirs:
            if fate[2:3] == ("plain",) and weight.codes.dtype != one.codes.dtype:
                raise SourceError(
                    f"is {weight.codes.dtype}, {one.codes.name} is {one.codes.dtype}: the weights of a fused group "
                    "are of two types",
                    where=f"{weight.codes.file}: {weight.codes.name}",
                    hint="save the checkpoint in one type, or keep these layers",
                )
            continue
        raise UsageError(
            f"its members differ: {one.module} is {' '.join(theirs)}, {weight.module} {' '.join(fate)}",
            where=f"fused group {fuse_key(weight.module)}",
            hint="runtimes load these weights as one: convert them by one rule, or keep them all",
        )


def _fate(weight: SourceWeight, conversion: Conversion | None, gguf: bool) -> tuple[str, ...]:
    if conversion is None:
        return ("kept",) if weight.format == "plain" else ("kept", weight.format)
    if conversion.target == "bf16":
        return ("kept",)  # plain in the output either way
    source = "gguf" if gguf else weight.format  # whose files mix types as they like
    return (conversion.target, "from", source, "with scale", conversion.scale)
