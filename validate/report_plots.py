"""The sign-off's charts as files of their own: `requant.signoff.NAME.svg`, which the model card shows.

They are those of the page (report_charts.py). A picture in a page of others takes no style sheet from it, so each file
carries the rules it needs, of the light colours, on a ground of its own: it reads in a dark page, too.
"""

from __future__ import annotations

import re
from functools import cache
from html import escape
from pathlib import Path
from typing import Final

from requant.validate.report_charts import bytes_chart, kl_chart, scale_histogram, sqnr_map
from requant.validate.report_tables import tensor_rows
from requant.validate.svg import Chart
from requant.validate.verdict import SignOff

__all__ = ["PLOT_PREFIX", "plots_of"]

PLOT_PREFIX: Final = "requant.signoff."
TITLE: Final = 28
"""Height of the title."""
_VIEW: Final = re.compile(r'viewBox="0 0 ([\d.]+) ([\d.]+)"')


def plots_of(signoff: SignOff) -> dict[str, str]:
    """SVG text by file name: bytes before and after, loss by layer, block scales, divergence; where there is data."""
    charts: dict[str, Chart | None] = {}
    numerics, model = signoff.stage("numerics"), signoff.stage("model")
    if numerics is not None and numerics.data:
        charts["bytes"] = bytes_chart(numerics.data)
        charts["layers"] = sqnr_map(tensor_rows(numerics))
        charts["scales"] = scale_histogram(numerics.data)
    if model is not None and model.data:
        charts["kl"] = kl_chart(model.data)
    return {f"{PLOT_PREFIX}{name}.svg": _alone(chart) for name, chart in charts.items() if chart is not None}


def _alone(chart: Chart) -> str:
    """The chart with its size, its style, its ground, and its title above it."""
    found = _VIEW.search(chart.svg)
    width, height = (float(found[1]), float(found[2]) + TITLE) if found else (720.0, 240.0)
    size = f'width="{width:g}" height="{height:g}"'
    sized = _VIEW.sub(f'{size} viewBox="0 -{TITLE} {width:g} {height:g}"', chart.svg, count=1)
    ground = f'<rect y="-{TITLE}" {size} style="fill: var(--page)"/>'
    title = f'<text x="12" y="-8" style="font-weight: 650; font-size: 14px">{escape(chart.title)}</text>'
    return sized.replace("</desc>", f"</desc><style>{_style()}</style>{ground}{title}", 1) + "\n"


@cache
def _style() -> str:
    """Of the page's style sheet the light colours, and what it says of charts."""
    sheet = (Path(__file__).parent / "templates" / "report.css").read_text(encoding="utf-8")
    colours = sheet[sheet.index(":root {") : sheet.index("}") + 1]
    rules = [line for line in sheet.partition("@media print")[0].splitlines() if line.startswith(".chart ")]
    return "".join([colours, *(rule for rule in rules if not rule.startswith(".chart {"))])
