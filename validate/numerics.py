"""The numerics stage: every output tensor against the source it was made from, in exact arithmetic.

The second opinion. Both checkpoints are read again with the safetensors library, tensors are paired by `pairing.py`'s
own knowledge of the layouts, copies are compared byte for byte and converted weights number for number, in float64,
which is exact here: a code, a block scale and a global scale have 30 significant bits together (`numerics_blocks.py`).
The census is closed: every tensor on both sides is accounted for, with its reason.

Spans and windows. A block scale is exact within `k_max - k <= 17` of the largest block that shares its global scale,
and survives Marlin within 14. `span` is a tensor's own, over live blocks; `fused_span` that of all weights a runtime
fuses with it (q/k/v, gate/up), which is the one that decides.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final, cast

from requant.kernels.formats import E4M3_POW2_MIN, MARLIN_WINDOW, NATIVE_WINDOW
from requant.manifests.errors import ManifestError
from requant.manifests.match import compile_match
from requant.manifests.schema import NumericsGate
from requant.validate.carried_scales import CarriedScales
from requant.validate.collector import Collector
from requant.validate.modules import Module
from requant.validate.numerics_blocks import Tally
from requant.validate.numerics_compare import Result, compare, compare_kept, look_again
from requant.validate.numerics_read import MappedReader
from requant.validate.opened import OpenedFolder, open_folder
from requant.validate.pairing import Pair, Pairing, pair_checkpoints
from requant.validate.results import JSON, StageResult, status_of

__all__ = [
    "COLUMNS",
    "STAGE",
    "Both",
    "Progress",
    "check_numerics",
    "conclude",
    "fused_spans",
    "judge_copy",
    "open_both",
]

STAGE: Final = "numerics"
Progress = Callable[[int, int], None]
"""Called with (source bytes judged so far, source bytes in all)."""

COLUMNS: Final = (
    "tensor",
    "source",
    "target",
    "weights",
    *(f.name for f in fields(Tally) if f.name not in ("squared_error", "signal", "max_error", "octaves")),
    "max_error",
    "rms_error",
    "sqnr_db",
    "span",
    "fused_span",
)
"""Columns of data["tensors"]["rows"], one row per converted output weight; the counts are `Tally`'s, in blocks of 16.

sqnr_db is null where nothing was lost; the spans are null where the source has no E8M0 scales.
"""

_SOURCE_FAULTS: Final = frozenset(
    {"shard-unreadable", "shard-missing", "json-unreadable", "index-malformed", "index-path-escapes", "no-tensors"}
)
"""Container rules that matter on the source's side; the others speak of what a runtime would load."""
_COMPENSATED_DB: Final = 10.0
"""SQNR that compensating rounding stays above (NVFP4 has 20 dB by the nearest codes, MXFP4 18; GPTQ takes a few off);
codes and scales that do not belong together are at 0."""
_FUSED: Final = (
    (re.compile(r"\.[qkv]_proj$"), ".qkv_proj"),
    (re.compile(r"\.(?:gate|up)_proj$"), ".gate_up_proj"),
    (re.compile(r"\.w[13]$"), ".w13"),
)


def check_numerics(
    source: Path, output: Path, gate: NumericsGate | None, *, progress: Progress | None = None
) -> StageResult:
    """Compare the folder `output` with the checkpoint `source` that it was made from.

    Fails for anything unaccounted for, a copied byte that changed, a NaN scale, an activation scale of another amax, an
    all-zero weight whose source is not, a code that is not the nearest under its scale, and for what the gate forbids.
    data: {"totals", "census", "block_scales", "tensors": {"columns", "rows"}}. Never raises for what the folders hold.
    """
    started = time.perf_counter()
    both = open_both(source, output, complete=True)
    advance = _meter(progress, both.theirs.nbytes)
    before, after = MappedReader(both.theirs), MappedReader(both.ours)
    carried = CarriedScales(both.theirs, both.ours)
    for copy in both.census.copies:
        wrong = compare_kept(copy, both.theirs.tensors, before, after)
        judge_copy("" if wrong and carried.gives(copy.output.name, after) else wrong, copy.output.name, both.found)
        advance(copy.output.nbytes)
    results = [compare(name, pairs, before, after, advance) for name, pairs in both.groups.items()]
    for result in results:
        wrong = carried.wrong(result.pairs, before, after)
        result.activation = "" if wrong and carried.given(result.pairs, after) else wrong
    spans = fused_spans(results, before, after)
    advance(both.theirs.nbytes)
    return conclude(both, results, spans, gate, time.perf_counter() - started)


@dataclass(frozen=True, slots=True)
class Both:
    """The two checkpoints with the census over them. groups: the pairs of each output weight. found: doubts so far."""

    theirs: OpenedFolder
    ours: OpenedFolder
    census: Pairing
    groups: Mapping[str, list[Pair]]
    found: Collector


def open_both(source: Path, output: Path, *, complete: bool = False, restated: Collection[str] = frozenset()) -> Both:
    """Open both sides and pair their tensors, from headers alone; if both are complete, by their global scales too.

    restated: NVFP4 modules that are known to have other global scales, where not both are complete.
    """
    found, doubts = Collector(), Collector()
    theirs, ours = open_folder(source, doubts), open_folder(output, Collector())
    for finding in doubts.findings():
        if finding.rule in _SOURCE_FAULTS and finding.severity == "error":
            found.error(finding.rule, f"source: {finding.message}", where=finding.where, hint=finding.hint)
    configs = (theirs.config, ours.config)

    def known(module: Module, _: Module) -> bool:
        return module.name in restated

    differs = _restated(theirs, ours) if complete else known
    census = pair_checkpoints(theirs.tensors, ours.tensors, _drop_rules(output), configs, differs)
    _judge_census(census, found)
    groups: dict[str, list[Pair]] = {}
    for pair in census.pairs:
        groups.setdefault(pair.name, []).append(pair)
    return Both(theirs, ours, census, groups, found)


def _restated(theirs: OpenedFolder, ours: OpenedFolder) -> Callable[[Module, Module], bool]:
    """Whether two NVFP4 modules of the same names, dtypes and shapes have different global scales."""
    before, after = MappedReader(theirs), MappedReader(ours)

    def differs(module: Module, origin: Module) -> bool:
        one, other = module.global_scale, origin.global_scale
        if one is None or other is None:
            return False
        rows = max(1, one.shape[0]) if one.shape else 1
        return after.rows(one, 0, rows).tobytes() != before.rows(other, 0, rows).tobytes()

    return differs


def judge_copy(wrong: str, name: str, found: Collector) -> None:
    """What a copied tensor's comparison said, as a finding."""
    if wrong:
        found.error("copy-differs", wrong, where=name, hint="copied tensors must keep every byte: convert again")


def conclude(
    both: Both, results: Sequence[Result], spans: Mapping[str, int | None], gate: NumericsGate | None, seconds: float
) -> StageResult:
    """The stage's result from that of every weight. spans: of each weight's fused group, by name."""
    found = both.found
    _judge_weights(results, _compensated(both.ours.path), found)
    _judge_gate(results, gate, found)
    return StageResult(
        STAGE,
        status_of(found.findings()),
        _reason(results, both.census, gate, found),
        found.findings(),
        _data(results, spans, both.census, both.theirs, both.ours),
        "cpu",
        seconds,
    )


def _meter(progress: Progress | None, total: int) -> Callable[[int], None]:
    """Adds up judged bytes for the progress callback; never passes the total."""
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done = min(done + nbytes, total)
        if progress is not None:
            progress(done, total)

    return advance


def _rules(output: Path) -> Callable[[str], Mapping[str, object]]:
    """module -> the first rule that matches it, from the manifest that lies in the output; empty if none does."""
    import yaml

    try:
        loaded = cast("object", yaml.safe_load((output / "requant.manifest.yaml").read_text(encoding="utf-8")))
        layers = cast("Mapping[str, Sequence[Mapping[str, object]]]", loaded)["layers"]
        rules = [(compile_match(str(rule["match"])), {**rule}) for rule in layers]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError, ManifestError):
        rules = []  # no readable manifest: no rule dropped anything, and what is missing is missing

    def rule_of(module: str) -> Mapping[str, object]:
        for matches, rule in rules:
            if matches(module):
                return rule
        return {}

    return rule_of


def _drop_rules(output: Path) -> Callable[[str], str | None]:
    """module -> the rule that drops it."""
    rule_of = _rules(output)

    def dropped_by(module: str) -> str | None:
        rule = rule_of(module)
        return f"dropped by the rule {str(rule['match'])!r}" if rule.get("to") == "drop" else None

    return dropped_by


def _compensated(output: Path) -> Callable[[str], bool]:
    """Whether a module's rule says `rounding: gptq`, which takes another code than the nearest on purpose."""
    rule_of = _rules(output)
    return lambda module: rule_of(module).get("rounding") == "gptq"


def fused_spans(
    results: Sequence[Result], before: MappedReader | None = None, after: MappedReader | None = None
) -> dict[str, int | None]:
    """Span of the exponents over each tensor's fused group.

    Where the exponents of all blocks pass the Marlin window, the group's codes are looked at (if there are readers), so
    that only live blocks count, as they do for the one who chose the global scale.
    """
    groups: dict[str, list[Result]] = {}
    for result in results:
        key = next((rx.sub(to, result.name) for rx, to in _FUSED if rx.search(result.name)), result.name)
        groups.setdefault(key, []).append(result)
    spans: dict[str, int | None] = {}
    for members in groups.values():
        span = _joint_span(members)
        if before and after and len(members) > 1 and span is not None and span > MARLIN_WINDOW:
            for member in members:
                look_again(member, before, after)
            span = _joint_span(members)
        spans.update((member.name, span) for member in members)
    return spans


def _joint_span(members: Sequence[Result]) -> int | None:
    ranges = [member.k for member in members if member.k is not None]
    return max(high for _, high in ranges) - min(low for low, _ in ranges) if ranges else None


# --- judging ----------------------------------------------------------------------------------------------------------


def _judge_census(census: Pairing, found: Collector) -> None:
    for name, why in census.unreadable.items():
        found.error("weight-unpaired", why, where=name, hint="the output must hold this weight in the declared format")
    for name in census.missing:
        message = "is in the source, and neither converted nor copied nor dropped by a rule"
        found.error("tensor-missing", message, where=name, hint="name it in a `to: drop` rule if it is to be left out")
    for name, why in census.incomplete.items():
        found.error("tensor-incomplete", why, where=name, hint="convert again")
    for name in census.extra:
        found.error(
            "tensor-extra", "is in the output and comes from no source tensor", where=name, hint="convert again"
        )
    for name in census.leftover:
        message = "is the source's, left beside the weight it belonged to, which was converted"
        found.error("tensor-leftover", message, where=name, hint="a loader may take it for a scale: convert again")
    for name, rule in census.dropped.items():
        found.info("tensor-dropped", rule, where=name)


def _judge_weights(results: Sequence[Result], compensated: Callable[[str], bool], found: Collector) -> None:
    """What is wrong whatever the gate says."""
    for result in results:
        tally, where = result.tally, result.name
        if result.source_live and not result.output_live:
            found.error("all-zero", "is all zeros, its source is not", where=where, hint="convert again")
        if tally.nan:
            message = f"{tally.nan:,} blocks of 16 have a NaN scale on either side"
            found.error("nan-scale", message, where=where, hint="a NaN scale in the source is a corrupt download")
        if result.activation:
            hint = "runtimes round activations under it: convert again, or say in `activations` where scales come from"
            found.error("activation-scale-differs", result.activation, where=where, hint=hint)
        sqnr = result.sqnr_db
        if tally.misrounded and compensated(where) and (sqnr is None or sqnr > _COMPENSATED_DB):
            message = f"{tally.misrounded:,} weights hold another code than the nearest, as rounding: gptq means to"
            found.info("compensated", message, where=where)
        elif tally.misrounded:
            message = f"{tally.misrounded:,} weights do not hold the code nearest to their source under its scale"
            hint = "codes and scales do not belong together: clamped scales, swapped nibbles or another scale rule"
            found.error("misrounded", message, where=where, hint=hint)
        if tally.avoidable:
            message = f"{tally.avoidable:,} lossy blocks would have been exact under the same global scale"
            found.warning("loss-avoidable", message, where=where, hint="shift codes and scales together")


def _judge_gate(results: Sequence[Result], gate: NumericsGate | None, found: Collector) -> None:
    forbidden = gate is not None and gate.lossless == "required"
    for result in results:
        tally = result.tally
        if tally.lossy and (forbidden or result.span is not None):  # plain weights lose something in every block
            message = f"{tally.lossy:,} of {tally.blocks:,} blocks lossy, max error {tally.max_error:.3g}"
            hint = "lossless: required allows none; lossless: report counts them" if forbidden else ""
            found.add("lossy-blocks", "error" if forbidden else "info", message, where=result.name, hint=hint)
        if tally.zero_sign:
            message = f"{tally.zero_signs:,} zeros lost their sign, in {tally.zero_sign:,} blocks equal in value"
            hint = "0x8 is -0: keep the code as it is"
            found.add("zero-sign", "error" if forbidden else "warning", message, where=result.name, hint=hint)
    if gate is None:
        return
    lossy = [result.name for result in results if result.tally.lossy]
    if gate.max_lossy_tensors is not None and len(lossy) > gate.max_lossy_tensors:
        message = f"{len(lossy):,} tensors hold a lossy block, the gate allows {gate.max_lossy_tensors:,}"
        found.error("lossy-tensors", message, where=lossy[0], hint="raise max_lossy_tensors, or keep these tensors")
    for result in results:
        sqnr = result.sqnr_db
        if gate.min_sqnr_db is not None and sqnr is not None and sqnr < gate.min_sqnr_db:
            message = f"{sqnr:.2f} dB signal to quantization noise, the gate asks for {gate.min_sqnr_db:g}"
            found.error("sqnr-low", message, where=result.name, hint="keep this layer, or try another scale rule")


def _reason(results: Sequence[Result], census: Pairing, gate: NumericsGate | None, found: Collector) -> str:
    total = _total(results)
    lossy = sum(result.tally.lossy > 0 for result in results)
    tensors = f"{len(results):,} converted and {len(census.copies):,} copied tensors"
    sqnr = [result.sqnr_db for result in results if result.sqnr_db is not None]
    if not results:
        blocks = "nothing was converted"
    elif sqnr and all(result.span is None for result in results):
        blocks = f"{total.blocks:,} blocks rounded, SQNR at least {min(sqnr):.2f} dB"
    elif total.lossy:
        blocks = f"{total.lossy:,} of {total.blocks:,} blocks lossy in {lossy:,} of {len(results):,} converted tensors"
    elif total.zero_sign:
        blocks = f"{total.blocks:,} blocks equal in value, {total.zero_signs:,} zeros without their sign"
    else:
        blocks = f"all {total.blocks:,} blocks equal their source ({total.shifted:,} by exact shift)"
    errors = {finding.rule for finding in found.findings() if finding.severity == "error"}
    if not errors:
        return f"{tensors}: {blocks}"
    required = "lossless: required; " if gate is not None and gate.lossless == "required" else ""
    return f"{required}{blocks}; broken: {', '.join(f'{rule} ({found.counts[rule]:,})' for rule in sorted(errors))}"


# --- data -------------------------------------------------------------------------------------------------------------


def _total(results: Sequence[Result]) -> Tally:
    total = Tally()
    for result in results:
        total.add(result.tally)
    return total


def _data(
    results: Sequence[Result],
    spans: Mapping[str, int | None],
    census: Pairing,
    theirs: OpenedFolder,
    ours: OpenedFolder,
) -> dict[str, JSON]:
    total = _total(results)
    known = [span for span in spans.values() if span is not None]
    sqnr = [result.sqnr_db for result in results if result.sqnr_db is not None]
    counts: dict[str, JSON] = {f.name: getattr(total, f.name) for f in fields(Tally) if f.name in COLUMNS}
    return {
        "totals": {
            **counts,
            "weights": sum(result.weights for result in results),
            "lossy_tensors": sum(result.tally.lossy > 0 for result in results),
            "min_sqnr_db": round(min(sqnr), 3) if sqnr else None,
            "windows": {
                "tensors": len(known),
                "native": sum(span <= NATIVE_WINDOW for span in known),
                "marlin": sum(span <= MARLIN_WINDOW for span in known),
            },
        },
        "census": {
            "source_tensors": len(theirs.tensors),
            "source_bytes": theirs.nbytes,
            "output_tensors": len(ours.tensors),
            "output_bytes": ours.nbytes,
            "converted": len(results),
            "copied": len(census.copies),
            "added": len(census.added),
            "dropped": dict(census.dropped),
        },
        "block_scales": {"first_exponent": E4M3_POW2_MIN, "octaves": total.octaves},
        "tensors": {"columns": list(COLUMNS), "rows": [_row(result, spans[result.name]) for result in results]},
    }


def _row(result: Result, fused_span: int | None) -> list[JSON]:
    tally, first = result.tally, result.pairs[0]
    values: dict[str, JSON] = {f.name: getattr(tally, f.name) for f in fields(Tally)}
    values |= {
        "tensor": result.name,
        "source": first.source.label,
        "target": first.output.label,
        "weights": result.weights,
        "rms_error": result.rms_error,
        "sqnr_db": None if result.sqnr_db is None else round(result.sqnr_db, 3),
        "span": result.span,
        "fused_span": fused_span,
    }
    return [values[column] for column in COLUMNS]
