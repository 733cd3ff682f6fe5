"""The model card of a published checkpoint, made from its sign-off, lock and manifest.

Our part stands between two markers. A README that somebody wrote keeps every line outside them, and every metadata key
it has; a new card gets a title and the licence, language and task of the source's own card.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, cast

import yaml
from requant.manifests.errors import PublishError
from requant.manifests.schema import Manifest
from requant.validate.decode_report import DECODING
from requant.validate.report import markdown_table
from requant.validate.report_tables import SERVING, tables_of
from requant.validate.results import Status
from requant.validate.verdict import SignOff

__all__ = ["BEGIN", "END", "CardFacts", "make_card"]

BEGIN: Final = "<!-- requant:begin, this part is written by requant -->"
END: Final = "<!-- requant:end -->"

_CARRIED: Final = ("license", "license_name", "license_link", "language", "pipeline_tag")
"""Metadata that a quantized checkpoint has in common with its source."""
_SERVE: Final[Mapping[str, tuple[str, str]]] = {
    "vllm": ("bash", "vllm serve {repo}"),
    "sglang": ("bash", "python -m sglang.launch_server --model-path {repo}"),
    "trtllm": ("bash", "trtllm-serve {repo}"),
    "transformers": (
        "python",
        'from transformers import AutoModelForCausalLM\n\nmodel = AutoModelForCausalLM.from_pretrained("{repo}")',
    ),
}
"""How each runtime loads a checkpoint from the Hub; the format is read from config.json."""
_MEASURED: Final = (
    ("Accuracy", ("Model against", "Tasks of")),
    ("Speed", (DECODING, "Kernel times", SERVING)),
)
"""Sections of the card, and the beginnings of the headings of the report's tables that they show."""
_STAGES: Final = {
    "model": "accuracy of the whole model",
    "speed": "speed",
    "kernels": "FP4 kernels",
    "serving": "a running server",
}
_HELD: Final = "simulated: ok"
"""What the contract stage says of a runtime whose loader rules hold."""


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What a card is made of. unsigned: why it is published without a valid sign-off, or ""."""

    repo: str
    manifest: Manifest
    lock: Mapping[str, Any]
    signoff: SignOff | None
    unsigned: str
    files: Sequence[str]


def make_card(facts: CardFacts, existing: str | None, source_card: str | None) -> str:
    """README.md: `existing` with our part replaced or added, or a new card. PublishError if it cannot be merged."""
    hub: Any = import_module("huggingface_hub")
    section = f"{BEGIN}\n{_section(facts)}\n{END}\n"
    if existing is None:
        text = f"\n# {facts.repo.partition('/')[2]}\n\n{section}"
        metadata = _merged(facts, {}, _metadata(source_card or "", lenient=True))
    else:
        text = _replaced(_body(existing), section)
        metadata = _merged(facts, _metadata(existing, lenient=False), _metadata(source_card or "", lenient=True))
    card = hub.ModelCard(f"---\n{yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)}---\n{text}")
    return str(card)


def _replaced(text: str, section: str) -> str:
    """The text with our section in the place of its last version, or at the end."""
    before, begin, rest = text.partition(BEGIN)
    if not begin:
        return f"{text.rstrip()}\n\n{section}" if text.strip() else f"\n{section}"
    inside, end, after = rest.partition(END)
    if not end or BEGIN in inside or BEGIN in after:
        raise PublishError(
            "its markers of our part do not pair up",
            where="README.md",
            hint=f"leave one pair of {BEGIN} and {END}, or none",
        )
    return before + section.rstrip("\n") + after


# --- metadata ---------------------------------------------------------------------------------------------------------


def _parts(card: str) -> tuple[str | None, str]:
    """(YAML block, text) of a card."""
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    match = REGEX_YAML_BLOCK.search(card)
    return (match.group(2), card[match.end() :]) if match else (None, card)


def _body(card: str) -> str:
    return _parts(card)[1]


def _metadata(card: str, *, lenient: bool) -> dict[str, Any]:
    """The metadata of a card. lenient: what cannot be read counts as none."""
    block, _ = _parts(card)
    try:
        found: object = yaml.safe_load(block) if block else {}
    except yaml.YAMLError as error:
        found = error
    if isinstance(found, dict):
        return cast("dict[str, Any]", found)
    if found is None or lenient:
        return {}
    raise PublishError(
        "its metadata block cannot be read, so nothing can be added to it",
        where="README.md of the repository",
        hint="mend the block between the --- lines, or delete the file there",
    )


def _merged(facts: CardFacts, theirs: Mapping[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    """Their metadata with ours added: what they set stays, tags add up, the relation is a fact."""
    target = facts.manifest.target
    ours: dict[str, Any] = {key: source[key] for key in _CARRIED if source.get(key)}
    if base := cast("Mapping[str, Any]", facts.lock.get("source") or {}).get("repo"):
        ours["base_model"] = base
        ours["base_model_relation"] = "quantized"
    ours["library_name"] = "transformers" if target.layout == "compressed-tensors" else "Model Optimizer"
    tags = [*_listed(theirs.get("tags")), "requant", target.format, target.layout, "quantized"]
    return {**ours, **theirs, "tags": list(dict.fromkeys(tags))}


def _listed(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [str(item) for item in cast("list[object]", value)] if isinstance(value, list) else []


# --- our part ---------------------------------------------------------------------------------------------------------


def _section(facts: CardFacts) -> str:
    lines: list[str] = []
    if facts.unsigned:
        lines += [f"> **Not signed off.** Published all the same, with `--force-unsigned`: {facts.unsigned}.", ""]
    lines += [*_made(facts), "", *_serve(facts), *_signed(facts), "", "### Limits", "", *_limits(facts), ""]
    lines += [
        "### Files",
        "",
        "[requant.manifest.yaml](requant.manifest.yaml) says how it was made, "
        "[requant.lock.json](requant.lock.json) from what.",
    ]
    return "\n".join(lines)


def _made(facts: CardFacts) -> list[str]:
    source = cast("Mapping[str, Any]", facts.lock.get("source") or {})
    groups = cast("Mapping[str, int]", facts.lock.get("groups") or {})
    origin = f"[{source['repo']}](https://huggingface.co/{source['repo']})" if source.get("repo") else "a local folder"
    if commit := source.get("commit"):
        origin += f" at commit `{commit}`"
    target, tool = facts.manifest.target, facts.lock.get("tool", "requant")
    lines = [
        "### Conversion",
        "",
        f"{origin}, converted to {target.format.upper()} (layout {target.layout}) by {tool}.",
    ]
    exact, shifted, lossy = (groups.get(key, 0) for key in ("exact", "shifted", "lossy"))
    if exact or shifted or lossy:
        lines.append(
            f"{exact:,} blocks of 16 kept their codes, {shifted:,} were shifted exactly, {lossy:,} lost precision."
        )
    if weights := groups.get("weights_quantized", 0):
        lines.append(f"{weights:,} weights were rounded from floating point.")
    return lines


def _serve(facts: CardFacts) -> list[str]:
    """Commands for each runtime whose contract held; nothing for the others."""
    held = _held(facts.signoff)
    lines = ["### Serve", ""] if held else []
    for runtime in held:
        language, command = _SERVE[runtime]
        lines += [f"```{language}", command.format(repo=facts.repo), "```", ""]
    return lines


def _held(signoff: SignOff | None) -> list[str]:
    contract = signoff.stage("contract") if signoff else None
    if contract is None or contract.status is not Status.PASSED:
        return []
    standing = contract.data.get("runtimes")
    found: Mapping[str, str] = cast("Mapping[str, str]", standing) if isinstance(standing, Mapping) else {}
    return [runtime for runtime, how in found.items() if how == _HELD and runtime in _SERVE]


def _signed(facts: CardFacts) -> list[str]:
    signoff = facts.signoff
    if signoff is None:
        return ["### Sign-off", "", "There is none."]
    verdict = "Signed off: every required gate passed." if signoff.signed_off else "Not signed off."
    lines = ["### Sign-off", "", f"{verdict} The whole report: [requant.signoff.md](requant.signoff.md).", ""]
    lines += ["| gate | | result | measured on | reason |", "|---|---|---|---|---|"]
    for gate in signoff.gates:
        need = "required" if gate.required else "optional"
        cells = (gate.name, need, gate.status.value, gate.measured_on or "-", gate.reason)
        lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    for heading, beginnings in _MEASURED:
        shown = [table for table in tables_of(signoff) if table.heading.startswith(beginnings)]
        lines += ["", f"### {heading}"] if shown else []
        for table in shown:
            title = [f"{table.heading}:", ""] if len(shown) > 1 else []
            lines += ["", *title, *(line.replace("<", "&lt;") for line in markdown_table(table))]
            lines += ["", _cell(table.note)] if table.note else []
    plots = [name for name in facts.files if name.startswith("requant.signoff") and name.endswith((".png", ".svg"))]
    return [*lines, *(line for name in plots for line in ("", f"![{name}]({name})"))]


def _cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _limits(facts: CardFacts) -> list[str]:
    """What was not shown, said plainly."""
    return [f"- {_cell(line)}" for line in _limit_lines(facts)]


def _limit_lines(facts: CardFacts) -> Iterable[str]:
    signoff, target = facts.signoff, facts.manifest.target
    if signoff is not None:
        for gate in signoff.gates:
            if gate.status is not Status.PASSED:
                yield f"{gate.name} {gate.status.value}: {gate.reason}"
    held = _held(signoff)
    if held:
        yield f"Loader rules of {', '.join(held)} were applied to the files; that is no run of these programs."
    for runtime in target.runtimes:
        if runtime not in held:
            yield f"The loader contract of {runtime} was not shown to hold."
    judged = {gate.name for gate in signoff.gates} if signoff is not None else set[str]()
    for name, what in _STAGES.items():
        if name not in judged:
            yield f"Not measured: {what}."
    if str(facts.lock.get("input_scale", "")).startswith("constant"):
        yield f"Activation scales are not calibrated ({facts.lock['input_scale']})."
