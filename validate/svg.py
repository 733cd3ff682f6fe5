"""Small charts as SVG text: bars, a histogram with windows, lines, a scatter under a roofline, a heat map.

Written by hand and not by a plotting library, so that the page needs none, stays small, and takes its colours from the
style sheet: classes `s0` ... `s5` (series), `h0` ... `h5` (heat), `bar`, `grid`, `axis`, which differ in dark mode and
in print. No meaning rests on colour alone: series have dashes, markers and names, cells and bars their numbers.

Every chart is `<svg role="img">` with a `<title>` and a `<desc>` that says in words what it shows. Text is escaped
here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

__all__ = ["Band", "Cell", "Chart", "Series", "compare_bars", "heat_map", "histogram", "line_chart"]

_WIDTH: Final = 720
_LEFT: Final = 64
_RIGHT: Final = 16
_TOP: Final = 16
_SERIES: Final = 6
"""Series that have a style of their own in the style sheet."""
_MARKERS: Final = ("circle", "square", "up", "down", "diamond", "cross")


@dataclass(frozen=True, slots=True)
class Band:
    """A stretch of bars under a name, first to last inclusive, by index."""

    name: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Series:
    """Points (x, y) under a name. bare: a line without markers, such as a ceiling."""

    name: str
    points: tuple[tuple[float, float], ...]
    bare: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """One square of a heat map: its style class, what is written in it, and what a pointer or reader is told."""

    style: str
    text: str
    title: str


@dataclass(frozen=True, slots=True)
class Chart:
    """A finished picture; the title stands in it for screen readers, and is for the caption above it."""

    title: str
    svg: str


def _svg(height: float, title: str, description: str, parts: Sequence[str], width: int = _WIDTH) -> Chart:
    """The whole picture. Ids are not used: several charts stand in one page."""
    head = (
        f'<svg class="chart" role="img" viewBox="0 0 {width} {height:g}" aria-label="{escape(title)}. '
        f'{escape(description)}" xmlns="http://www.w3.org/2000/svg">'
    )
    svg = f"{head}<title>{escape(title)}</title><desc>{escape(description)}</desc>{''.join(parts)}</svg>"
    return Chart(title, svg)


def _text(x: float, y: float, text: str, anchor: str = "start", style: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{style}"/>'


def _rect(x: float, y: float, width: float, height: float, style: str, title: str = "") -> str:
    inner = f"<title>{escape(title)}</title>" if title else ""
    size = f'width="{max(width, 0):.1f}" height="{max(height, 0):.1f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} class="{style}">{inner}</rect>'


def compare_bars(rows: Sequence[tuple[str, float, str]], title: str) -> Chart:
    """Horizontal bars from zero: (name, value, label) each, in the same unit."""
    longest = max((value for _, value, _ in rows), default=0.0) or 1.0
    parts: list[str] = []
    for index, (name, value, label) in enumerate(rows):
        y = 8.0 + 34 * index
        width = 420 * value / longest
        parts += [_text(150, y + 18, name, "end"), _rect(160, y + 2, width, 22, f"bar s{index % _SERIES}")]
        parts.append(_text(168 + width, y + 18, label))
    description = "; ".join(f"{name}: {label}" for name, _, label in rows)
    return _svg(16 + 34 * len(rows), title, description, parts)


def histogram(labels: Sequence[str], counts: Sequence[int], bands: Sequence[Band], title: str, x_label: str) -> Chart:
    """Bars over a logarithmic axis of counts, each with its number, and brackets for the bands below them."""
    height, bottom = 240.0, 200.0
    decades = max(1, math.ceil(math.log10(max((*counts, 1)) + 1)))
    step = (_WIDTH - _LEFT - _RIGHT) / max(1, len(labels))
    parts: list[str] = []

    def level(value: float) -> float:
        """1 stands half a decade above the axis, so that a single scale can be seen."""
        return bottom - (bottom - _TOP - 12) * (math.log10(value) + 0.5) / (decades + 0.5)

    for decade in range(0, decades + 1, 1 if decades <= 5 else 2):
        y = level(10**decade)
        parts += [_line(_LEFT, y, _WIDTH - _RIGHT, y, "grid"), _text(_LEFT - 8, y + 4, _power(decade), "end")]
    for index, (label, number) in enumerate(zip(labels, counts, strict=True)):
        x = _LEFT + step * index
        if number:
            top = level(number)
            parts.append(_rect(x + 2, top, step - 4, bottom - top, "bar s0", f"{label}: {number:,}"))
            parts.append(_text(x + step / 2, top - 4, _short(number, 2), "middle", "small"))
        parts.append(_text(x + step / 2, bottom + 16, label, "middle"))
    parts.append(_line(_LEFT, bottom, _WIDTH - _RIGHT, bottom, "axis"))
    for index, band in enumerate(bands):
        y = bottom + 30 + 20 * index
        left, right = _LEFT + step * band.first + 2, _LEFT + step * (band.last + 1) - 2
        parts.append(f'<path d="M{left:.1f} {y - 5:.1f}v5H{right:.1f}v-5" class="bracket s{(index + 1) % _SERIES}"/>')
        parts.append(_text((left + right) / 2, y + 13, band.name, "middle", "small"))
        height = y + 20
    parts.append(_text(_WIDTH / 2, height + 12, x_label, "middle", "label"))
    shown = [f"{label}: {number:,}" for label, number in zip(labels, counts, strict=True) if number]
    inside = [f"{band.name} spans {labels[band.first]} to {labels[band.last]}" for band in bands]
    return _svg(height + 20, title, "; ".join(shown + inside) or "no entries", parts)


def line_chart(
    series: Sequence[Series],
    title: str,
    x_label: str,
    y_label: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    x_ticks: Sequence[float] | None = None,
    joined: bool = True,
) -> Chart:
    """Lines (or points alone) over linear or logarithmic axes; a linear y axis starts at zero. Legend below.

    Points that an axis cannot show (zero or below on a logarithmic one, NaN) are left out.
    """
    kept = [Series(s.name, tuple(p for p in s.points if _shown(p, log_x, log_y)), s.bare) for s in series]
    kept = [s for s in kept if s.points]
    xs, ys = [x for s in kept for x, _ in s.points], [y for s in kept for _, y in s.points]
    if not xs:
        return _svg(40, title, "no points", [_text(_WIDTH / 2, 24, "nothing was measured", "middle")])
    bottom, parts = 250.0, list[str]()
    at_x, default_x = _axis(min(xs), max(xs), _LEFT, _WIDTH - _RIGHT - 8, log_x, tight=x_ticks is not None)
    at_y, ticks_y = _axis(min(ys) if log_y else min(0.0, *ys), max(ys), bottom, _TOP, log_y)
    for tick in ticks_y:
        y = at_y(tick)
        parts += [_line(_LEFT, y, _WIDTH - _RIGHT, y, "grid"), _text(_LEFT - 8, y + 4, _number(tick), "end")]
    for tick in default_x if x_ticks is None else x_ticks:
        parts += [_line(at_x(tick), bottom, at_x(tick), bottom + 4, "axis")]
        parts.append(_text(at_x(tick), bottom + 18, _number(tick), "middle"))
    parts.append(_line(_LEFT, bottom, _WIDTH - _RIGHT, bottom, "axis"))
    for index, one in enumerate(kept):
        style, marker = f"s{index % _SERIES}", _MARKERS[index % len(_MARKERS)]
        places = [(at_x(x), at_y(y)) for x, y in one.points]
        if len(places) > 1 and (joined or one.bare):
            parts.append(f'<path d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in places)}" class="line {style}"/>')
        if not one.bare:
            parts += [
                _marker(marker, *place, style, f"{one.name}: {_number(x)}, {_number(y)}")
                for place, (x, y) in zip(places, one.points, strict=True)
            ]
    parts.append(_text((_LEFT + _WIDTH) / 2, bottom + 38, x_label, "middle", "label"))
    middle = (bottom + _TOP) / 2
    rotated = f'<text transform="translate(14 {middle:.1f}) rotate(-90)" text-anchor="middle" class="label">'
    parts.append(f"{rotated}{escape(y_label)}</text>")
    height = bottom + 48
    for index, one in enumerate(kept):
        x, y = _LEFT + 330 * (index % 2), bottom + 60 + 20 * (index // 2)
        parts.append(_line(x, y - 4, x + 26, y - 4, f"line s{index % _SERIES}"))
        if not one.bare:
            parts.append(_marker(_MARKERS[index % len(_MARKERS)], x + 13, y - 4, f"s{index % _SERIES}"))
        parts.append(_text(x + 34, y, _cut(one.name, 44)))
        height = y + 12
    return _svg(height, title, _in_words(kept, x_label, y_label), parts)


def heat_map(
    rows: Sequence[str], columns: Sequence[str], cells: Sequence[Sequence[Cell | None]], title: str, description: str
) -> Chart:
    """A grid, rows down, columns across with slanted heads. A cell of None stays empty."""
    left, size, head = 58.0, 22.0, 14.0 + 5.2 * max((len(column) for column in columns), default=0)
    width = min(64.0, max(30.0, (_WIDTH - left - head * 0.6) / max(1, len(columns))))
    total = max(_WIDTH, math.ceil(left + width * len(columns) + head * 0.8))
    parts = [
        f'<text transform="translate({left + width * (index + 0.5):.1f} {head:.1f}) rotate(-38)" '
        f'class="small">{escape(column)}</text>'
        for index, column in enumerate(columns)
    ]
    for index, (name, line) in enumerate(zip(rows, cells, strict=True)):
        y = head + 6 + size * index
        parts.append(_text(left - 8, y + 15, name, "end", "small"))
        for place, cell in enumerate(line):
            if cell is not None:
                x = left + width * place
                parts.append(_rect(x + 1, y + 1, width - 2, size - 2, cell.style, cell.title))
                parts.append(_text(x + width / 2, y + 15, cell.text, "middle", f"cell {cell.style}"))
    return _svg(head + 12 + size * len(rows), title, description, parts, total)


# --- axes and numbers -------------------------------------------------------------------------------------------------


def _shown(point: tuple[float, float], log_x: bool, log_y: bool) -> bool:
    x, y = point
    return math.isfinite(x) and math.isfinite(y) and (x > 0 or not log_x) and (y > 0 or not log_y)


def _axis(
    low: float, high: float, start: float, end: float, log: bool, *, tight: bool = False
) -> tuple[Callable[[float], float], list[float]]:
    """(value -> coordinate, ticks) of an axis that covers low to high. tight: a logarithmic one ends at high itself."""
    if log and tight and high > low:
        span = math.log10(high / low)
        return lambda value: start + (end - start) * math.log10(value / low) / span, [low, high]
    if log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        last = max(last, first + 1)
        stride = max(1, (last - first) // 6)
        return (
            lambda value: start + (end - start) * (math.log10(value) - first) / (last - first),
            [10.0**e for e in range(first, last + 1, stride)],
        )
    stride = _stride(high - low)
    floor, ceiling = math.floor(low / stride) * stride, math.ceil(high / stride) * stride
    if ceiling <= floor:
        ceiling = floor + stride
    steps = round((ceiling - floor) / stride)
    ticks = [floor + stride * n for n in range(steps + 1)]
    return lambda value: start + (end - start) * (value - floor) / (ceiling - floor), ticks


def _stride(span: float) -> float:
    """1, 2 or 5 times a power of ten, so that a span has four to ten steps."""
    if span <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(span / 5))
    return next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= 8)


def _marker(kind: str, x: float, y: float, style: str, title: str = "") -> str:
    inner = f"<title>{escape(title)}</title>" if title else ""
    shapes = {
        "square": f"M{x - 4:.1f} {y - 4:.1f}h8v8h-8z",
        "up": f"M{x:.1f} {y - 5:.1f}l5 9h-10z",
        "down": f"M{x:.1f} {y + 5:.1f}l5 -9h-10z",
        "diamond": f"M{x:.1f} {y - 5.5:.1f}l5.5 5.5l-5.5 5.5l-5.5 -5.5z",
        "cross": f"M{x - 4.5:.1f} {y - 1.5:.1f}h3v-3h3v3h3v3h-3v3h-3v-3h-3z",
    }
    if kind in shapes:
        return f'<path d="{shapes[kind]}" class="mark {style}">{inner}</path>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="mark {style}">{inner}</circle>'


def _in_words(series: Sequence[Series], x_label: str, y_label: str) -> str:
    lines = [
        f"{one.name}: {', '.join(f'{_number(y)} at {_number(x)}' for x, y in one.points[:16])}"
        for one in series
        if not one.bare
    ]
    return f"{y_label} against {x_label}. {'; '.join(lines)}"


def _number(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.3g}"
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def _short(number: int, digits: int = 3) -> str:
    """With a unit and so many significant digits (neighbouring bars have room for two); under 1000 as it is."""
    if number < 1000:
        return str(number)
    rounded = int(float(f"{number:.{digits}g}"))
    size, unit = next((size, unit) for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")) if rounded >= size)
    return f"{rounded / size:g}{unit}"


def _power(exponent: int) -> str:
    return _short(10**exponent) if exponent < 12 else f"1e{exponent}"


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}\N{HORIZONTAL ELLIPSIS}"
