"""The server itself: started or found, waited for until it is healthy, asked who it is, and stopped if it is ours.

A server that we started leads a process group of its own and is stopped through it, whatever happened.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol, cast

from requant.validate.serving_client import Client
from requant.validate.serving_run import Broken, Run, Server

__all__ = ["Alive", "free_port", "running"]

_POLL: Final = 0.5
_STOP: Final = 20.0
"""Seconds between SIGTERM and SIGKILL: servers free their GPUs in that time."""
_LOG_KEPT: Final = 4 << 20
"""Bytes of a log that are read: kernels are chosen while the model loads."""
_LAST: Final = 1 << 16
"""Bytes at the end of a log that may hold the last words."""


class Alive(Protocol):
    """Raises Broken where the server has ended, or does so within `patience` seconds."""

    def __call__(self, patience: float = 0.0, /) -> None: ...


@contextmanager
def running(server: Server, run: Run) -> Generator[tuple[Client, Alive]]:
    """A healthy server as a client, and a check that it still lives. Ours is stopped at the end."""
    if server.endpoint is not None:
        client = Client(server.endpoint.rstrip("/").removesuffix("/v1"), server.model)
        _wait(client, server.timeout_s, lambda: None)
        _identify(server, client, run, "")
        yield _with_model(client, server), lambda _patience=0.0: None
        return
    command = server.launch or ""
    port = free_port()
    run.flags = run.flags or command
    filled = command.replace("{model}", shlex.quote(str(server.folder.resolve()))).replace("{port}", str(port))
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                shlex.split(filled), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        except (OSError, ValueError) as error:
            raise Broken(f"the server cannot be started: {error}") from error

        def alive(patience: float = 0.0) -> None:
            try:
                code = process.wait(patience)
            except subprocess.TimeoutExpired:
                return
            raise Broken(f"the server has ended with exit code {code}; its last words: {_last_words(log.fileno())}")

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
            raise Broken(f"the server did not become healthy within {seconds:.0f} s")
        time.sleep(_POLL)


def _with_model(client: Client, server: Server) -> Client:
    """The name under which the server has the model: the first that it lists; some list none before it is asked for."""
    name = server.model or client.first_model() or (str(server.folder.resolve()) if server.launch else "")
    if not name:
        raise Broken("the server lists no model; name it with --model")
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
        try:
            said = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30).stdout
        except (OSError, subprocess.SubprocessError):
            said = ""  # no driver, or one that hangs
        if names := [line.strip() for line in said.splitlines() if line.strip()]:
            return names[0] if len(names) == 1 else f"{len(names)} x {names[0]}"
    from requant.validate.signoff import cpu_name

    return f"{cpu_name()}, {os.cpu_count() or 1} logical, {platform.machine()}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(cast("tuple[str, int]", probe.getsockname())[1])


def _text(log: int) -> str:
    """The beginning of the log: the descriptor's position is the server's, so it is read without moving it."""
    return os.pread(log, _LOG_KEPT, 0).decode("utf-8", "replace")


def _last_words(log: int) -> str:
    end = os.pread(log, _LAST, max(0, os.fstat(log).st_size - _LAST)).decode("utf-8", "replace")
    lines = [line.strip() for line in end.splitlines() if line.strip()]
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
