"""Load on a server, by guidellm: its own process, one concurrency at a time, its JSON report read back.

guidellm (extra `requant[serve]`) makes the prompts, streams the requests and times them. It is started as a program and
not imported: its Python interface changes from release to release, and its dependencies are none of ours. Prompts are
synthetic, of a fixed number of tokens, or from a file with one prompt per line (or guidellm's JSON lines).

Where a server refuses `ignore_eos`, lengths are only bounded: `Load.fixed` is False and the run says so.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from requant.manifests.errors import EnvironmentFault
from requant.validate.results import JSON

__all__ = ["Load", "LoadError", "Point", "guidellm", "measure_point", "read_report"]

_ENDED: Final = 15.0
"""Seconds between SIGTERM and SIGKILL."""


class LoadError(Exception):
    """guidellm gave no report; the message says why."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent. prompts: a file, or None for synthetic ones. tokenizer: a folder. fixed: exact output lengths."""

    tokenizer: Path
    prompt_tokens: int = 512
    output_tokens: int = 128
    prompts: Path | None = None
    fixed: bool = True
    seed: int = 42


@dataclass(frozen=True, slots=True)
class Point:
    """One concurrency. Times in ms; rates in output tokens per second over all streams. None: nothing to measure.

    samples: by request: latency_s, ttft_ms, itl_ms, output_tokens. empty: streams that ended well without a token.
    """

    concurrency: int
    requests: int
    completed: int
    errors: int
    empty: int
    output_tokens_per_s: float | None
    ttft_ms_median: float | None
    ttft_ms_p95: float | None
    itl_ms_median: float | None
    itl_ms_p95: float | None
    first_error: str
    samples: Mapping[str, Sequence[float]]

    @property
    def sound(self) -> bool:
        """Every request was answered with at least one token."""
        return self.completed == self.requests and not self.errors and not self.empty

    def to_json(self) -> dict[str, JSON]:
        """As json.dumps takes it."""
        fields: dict[str, JSON] = {name: getattr(self, name) for name in self.__slots__ if name != "samples"}
        return {**fields, "samples": {key: list(values) for key, values in self.samples.items()}}


def guidellm() -> list[str]:
    """The command that starts guidellm; EnvironmentFault if it is not installed."""
    if importlib.util.find_spec("guidellm") is not None:
        return [sys.executable, "-m", "guidellm"]
    found = shutil.which("guidellm")
    if found is None:
        raise EnvironmentFault("guidellm is not installed", hint="pip install 'requant[serve]'")
    return [found]


def measure_point(url: str, model: str, load: Load, streams: int, requests: int, seconds: float) -> Point:
    """Send `requests` requests, `streams` at a time. LoadError if guidellm fails or takes longer than `seconds`."""
    with tempfile.TemporaryDirectory(prefix="requant-serving-") as folder:
        report = Path(folder) / "report.json"
        command = [*guidellm(), *_arguments(url, model, load, streams, requests, report)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}  # the tokenizer is a folder; nothing is to be fetched
        said = _run(command, environment, seconds)
        try:
            text = report.read_text(encoding="utf-8")
        except OSError as error:
            raise LoadError(f"guidellm wrote no report: {_tail(said)}") from error
    return read_report(text, streams, requests)


def read_report(text: str, streams: int, requests: int) -> Point:
    """A report of guidellm (0.8) with one benchmark in it. LoadError if it is not one."""
    try:
        raw = cast("Mapping[str, object]", json.loads(text))
        benchmark = cast("list[Mapping[str, object]]", raw["benchmarks"])[0]
        by_status = cast("Mapping[str, list[Mapping[str, object]] | None]", benchmark["requests"])
        metrics = cast("Mapping[str, Mapping[str, object] | None]", benchmark["metrics"])
        done, failed = by_status.get("successful") or [], by_status.get("errored") or []
        failed = [*failed, *(by_status.get("incomplete") or [])]
        full = [request for request in done if request.get("output_tokens")]
        return Point(
            concurrency=streams,
            requests=requests,
            completed=len(done),
            errors=len(failed),
            empty=len(done) - len(full),
            output_tokens_per_s=_statistic(metrics, "output_tokens_per_second", "mean"),
            ttft_ms_median=_statistic(metrics, "time_to_first_token_ms", "median"),
            ttft_ms_p95=_statistic(metrics, "time_to_first_token_ms", "p95"),
            itl_ms_median=_statistic(metrics, "inter_token_latency_ms", "median"),
            itl_ms_p95=_statistic(metrics, "inter_token_latency_ms", "p95"),
            first_error=_error(failed[0]) if failed else "",
            samples={
                "latency_s": _column(full, "request_latency"),
                "ttft_ms": _column(full, "time_to_first_token_ms"),
                "itl_ms": _column(full, "inter_token_latency_ms"),
                "output_tokens": _column(full, "output_tokens"),
            },
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise LoadError(f"guidellm's report cannot be read: {type(error).__name__}: {error}") from error


def _arguments(url: str, model: str, load: Load, streams: int, requests: int, report: Path) -> list[str]:
    backend = {"kind": "openai_http", "target": url, "model": model, "request_format": "/v1/completions"}
    data: dict[str, object] = {"kind": "synthetic_text", "prompt_tokens": load.prompt_tokens}
    if load.prompts is not None:
        kind = "json_file" if load.prompts.suffix in (".json", ".jsonl") else "text_file"
        data = {"kind": kind, "path": str(load.prompts)}
    if load.fixed and load.prompts is None:
        data["output_tokens"] = load.output_tokens  # guidellm then sends ignore_eos with max_tokens
    else:
        backend["max_tokens"] = str(load.output_tokens)
    given: list[tuple[str, Mapping[str, object]]] = [
        ("--backend", backend),
        ("--profile", {"kind": "concurrent", "streams": streams}),
        ("--constraint", {"kind": "max_requests", "count": requests}),
        ("--tokenizer", {"kind": "huggingface_auto", "model": str(load.tokenizer)}),
        ("--data", data),
        ("--seed", {"kind": "static", "value": load.seed}),
        ("--output", {"kind": "json", "path": str(report)}),
    ]
    pairs = [item for option, value in given for item in (option, json.dumps(value))]
    return ["run", *pairs, "--disable-console"]


def _run(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> str:
    """What the program said. Its whole process group is ended if it takes too long."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=dict(environment),
        start_new_session=True,
    )
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired as error:
        raise LoadError(f"guidellm did not finish within {seconds:.0f} s") from error
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.communicate(timeout=_ENDED)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _statistic(metrics: Mapping[str, Mapping[str, object] | None], name: str, which: str) -> float | None:
    """One number of the successful requests' distribution; None if there was none."""
    summary = cast("Mapping[str, object]", (metrics.get(name) or {}).get("successful") or {})
    if not summary.get("count"):
        return None
    place = cast("Mapping[str, object]", summary["percentiles"]) if which.startswith("p") else summary
    return round(float(cast("float", place[which])), 4)


def _column(requests: Sequence[Mapping[str, object]], key: str) -> list[float]:
    return [round(float(value), 4) if isinstance(value := r.get(key), int | float) else 0.0 for r in requests]


def _error(request: Mapping[str, object]) -> str:
    info = cast("Mapping[str, object]", request.get("info") or {})
    return " ".join(str(info.get("error") or "no answer came").split())[:300]


def _tail(said: str) -> str:
    lines = [line for line in said.splitlines() if line.strip()]
    return " ".join(lines[-3:])[-400:] or "it said nothing"
