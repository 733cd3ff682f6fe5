"""The stage `speed`: the FP4 kernels on the checkpoint's own shapes (speed_bench.py), then the model as it decodes
(decode_speed.py), and the gate's bounds on both.

Wrong outputs fail it, whatever the speed; a gate that asks for a GPU is `not run` without one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Final, cast

from requant.kernels.availability import KernelUnavailableError
from requant.manifests.errors import SourceError
from requant.manifests.gates import SpeedGate
from requant.validate.results import JSON, Finding, StageResult, Status
from requant.validate.speed_bench import Bench, bench_kernels, has_gpu

if TYPE_CHECKING:
    from requant.validate.decode_speed import Measured

__all__ = ["STAGE", "check_speed"]

STAGE: Final = "speed"
Progress = Callable[[int, int], None]


def check_speed(
    output: FilePath, gate: SpeedGate, *, source: FilePath | None = None, progress: Progress | None = None
) -> StageResult:
    """The gate: the kernels on the checkpoint's shapes, then the model as it decodes (decode_speed.py), and its bounds.

    Wrong outputs fail it, whatever the speed. Where the model cannot run (no transformers, no such class, no memory) it
    is `not run` with that reason, and the kernels' times are kept.
    """
    started = time.perf_counter()
    if gate.device != "cpu" and not has_gpu():
        return StageResult(STAGE, Status.NOT_RUN, "no GPU: a CPU's times say nothing about decoding", device="")
    device = "cpu" if gate.device == "cpu" else "auto"
    try:
        bench = bench_kernels(output, tokens=gate.concurrency, device=device, progress=progress)
    except (SourceError, KernelUnavailableError) as error:
        return StageResult(STAGE, Status.NOT_RUN, f"the kernels cannot be timed: {error}", device="")
    except (MemoryError, RuntimeError, ValueError) as error:  # a launch or an allocation
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        reason = f"timing the kernels broke off with {type(error).__name__}: {first}"
        return StageResult(STAGE, Status.NOT_RUN, reason, device="")
    findings = [
        Finding(
            "beyond-bound",
            "error",
            f"{point.path}, {point.tokens} tokens: the output timed is off by {point.of_bound:.3g} times its bound",
            where=point.layer,
        )
        for point in bench.wrong
    ]
    data: dict[str, JSON] = {"kernels": bench.to_json()}

    def result(status: Status, reason: str) -> StageResult:
        seconds = time.perf_counter() - started
        return StageResult(STAGE, status, reason, tuple(findings), data, bench.device, seconds)

    if findings:
        return result(Status.FAILED, f"{len(findings)} of {len(bench.points)} timed outputs are wrong")
    missing = _model_part(output, source, gate, bench, data, findings, progress)
    wrong = [finding for finding in findings if finding.severity == "error"]
    if missing and not wrong:  # what was found wrong stays wrong, whatever is missing beside it
        ratios = [r for p in bench.points if (r := p.against_mxfp4 if gate.baseline == "source" else p.against_bf16)]
        mean = (
            f"{statistics.geometric_mean(ratios):.2f} times the speed of {gate.baseline}" if ratios else "no baseline"
        )
        kernels = f"the kernels ran ({len(bench.points)} points, {mean})"
        return result(Status.NOT_RUN, f"{kernels}; the model's tokens per second were not measured: {missing}")
    return result(Status.FAILED if wrong else Status.PASSED, wrong[0].message if wrong else _reason(data, gate))


def _model_part(
    output: FilePath,
    source: FilePath | None,
    gate: SpeedGate,
    bench: Bench,
    data: dict[str, JSON],
    findings: list[Finding],
    progress: Progress | None,
) -> str:
    """Measure the model and judge it; what it gave goes to data and findings. Why it could not be measured, or ""."""
    from requant.kernels.empty_model import ModelUnavailableError
    from requant.validate.decode_speed import measure_model

    try:
        measured = measure_model(
            output,
            source,
            gate,
            read_gbps=None if bench.ceilings is None else bench.ceilings.read_gbps,
            device="cuda" if bench.on_gpu else "cpu",
            progress=progress or (lambda _done, _all: None),
        )
    except ModelUnavailableError as error:
        return str(error)
    data.update(measured.data)
    findings += measured.findings
    return _judge(measured, gate, data, findings)


def _judge(measured: Measured, gate: SpeedGate, data: dict[str, JSON], findings: list[Finding]) -> str:
    """Findings for every bound that is not kept; what a bound needs and was not measured, or ""."""
    if "converted" in measured.missing:
        return measured.missing["converted"]
    first = measured.runs["converted"][0]
    for key in ("breakdown", "bottleneck"):
        if key in first:
            data[key] = first[key]
    speedups = measured.speedups(gate.baseline)
    data["speedups"] = {baseline: _by_concurrency(measured, baseline) for baseline in ("source", "bf16")}
    if gate.min_speedup is not None:
        if not speedups:
            return f"min_speedup needs {gate.baseline}: {measured.missing.get(gate.baseline, 'not measured here')}"
        lacking = [str(p["concurrency"]) for p in measured.runs["converted"] if p["concurrency"] not in speedups]
        if lacking:
            why = measured.missing.get(gate.baseline, "the two did not decode as many streams at a time")
            return f"min_speedup needs {gate.baseline} at {', '.join(lacking)} streams too: {why}"
        for streams, ratio in speedups.items():
            if not ratio >= gate.min_speedup:
                message = (
                    f"at {streams} streams {ratio:.3f} times the speed of {gate.baseline}, under {gate.min_speedup:g}"
                )
                findings.append(Finding("too-slow", "error", message, hint="min_speedup"))
    for key, bound, name in (
        ("stream_tokens_per_s", gate.min_tokens_per_s, "min_tokens_per_s"),
        ("of_roofline", gate.min_roofline, "min_roofline"),
    ):
        value = first.get(key)
        if bound is None:
            continue
        if not isinstance(value, int | float):
            return f"{name} needs a GPU"
        if first.get("batch") != first["concurrency"]:
            streams, batch = first["concurrency"], first.get("batch")
            return f"{name} is of {streams} streams, and memory sufficed for {batch} at a time"
        if not value >= bound:
            message = f"{key} is {value:g} at {first['concurrency']} streams, under {bound:g}"
            findings.append(Finding("too-slow", "error", message, hint=name))
    return ""


def _by_concurrency(measured: Measured, baseline: str) -> dict[str, JSON]:
    return {str(streams): round(ratio, 4) for streams, ratio in measured.speedups(baseline).items()}


def _reason(data: dict[str, JSON], gate: SpeedGate) -> str:
    """Tokens per second at each concurrency, and against the baseline where it was measured."""
    runs = cast("list[dict[str, JSON]]", data["runs"])
    points = cast("list[dict[str, JSON]]", runs[0]["points"])
    ratios = cast("dict[str, dict[str, float]]", data["speedups"])[gate.baseline]
    told: list[str] = []
    for point in points:
        streams = str(point["concurrency"])
        against = f" ({ratios[streams]:.2f}x {gate.baseline})" if streams in ratios else ""
        told.append(f"{cast('float', point['decode_tokens_per_s']):,.0f} tokens/s at {streams}{against}")
    roofline = points[0].get("of_roofline")
    part = (
        f"; {100 * roofline:.0f}% of the roofline at {points[0]['concurrency']}" if isinstance(roofline, float) else ""
    )
    return f"decodes {', '.join(told)}{part}"
