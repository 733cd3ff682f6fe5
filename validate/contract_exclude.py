"""Contract, exclude lists: under each runtime's own matching rules, exactly the modules left plain are excluded.

A plain module that is not excluded loads as FP4 and gives NaN; a quantized one that is excluded fails to load, or loads
packed bytes as plain weights. Both matchers are simulated over the names that the runtimes ask about: each module, the
fused modules (`qkv_proj`, `gate_up_proj`), and `experts` in the place of all experts of a layer.

The DeepSeek-V4 hybrid is exempt: its `ignore` list is documentation, its fp8 method decides by itself. Where
MIXED_PRECISION lists every quantized module, only the second fault is possible.
"""

from __future__ import annotations

from requant.validate.collector import Collector
from requant.validate.declared import Declared, Dialect
from requant.validate.matchers import (
    Matcher,
    RuntimePrefix,
    Verdict,
    compressed_tensors_matcher,
    runtime_prefixes,
    sglang_matcher,
    vllm_matcher,
)
from requant.validate.opened import as_object
from requant.validate.output_view import OutputView

__all__ = ["check_exclude_lists", "matchers_for"]

VISION_NAMES = ("vision_tower", "vision_model", "vit_large_projector")
"""vLLM leaves modules with these in their names plain, listed or not (quantization/modelopt.py)."""


def matchers_for(declared: Declared) -> dict[str, Matcher]:
    """Each runtime's matcher for the declared list, by runtime."""
    patterns = declared.exclude or ()
    if declared.dialect is Dialect.COMPRESSED_TENSORS:
        matcher = compressed_tensors_matcher(patterns)
        return {"vllm": matcher, "sglang": matcher}
    return {"vllm": vllm_matcher(patterns), "sglang": sglang_matcher(patterns)}


def check_exclude_lists(view: OutputView, found: Collector) -> list[str]:
    """Simulate both matchers; returns the plain modules that a runtime would take for quantized ones."""
    declared = view.declared
    if declared is None or declared.dialect in (Dialect.HYBRID, Dialect.OTHER) or not view.quantized:
        return []
    if declared.exclude is None and not declared.mixed:
        key = "ignore" if declared is view.in_config else "exclude_modules"
        found.error("exclude-list-missing", f"there is no {key} list", where=key, hint="write it, empty if need be")
    plain = {module.name for module in view.linears()}
    quantized = {module.name for module in view.quantized}
    prefixes = runtime_prefixes([name for name in view.modules if name in plain or name in quantized])
    prefixes = [_stacked_parent(prefix) if view.modules[prefix.modules[0]].stacked else prefix for prefix in prefixes]
    missed: dict[str, None] = {}
    for prefix in [prefix for prefix in prefixes if prefix.experts]:
        left = [name for name in prefix.modules if name in plain]
        if 0 < len(left) < len(prefix.modules):
            message = f"{len(left)} of its {len(prefix.modules)} weights are plain ({left[0]}), the rest is not"
            hint = "runtimes build all experts of a layer in one format: match all their projections, or none"
            found.error("experts-mixed-formats", message, where=prefix.prefix, hint=hint)
            missed.update(dict.fromkeys(left))
            prefixes.remove(prefix)
    _check_tied_head(view, declared, found)
    for runtime, matcher in matchers_for(declared).items():
        for prefix in prefixes:
            left = [name for name in prefix.modules if name in plain]
            verdict = matcher(prefix.prefix)
            if verdict is Verdict.SPLIT:
                message = "only some parts of this fused module are excluded: the runtime refuses to load"
                hint = "list all parts or none, or use `prefix.self_attn*`"
                found.error("exclude-splits-fused", message, where=prefix.prefix, runtime=runtime, hint=hint)
            elif verdict is Verdict.EXCLUDED and len(left) < len(prefix.modules):
                _report_excluded(declared, prefix, quantized, runtime, found)
            elif verdict is Verdict.QUANTIZED and left and not declared.mixed and not _is_vision(prefix, runtime):
                message = "is plain and not excluded: the runtime builds it as FP4"
                hint = "list it in the exclude list by its full name"
                found.error("plain-not-excluded", message, where=prefix.prefix, runtime=runtime, hint=hint)
                missed.update(dict.fromkeys(left))
    return list(missed)


def _check_tied_head(view: OutputView, declared: Declared, found: Collector) -> None:
    """A head tied to its embedding has no tensor, and is built as FP4 all the same unless the list names it."""
    config = view.folder.config or {}
    text = as_object(config.get("text_config")) or {}
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    if tied is not True or declared.mixed or any(name.endswith("lm_head.weight") for name in view.folder.tensors):
        return
    matchers = matchers_for(declared).values()
    if all(matcher("lm_head") is Verdict.EXCLUDED for matcher in matchers):
        return
    if not any(name.endswith("lm_head") for name in declared.exclude or ()):
        message = "is tied to the embedding, has no tensor, and is not excluded: loaders may build it as FP4"
        found.error("tied-head-not-excluded", message, where="lm_head", hint="add lm_head to the exclude list")


def _stacked_parent(prefix: RuntimePrefix) -> RuntimePrefix:
    """Stacked experts are one module of the runtime: `...experts`, without the projection."""
    return RuntimePrefix(prefix.prefix.rpartition(".")[0], prefix.modules, experts=True)


def _is_vision(prefix: RuntimePrefix, runtime: str) -> bool:
    return runtime == "vllm" and any(name in prefix.prefix for name in VISION_NAMES)


def _report_excluded(
    declared: Declared, prefix: RuntimePrefix, quantized: set[str], runtime: str, found: Collector
) -> None:
    name = next(module for module in prefix.modules if module in quantized)
    culprits = [entry for entry in declared.exclude or () if entry in prefix.prefix and entry != prefix.prefix]
    because = f", because {culprits[0]!r} is a part of its name" if runtime == "vllm" and culprits else ""
    message = f"is quantized ({name}) and the runtime excludes it{because}"
    hint = "list full module names that are no part of another module's name"
    found.error("quantized-excluded", message, where=prefix.prefix, runtime=runtime, hint=hint)
