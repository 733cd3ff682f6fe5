"""A real server process: asked before it is timed, every fault named, partial results kept, nothing left running."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from requant.manifests.errors import EnvironmentFault, NotSignedOffError, UsageError
from requant.manifests.gates import ServingGate
from requant.validate import serving, serving_load, serving_process
from requant.validate.results import Status
from requant.validate.serving import check_serving, measure_server, numbers_in, run_text, write_run
from requant.validate.serving_client import Client, Refused, holds
from requant.validate.serving_load import Load, LoadError, read_report
from requant.validate.serving_run import Run, Server

HERE = Path(__file__).parent
CARD = serving_process._card
REPORT = HERE.parent / "goldens" / "guidellm" / "report.json"


@pytest.fixture(autouse=True)
def load_program(monkeypatch):
    """The stand-in for guidellm, and no asking for cards."""
    command = [sys.executable, str(HERE / "load_program.py")]
    monkeypatch.setattr(serving_load, "guidellm", lambda: command)
    monkeypatch.setattr(serving, "guidellm", lambda: command)
    monkeypatch.setattr(serving_process, "_card", lambda: "a card")


def command(behaviour: str) -> str:
    return f"{sys.executable} {HERE / 'openai_server.py'} {{port}} {behaviour}"


def measure(tmp_path, behaviour, concurrency=(1, 4), requests=(4, 8), seconds=30.0, **more):
    server = Server(tmp_path, launch=command(behaviour), label=behaviour, timeout_s=seconds, **more)
    return measure_server(server, Load(tmp_path, 16, 8), concurrency, requests)


def running(behaviour: str) -> list[str]:
    """Command lines of processes that still serve."""
    found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in found if "openai_server.py" in line and line.endswith(behaviour) and " -eo " not in line]


def test_a_sound_server_is_asked_timed_identified_and_stopped(tmp_path) -> None:
    run = measure(tmp_path, "sound")
    assert (run.complete, run.error, run.fault()) == (True, "", None)
    assert run.answer == "It is Paris."
    assert run.server == "vLLM 0.30.0"
    assert (run.kernels, run.fp4_native) == (("MoE: FLASHINFER_CUTLASS",), True)
    assert run.flags == command("sound")
    assert run.card == "a card"
    assert run.prompts == {"synthetic_tokens": 16, "seed": 42, "output_tokens": 8, "fixed_lengths": True}
    assert [(p.concurrency, p.completed, p.errors, p.empty) for p in run.points] == [(1, 4, 0, 0), (4, 8, 0, 0)]
    assert run.points[1].samples["output_tokens"] == [8.0] * 8
    assert run.points[0].output_tokens_per_s > 0
    assert 0 < run.points[0].ttft_ms_median <= run.points[0].ttft_ms_p95
    assert "vLLM 0.30.0 on a card" in run_text(run)
    assert running("sound") == []


@pytest.mark.parametrize(
    ("behaviour", "message", "kind", "points"),
    [
        ("exits", r"ended with exit code 1; its last words: ValueError: weight_scale_2 not found \| Engine", 6, 0),
        ("wrong", "without 'Paris'", 5, 0),
        ("mute", "is empty", 5, 0),
        ("failing", "the server fails: /v1/completions answered 500: .*out of memory", 5, 0),
        ("empty", "4 of 4 streams at concurrency 1 ended without a token", 5, 1),
        ("dying", "ended with exit code 3; .*illegal memory access", 6, 1),
    ],
)
def test_every_fault_is_named_with_its_exit_code_and_what_was_measured_is_kept(
    tmp_path, behaviour, message, kind, points
) -> None:
    run = measure(tmp_path, behaviour)
    assert not run.complete
    assert re.search(message, run.error), run.error
    fault = run.fault()
    assert isinstance(fault, NotSignedOffError if kind == 5 else EnvironmentFault)
    assert int(fault.exit_code) == kind
    assert len(run.points) == points
    assert ("kept, marked incomplete" in fault.hint) == bool(points)
    assert running(behaviour) == []
    assert "INCOMPLETE" in run_text(run)
    raw = json.loads(write_run(run, tmp_path / "runs").read_text())
    assert (raw["complete"], raw["error"], len(raw["points"])) == (False, run.error, points)


def test_a_server_that_never_becomes_healthy_is_given_up_in_time(tmp_path) -> None:
    begin = time.monotonic()
    run = measure(tmp_path, "silent", seconds=2)
    assert time.monotonic() - begin < 15
    assert run.error == "the server did not become healthy within 2 s"
    assert isinstance(run.fault(), EnvironmentFault)
    assert running("silent") == []


def test_a_server_that_ignores_sigterm_and_its_children_are_ended(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(serving_process, "_STOP", 1.0)
    found: list[int] = []
    text = serving_process._text

    def spy(log: int) -> str:
        said = text(log)
        found[:] = [int(pid) for pid in re.findall(r"child (\d+)", said)]
        return said

    monkeypatch.setattr(serving_process, "_text", spy)
    run = measure(tmp_path, "stubborn", (1,), (1,))
    assert run.complete
    assert len(found) == 1
    for _ in range(50):
        state = Path(f"/proc/{found[0]}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.1)
    else:
        pytest.fail("the server's child runs on")
    assert running("stubborn") == []


def test_where_lengths_cannot_be_fixed_the_run_says_so(tmp_path) -> None:
    run = measure(tmp_path, "strict", (2,), (4,))
    assert run.complete
    assert run.prompts["fixed_lengths"] is False
    assert "answers may be shorter" in run_text(run)


def test_random_weights_need_no_answer(tmp_path) -> None:
    run = measure(tmp_path, "wrong", (1,), (2,), answer="")
    assert run.complete
    assert run.answer == "not asked"


def test_an_endpoint_is_measured_and_left_running(tmp_path) -> None:
    port = serving_process.free_port()
    process = subprocess.Popen(
        [sys.executable, str(HERE / "openai_server.py"), str(port), "sound"], stdout=subprocess.DEVNULL
    )
    try:
        server = Server(tmp_path, endpoint=f"http://127.0.0.1:{port}/v1/", label="there", flags="--tp 1", card="H200")
        run = measure_server(server, Load(tmp_path, 16, 4), (2,), (4,))
        assert run.complete, run.error
        assert (run.server, run.flags, run.card, run.fp4_native) == ("vLLM 0.30.0", "--tp 1", "H200", None)
        assert process.poll() is None
    finally:
        process.terminate()
        process.wait()


def test_nothing_at_the_address_is_a_fault_of_the_environment(tmp_path) -> None:
    server = Server(tmp_path, endpoint=f"http://127.0.0.1:{serving_process.free_port()}", timeout_s=1)
    run = measure_server(server, Load(tmp_path), (1,), (1,))
    assert "did not become healthy within 1 s" in run.error
    assert isinstance(run.fault(), EnvironmentFault)


def test_what_cannot_be_started_or_was_not_asked_for_rightly(tmp_path) -> None:
    run = measure_server(Server(tmp_path, launch="no-such-server --port {port}"), Load(tmp_path), (1,), (1,))
    assert run.error.startswith("the server cannot be started")
    with pytest.raises(UsageError, match=r"no \{port\}"):
        measure_server(Server(tmp_path, launch="vllm serve"), Load(tmp_path), (1,), (1,))
    with pytest.raises(UsageError, match="one of them"):
        measure_server(Server(tmp_path), Load(tmp_path), (1,), (1,))
    with pytest.raises(UsageError, match="2 concurrencies and 1 numbers"):
        measure_server(Server(tmp_path, launch="x {port}"), Load(tmp_path), (1, 2), (1,))
    with pytest.raises(UsageError, match="no such file"):
        measure_server(Server(tmp_path, launch="x {port}"), Load(tmp_path, prompts=tmp_path / "p"), (1,), (1,))
    for text in ("", "1,x", "0", "4,-1"):
        with pytest.raises(UsageError):
            numbers_in(text)
    assert numbers_in("1,8") == (1, 8)


def test_without_guidellm_nothing_is_launched(tmp_path, monkeypatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(serving_load.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    gate = ServingGate(launch="no-such-server --port {port}")
    result = check_serving(tmp_path, gate)
    assert (result.status, result.reason) == (Status.NOT_RUN, "guidellm is not installed")


@pytest.mark.parametrize(
    ("behaviour", "status"), [("sound", Status.PASSED), ("wrong", Status.FAILED), ("exits", Status.NOT_RUN)]
)
def test_the_gate_fails_for_wrong_answers_and_is_not_run_where_nothing_could_be_tried(
    tmp_path, behaviour, status
) -> None:
    gate = ServingGate(launch=command(behaviour), timeout_s=30.0, concurrency=(1,), requests=(2,))
    result = check_serving(tmp_path, gate)
    assert result.status is status
    assert result.data["runs"][0]["complete"] is (status is Status.PASSED)
    assert bool(result.findings) is (status is Status.FAILED)


def gate_of(behaviour="sound", **fields):
    return ServingGate(
        launch=command(behaviour), timeout_s=30.0, **{"concurrency": (1, 2), "requests": (2, 4), **fields}
    )


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"max_ttft_ms": 1e-6}, [("max_ttft_ms", 1), ("max_ttft_ms", 2)]),
        ({"max_itl_ms": (1e6, 1e-6)}, [("max_itl_ms", 2)]),
        ({"min_output_tokens_per_s": (1e9, 1e-3)}, [("min_output_tokens_per_s", 1)]),
        ({"max_ttft_ms": 1e6, "max_itl_ms": 1e6, "min_output_tokens_per_s": 1e-3, "native_fp4": True}, []),
    ],
)
def test_bounds_of_the_gate_are_judged_at_each_concurrency(tmp_path, fields, told) -> None:
    result = check_serving(tmp_path, gate_of(**fields))
    assert [
        (f.hint.rpartition(".")[2], int(re.search(r"concurrency (\d+)", f.message)[1])) for f in result.findings
    ] == told
    assert result.status is (Status.FAILED if told else Status.PASSED)
    assert result.data["runs"][0]["complete"] is True
    if told:
        assert result.reason == result.findings[0].message


def test_the_gate_sends_what_the_manifest_says_and_asks_its_own_question(tmp_path) -> None:
    result = check_serving(tmp_path, gate_of(prompt_tokens=24, output_tokens=5))
    assert result.data["runs"][0]["prompts"] == {
        "synthetic_tokens": 24, "seed": 42, "output_tokens": 5, "fixed_lengths": True
    }  # fmt: skip
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo\n")
    result = check_serving(tmp_path, gate_of(prompts=str(prompts)))
    assert "file_sha256" in result.data["runs"][0]["prompts"]
    result = check_serving(tmp_path, gate_of(question="And of Italy?", answer="Rome"))
    assert result.status is Status.FAILED
    assert "asked 'And of Italy?'" in result.reason
    assert check_serving(tmp_path, gate_of("wrong", answer="")).data["runs"][0]["answer"] == "not asked"


def test_a_server_whose_log_names_no_fp4_kernel_is_not_native(tmp_path, monkeypatch) -> None:
    from requant.validate.serving_log import Backend

    backend = Backend("vLLM", "0.30.0", ("dense: Marlin",), False)
    monkeypatch.setattr("requant.validate.serving_log.read_log", lambda log: backend)
    result = check_serving(tmp_path, gate_of(native_fp4=True))
    assert result.status is Status.FAILED
    assert "does not multiply in FP4, as far as its log says (kernels: dense: Marlin)" in result.reason


def test_an_endpoints_card_is_what_the_manifest_says(tmp_path, monkeypatch) -> None:
    seen = []

    def measured(server, *_arguments, **_options):
        seen.append(server)
        return Run("l", "m", "now", card=server.card, complete=True)

    monkeypatch.setattr(serving, "measure_server", measured)
    gate = ServingGate(endpoint="http://h:1", card="NVIDIA B200", device="cuda", concurrency=(1,), requests=(1,))
    assert check_serving(tmp_path, gate).device == "cuda:0 NVIDIA B200"
    assert check_serving(tmp_path, ServingGate(endpoint="http://h:1")).device == ""
    for card, device in (("B200", "B200"), ("AMD Instinct MI300X", "AMD Instinct MI300X"), ("CPU, 64 cores", "cpu")):
        assert check_serving(tmp_path, ServingGate(endpoint="http://h:1", card=card)).device == device
    launched = ServingGate(launch="serve --port {port}", card="AMD EPYC 7763, 8 logical")
    assert check_serving(tmp_path, launched).device == "cpu"


def test_a_report_of_guidellm_itself_is_read() -> None:
    """Recorded from guidellm 0.8.1 on `transformers serve` with SmolLM2, six requests at two streams."""
    point = read_report(REPORT.read_text(), 2, 6)
    assert (point.completed, point.errors, point.empty, point.sound) == (6, 0, 0, True)
    assert point.output_tokens_per_s == pytest.approx(0.9783, abs=1e-4)
    assert point.ttft_ms_median == pytest.approx(9249.7501, abs=1e-3)
    assert point.itl_ms_median == pytest.approx(464.6981, abs=1e-3)
    assert point.samples["output_tokens"] == [8.0] * 6
    assert point.samples["latency_s"][0] == pytest.approx(12.1941, abs=1e-4)
    for broken in ("", "{}", '{"benchmarks": []}', "[1]", '{"benchmarks": [{"requests": {}}]}'):
        with pytest.raises(LoadError):
            read_report(broken, 1, 1)


def test_a_load_program_that_hangs_is_ended(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(serving_load, "guidellm", lambda: ["sleep", "60", "#"])
    monkeypatch.setattr(serving_load, "_arguments", lambda *_: ["1"])
    monkeypatch.setattr(serving_load, "guidellm", lambda: [sys.executable, "-c", "import time; time.sleep(60)"])
    begin = time.monotonic()
    with pytest.raises(LoadError, match="did not finish within 1 s"):
        serving_load.measure_point("http://x", "m", Load(tmp_path), 1, 1, 1.0)
    assert time.monotonic() - begin < 10


def test_the_answer_is_a_word_of_its_own() -> None:
    assert holds("It is PARIS.", "paris")
    assert holds("**Paris**", "Paris")
    assert not holds("Comparison", "Paris")
    assert not holds("Parisian", "Paris")


def test_a_label_cannot_leave_the_folder(tmp_path) -> None:
    run = serving.Run("../../etc/x y", "m", "now")
    path = write_run(run, tmp_path / "runs")
    assert path.parent == tmp_path / "runs"
    assert list((tmp_path / "runs").iterdir()) == [path]


@pytest.mark.parametrize(
    ("answer", "said", "status"),
    [
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 39\r\n\r\n{",
            r"/v1/completions: IncompleteRead\(1 bytes read, 38 more",
            0,
        ),
        (
            b"HTTP/1.1 500 Oh\r\nContent-Length: 39\r\n\r\n{",
            "answered 500: nothing more, the connection broke off",
            500,
        ),
        (b"", "/v1/completions: Remote end closed connection without response", 0),
        (b"SSH-2.0-x\r\n\r\n", "/v1/completions: SSH-2.0-x", 0),
    ],
)
def test_an_answer_that_breaks_off_is_a_fault_of_the_server_and_no_crash(answer, said, status) -> None:
    import socket
    import threading

    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            taken, _ = listening.accept()
            with taken:
                taken.recv(4096)
                taken.sendall(answer)
                taken.shutdown(socket.SHUT_WR)
                while taken.recv(4096):  # a socket closed on unread bytes resets the connection, and the answer is lost
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        client = Client(f"http://127.0.0.1:{listening.getsockname()[1]}", "served", seconds=10)
        with pytest.raises(Refused, match=said) as error:
            client.takes_fixed_lengths()
        thread.join()
    assert error.value.status == status


def test_the_last_words_of_a_long_log_are_its_last() -> None:
    with tempfile.TemporaryFile() as log:
        log.write(b"a line\n" * 800_000 + b"out of memory\n\ngood bye\n")
        log.flush()
        assert serving_process._last_words(log.fileno()) == "a line | out of memory | good bye"


def test_a_driver_that_hangs_leaves_the_processor_as_the_card(monkeypatch) -> None:
    def hangs(command, **_):
        raise subprocess.TimeoutExpired(command, 30)

    monkeypatch.setattr(serving_process.shutil, "which", lambda _: "nvidia-smi")
    monkeypatch.setattr(serving_process.subprocess, "run", hangs)
    assert "logical" in CARD()
