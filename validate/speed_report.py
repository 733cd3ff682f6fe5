"""The tables of a bench, for a terminal and for docs/: one table per shape, one row per number of tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from requant.kernels.availability import KernelUnavailableError
from requant.manifests.errors import EnvironmentFault, UsageError
from requant.validate.speed_bench import Bench, Point, bench_kernels

__all__ = ["bench_markdown", "bench_text", "run_bench", "write_bench"]

_GPU_COLUMNS: Final = ("tokens", "us", "spread", "MB", "GB/s", "of read ceiling", "of floor", "BF16 us", "x BF16")
_SOURCE_COLUMNS: Final = ("MXFP4 us", "x MXFP4")
_CPU_COLUMNS: Final = ("tokens", "us", "spread", "GB/s", "FP32 BLAS us", "of bound")


def run_bench(
    folder: Path, tokens: str, device: str, path: str, progress: Callable[[int, int], None] | None = None
) -> Bench:
    """`requant bench`: the options as they were typed.

    UsageError for what they cannot mean, EnvironmentFault for a path that this machine does not have.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"no device is called {device!r}", where="--device", hint="auto, cpu, cuda")
    try:
        counts = tuple(int(part) for part in tokens.split(","))
    except ValueError as error:
        raise UsageError(f"{tokens!r} is no list of numbers", where="--tokens", hint="e.g. 1,8,64") from error
    if any(count < 1 for count in counts):
        raise UsageError("a number of tokens is at least 1", where="--tokens", hint="e.g. 1,8,64")
    try:
        return bench_kernels(folder, tokens=counts, device=device, path=path, progress=progress)
    except KernelUnavailableError as error:
        raise EnvironmentFault(str(error), hint="`requant doctor` lists what runs here") from error
    except ValueError as error:
        raise UsageError(str(error), where="--path", hint="`requant doctor` lists the paths") from error


def write_bench(bench: Bench, name: str, folder: Path) -> tuple[list[Path], str]:
    """bench.json, bench.md and, from a GPU, roofline.svg and .png; the files, and why there is no plot (or "")."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "bench.json", folder / "bench.md"]
    files[0].write_text(json.dumps(bench.to_json(), indent=1) + "\n", encoding="utf-8")
    files[1].write_text(bench_markdown(bench, f"FP4 kernels on {name}") + "\n", encoding="utf-8")
    if not bench.on_gpu:
        return files, "a CPU's times have no roofline"
    from requant.validate.speed_plot import plot_roofline

    try:
        return [*files, *plot_roofline(bench, folder / "roofline", f"FP4 kernels on {name}")], ""
    except EnvironmentFault as error:
        return files, str(error)


def bench_markdown(bench: Bench, title: str, facts: Sequence[str] = ()) -> str:
    """A page: what ran, on what, then the tables. facts: lines for the head (commit, command)."""
    lines = [f"# {title}", "", *(f"- {line}" for line in (*facts, *_head(bench))), ""]
    for shape, points in _by_shape(bench).items():
        columns, rows = _table(bench, points)
        lines += [f"## {shape}", "", f"`{points[0].layer}`, path `{points[0].path}`, kernel `{points[0].kernel}`", ""]
        lines += [f"| {' | '.join(columns)} |", f"|{'|'.join(['--:'] * len(columns))}|"]
        lines += [f"| {' | '.join(row)} |" for row in rows]
        lines.append("")
    return "\n".join([*lines, *_notes(bench), ""])


def bench_text(bench: Bench) -> str:
    """The same for a terminal."""
    lines = [*_head(bench), ""]
    for shape, points in _by_shape(bench).items():
        columns, rows = _table(bench, points)
        widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
        lines.append(f"{shape}  ({points[0].layer}; {points[0].path}, {points[0].kernel})")
        lines += ["  " + "  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in (columns, *rows)]
        lines.append("")
    return "\n".join([*lines, *_notes(bench)])


def _by_shape(bench: Bench) -> dict[str, list[Point]]:
    found: dict[str, list[Point]] = {}
    for point in bench.points:
        found.setdefault(point.shape, []).append(point)
    return found


def _head(bench: Bench) -> list[str]:
    lines = [f"device: {bench.device}; {bench.versions}", f"path {bench.choice}"]
    if bench.ceilings is not None:
        c = bench.ceilings
        lines.append(
            f"ceilings of this card, same run: read {c.read_gbps / 1e3:.2f} TB/s, copy {c.copy_gbps / 1e3:.2f} TB/s, "
            f"BF16 torch.matmul {c.peak_tflops:.0f} TFLOP/s"
        )
    if not bench.on_gpu:
        lines.append("CPU path: the numbers are right, the times say nothing about decoding; GPU gates were not run")
    wrong = bench.wrong
    lines.append(
        f"outputs: {len(wrong)} of {len(bench.points)} WRONG (beyond their bound)"
        if wrong
        else f"outputs: all {len(bench.points)} that were timed are within their bound"
    )
    return lines


def _table(bench: Bench, points: Sequence[Point]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    if not bench.on_gpu:
        return _CPU_COLUMNS, [
            (
                str(p.tokens),
                f"{p.us:.0f}",
                f"{p.spread_us:.0f}",
                f"{p.gbps:.2f}",
                "-" if p.bf16_us is None else f"{p.bf16_us:.0f}",
                f"{p.of_bound:.2g}",
            )
            for p in points
        ]
    source = any(p.mxfp4_us is not None for p in points)
    moe = points[0].experts > 0
    columns = (*_GPU_COLUMNS, *(_SOURCE_COLUMNS if source else ()), *(("experts",) if moe else ()), "of bound")
    rows: list[tuple[str, ...]] = []
    for p in points:
        row = [str(p.tokens), f"{p.us:.2f}", f"{p.spread_us:.2f}", f"{p.bytes / 1e6:.2f}", f"{p.gbps:.0f}"]
        row += [_percent(p.of_ceiling), _percent(p.of_floor), _us(p.bf16_us), _times(p.against_bf16)]
        row += [_us(p.mxfp4_us), _times(p.against_mxfp4)] if source else []
        row += [f"{p.touched:.1f}"] if moe else []
        rows.append((*row, f"{p.of_bound:.2g}" if p.of_bound <= 1 else f"WRONG {p.of_bound:.2g}"))
    return columns, rows


def _notes(bench: Bench) -> list[str]:
    if not bench.on_gpu:
        return ["us: median of three calls; spread: largest less least. Of an MoE layer one expert is timed."]
    return [
        "us: median over replays of a CUDA graph whose launches rotate weights (MoE: routings) past the L2 cache; "
        "spread: largest less least. MB: codes, scales, x and y once, of the experts touched (a mean over the "
        "routings). Floor: the larger of those bytes over the read ceiling and the flops over the BF16 peak. BF16: "
        "torch.matmul (MoE: one call per expert touched). MXFP4: the same codes under E8M0 scales, through the same "
        "kernel. Of bound: the largest error of the output that was timed, as a multiple of 2^-8 |y| + 2^-14 sum |w "
        "x|, on activations of a dynamic range of 2^20 with outlier channels."
    ]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
