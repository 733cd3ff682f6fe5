"""A real server on the converted checkpoint: started or found, asked one question, then loaded and timed.

In this order, and it stops at the first thing that is wrong: launch (if we launch it), wait until it is healthy, ask a
question with a known answer, then each concurrency after a warm-up of as many streams. What was measured before
something went wrong is kept: the run says `complete: false` and why (serving_run.py). serving_process.py starts and
stops the server.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from requant.manifests.errors import EnvironmentFault, UsageError
from requant.manifests.gates import ServingGate
from requant.validate.results import JSON, Finding, StageResult, Status, status_of
from requant.validate.serving_client import Client, Refused, holds
from requant.validate.serving_load import Load, LoadError, Point, guidellm, measure_point
from requant.validate.serving_process import Alive, running
from requant.validate.serving_run import QUESTION, Broken, Run, Server

__all__ = ["check_serving", "measure_server", "numbers_in", "run_text", "write_run"]

STAGE: Final = "serving"
_DYING: Final = 3.0
"""Seconds within which a server that broke a connection off may still end, so that its own last words are told."""
Progress = Callable[[int, int], None]


def measure_server(
    server: Server,
    load: Load,
    concurrency: Sequence[int],
    requests: Sequence[int],
    *,
    keep: Callable[[Run], None] = lambda _: None,
    progress: Progress | None = None,
) -> Run:
    """Measure every concurrency. Never raises for what the server does: see Run.error and Run.fault.

    keep: called with the run so far after each concurrency. UsageError for a template without {port}; EnvironmentFault
    without guidellm.
    """
    if (server.endpoint is None) == (server.launch is None):
        raise UsageError("give an endpoint or a command to launch, one of them", where="requant bench")
    if server.launch is not None and "{port}" not in server.launch:
        hint = "'vllm serve {model} --port {port}'"
        raise UsageError("the command to launch has no {port}", where="--launch", hint=hint)
    if len(concurrency) != len(requests):
        message = f"{len(concurrency)} concurrencies and {len(requests)} numbers of requests"
        raise UsageError(message, where="requant bench", hint="give one number of requests for each concurrency")
    if load.prompts is not None and not load.prompts.is_file():
        raise UsageError("there is no such file", where=str(load.prompts), hint="a file with a prompt per line")
    guidellm()  # asked before a server loads for minutes
    label = server.label or server.folder.resolve().name
    run = Run(label, server.folder.resolve().name, datetime.now(UTC).isoformat(timespec="seconds"))
    run.card, run.flags = server.card, server.flags
    try:
        with running(server, run) as (client, alive):
            _measure(server, client, load, list(zip(concurrency, requests, strict=True)), run, alive, keep, progress)
        run.complete = True
    except Broken as error:
        run.error, run.wrong = str(error), error.wrong
    keep(run)
    return run


def check_serving(folder: Path, gate: ServingGate, *, progress: Progress | None = None) -> StageResult:
    """The gate: a server loads the folder, answers, serves every request at each concurrency without an error, and
    keeps the manifest's bounds on times and output.

    `not run` where it could not be tried (no guidellm, nothing healthy); failed where the server answered wrongly.
    """
    started = time.perf_counter()
    server = Server(
        folder,
        gate.endpoint,
        gate.launch,
        gate.label or "",
        timeout_s=gate.timeout_s,
        question=gate.question or QUESTION,
        answer=gate.answer,
        card=gate.card or "",
    )
    prompts = None if gate.prompts is None else Path(gate.prompts)
    load = Load(folder, gate.prompt_tokens, gate.output_tokens, prompts)
    try:
        run = measure_server(server, load, gate.concurrency, gate.requests, progress=progress)
    except (EnvironmentFault, UsageError) as error:
        return StageResult(STAGE, Status.NOT_RUN, error.message, device="")
    data: dict[str, JSON] = {"runs": [run.to_json()]}
    device = _device(run.card, ours=gate.launch is not None)
    seconds = time.perf_counter() - started
    if run.complete:
        findings = tuple(_over_bounds(run, gate))
        rates = ", ".join(f"{p.output_tokens_per_s or 0:,.0f} tokens/s at {p.concurrency}" for p in run.points)
        reason = findings[0].message if findings else f"{run.server or 'server'}: {rates}"
        return StageResult(STAGE, status_of(findings), reason, findings, data, device, seconds)
    findings = (Finding("serving-broken", "error", run.error, where=run.label),)
    status = Status.FAILED if run.wrong else Status.NOT_RUN
    return StageResult(STAGE, status, run.error, findings if run.wrong else (), data, device, seconds)


def _device(card: str, *, ours: bool) -> str:
    """What counts as the gate's device. ours: we launched the server here, so that without an NVIDIA card it is a CPU;
    of an endpoint any other card is only itself."""
    if "NVIDIA" in card:
        return f"cuda:0 {card}"
    return "cpu" if card and (ours or card.lower().startswith("cpu")) else card


def _over_bounds(run: Run, gate: ServingGate) -> Iterator[Finding]:
    """A finding for every bound of the manifest that a concurrency does not keep; what was not measured keeps none."""
    for index, point in enumerate(run.points):
        at = f"at concurrency {point.concurrency}"
        for name, bounds, value, unit, most in (
            ("max_ttft_ms", gate.max_ttft_ms, point.ttft_ms_p95, "ms to the first token for 95% of requests", True),
            ("max_itl_ms", gate.max_itl_ms, point.itl_ms_p95, "ms between tokens for 95% of requests", True),
            ("min_output_tokens_per_s", gate.min_output_tokens_per_s, point.output_tokens_per_s, "tokens/s", False),
        ):
            bound = bounds[index] if isinstance(bounds, tuple) else bounds
            if bound is None or (value is not None and (value <= bound if most else value >= bound)):
                continue
            message = f"{_shown(value)} {unit} {at}, {'at most' if most else 'at least'} {bound:g} were asked for"
            yield Finding("serving-over-bound", "error", message, where=run.label, hint=f"validate.serving.{name}")
    if gate.native_fp4 and run.fp4_native is not True:
        named = ", ".join(run.kernels) or "none"
        message = f"the server does not multiply in FP4, as far as its log says (kernels: {named})"
        yield Finding("serving-not-native", "error", message, where=run.label, hint="validate.serving.native_fp4")


def numbers_in(text: str) -> tuple[int, ...]:
    """ "1,8,16" as numbers. UsageError if one is none, or not above 0."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"{text!r} is no list of numbers", where="requant bench", hint="write 1,8,16") from error
    if min(numbers) < 1:
        raise UsageError(f"{text!r} holds a number below 1", where="requant bench")
    return numbers


def run_text(run: Run) -> str:
    """The run for a terminal."""
    native = {True: "native FP4", False: "FP4 decoded first", None: "not known whether native"}[run.fp4_native]
    lines = [
        f"{run.label}: {run.server or 'unknown server'} on {run.card or 'an unknown card'}",
        f"  kernels: {', '.join(run.kernels) or 'none named in the log'} ({native})",
        f"  answer: {run.answer}",
        "  streams  done     tokens/s   TTFT ms (median, p95)   between tokens ms (median, p95)",
    ]
    lines += [
        f"  {p.concurrency:>7}  {p.completed:>4}  {_shown(p.output_tokens_per_s):>11}  {_shown(p.ttft_ms_median):>10}"
        f"{_shown(p.ttft_ms_p95):>12}   {_shown(p.itl_ms_median):>12}{_shown(p.itl_ms_p95):>12}"
        for p in run.points
    ]
    if not run.prompts.get("fixed_lengths", True):
        lines.append(
            "  the server refuses ignore_eos, or prompts come from a file: answers may be shorter than asked for"
        )
    return "\n".join([*lines, *([f"  INCOMPLETE: {run.error}"] if run.error else [])])


def write_run(run: Run, folder: Path) -> Path:
    """The run as LABEL.json in `folder`, replaced at once. OSError if it cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^\w.+-]+", "-", run.label).strip("-.") or "run"
    path = folder / f"{name}.json"
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(
        json.dumps(run.to_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8"
    )
    partial.replace(path)
    return path


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


# --- one run ----------------------------------------------------------------------------------------------------------


def _measure(
    server: Server,
    client: Client,
    load: Load,
    points: Sequence[tuple[int, int]],
    run: Run,
    alive: Alive,
    keep: Callable[[Run], None],
    progress: Progress | None,
) -> None:
    """Question, warm-up, points; every fault becomes a Broken."""
    try:
        _sanity(server, client, run)
        load = replace(load, fixed=load.fixed and client.takes_fixed_lengths())
        run.prompts = _described(load)
        for done, (streams, count) in enumerate(points):
            if progress is not None:
                progress(done, len(points))
            client.warm_up(streams)
            point = measure_point(client.url, client.model, load, streams, count, server.timeout_s)
            run.points.append(point)
            keep(run)
            alive()
            _judge(point)
        if progress is not None:
            progress(len(points), len(points))
    except Refused as error:
        alive(0.0 if error.status else _DYING)
        raise Broken(f"the server fails: {error}", wrong=error.status != 0) from error
    except LoadError as error:
        alive(_DYING)
        raise Broken(str(error)) from error


def _sanity(server: Server, client: Client, run: Run) -> None:
    if not server.answer:
        return
    answer = client.ask(server.question)
    run.answer = " ".join(answer.split())[:200]
    if not answer.strip():
        raise Broken(f"the answer to {server.question!r} is empty", wrong=True)
    if not holds(answer, server.answer):
        raise Broken(f"asked {server.question!r}, it said {run.answer!r}, without {server.answer!r}", wrong=True)


def _judge(point: Point) -> None:
    at = f"at concurrency {point.concurrency}"
    if point.empty:
        raise Broken(f"{point.empty} of {point.requests} streams {at} ended without a token", wrong=True)
    if point.errors:
        said = point.first_error or "no answer came"
        raise Broken(f"{point.errors} of {point.requests} requests {at} failed, the first with: {said}", wrong=True)
    if point.completed < point.requests:
        raise Broken(f"only {point.completed} of {point.requests} requests {at} were answered", wrong=True)


def _described(load: Load) -> dict[str, JSON]:
    """What was sent, for comparison: no path, a file by its hash."""
    import hashlib

    facts: dict[str, JSON] = {"output_tokens": load.output_tokens, "fixed_lengths": load.fixed and load.prompts is None}
    if load.prompts is not None:
        return {"file_sha256": hashlib.sha256(load.prompts.read_bytes()).hexdigest(), **facts}
    return {"synthetic_tokens": load.prompt_tokens, "seed": load.seed, **facts}
