"""A real server on the converted checkpoint: started or found, asked one question, then loaded and timed.

In this order, and it stops at the first thing that is wrong: launch (if we launch it), wait until it is healthy, ask a
question with a known answer, then each concurrency after a warm-up of as many streams. What was measured before
something went wrong is kept: the run says `complete: false` and why. A server that we started is stopped through its
own process group, whatever happened.

A run is a JSON object with a label and everything that two runs must share to be compared (compare.py): server and
version, flags, prompts and their lengths, card.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Protocol, cast

from requant.manifests.errors import EnvironmentFault, NotSignedOffError, RequantError, UsageError
from requant.manifests.gates import ServingGate
from requant.validate.results import JSON, Finding, StageResult, Status, status_of
from requant.validate.serving_client import Client, Refused, holds
from requant.validate.serving_load import Load, LoadError, Point, guidellm, measure_point

__all__ = [
    "ANSWER",
    "QUESTION",
    "RUN_KIND",
    "Run",
    "Server",
    "check_serving",
    "measure_server",
    "numbers_in",
    "run_text",
    "write_run",
]

STAGE: Final = "serving"
RUN_KIND: Final = "requant serving run"
QUESTION: Final = "What is the capital of France? Answer with one word."
ANSWER: Final = "Paris"
_POLL: Final = 0.5
_DYING: Final = 3.0
"""Seconds within which a server that broke a connection off may still end, so that its own last words are told."""
_STOP: Final = 20.0
"""Seconds between SIGTERM and SIGKILL: servers free their GPUs in that time."""
_LOG_KEPT: Final = 4 << 20
"""Bytes of a log that are read: kernels are chosen while the model loads."""
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Server:
    """What to measure. endpoint or launch; the others describe a server that cannot be asked, or override its answer.

    launch: a command; `{model}` and `{port}` are filled in. answer "": the question is not asked.
    """

    folder: Path
    endpoint: str | None = None
    launch: str | None = None
    label: str = ""
    model: str = ""
    timeout_s: float = 900.0
    question: str = QUESTION
    answer: str = ANSWER
    version: str = ""
    flags: str = ""
    card: str = ""


@dataclass(slots=True)
class Run:
    """One labelled run. error: why it is not complete. wrong: the server's answers are at fault, not this machine."""

    label: str
    model: str
    created: str
    server: str = ""
    flags: str = ""
    card: str = ""
    kernels: tuple[str, ...] = ()
    fp4_native: bool | None = None
    prompts: dict[str, JSON] = field(default_factory=dict[str, JSON])
    answer: str = "not asked"
    points: list[Point] = field(default_factory=list[Point])
    complete: bool = False
    error: str = ""
    wrong: bool = False

    def to_json(self) -> dict[str, JSON]:
        """As json.dumps takes it."""
        return {
            "kind": RUN_KIND,
            "version": 1,
            "label": self.label,
            "complete": self.complete,
            "error": self.error,
            "created": self.created,
            "model": self.model,
            "server": self.server,
            "flags": self.flags,
            "card": self.card,
            "kernels": list(self.kernels),
            "fp4_native": self.fp4_native,
            "prompts": self.prompts,
            "answer": self.answer,
            "points": [point.to_json() for point in self.points],
        }

    def fault(self) -> RequantError | None:
        """The error to end with, or None after a complete run: exit 5 for wrong answers, 6 for what did not work."""
        if self.complete:
            return None
        kept = f"{len(self.points)} concurrencies were measured and are kept, marked incomplete" if self.points else ""
        kind = NotSignedOffError if self.wrong else EnvironmentFault
        return kind(self.error, where=f"run {self.label!r}", hint=kept or "nothing was measured")


class _Broken(Exception):  # noqa: N818 - ends a run; becomes Run.error
    """wrong: the server answers, but not as it must."""

    def __init__(self, message: str, *, wrong: bool = False) -> None:
        super().__init__(message)
        self.wrong = wrong


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
        with _running(server, run) as (client, alive):
            _measure(server, client, load, list(zip(concurrency, requests, strict=True)), run, alive, keep, progress)
        run.complete = True
    except _Broken as error:
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


class Alive(Protocol):
    """Raises _Broken where the server has ended, or does so within `patience` seconds."""

    def __call__(self, patience: float = 0.0, /) -> None: ...


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
    """Question, warm-up, points; every fault becomes a _Broken."""
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
        raise _Broken(f"the server fails: {error}", wrong=error.status != 0) from error
    except LoadError as error:
        alive(_DYING)
        raise _Broken(str(error)) from error


def _sanity(server: Server, client: Client, run: Run) -> None:
    if not server.answer:
        return
    answer = client.ask(server.question)
    run.answer = " ".join(answer.split())[:200]
    if not answer.strip():
        raise _Broken(f"the answer to {server.question!r} is empty", wrong=True)
    if not holds(answer, server.answer):
        raise _Broken(f"asked {server.question!r}, it said {run.answer!r}, without {server.answer!r}", wrong=True)


def _judge(point: Point) -> None:
    at = f"at concurrency {point.concurrency}"
    if point.empty:
        raise _Broken(f"{point.empty} of {point.requests} streams {at} ended without a token", wrong=True)
    if point.errors:
        said = point.first_error or "no answer came"
        raise _Broken(f"{point.errors} of {point.requests} requests {at} failed, the first with: {said}", wrong=True)
    if point.completed < point.requests:
        raise _Broken(f"only {point.completed} of {point.requests} requests {at} were answered", wrong=True)


def _described(load: Load) -> dict[str, JSON]:
    """What was sent, for comparison: no path, a file by its hash."""
    import hashlib

    facts: dict[str, JSON] = {"output_tokens": load.output_tokens, "fixed_lengths": load.fixed and load.prompts is None}
    if load.prompts is not None:
        return {"file_sha256": hashlib.sha256(load.prompts.read_bytes()).hexdigest(), **facts}
    return {"synthetic_tokens": load.prompt_tokens, "seed": load.seed, **facts}


# --- the server -------------------------------------------------------------------------------------------------------


@contextmanager
def _running(server: Server, run: Run) -> Generator[tuple[Client, Alive]]:
    """A healthy server as a client, and a check that it still lives. Ours is stopped at the end."""
    if server.endpoint is not None:
        client = Client(server.endpoint.rstrip("/").removesuffix("/v1"), server.model)
        _wait(client, server.timeout_s, lambda: None)
        _identify(server, client, run, "")
        yield _with_model(client, server), lambda _patience=0.0: None
        return
    command = server.launch or ""
    port = _free_port()
    run.flags = run.flags or command
    filled = command.replace("{model}", shlex.quote(str(server.folder.resolve()))).replace("{port}", str(port))
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                shlex.split(filled), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        except (OSError, ValueError) as error:
            raise _Broken(f"the server cannot be started: {error}") from error

        def alive(patience: float = 0.0) -> None:
            try:
                code = process.wait(patience)
            except subprocess.TimeoutExpired:
                return
            raise _Broken(
                f"the server has ended with exit code {code}; its last words: {_last_words(_text(log.fileno()))}"
            )

        try:
            client = Client(f"http://127.0.0.1:{port}", server.model)
            _wait(client, server.timeout_s, alive)
            _identify(server, client, run, _text(log.fileno()))
            yield _with_model(client, server), alive
            _identify(server, client, run, _text(log.fileno()))  # some kernels are chosen at the first request
        finally:
            _stop(process)


def _wait(client: Client, seconds: float, alive: Callable[[], None]) -> None:
    until = time.monotonic() + seconds
    while not client.healthy():
        alive()
        if time.monotonic() > until:
            raise _Broken(f"the server did not become healthy within {seconds:.0f} s")
        time.sleep(_POLL)


def _with_model(client: Client, server: Server) -> Client:
    """The name under which the server has the model: the first that it lists; some list none before it is asked for."""
    name = server.model or client.first_model() or (str(server.folder.resolve()) if server.launch else "")
    if not name:
        raise _Broken("the server lists no model; name it with --model")
    return replace(client, model=name)


def _identify(server: Server, client: Client, run: Run, log: str) -> None:
    from requant.validate.serving_log import read_log

    backend = read_log(log)
    name = f"{backend.server} {backend.version}".strip() if backend.version else ""
    run.server = server.version or client.version() or name or _program(server) or backend.server
    run.kernels, run.fp4_native = backend.kernels, backend.fp4_native
    run.card = server.card or (_card() if server.launch else "")


def _program(server: Server) -> str:
    """The launched program's package and version, where pip knows it: `transformers serve` is transformers'."""
    import importlib.metadata

    if not server.launch:
        return ""
    program = Path(shlex.split(server.launch)[0])
    for name in (program.name.split("-")[0], program.name):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except (importlib.metadata.PackageNotFoundError, ValueError):
            pass
        if program.parent != Path() and (found := _beside(program, name)):
            return found
    return ""


def _beside(program: Path, name: str) -> str:
    """The version of a package in the virtual environment that the program lies in."""
    pattern = f"lib/python*/site-packages/{name}-*.dist-info"
    found = next(iter(sorted(program.resolve().parent.parent.glob(pattern))), None)
    return f"{name} {found.name.removesuffix('.dist-info').partition('-')[2]}" if found is not None else ""


def _card() -> str:
    """The accelerators of this machine, as nvidia-smi names them, or its processor."""
    smi = shutil.which("nvidia-smi")
    if smi is not None:
        asked = [smi, "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=30)
        names = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        if done.returncode == 0 and names:
            return names[0] if len(names) == 1 else f"{len(names)} x {names[0]}"
    from requant.validate.signoff import cpu_name

    return f"{cpu_name()}, {os.cpu_count() or 1} logical, {platform.machine()}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(cast("tuple[str, int]", probe.getsockname())[1])


def _text(log: int) -> str:
    """The beginning of the log: the descriptor's position is the server's, so it is read without moving it."""
    return os.pread(log, _LOG_KEPT, 0).decode("utf-8", "replace")


def _last_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-3:])[-500:] or "(none)"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the process group that the server leads: workers of its own outlive a leader that is killed alone."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        try:
            process.wait(_STOP)
        except subprocess.TimeoutExpired:
            continue
    process.wait()
