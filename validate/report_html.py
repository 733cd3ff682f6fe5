"""A sign-off as one HTML page that needs nothing else: no network, no fonts, no library; style and script are inside.

The verdict comes first, then the gates, what was converted, where it lost, how the model and the kernels did, and at
the end every tensor. The tables are those of the Markdown report (`report.py`), the charts those of `report_charts.py`;
`templates/` holds the page, its style (light, dark, print) and its script. The page is complete without the script, but
for the table of tensors, of which it then shows the first rows: 30,000 of them lie in the page as JSON, and the script
sorts, filters and pages through them, a hundred at a time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from requant.validate.decode_report import DECODING, STEP
from requant.validate.report import finding_line, footer_of, verdict_of
from requant.validate.report_charts import (
    breakdown_chart,
    bytes_chart,
    kernel_speedup,
    kl_chart,
    layer_and_kind,
    roofline,
    scale_histogram,
    serving_chart,
    sqnr_map,
)
from requant.validate.report_tables import SERVING, Table, bytes_text, object_of, tables_of, tensor_rows
from requant.validate.results import JSON, StageResult, Status
from requant.validate.svg import Chart
from requant.validate.verdict import SignOff

__all__ = ["render_html"]

_TEMPLATES: Final = Path(__file__).parent / "templates"
_PAGE_ROWS: Final = 100
"""Rows of the tensor table on show at a time, and without the script."""
_TENSOR_COLUMNS: Final = (
    "tensor", "source", "target", "weights", "blocks", "exact", "shifted", "lossy",
    "max_error", "rms_error", "sqnr_db", "span", "fused_span",
)  # fmt: skip
_TEXT_COLUMNS: Final = 3
"""The first of them are text, the others numbers."""
_SERVING: Final = (
    ("output_tokens_per_s", "Output tokens per second", "tokens/s"),
    ("ttft_ms_median", "Time to first token, median", "ms"),
    ("itl_ms_median", "Time between tokens, median", "ms"),
)
_SPEED: Final = (
    ("decode_tokens_per_s", "Tokens per second while decoding", "tokens/s"),
    ("output_tokens_per_s", "Tokens per second with prefills", "tokens/s"),
    ("ttft_ms_median", "Time to first token, median", "ms"),
    ("itl_ms_median", "Time between tokens, median", "ms"),
)


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page. lines: findings and the like, each one item of a list. folded: closed until asked for."""

    id: str
    heading: str
    lead: str = ""
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()
    lines: tuple[str, ...] = ()
    folded: bool = False


@dataclass(frozen=True, slots=True)
class _Tensors:
    """The table of all tensors: rows as JSON for the script, the first of them for everyone else."""

    columns: tuple[str, ...]
    first: tuple[tuple[str, ...], ...]
    total: int
    page_rows: int
    json: str
    text_columns: int = field(default=_TEXT_COLUMNS)


def render_html(signoff: SignOff) -> str:
    """The whole page."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES, encoding="utf-8"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("report.html.j2")
    return template.render(
        name=signoff.name,
        verdict=verdict_of(signoff),
        signed_off=signoff.signed_off,
        gates=[(gate, _STYLE[gate.status]) for gate in signoff.gates],
        sections=_sections(signoff),
        tensors=_tensors(signoff.stage("numerics")),
        footer=footer_of(signoff),
    )


_STYLE: Final = {Status.PASSED: "passed", Status.FAILED: "failed", Status.NOT_RUN: "notrun"}


def _sections(signoff: SignOff) -> list[Section]:
    """Every section that has something to show."""
    tables = {table.heading: table for table in tables_of(signoff) if table.heading != "Gates"}
    numerics = signoff.stage("numerics")
    sections = _weights(numerics, tables) if numerics is not None else []
    sections += _runtimes(tables)
    kernels, model, speed, serving = (signoff.stage(name) for name in ("kernels", "model", "speed", "serving"))
    if kernels is not None and kernels.data:
        sections.append(_kernels(kernels, tables))
    if model is not None and model.data:
        sections.append(_model(model, tables))
    if speed is not None and speed.data:
        sections.append(_speed(speed, tables))
    if serving is not None and serving.data:
        sections.append(_serving(serving, tables))
    if tables:  # what another version's report has and this page has no place for
        sections.append(Section("more", "More measurements", tables=tuple(tables.values())))
    for stage in signoff.stages:
        if stage.findings:
            lines = tuple(finding_line(finding) for finding in stage.findings[:200])
            more = len(stage.findings) - len(lines)
            lead = f"{more:,} more are in requant.signoff.json." if more else ""
            sections.append(Section(f"findings-{stage.stage}", f"Findings: {stage.stage}", lead, lines=lines))
    sections.append(_files(signoff))
    sections.append(_environment(signoff))
    return sections


def _weights(numerics: StageResult, tables: dict[str, Table]) -> list[Section]:
    rows = tensor_rows(numerics)
    counts, worst = _taken(tables, "Weights"), _taken(tables, "Worst", "Tensors with")
    bytes_svg, heat, scales = bytes_chart(numerics.data), sqnr_map(rows), scale_histogram(numerics.data)
    sections = [
        Section(
            "converted",
            "What was converted",
            numerics.reason,
            (bytes_svg,) if bytes_svg else (),
            ((_by_kind(rows),) if rows else ()) + counts,
        )
    ]
    if heat:
        lead = "Each square is the least signal to quantization noise of a kind of weight in a layer; = is equality."
        sections.append(Section("layers", "Loss by layer", lead, (heat,), worst))
    if scales:
        lead = (
            "How many block scales lie in each power of two. A kernel that flushes those below its window loses them."
        )
        sections.append(Section("scales", "Block scales", lead, (scales,)))
    return sections


def _taken(tables: dict[str, Table], *beginnings: str) -> tuple[Table, ...]:
    """The tables whose headings begin so, taken out of `tables`."""
    return tuple(tables.pop(heading) for heading in list(tables) if heading.startswith(beginnings))


def _by_kind(rows: Sequence[Mapping[str, JSON]]) -> Table:
    """Formats by kind of weight, layers and experts added up."""
    groups: dict[tuple[str, str, str], list[Mapping[str, JSON]]] = {}
    for row in rows:
        kind = layer_and_kind(str(row["tensor"]))[1]
        groups.setdefault((kind, str(row["source"]), str(row["target"])), []).append(row)

    def total(some: Sequence[Mapping[str, JSON]], key: str) -> int:
        return sum(value for row in some if isinstance(value := row.get(key), int))

    cells = tuple(
        (
            kind,
            f"{source} to {target}",
            f"{len(some):,}",
            f"{total(some, 'weights'):,}",
            f"{total(some, 'exact') + total(some, 'shifted') + total(some, 'zero_sign'):,}",
            f"{total(some, 'lossy'):,}",
        )
        for (kind, source, target), some in groups.items()
    )
    columns = ("kind of weight", "formats", "tensors", "weights", "equal blocks of 16", "lossy blocks of 16")
    return Table("Formats", columns, cells, frozenset(range(2, 6)))


def _runtimes(tables: dict[str, Table]) -> list[Section]:
    table = tables.pop("Runtimes", None)
    return [Section("runtimes", "Runtimes", table.note, tables=(table,))] if table is not None else []


def _model(model: StageResult, tables: dict[str, Table]) -> Section:
    """KL, agreement, perplexity and greedy steps, as far as they were measured."""
    chart, tables_of_it = kl_chart(model.data), _taken(tables, "Model against", "Tasks of")
    return Section("model", "Accuracy of the model", model.reason, (chart,) if chart else (), tables_of_it)


def _kernels(stage: StageResult, tables: dict[str, Table]) -> Section:
    return Section("kernels", "Kernels", stage.reason, tables=_taken(tables, "Kernels against"))


def _speed(stage: StageResult, tables: dict[str, Table]) -> Section:
    """Tokens per second of the model (data["runs"], as a server's), its step by kind of kernel, and the kernels alone.

    data["breakdown"]: [{"kind", "us"}] of one step; data["bottleneck"]: the sentence that names what holds it up.
    """
    kernels = object_of(stage.data.get("kernels"))
    points, runs = _objects(kernels.get("points")), _objects(stage.data.get("runs"))
    charts = [serving_chart(runs, key, title, unit) for key, title, unit in _SPEED]
    charts.append(breakdown_chart(_objects(stage.data.get("breakdown"))))
    charts += [kernel_speedup(points), roofline(points, object_of(kernels.get("ceilings")))]
    shown, bottleneck = tuple(chart for chart in charts if chart), stage.data.get("bottleneck")
    lines = (bottleneck,) if isinstance(bottleneck, str) and STEP not in tables else ()  # that table's note says it
    return Section("speed", "Speed", stage.reason, shown, _taken(tables, DECODING, STEP, "Kernel times"), lines)


def _serving(serving: StageResult, tables: dict[str, Table]) -> Section:
    runs = _objects(serving.data.get("runs"))
    charts = tuple(chart for key, title, unit in _SERVING if (chart := serving_chart(runs, key, title, unit)))
    return Section("serving", "A running server", serving.reason, charts, _taken(tables, SERVING))


def _files(signoff: SignOff) -> Section:
    heading = f"Files ({len(signoff.files):,}, {bytes_text(sum(file.size for file in signoff.files))})"
    rows = tuple((file.name, f"{file.size:,}", file.sha256) for file in signoff.files)
    table = Table("Files", ("file", "bytes", "sha256"), rows, frozenset({1}))
    return Section("files", heading, "Every file that the sign-off covers.", tables=(table,), folded=True)


def _environment(signoff: SignOff) -> Section:
    facts = [*signoff.environment.items(), *((f"source: {key}", value) for key, value in signoff.source.items())]
    devices = [(f"device of {s.stage}", s.device) for s in signoff.stages if s.device]
    times = [(f"seconds of {s.stage}", f"{s.seconds:.1f}") for s in signoff.stages if s.seconds]
    table = Table("Environment", ("what", "value"), (*facts, *devices, *times))
    return Section("environment", "Environment", tables=(table,))


def _tensors(numerics: StageResult | None) -> _Tensors | None:
    rows = tensor_rows(numerics) if numerics is not None else []
    if not rows:
        return None
    values = [[row.get(column) for column in _TENSOR_COLUMNS] for row in rows]
    first = tuple(tuple(_cell(value) for value in row) for row in values[:_PAGE_ROWS])
    text = json.dumps(values, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    safe = text.replace("<", "\\u003c")  # "</script>" in a tensor's name would end the block
    return _Tensors(_TENSOR_COLUMNS, first, len(rows), _PAGE_ROWS, safe)


def _objects(value: JSON) -> list[Mapping[str, JSON]]:
    return [object_of(item) for item in value] if isinstance(value, list | tuple) else []


def _cell(value: JSON) -> str:
    """A value as a reader wants it; "-" for none."""
    if value is None:
        return "-"
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)
