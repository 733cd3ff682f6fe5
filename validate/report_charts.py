"""What a sign-off's measurements look like: from the stages' data to the charts of the HTML page.

Each function takes one stage's data and gives a chart, or None where the data is absent: an older sign-off, a stage
that did not run, weights without a loss. Nothing is computed here that the stages have not measured.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from requant.kernels.formats import MARLIN_POW2_MIN
from requant.validate.report_tables import bytes_text, numbers_of, object_of
from requant.validate.results import JSON
from requant.validate.svg import Band, Cell, Chart, Series, compare_bars, heat_map, histogram, line_chart

__all__ = [
    "breakdown_chart",
    "bytes_chart",
    "kernel_speedup",
    "kl_chart",
    "layer_and_kind",
    "roofline",
    "scale_histogram",
    "serving_chart",
    "sqnr_map",
]

_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.|$)")
_HEAT: Final = 6
"""Steps of the heat map's scale."""
_SHAPES: Final = 6
"""Shapes in one chart; the table below it has them all."""


def layer_and_kind(module: str) -> tuple[str, str]:
    """A module's layer number ("-" without one) and what it is: its name without layer, further numbers as `*`."""
    found = _NUMBER.search(module)
    if found is None:
        return "-", module
    kind = _NUMBER.sub("*", module[found.end() + 1 :]) or module[: found.start() - 1]
    return found.group(), kind


def bytes_chart(numerics: Mapping[str, JSON]) -> Chart | None:
    """Bytes of the checkpoint before and after."""
    census = object_of(numerics.get("census"))
    before, after = _number(census.get("source_bytes")), _number(census.get("output_bytes"))
    if not before:
        return None
    rows = [
        ("before", before, bytes_text(int(before))),
        ("after", after, f"{bytes_text(int(after))} ({after / before:.3f}x)"),
    ]
    return compare_bars(rows, "Tensor bytes before and after")


def sqnr_map(rows: Sequence[Mapping[str, JSON]]) -> Chart | None:
    """Layers down, kinds of weights across, the least SQNR of each. None if there is nothing to place."""
    grid: dict[tuple[str, str], list[float | None]] = {}
    for row in rows:
        sqnr = row.get("sqnr_db")
        grid.setdefault(layer_and_kind(str(row["tensor"])), []).append(
            float(sqnr) if isinstance(sqnr, int | float) else None
        )
    layers = sorted({layer for layer, _ in grid}, key=lambda name: (name == "-", int(name) if name != "-" else 0))
    kinds = list(dict.fromkeys(kind for _, kind in grid))
    least = {key: min((v for v in values if v is not None), default=None) for key, values in grid.items()}
    known = [value for value in least.values() if value is not None]
    if not grid:
        return None
    low, high = (min(known), max(known)) if known else (0.0, 0.0)

    def cell(layer: str, kind: str) -> Cell | None:
        if (layer, kind) not in grid:
            return None
        value, number = least[layer, kind], len(grid[layer, kind])
        where = f"layer {layer}, {kind}" + (f", least of {number:,}" if number > 1 else "")
        if value is None:
            return Cell("exact", "=", f"{where}: equal to the source")
        step = min(_HEAT - 1, int(_HEAT * (value - low) / (high - low))) if high > low else _HEAT - 1
        return Cell(f"h{step}", f"{value:.1f}", f"{where}: {value:.2f} dB")

    told = f"Least {low:.2f} dB, most {high:.2f} dB" if known else "Every weight equals its source"
    description = f"{told}. {len(layers)} layers, {len(kinds)} kinds of weights; the table of tensors has every value."
    cells = [[cell(layer, kind) for kind in kinds] for layer in layers]
    return heat_map(layers, kinds, cells, "Signal to quantization noise by layer, in dB", description)


def scale_histogram(numerics: Mapping[str, JSON]) -> Chart | None:
    """The output's E4M3 block scales by octave, over what each kernel keeps of them."""
    scales = object_of(numerics.get("block_scales"))
    counts, first = [int(n) for n in numbers_of(scales.get("octaves"))], scales.get("first_exponent")
    if not any(counts) or not isinstance(first, int):
        return None
    last = len(counts) - 1
    bands = [
        Band("native FP4 units: every E4M3 value", 0, last),
        Band("Marlin: below 2^-6 flushed to zero", MARLIN_POW2_MIN - first, last),
    ]
    labels = [str(first + octave) for octave in range(len(counts))]
    title = "Block scales of the output, by power of two"
    return histogram(labels, counts, bands, title, "exponent of the E4M3 block scale (2^e and above)")


def kl_chart(model: Mapping[str, JSON]) -> Chart | None:
    """KL divergence by position in the stretch of text."""
    values = numbers_of(object_of(model.get("kl")).get("by_position"))
    length = _number(model.get("sequence_length"))
    if not values or not length:
        return None
    width = length / len(values)
    points = tuple((width * (index + 0.5), value) for index, value in enumerate(values))
    return line_chart(
        [Series("mean KL of a stretch's tokens at this place", points)],
        "KL divergence from the source, by position",
        "token in the stretch",
        "KL, nats",
    )


def kernel_speedup(points: Sequence[Mapping[str, JSON]]) -> Chart | None:
    """Kernel times as a multiple of BF16's, against tokens, for a few shapes."""
    series = [
        Series(shape, tuple((_number(p["tokens"]), _number(p["against_bf16"])) for p in some))
        for shape, some in _by_shape(points, "against_bf16")
    ]
    if not series:
        return None
    ticks = sorted({x for one in series for x, _ in one.points})
    title = "FP4 kernels against BF16"
    return line_chart(series, title, "tokens", "times as fast as BF16", log_x=True, x_ticks=ticks)


def roofline(points: Sequence[Mapping[str, JSON]], ceilings: Mapping[str, JSON]) -> Chart | None:
    """Achieved TFLOP/s over flops per byte, under what the card was measured to do."""
    read, peak = _number(ceilings.get("read_gbps")), _number(ceilings.get("peak_tflops"))
    series = [
        Series(shape, tuple(_on_roofline(p) for p in some if _number(p.get("us")) and _number(p.get("bytes"))))
        for shape, some in _by_shape(points, "flops")
    ]
    places = [x for one in series for x, _ in one.points]
    if not read or not peak or not places:
        return None
    ridge = peak * 1e3 / read
    left, right = min(places) / 2, max(*places, ridge) * 2
    roof = ((left, left * read / 1e3), (ridge, peak), (right, peak))
    limit = Series(f"ceilings: {read:,.0f} GB/s, {peak:,.0f} TFLOP/s", roof, bare=True)
    title = "Roofline of the FP4 kernels"
    return line_chart(
        [*series[: _SHAPES - 1], limit], title, "flops per byte", "TFLOP/s", log_x=True, log_y=True, joined=False
    )


def serving_chart(runs: Sequence[Mapping[str, JSON]], metric: str, title: str, y_label: str) -> Chart | None:
    """One measure of the labelled runs against concurrency."""
    series: list[Series] = []
    for run in runs:
        points = run.get("points")
        rows = [object_of(p) for p in points] if isinstance(points, list | tuple) else []
        places = tuple(
            (_number(row.get("concurrency")), _number(row[metric]))
            for row in rows
            if isinstance(row.get(metric), int | float)
        )
        if places:
            series.append(Series(str(run.get("label") or "run"), places))
    if not series:
        return None
    ticks = sorted({x for one in series for x, _ in one.points})
    return line_chart(series, title, "concurrent streams", y_label, log_x=len(ticks) > 1, x_ticks=ticks)


def breakdown_chart(parts: Sequence[Mapping[str, JSON]]) -> Chart | None:
    """Microseconds of one decode step by kind of kernel, largest first."""
    times = sorted(((str(p.get("kind")), _number(p.get("us"))) for p in parts), key=lambda pair: -pair[1])
    total = sum(us for _, us in times)
    if not total:
        return None
    rows = [(kind, us, f"{us:,.1f} us ({100 * us / total:.0f}%)") for kind, us in times]
    return compare_bars(rows, "Kernel time of a decode step")


def _by_shape(points: Sequence[Mapping[str, JSON]], key: str) -> list[tuple[str, list[Mapping[str, JSON]]]]:
    groups: dict[str, list[Mapping[str, JSON]]] = {}
    for point in points:
        if isinstance(point.get(key), int | float):
            groups.setdefault(str(point.get("shape")), []).append(point)
    return list(groups.items())[:_SHAPES]


def _on_roofline(point: Mapping[str, JSON]) -> tuple[float, float]:
    flops, moved, us = (_number(point.get(key)) for key in ("flops", "bytes", "us"))
    return flops / moved, flops / us / 1e6


def _number(value: JSON) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
