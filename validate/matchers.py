"""What each runtime takes an exclude list to mean. Transcribed by behaviour, so that a list can be tried without them.

| prefix / pattern                           | vLLM                 | SGLang     |
|--------------------------------------------|----------------------|------------|
| layers.10...down_proj / model.layers.1     | excluded (substring) | no         |
| layers.1.mlp.gate_up_proj / ...1.mlp.gate  | excluded (substring) | no         |
| fused qkv_proj / only ...q_proj            | ValueError           | ValueError |
| qkv_proj / ...0.self_attn*                 | excluded             | excluded   |
| mlp.experts / *.mlp.experts.*              | no                   | no         |

A runtime asks about *its* modules, not the checkpoint's: q, k and v are one `qkv_proj`, gate and up one `gate_up_proj`,
all experts of a layer one `experts`. `runtime_prefixes` makes those names from the checkpoint's.

Sources: vLLM 0.32 quantization/modelopt.py (is_layer_excluded) and utils/quant_utils.py (is_layer_skipped); SGLang
0.5.23 quantization/modelopt_quant.py (is_layer_excluded) and utils.py; both projects' compressed_tensors/utils.py
(should_ignore_layer). compressed-tensors lists hold whole names or `re:` expressions that match from the start.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import translate

__all__ = [
    "FUSED_MODULES",
    "Matcher",
    "RuntimePrefix",
    "Verdict",
    "compressed_tensors_matcher",
    "runtime_prefixes",
    "sglang_matcher",
    "vllm_matcher",
]

FUSED_MODULES: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
"""The runtimes' packed_modules_mapping: one module of theirs, several of the checkpoint's."""
SGLANG_FUSED_TAILS = frozenset({"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"})
"""Pattern tails that SGLang looks for inside the last part of a prefix (MLA's fused projections)."""
_EXPERT = re.compile(r"^(?P<parent>.*\bexperts)\.\d+\.")


class Verdict(StrEnum):
    """What a runtime does with one of its modules."""

    QUANTIZED = "quantized"
    EXCLUDED = "excluded"
    SPLIT = "split"
    """Some parts of a fused module are listed and some are not: the runtime raises ValueError."""


Matcher = Callable[[str], Verdict]
"""From a runtime's module name to what the runtime does with it."""


@dataclass(frozen=True, slots=True)
class RuntimePrefix:
    """A module as a runtime names it, and the checkpoint modules that it is made of."""

    prefix: str
    modules: tuple[str, ...]
    experts: bool = False


def vllm_matcher(patterns: Sequence[str]) -> Matcher:
    """vLLM on modelopt checkpoints: exact (fused-aware), then substring, then fnmatch."""
    listed = frozenset(patterns)
    expert_patterns = [pattern for pattern in patterns if "experts" in pattern]
    globs = [re.compile(translate(pattern)) for pattern in patterns if any(c in pattern for c in "*?[")]

    def matcher(prefix: str) -> Verdict:
        skipped = _skipped_exactly(prefix, listed, expert_patterns)
        if skipped is not Verdict.QUANTIZED:
            return skipped
        inner = prefix.removeprefix("language_model.")
        if any(pattern != prefix and (pattern in prefix or pattern in inner) for pattern in patterns):
            return Verdict.EXCLUDED
        return Verdict.EXCLUDED if any(glob.match(prefix) for glob in globs) else Verdict.QUANTIZED

    return matcher


def _skipped_exactly(prefix: str, listed: frozenset[str], expert_patterns: Sequence[str] | None) -> Verdict:
    """is_layer_skipped of both runtimes; vLLM's has an experts branch (a list), SGLang's has none (None)."""
    head, _, leaf = prefix.rpartition(".")
    if leaf in FUSED_MODULES:
        if expert_patterns is not None and prefix in listed:
            return Verdict.EXCLUDED
        hits = {(f"{head}.{shard}" if head else shard) in listed for shard in FUSED_MODULES[leaf]}
        if len(hits) == 2:
            return Verdict.SPLIT
        return Verdict.EXCLUDED if hits == {True} else Verdict.QUANTIZED
    if expert_patterns is not None and "experts" in prefix:
        return Verdict.EXCLUDED if any(prefix in pattern for pattern in expert_patterns) else Verdict.QUANTIZED
    return Verdict.EXCLUDED if prefix in listed else Verdict.QUANTIZED


def sglang_matcher(patterns: Sequence[str]) -> Matcher:
    """SGLang on modelopt checkpoints: exact (fused-aware), then `*` globs on the whole name and each of its parts."""
    listed = frozenset(patterns)
    globs = [re.compile(pattern.replace(".", r"\.").replace("*", ".*")) for pattern in patterns if _compiles(pattern)]
    tails = [tail for pattern in patterns if (tail := pattern.rpartition(".")[2]) in SGLANG_FUSED_TAILS]

    def matcher(prefix: str) -> Verdict:
        is_experts = prefix.rpartition(".")[2] == "experts"
        skipped = Verdict.QUANTIZED if is_experts else _skipped_exactly(prefix, listed, None)
        if skipped is not Verdict.QUANTIZED:
            return skipped
        for name in {prefix, prefix.removeprefix("language_model.")}:
            parts = name.split(".")
            if any(glob.fullmatch(name) or any(glob.fullmatch(part) for part in parts) for glob in globs):
                return Verdict.EXCLUDED
            if any(tail in parts[-1] for tail in tails):
                return Verdict.EXCLUDED
        return Verdict.QUANTIZED

    return matcher


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern.replace(".", r"\.").replace("*", ".*"))
    except re.error:
        return False
    return True


def compressed_tensors_matcher(ignore: Sequence[str]) -> Matcher:
    """Both runtimes on compressed-tensors checkpoints: whole names or `re:` expressions, fused-aware."""
    listed = frozenset(name for name in ignore if not name.startswith("re:"))
    expressions = [re.compile(name.removeprefix("re:")) for name in ignore if name.startswith("re:")]

    def hit(name: str) -> bool:
        return name in listed or any(expression.match(name) for expression in expressions)

    def matcher(prefix: str) -> Verdict:
        head, _, leaf = prefix.rpartition(".")
        if leaf in FUSED_MODULES and prefix not in listed:
            hits = {hit(f"{head}.{shard}" if head else shard) for shard in FUSED_MODULES[leaf]}
            if len(hits) == 2:
                return Verdict.SPLIT
            return Verdict.EXCLUDED if hits == {True} else Verdict.QUANTIZED
        if leaf == "experts":  # the runtimes ask about expert 0's projections in the experts' stead
            return Verdict.EXCLUDED if hit(f"{prefix}.0.gate_proj") or hit(prefix) else Verdict.QUANTIZED
        return Verdict.EXCLUDED if hit(prefix) else Verdict.QUANTIZED

    return matcher


def runtime_prefixes(modules: Iterable[str]) -> list[RuntimePrefix]:
    """The runtimes' module names for these checkpoint modules, in order of first appearance.

    A module that becomes part of a fused one is asked about under both names: some models do not fuse.
    """
    names = list(modules)
    present = set(names)
    experts: dict[str, list[str]] = {}
    fused: dict[str, tuple[str, ...]] = {}
    plain: list[RuntimePrefix] = []
    for name in names:
        expert = _EXPERT.match(name)
        if expert:
            experts.setdefault(expert["parent"], []).append(name)
            continue
        plain.append(RuntimePrefix(name, (name,)))
        head, _, leaf = name.rpartition(".")
        for whole, shards in FUSED_MODULES.items():
            members = tuple(f"{head}.{shard}" if head else shard for shard in shards)
            if leaf == shards[0] and all(member in present for member in members):
                fused[f"{head}.{whole}" if head else whole] = members
    return [
        *plain,
        *(RuntimePrefix(prefix, members) for prefix, members in fused.items()),
        *(RuntimePrefix(parent, tuple(members), experts=True) for parent, members in experts.items()),
    ]
