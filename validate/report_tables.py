"""The tables of a sign-off, stage by stage: what the Markdown, the terminal and the page all show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

from requant.kernels.formats import MARLIN_WINDOW, NATIVE_WINDOW, NumberFormat
from requant.validate.decode_report import DECODING, STEP, decoding_rows, step_rows
from requant.validate.results import JSON, StageResult, Status
from requant.validate.verdict import SignOff

__all__ = ["SERVING", "Table", "bytes_text", "numbers_of", "object_of", "tables_of", "tensor_rows"]

SERVING: Final = "Requests to a running server"
_NATIVE: Final = {True: "native FP4", False: "FP4 decoded first"}
_WORST: Final = 10
"""Tensors in the table of the worst."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table under a heading. right: columns (by index) aligned to the right. note: a sentence below it."""

    heading: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[int] = frozenset()
    note: str = ""


def tables_of(signoff: SignOff) -> list[Table]:
    """Gates first, then what the stages measured."""
    gates = tuple(
        (
            gate.name,
            "required" if gate.required else "optional",
            gate.status.value.upper() if gate.status is Status.FAILED else gate.status.value,
            gate.measured_on or "-",
            gate.reason,
        )
        for gate in signoff.gates
    )
    tables = [Table("Gates", ("gate", "", "result", "measured on", "reason"), gates)]
    contract, numerics = signoff.stage("contract"), signoff.stage("numerics")
    if contract is not None:
        tables += _runtimes(contract)
    if numerics is not None and "totals" in numerics.data:
        tables += [_weights(numerics), *_worst(numerics)]
    model = signoff.stage("model")
    if model is not None:
        tables += _model(model)
    kernels, speed = signoff.stage("kernels"), signoff.stage("speed")
    if kernels is not None:
        tables += _kernels(kernels)
    if speed is not None:
        tables += _speed(speed)
    serving = signoff.stage("serving")
    if serving is not None:
        tables += _serving(serving)
    return tables


def _model(stage: StageResult) -> list[Table]:
    """The model against its source, each figure with its error and the bound it was held to."""
    data = stage.data
    kl, perplexity, agreement = (object_of(data.get(key)) for key in ("kl", "perplexity", "top1_agreement"))
    greedy, answers, limits = (object_of(data.get(key)) for key in ("greedy", "answers", "limits"))
    if not kl:
        return []
    bounds = {key: "-" if limits.get(key) is None else f"{_float(limits, key):g}" for key in limits}
    interval = f"{_float(perplexity, 'ratio_low'):.4f} to {_float(perplexity, 'ratio_high'):.4f}"
    rows = [
        ("KL on the text, mean", f"{_float(kl, 'mean'):.5g}", _error(kl), bounds.get("max_kl", "-")),
        ("KL on the text, 99% of positions below", f"{_float(kl, 'p99'):.5g}", "", "-"),
        ("same first token", f"{100 * _float(agreement, 'mean'):.2f}%", _error(agreement, 100), "-"),
        (
            "perplexity of the source",
            f"{_float(perplexity, 'source'):.3f}",
            _error(perplexity, 1, "source_stderr"),
            "-",
        ),
        ("perplexity", f"{_float(perplexity, 'target'):.3f}", _error(perplexity, 1, "target_stderr"), "-"),
        ("ratio of perplexities", f"{_float(perplexity, 'ratio'):.4f}", interval, bounds.get("max_ppl_ratio", "-")),
    ]
    if greedy:
        steps = f"of {_int(greedy, 'prompts')} ({greedy.get('of')}), {_int(greedy, 'steps')} steps"
        wanted = "all" if limits.get("identical_greedy") else "-"
        rows.append(("greedy continuations identical", f"{_int(greedy, 'identical')}", steps, wanted))
    if answers:
        along = ("KL along the source's answers, mean", f"{_float(answers, 'kl_mean'):.5g}")
        rows.append((*along, _error(answers, 1, "kl_stderr"), rows[0][3]))
        if "top1_agreement" in answers:
            rows.append(("same first token along them", f"{100 * _float(answers, 'top1_agreement'):.2f}%", "", "-"))
    text = object_of(data.get("text"))
    note = f"{_int(data, 'tokens'):,} tokens of {text.get('file')}, {_int(data, 'sequence_length')} in a row"
    note += f"; {data.get('path')}; bounds: {limits.get('origin', 'not judged')}."
    note += "".join(f" Reduced: {line}." for line in _texts(data.get("reduced")))
    if not data.get("complete"):
        note += " Incomplete: the stage broke off."
    columns = ("", "value", "error, interval", "bound")
    return [Table("Model against its source", columns, tuple(rows), frozenset({1}), note), *_tasks(data)]


def _tasks(data: Mapping[str, JSON]) -> list[Table]:
    """lm-eval's tasks on both models."""
    run = object_of(data.get("lm_eval"))
    rows: list[tuple[str, ...]] = []
    for name, told in object_of(run.get("tasks")).items():
        task = object_of(told)
        scores = [
            f"{_float(task, key):{sign}.4f} {_error(task, 1, f'{key}_stderr')}".rstrip()
            for key, sign in (("source", ""), ("target", ""), ("difference", "+"))
        ]
        bound = f"-{_float(task, 'margin'):g}" if task.get("judged") else "-"
        verdict = str(task.get("verdict")) if task.get("judged") else "not judged"
        rows.append((name, f"{_int(task, 'questions'):,}", *scores, bound, verdict))
    columns = ("task, metric", "questions", "source", "target", "difference", "margin", "verdict")
    note = f"lm-eval {run.get('version')}; of a task the first metric is judged, question by question."
    return [Table("Tasks of lm-eval", columns, tuple(rows), frozenset(range(1, 6)), note)] if rows else []


def _error(row: Mapping[str, JSON], factor: float = 1, key: str = "stderr") -> str:
    return f"+- {factor * _float(row, key):.3g}" if _is_number(row.get(key)) else ""


def _kernels(stage: StageResult) -> list[Table]:
    """Every path with its kernel: its worst error, or why it did not run."""
    worst = object_of(stage.data.get("worst"))
    rows: list[tuple[str, ...]] = []
    for path in cast("Sequence[Mapping[str, str]]", stage.data.get("paths") or ()):
        error = worst.get(path["path"])
        shown = f"{error:.2e}" if isinstance(error, float) else str(error or "-")
        rows.append((path["path"], path["kernel"], path["state"], shown, path["reason"]))
    note = ""
    marlin = object_of(stage.data.get("marlin"))
    if marlin:
        flushed = _part(_int(marlin, "flushed"), _int(marlin, "block_scales"))
        note = (
            f"Simulated: Marlin would flush {flushed} block scales of the matrices checked; worst relative error of an "
            f"output: {_float(marlin, 'worst_rel_error'):.2e}."
        )
    columns = ("path", "kernel", "here", "worst relative error", "on")
    return [Table("Kernels against float64", columns, tuple(rows), frozenset({3}), note)] if rows else []


def _speed(stage: StageResult) -> list[Table]:
    """The model as it decodes, its step by kind, and the kernels' times by shape and number of tokens."""
    tables: list[Table] = []
    for heading, made, words in ((DECODING, decoding_rows(stage.data), {0}), (STEP, step_rows(stage.data), {1, 6})):
        if made is not None:
            columns, rows, note = made
            tables.append(Table(heading, columns, rows, frozenset(range(len(columns))) - words, note))
    return tables + _kernel_times(stage)


def _kernel_times(stage: StageResult) -> list[Table]:
    bench = object_of(stage.data.get("kernels"))
    rows: list[tuple[str, ...]] = []
    for point in cast("Sequence[Mapping[str, JSON]]", bench.get("points") or ()):
        ceiling, bf16, mxfp4 = (point.get(key) for key in ("of_ceiling", "against_bf16", "against_mxfp4"))
        rows.append(
            (
                str(point["shape"]),
                str(point["tokens"]),
                str(point["path"]),
                f"{_float(point, 'us'):.1f}",
                f"{_float(point, 'gbps'):.0f}",
                f"{100 * ceiling:.0f}%" if isinstance(ceiling, float) else "-",
                f"{bf16:.2f}" if isinstance(bf16, float) else "-",
                f"{mxfp4:.2f}" if isinstance(mxfp4, float) else "-",
            )
        )
    columns = ("shape", "tokens", "path", "us", "GB/s", "of read ceiling", "x BF16", "x MXFP4")
    note = f"On {bench.get('device')}; {bench.get('path')}." if bench else ""
    heading = "Kernel times" if bench.get("on_gpu") else "Kernel times (CPU path: no claim about decoding)"
    return [Table(heading, columns, tuple(rows), frozenset({1, *range(3, 8)}), note)] if rows else []


def _serving(stage: StageResult) -> list[Table]:
    """Every labelled run of a server at every concurrency, and what the server said of its kernels."""
    rows: list[tuple[str, ...]] = []
    told: list[str] = []
    for run in _objects(stage.data.get("runs")):
        label = str(run.get("label"))
        for point in _objects(run.get("points")):
            counts = (str(_int(point, "concurrency")), f"{_int(point, 'completed')} of {_int(point, 'requests')}")
            times = (
                f"{_shown(point, f'{key}_median')} / {_shown(point, f'{key}_p95')}" for key in ("ttft_ms", "itl_ms")
            )
            rows.append((label, *counts, _shown(point, "output_tokens_per_s"), *times))
        kernels = ", ".join(_texts(run.get("kernels"))) or "no FP4 kernel named"
        incomplete = f"; INCOMPLETE: {run['error']}" if run.get("error") else ""
        known = run.get("fp4_native")
        native = "not known whether native" if not isinstance(known, bool) else _NATIVE[known]
        told.append(f"{label}: {run.get('server')} on {run.get('card')}, {kernels} ({native}){incomplete}")
    columns = ("run", "streams", "answered", "tokens/s", "TTFT ms, median / p95", "between tokens ms, median / p95")
    return [Table(SERVING, columns, tuple(rows), frozenset(range(1, 6)), ". ".join(told))] if rows else []


def _objects(value: JSON) -> list[Mapping[str, JSON]]:
    return [object_of(item) for item in value] if isinstance(value, list | tuple) else []


def _shown(row: Mapping[str, JSON], key: str) -> str:
    value = row.get(key)
    return f"{value:,.1f}" if isinstance(value, int | float) else "-"


def _runtimes(contract: StageResult) -> list[Table]:
    standing = object_of(contract.data.get("runtimes"))
    if not standing:
        return []
    rows = tuple((runtime, str(how)) for runtime, how in standing.items())
    note = "Simulated: the loaders' rules were applied to the files; no runtime has loaded them."
    return [Table("Runtimes", ("runtime", "contract"), rows, note=note)]


def _weights(numerics: StageResult) -> Table:
    totals, census = object_of(numerics.data.get("totals")), object_of(numerics.data.get("census"))
    windows, dropped = object_of(totals.get("windows")), object_of(census.get("dropped"))
    blocks, blocks32 = _int(totals, "blocks"), _int(totals, "blocks32")
    before, after = _int(census, "source_bytes"), _int(census, "output_bytes")
    weights = _int(totals, "weights")
    rows = [("weights equal to their source", _part(weights - _int(totals, "changed"), weights))]
    if not _from_plain(numerics):
        rows += [
            ("blocks of 16: equal, codes unchanged", _part(_int(totals, "exact"), blocks)),
            ("blocks of 16: equal by exact shift", _part(_int(totals, "shifted"), blocks)),
            ("blocks of 16: lossy", _part(_int(totals, "lossy"), blocks)),
            ("blocks of 32: lossy", _part(_int(totals, "lossy32"), blocks32)),
        ]
        if _int(totals, "zero_sign"):
            rows.insert(3, ("blocks of 16: equal but for the sign of a zero", _part(_int(totals, "zero_sign"), blocks)))
    if _int(totals, "lossy"):
        rows.append(("largest error", f"{_float(totals, 'max_error'):.4g}"))
        rows.append(("least SQNR of a tensor", _db(totals.get("min_sqnr_db"))))
    known = _int(windows, "tensors")
    if known:
        rows.append((f"tensors within {NATIVE_WINDOW} octaves (native)", f"{_int(windows, 'native'):,} of {known:,}"))
        rows.append((f"tensors within {MARLIN_WINDOW} octaves (Marlin)", f"{_int(windows, 'marlin'):,} of {known:,}"))
        rows.append(("block scales that Marlin flushes", f"{_int(totals, 'below_marlin'):,}"))
    rows += [
        ("tensors converted", f"{_int(census, 'converted'):,}"),
        ("tensors copied byte for byte", f"{_int(census, 'copied'):,}"),
        ("tensors dropped by a rule", f"{len(dropped):,}"),
        ("scales added", f"{_int(census, 'added'):,}"),
        ("bytes before", f"{before:,}"),
        ("bytes after", f"{after:,}" + (f" ({after / before:.3f}x)" if before else "")),
    ]
    return Table("Weights against the source", ("", "count"), tuple(rows), frozenset({1}))


def _worst(numerics: StageResult) -> list[Table]:
    """The tensors with the most to say: most lossy blocks, then least SQNR, then the widest span of exponents."""
    rows = tensor_rows(numerics)

    def badness(row: Mapping[str, JSON]) -> tuple[float, float, float, str]:
        sqnr, span = row["sqnr_db"], row["fused_span"]
        quiet = float(sqnr) if isinstance(sqnr, int | float) else float("inf")
        lossy = _int(row, "lossy") if span is not None else 0  # plain weights lose something in every block
        return (-lossy, quiet, -(span if isinstance(span, int) else 0), str(row["tensor"]))

    worst = sorted(rows, key=badness)[:_WORST]
    if not worst:
        return []
    cells = tuple(
        (
            str(row["tensor"]),
            f"{_int(row, 'blocks'):,}",
            f"{_int(row, 'shifted'):,}",
            f"{_int(row, 'lossy'):,}",
            f"{_float(row, 'max_error'):.3g}",
            f"{_float(row, 'rms_error'):.3g}",
            _db(row["sqnr_db"]),
            "-" if row["span"] is None else str(row["span"]),
            _window(row["fused_span"]),
        )
        for row in worst
    )
    kind = "Worst tensors" if any(_int(row, "lossy") for row in rows) else "Tensors with the widest exponents"
    heading = f"{kind} ({len(cells)} of {len(rows):,})"
    note = "span: octaves between a tensor's largest and least live exponent; window: that of its fused group."
    columns_out = ("tensor", "blocks", "shifted", "lossy", "max error", "RMS error", "SQNR", "span", "window")
    return [Table(heading, columns_out, cells, frozenset(range(1, 8)), note)]


def tensor_rows(numerics: StageResult) -> list[dict[str, JSON]]:
    """The rows of the numerics stage, each with its columns' names."""
    tensors = object_of(numerics.data.get("tensors"))
    columns = cast("Sequence[str]", tensors.get("columns") or ())
    rows = cast("Sequence[Sequence[JSON]]", tensors.get("rows") or ())
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _from_plain(numerics: StageResult) -> bool:
    """Whether all that was converted came from plain weights, where a count of equal blocks says nothing."""
    rows = tensor_rows(numerics)
    packed = (NumberFormat.MXFP4.value, NumberFormat.NVFP4.value)
    return bool(rows) and all(row["source"] not in packed for row in rows)


def _window(span: JSON) -> str:
    if not isinstance(span, int):
        return "-"
    if span <= MARLIN_WINDOW:
        return f"{span}: Marlin and native"
    return f"{span}: native only" if span <= NATIVE_WINDOW else f"{span}: outside both"


def object_of(value: object) -> Mapping[str, JSON]:
    """value if it is a JSON object, else an empty one: stages of other versions may lack it."""
    return cast("Mapping[str, JSON]", value) if isinstance(value, Mapping) else {}


def numbers_of(value: object) -> list[float]:
    """The numbers of a JSON array; empty if it is none or holds anything else."""
    items = cast("Sequence[object]", value) if isinstance(value, list | tuple) else ()
    return [float(x) for x in items if isinstance(x, int | float)] if all(_is_number(x) for x in items) else []


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _texts(value: JSON) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list | tuple) else []


def _int(row: Mapping[str, JSON], key: str) -> int:
    value = row.get(key)
    return value if isinstance(value, int) else 0


def _float(row: Mapping[str, JSON], key: str) -> float:
    value = row.get(key)
    return float(value) if isinstance(value, int | float) else 0.0


def _part(count: int, total: int) -> str:
    return f"{count:,} of {total:,}"


def _db(value: JSON) -> str:
    return f"{value:.2f} dB" if isinstance(value, int | float) else "exact"


def bytes_text(count: int) -> str:
    """With the unit (powers of 1000) that leaves one to three digits before the point."""
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{count} B" if unit == "B" else f"{size:.2f} {unit}"
