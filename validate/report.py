"""A sign-off for people: Markdown for the folder and the Hub, a plain table for the terminal. The verdict comes first.

All are views of the same `Table`s (report_tables.py), those of `report_html.py` too, so that they cannot say different
things. Rendering reads nothing but the sign-off: `requant report` shows an old one on any machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from requant.validate.report_tables import Table, bytes_text, tables_of
from requant.validate.results import Finding, StageResult
from requant.validate.verdict import SignOff

__all__ = ["finding_line", "footer_of", "markdown_table", "render_markdown", "render_text", "verdict_of"]

_FINDINGS: Final = 20
"""Findings of one stage that are written out; the rest is counted, and stands in the JSON."""


def render_markdown(signoff: SignOff) -> str:
    """The whole report as Markdown."""
    lines = [f"# Sign-off of {signoff.name}", "", f"**{verdict_of(signoff)}**", ""]
    for table in tables_of(signoff):
        lines += [f"## {table.heading}", "", *markdown_table(table), ""]
        if table.note:
            lines += [table.note, ""]
    for stage in signoff.stages:
        if stage.findings:
            lines += [f"## Findings: {stage.stage}", "", *(f"- {line}" for line in _findings(stage)), ""]
    files = Table(
        f"Files ({len(signoff.files):,}, {bytes_text(sum(f.size for f in signoff.files))})",
        ("file", "bytes", "sha256"),
        tuple((f.name, f"{f.size:,}", f"`{f.sha256}`") for f in signoff.files),
        frozenset({1}),
    )
    lines += [f"## {files.heading}", "", *markdown_table(files), "", "  \n".join(footer_of(signoff)), ""]
    return "\n".join(lines)


def render_text(signoff: SignOff) -> str:
    """The report for a terminal: verdict, gates, tables, findings; hashes are counted, not listed."""
    lines = [f"{signoff.name}: {verdict_of(signoff)}", ""]
    for table in tables_of(signoff):
        lines += [table.heading, *_text_table(table)]
        if table.note:
            lines.append(f"  {table.note}")
        lines.append("")
    for stage in signoff.stages:
        shown = [finding for finding in stage.findings if finding.severity != "info"]
        if shown:
            lines += [f"Findings: {stage.stage}", *(f"  {line}" for line in _findings(stage, shown)), ""]
    size = sum(file.size for file in signoff.files)
    lines += [f"{len(signoff.files):,} files, {bytes_text(size)}, hashed", *footer_of(signoff)]
    return "\n".join(lines) + "\n"


def verdict_of(signoff: SignOff) -> str:
    """The verdict in one line, with the gates in the way."""
    if signoff.signed_off:
        return "Signed off: every required gate passed"
    unmet = "; ".join(f"{gate.name} {gate.status.value}" for gate in signoff.unmet)
    return f"Not signed off: {unmet}"


def _findings(stage: StageResult, findings: Sequence[Finding] | None = None) -> list[str]:
    shown = list(stage.findings if findings is None else findings)
    lines: list[str] = []
    lines += [finding_line(finding) for finding in shown[:_FINDINGS]]
    if len(shown) > _FINDINGS:
        lines.append(f"{len(shown) - _FINDINGS:,} more in the JSON report")
    return lines


def finding_line(finding: Finding) -> str:
    """A finding as one line: severity, rule, runtime, where, what, what to do."""
    runtime = f" [{finding.runtime}]" if finding.runtime else ""
    where = f"{finding.where}: " if finding.where else ""
    hint = f" -> {finding.hint}" if finding.hint else ""
    return f"{finding.severity} {finding.rule}{runtime}: {where}{finding.message}{hint}"


def footer_of(signoff: SignOff) -> list[str]:
    """When and with what it was judged, and what was judged. Hashes are shortened; the JSON has them whole."""
    lines = [f"Judged {signoff.created} with {_facts(signoff.environment)}"]
    return [*lines, f"Source: {_facts(signoff.source)}"] if signoff.source else lines


def _facts(facts: Mapping[str, str]) -> str:
    return ", ".join(f"{key} {value[:12] if key.endswith('sha256') else value}" for key, value in facts.items())


def markdown_table(table: Table) -> list[str]:
    """A table as lines of Markdown, without its heading and note."""

    def line(cells: Sequence[str]) -> str:
        escaped = (cell.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ") for cell in cells)
        return f"| {' | '.join(escaped)} |"

    rule = ["--:" if index in table.right else "---" for index in range(len(table.columns))]
    return [line(table.columns), f"|{'|'.join(rule)}|", *(line(row) for row in table.rows)]


def _text_table(table: Table) -> list[str]:
    """Columns padded to their widest cell; the last one is left ragged."""
    rows = [table.columns, *table.rows] if any(table.columns) else list(table.rows)
    widths = [max(len(row[index]) for row in rows) for index in range(len(table.columns))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if index in table.right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return f"  {'  '.join(cells)}".rstrip()

    return [line(row) for row in rows]
