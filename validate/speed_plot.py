"""The roofline of a bench as SVG and PNG: flops per byte against TFLOP/s, with the card's own ceilings.

Each shape has a colour and a marker of its own, so that print in grey tells them apart; the colours (Okabe and Ito)
are safe for the colour-blind and stand out on white and on black alike. The background is transparent and the frame a
middle grey, so that the picture sits on a light page and on a dark one.
"""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# matplotlib is the extra `plots`, and leaves most of itself untyped.

from __future__ import annotations

from pathlib import Path
from typing import Final

from requant.manifests.errors import EnvironmentFault, UsageError
from requant.validate.speed_bench import Bench, Point

__all__ = ["plot_roofline"]

_COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999", "#B8A200")
_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "*")
_GREY: Final = "#808080"
"""4:1 against white and 5:1 against black."""
_DPI: Final = 160


def plot_roofline(bench: Bench, stem: Path, title: str) -> list[Path]:
    """Write stem.svg and stem.png; the files.

    UsageError for a bench without a GPU (a CPU's ceilings are not measured), EnvironmentFault without matplotlib.
    """
    if bench.ceilings is None:
        raise UsageError("there is no roofline without a GPU", hint="the plot shows the card's own ceilings")
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EnvironmentFault(f"matplotlib: {error}", hint="pip install 'requant[plots]'") from error
    ceilings = bench.ceilings
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    intensity = [p.flops / p.bytes for p in bench.points]
    left, right = min(intensity) / 2, max(max(intensity) * 2, ceilings.peak_tflops * 1e3 / ceilings.read_gbps * 1.5)
    ridge = ceilings.peak_tflops * 1e3 / ceilings.read_gbps
    roof = [left, ridge, right]
    axes.plot(roof, [min(x * ceilings.read_gbps / 1e3, ceilings.peak_tflops) for x in roof], color=_GREY, linewidth=1.5)
    axes.annotate(
        f"read {ceilings.read_gbps / 1e3:.2f} TB/s",
        (ridge / 4, ridge / 4 * 1.15 * ceilings.read_gbps / 1e3),
        ha="right",
        color=_GREY,
        fontsize=8,
    )
    axes.annotate(
        f"BF16 {ceilings.peak_tflops:.0f} TFLOP/s",
        (right / 1.1, ceilings.peak_tflops * 1.08),
        ha="right",
        color=_GREY,
        fontsize=8,
    )
    shapes: dict[str, list[Point]] = {}
    for point in bench.points:
        shapes.setdefault(point.shape, []).append(point)
    for index, (shape, points) in enumerate(shapes.items()):
        axes.plot(
            [p.flops / p.bytes for p in points],
            [p.flops / p.us / 1e6 for p in points],
            color=_COLOURS[index % len(_COLOURS)],
            marker=_MARKERS[index % len(_MARKERS)],
            markersize=5,
            linewidth=1,
            label=shape,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=10)
    axes.set_xlim(left, right)
    tokens = [point.tokens for point in bench.points]
    axes.set_xlabel(f"flops per byte; along a line {min(tokens)} to {max(tokens)} tokens", color=_GREY)
    axes.set_ylabel("TFLOP/s", color=_GREY)
    axes.set_title(f"{title}\n{bench.device}, path {bench.points[0].path}", color=_GREY, fontsize=10)
    axes.grid(visible=True, which="major", color=_GREY, alpha=0.25, linewidth=0.6)
    axes.tick_params(colors=_GREY, which="both")
    for spine in axes.spines.values():
        spine.set_color(_GREY)
    axes.patch.set_alpha(0)
    figure.patch.set_alpha(0)
    axes.legend(frameon=False, labelcolor=_GREY, fontsize=8, loc="lower right")
    files = [stem.with_suffix(".svg"), stem.with_suffix(".png")]
    with rc_context({"svg.hashsalt": "requant"}):  # names inside the file, so that the same run gives the same bytes
        figure.savefig(files[0], metadata={"Date": None, "Creator": None})
    figure.savefig(files[1], dpi=_DPI, metadata={"Software": None})
    return files
