"""Which rule of the manifest decides about which tensor. Closed: every tensor has an answer, every rule a use.

The first rule whose pattern fits a module's whole name decides. A rule that converts is honoured for weights; the
module's other tensors (biases, norms, routers' corrections) are kept. A pattern with wildcards does not reach the parts
that experts leave alone whatever the format (embeddings, heads, routers, vision towers, draft layers): plain ones are
kept, FP8 and integer ones become BF16, which every runtime reads; naming such a module in full converts it. FP4 weights
of the producer's own choice are exempt from that protection.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, cast

from requant.convert.checkpoint import Catalogue
from requant.convert.layouts.base import SourceWeight
from requant.convert.shards import TensorInfo
from requant.manifests.errors import ManifestError
from requant.manifests.match import compile_match
from requant.manifests.schema import LayerRule

__all__ = ["PRODUCERS_OWN", "PROTECTED", "Decision", "RuleUse", "decide", "refuse_idle"]

DRAFT: Final = "draft (MTP) layer"

PROTECTED: Final[tuple[tuple[str, str], ...]] = (
    ("*embed_tokens", "embedding"),
    ("*embeddings*", "embedding"),
    ("*word_embed*", "embedding"),
    ("*wte", "embedding"),
    ("embed", "embedding"),
    ("lm_head", "output head"),
    ("*.lm_head", "output head"),
    ("head", "output head"),
    ("*.router", "router"),
    ("*.router.*", "router"),
    ("*.gate", "router"),
    ("*.shared_expert_gate", "router"),
    ("*norm", "norm"),
    ("*norm?", "norm"),
    ("*vision*", "vision tower"),
    ("*visual*", "vision tower"),
    ("*audio*", "audio tower"),
    ("*mm_projector*", "multimodal projector"),
    ("*multi_modal_projector*", "multimodal projector"),
    ("mtp.*", DRAFT),
    ("*.mtp.*", DRAFT),
    ("*conv1d", "state-space part"),
    ("*.x_proj", "state-space part"),
    ("*.dt_proj", "state-space part"),
    ("*.linear_attn.in_proj_a", "gate of linear attention"),
    ("*.linear_attn.in_proj_b", "gate of linear attention"),
    ("*.linear_attn.in_proj_ba", "gate of linear attention"),
    ("*.kv_a_proj_with_mqa", "low-rank projection of MLA"),
    ("*.q_a_proj", "low-rank projection of MLA"),
    ("*.q_b_proj", "low-rank projection of MLA"),
    ("*.kv_b_proj", "low-rank projection of MLA"),
    ("*.embed_vision*", "vision tower"),
)
"""Modules that a wildcard leaves alone, with the reason that `plan` prints: those that nvidia's published NVFP4
checkpoints of these families leave plain (DeepSeek-V3.1, Kimi-K2.6, Qwen3.6, Gemma-4). Shared experts are converted."""

PRODUCERS_OWN: Final = frozenset({"mxfp4", "nvfp4"})
"""Formats in which a weight stands because its producer chose FP4 for it: converting it anew protects nothing."""

_LAYER: Final = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a module's tensors. rule: index in the manifest, or -1 if none matched. note: why kept, if kept
    against the rule's wish."""

    to: str
    rule: int
    note: str = ""


@dataclass(slots=True)
class RuleUse:
    """What a rule did: tensors and bytes of the source, bytes of the output."""

    tensors: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    notes: dict[str, int] = field(default_factory=dict[str, int])

    def count(self, nbytes: int, note: str) -> None:
        """One more source tensor."""
        self.tensors += 1
        self.bytes_in += nbytes
        if note:
            self.notes[note] = self.notes.get(note, 0) + 1


def module_of(tensor: str) -> str:
    """The module a tensor belongs to: its name without the last part (`X.weight` -> `X`)."""
    return tensor.rpartition(".")[0] or tensor


def decide(
    rules: Sequence[LayerRule], catalogue: Catalogue, weights: Sequence[SourceWeight], rest: Sequence[TensorInfo]
) -> dict[str, Decision]:
    """A decision for every module of the checkpoint. rest: the tensors that belong to no weight.

    ManifestError lists every rule that matches nothing, with the nearest module names.
    """
    matchers = [compile_match(rule.match) for rule in rules]
    protected = [(compile_match(pattern), reason) for pattern, reason in PROTECTED]
    protected.append((_draft_layers(catalogue), DRAFT))
    stacked = {module_of(tensor.name) for tensor in rest if len(tensor.shape) > 2}
    used = [False] * len(rules)
    plain = [Decision(rule.to, index) for index, rule in enumerate(rules)]  # shared: modules outnumber them by far
    decisions: dict[str, Decision] = {}
    obeyed = [rule.to in ("keep", "drop") for rule in rules]
    modules = chain(((weight[0], weight) for weight in weights), ((module_of(tensor.name), None) for tensor in rest))
    for module, weight in modules:
        if module in decisions:
            continue
        chosen = -1
        for index, matches in enumerate(matchers):
            if matches(module):
                chosen = index
                used[index] = True
                break
        if chosen >= 0 and (obeyed[chosen] or (weight is not None and weight[1] in PRODUCERS_OWN)):
            decisions[module] = plain[chosen]  # what _override comes to, for most of a quarter of a million modules
            continue
        override = _override(rules, chosen, weight, module, protected, module in stacked)
        decisions[module] = override or plain[chosen]
    _refuse_unused(rules, used, matchers, list(decisions))
    return decisions


def _override(
    rules: Sequence[LayerRule],
    chosen: int,
    weight: SourceWeight | None,
    module: str,
    protected: Sequence[tuple[Callable[[str], bool], str]],
    stacked: bool,
) -> Decision | None:
    """What becomes of a module against its rule's word, or without a rule; None where the rule is obeyed."""
    if chosen < 0:
        return Decision("keep", -1, "no rule matches: kept")
    rule = rules[chosen]
    if rule.to in ("keep", "drop"):
        return None
    if weight is None:
        return Decision("keep", chosen, "stacked weights without scales: kept" if stacked else "not a weight: kept")
    if weight.format in PRODUCERS_OWN or rule.to == "bf16" or not _has_wildcard(rule.match):
        return None
    for matches, reason in protected:
        if matches(module):
            if weight.format == "plain":
                return Decision("keep", chosen, f"{reason}: kept (name it in full to convert it)")
            return Decision("bf16", chosen, f"{reason}: made BF16 (name it in full to convert it)")
    return None


def _draft_layers(catalogue: Catalogue) -> Callable[[str], bool]:
    """Whether a module lies in a layer past the last one that the config counts: a draft (MTP) layer, as DeepSeek-V3
    and GLM store it."""
    text = catalogue.config.get("text_config")
    place = cast("Mapping[str, object]", text) if isinstance(text, dict) else catalogue.config
    count = place.get("num_hidden_layers")

    def beyond(module: str) -> bool:
        layer = _LAYER.search(module)
        return layer is not None and isinstance(count, int) and int(layer[1]) >= count

    return beyond


def refuse_idle(rules: Sequence[LayerRule], decisions: Mapping[str, Decision], converting: Iterable[int]) -> None:
    """ManifestError for rules that ask for a conversion and convert nothing: a model left as large as it was.

    converting: the rules by which something is converted.
    """
    busy = set(converting)
    faults: list[str] = []
    for index, rule in enumerate(rules):
        if rule.to in ("keep", "drop") or rule.optional or index in busy:
            continue
        if rule.to == "bf16" and busy:  # what it matches is BF16 already, or has no other form
            continue
        notes = Counter(d.note for d in decisions.values() if d.rule == index)
        why = "; ".join(f"{count} modules: {note}" for note, count in notes.most_common())
        faults.append(f"layers.{index} (match: {rule.match}) says to: {rule.to} and converts nothing ({why})")
    if faults:
        raise ManifestError(
            "\n".join(faults),
            hint="match the modules that hold weights (`requant inspect` lists names), or mark the rule optional: true",
        )


def _has_wildcard(pattern: str) -> bool:
    return pattern.startswith("re:") or "*" in pattern or "?" in pattern


def _refuse_unused(
    rules: Sequence[LayerRule], used: Sequence[bool], matchers: Sequence[object], modules: Sequence[str]
) -> None:
    """A rule without effect is a misspelling or a shadowed rule; both are silent disasters elsewhere."""
    faults: list[str] = []
    for index, rule in enumerate(rules):
        if used[index] or rule.optional:
            continue
        matches = matchers[index]
        shadowed = sum(1 for module in modules if callable(matches) and matches(module))
        if shadowed:
            why = f"all {shadowed} modules it matches are taken by earlier rules"
        else:
            near = difflib.get_close_matches(rule.match, modules[:2000], n=1, cutoff=0.3)
            why = f"matches no module{f'; the nearest name is {near[0]}' if near else ''}"
        faults.append(f"layers.{index} (match: {rule.match}) {why}")
    if faults:
        raise ManifestError(
            "\n".join(faults),
            hint="correct or delete the rule, or mark it optional: true; `requant inspect` lists module names",
        )
