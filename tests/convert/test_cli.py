"""The command line: verbs, exit codes, where results and messages go, interruption."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from requant.convert.cli import main

VERBS = ("convert", "check", "plan", "run", "validate", "report", "inspect", "diff", "init", "schema", "doctor")


@pytest.fixture
def cli(capsys):
    """Runs the program in this process: exit code, stdout, stderr."""

    def call(*arguments):
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return stop.value.code, captured.out, captured.err

    return call


@pytest.fixture
def manifest(kit):
    """A manifest for a small checkpoint that converts losslessly; no runtime named, so that it can be signed off."""
    source = kit.dsv4()
    path = kit.tmp / "m.yaml"
    path.write_text(kit.manifest_text(source, kit.tmp / "out", kit.EXPERTS, runtimes=[]))
    return path


def lossy(kit):
    """A manifest for a checkpoint whose exponents span too much for NVFP4."""
    source = kit.dsv4(low=60, high=120)
    path = kit.tmp / "m.yaml"
    text = kit.manifest_text(source, kit.tmp / "out", kit.EXPERTS, runtimes=[])
    path.write_text(text + "validate: {numerics: {lossless: required}}\n")
    return path


# --- verbs and exit codes ---------------------------------------------------------------------------------------------


def test_help_lists_every_verb_and_each_has_its_own(cli):
    code, out, err = cli("--help")
    assert (code, err) == (0, "")
    for verb in VERBS:
        assert re.search(rf"^  {verb}\s", out, re.MULTILINE), verb
        assert cli(verb, "--help")[0] == 0


def test_no_arguments_show_the_help(cli):
    code, out, err = cli()
    assert code == 2
    assert "Usage: " in out + err


def test_version_is_one_line(cli):
    code, out, err = cli("--version")
    assert (code, err) == (0, "")
    assert re.fullmatch(r"requant \d+\.\d+\.\d+\S*\n", out)


@pytest.mark.parametrize("verb", ["check", "plan", "inspect", "init", "schema", "doctor"])
def test_asking_verbs_end_in_0_and_write_nothing(cli, kit, manifest, verb):
    arguments = {"check": [manifest], "plan": [manifest], "inspect": [kit.tmp / "src"], "init": [kit.tmp / "src"]}
    before = sorted(kit.tmp.rglob("*"))
    code, out, err = cli(verb, *arguments.get(verb, []))
    assert (code, err) == (0, "")
    assert out
    assert sorted(kit.tmp.rglob("*")) == before


@pytest.mark.parametrize("verb", ["check", "plan", "inspect", "doctor", "run", "diff", "convert", "validate", "report"])
def test_format_json_is_json_and_nothing_else(cli, kit, manifest, verb):
    if verb in ("validate", "report"):
        assert cli("run", manifest, "--quiet")[0] == 0
    if verb == "report":
        cli("validate", kit.tmp / "out", "--quiet")
    source = kit.tmp / "src"
    arguments = {
        "inspect": [source],
        "diff": [source, source],
        "doctor": [],
        "validate": [kit.tmp / "out"],
        "report": [kit.tmp / "out"],
    }
    quiet = ["--quiet"] if verb in ("run", "diff", "convert", "validate") else []
    code, out, err = cli(verb, *arguments.get(verb, [manifest]), *quiet, "--format", "json")
    assert (code, err) == (0, "")
    facts = json.loads(out)
    key = {
        "check": ("valid", True),
        "plan": ("name", "t"),
        "inspect": ("layout", "deepseek-v4"),
        "run": ("lossy", 0),
        "diff": ("same", True),
        "convert": ("signed_off", True),
        "validate": ("signed_off", True),
        "report": ("signed_off", True),
    }.get(verb)
    assert key is None or facts[key[0]] == key[1]


def test_the_schema_is_json(cli):
    code, out, _ = cli("schema")
    assert code == 0
    assert "layers" in json.loads(out)["properties"]


def test_a_manifest_alone_means_the_whole_pipeline(cli, kit, manifest):
    code, out, _ = cli(manifest, "--quiet")
    assert code == 0
    assert "deepseek-v4 -> nvfp4 (modelopt)" in out
    assert (kit.tmp / "out" / "requant.signoff.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["frobnicate"], "frobnicate"),
        (["plan", "no-such-manifest"], "no-such-manifest"),
        (["plan"], "MANIFEST"),
        (["plan", "{m}", "extra"], "extra"),
        (["plan", "{m}", "--nope"], "--nope"),
        (["plan", "{m}", "--format", "xml"], "xml"),
        (["plan", "{m}", "--set", "target.formt=nvfp4"], "target.formt"),
        (["plan", "{m}", "--set", "novalue"], "novalue"),
        (["check", "{tmp}/broken.yaml"], "broken.yaml"),
        (["validate", "{tmp}/out", "--only", "nonsense"], ""),
    ],
)
def test_usage_and_manifest_errors_are_exit_2_with_nothing_on_stdout(cli, kit, manifest, arguments, words):
    (kit.tmp / "broken.yaml").write_text("version: 1\nname: [\n")
    if "validate" in arguments:
        assert cli("run", manifest, "--quiet")[0] == 0
    code, out, err = cli(*(a.format(m=manifest, tmp=kit.tmp) for a in arguments))
    assert (code, out) == (2, "")
    assert words in err
    assert "Traceback" not in err


def test_a_missing_source_is_exit_3(cli, kit, manifest):
    code, out, err = cli("plan", manifest, "--set", f"source.path={kit.tmp / 'gone'}")
    assert (code, out) == (3, "")
    assert err == f"error: {kit.tmp / 'gone'}: is not a folder\n  -> give the folder that holds config.json\n"


@pytest.mark.parametrize("verb", ["validate", "report"])
def test_judging_what_is_no_output_of_ours_is_exit_3(cli, kit, verb):
    code, out, err = cli(verb, kit.dsv4())
    assert (code, out) == (3, "")
    assert err.startswith("error: ")


def test_a_disk_that_fills_up_is_exit_4(cli, manifest, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("requant.convert.execute.preallocate", full)
    code, out, err = cli("run", manifest, "--quiet")
    assert (code, out) == (4, "")
    assert "the disk is full" in err


@pytest.mark.parametrize("verb", ["convert", "validate"])
def test_a_lossy_block_where_lossless_is_required_is_exit_5_with_the_count(cli, kit, verb):
    """C13."""
    manifest = lossy(kit)
    if verb == "validate":
        code, out, _ = cli("run", manifest, "--quiet", "--format", "json")
        assert code == 0
        assert json.loads(out)["lossy"] > 0
    code, out, err = cli(verb, manifest if verb == "convert" else kit.tmp / "out", "--quiet")
    assert code == 5
    assert "lossy" in out
    assert "layers.0.ffn.experts." in out
    assert "not signed off" in err
    assert cli("report", kit.tmp / "out")[0] == 5


def test_an_output_that_cannot_be_written_is_exit_6(cli, kit, manifest):
    (kit.tmp / "file").write_text("x")
    code, out, err = cli("run", manifest, "--quiet", "--set", f"target.output={kit.tmp / 'file' / 'out'}")
    assert (code, out) == (6, "")
    assert "cannot be written" in err


def test_a_missing_package_is_exit_6_and_named(cli, manifest, monkeypatch):
    def missing(*_, **__):
        raise ModuleNotFoundError("No module named 'tqdm'", name="tqdm")

    monkeypatch.setattr("requant.convert.pipeline.run_job", missing)
    code, _, err = cli("run", manifest, "--quiet")
    assert code == 6
    assert "the package tqdm is missing" in err


def test_a_bug_is_exit_1_asks_for_a_report_and_hides_the_traceback_unless_asked(cli, manifest, monkeypatch):
    def bug(*_, **__):
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("requant.convert.pipeline.run_job", bug)
    code, out, err = cli("run", manifest, "--quiet")
    assert (code, out) == (1, "")
    assert err.startswith("bug: ZeroDivisionError: division by zero\n  -> please report it")
    with pytest.raises(ZeroDivisionError):
        main(["run", str(manifest), "--quiet", "-v"])


def test_init_writes_a_manifest_that_plans(cli, kit):
    source = kit.dsv4()
    path = kit.tmp / "made.yaml"
    code, out, _ = cli("init", source, "-o", path)
    assert code == 0
    assert f"requant plan {path}" in out
    code, out, _ = cli("plan", path, "--format", "json", "--set", f"target.output={kit.tmp / 'out'}")
    assert code == 0
    assert json.loads(out)["units"]["groups"] == 4
    assert cli("init", source, "-o", path)[0] == 2


def test_set_overrides_the_manifest(cli, kit, manifest):
    code, out, _ = cli(
        "plan", manifest, "--format", "json", "--set", "target.shard_size=20KB", "--set", "activations.input_scale=0.5"
    )
    facts = json.loads(out)
    assert code == 0
    assert facts["target"]["shards"] > 1
    assert facts["target"]["input_scale"] == "constant 0.5"


def test_plan_scan_forecasts_in_both_forms(cli, kit, manifest):
    code, out, _ = cli("plan", manifest, "--scan", "--quiet", "--format", "json")
    assert code == 0
    assert json.loads(out)["scan"]["groups"] == json.loads(out)["scan"]["certainly_lossless"] == 4
    code, out, _ = cli("plan", manifest, "--scan", "--quiet")
    assert "4 of 4 fused groups are certainly lossless" in out


def test_diff_finds_one_byte(cli, kit, manifest):
    """C139."""
    assert cli("run", manifest, "--quiet")[0] == 0
    assert cli("run", manifest, "--quiet", "--set", f"target.output={kit.tmp / 'two'}")[0] == 0
    path = kit.tmp / "two" / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)
    code, out, _ = cli("diff", kit.tmp / "out", kit.tmp / "two", "--quiet", "--format", "json")
    facts = json.loads(out)
    assert code == 0
    assert facts["same"] is False
    (changed,) = facts["changed"]
    assert changed["bytes_different"] == 1
    assert facts["missing_in_b"] == facts["extra_in_b"] == facts["config"] == []


# --- streams ----------------------------------------------------------------------------------------------------------


def test_progress_goes_to_stderr_and_results_to_stdout(cli, manifest):
    code, out, err = cli("run", manifest)
    assert code == 0
    assert out.startswith("wrote ")
    assert "convert" not in out
    assert "convert: 100%" in err
    assert "wrote" not in err


def test_quiet_has_no_bar(cli, manifest):
    assert cli("run", manifest, "--quiet")[2] == ""


def test_the_log_file_holds_what_happened(cli, kit, manifest):
    log = kit.tmp / "run.log"
    assert cli("run", manifest, "--quiet", "--log-file", log)[0] == 0
    assert re.search(r"INFO wrote .*out \(\d+ units, 0 done by an earlier run\)", log.read_text())
    assert cli("run", manifest, "--quiet", "--log-file", log)[0] == 3
    assert "is finished already" in log.read_text()


@pytest.mark.parametrize(
    "arguments", [["check", "{m}", "--log-file", "{tmp}/no/run.log"], ["init", "{tmp}/src", "-o", "{tmp}/no/m.yaml"]]
)
def test_a_file_that_cannot_be_written_is_named(cli, kit, manifest, arguments):
    code, out, err = cli(*(a.format(m=manifest, tmp=kit.tmp) for a in arguments))
    assert (code, out) == (6, "")
    assert err.startswith(f"error: {kit.tmp}/no/")
    assert "cannot be written: No such file or directory\n  -> " in err


@pytest.mark.parametrize("verb", ["schema", "plan", "--version", "--help"])
def test_a_reader_that_has_gone_is_no_error(manifest, verb):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "requant.convert.cli", verb, *([str(manifest)] if verb == "plan" else [])]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


# --- interruption -----------------------------------------------------------------------------------------------------

SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests started in the background inherit that it is ignored
from requant.convert import compute, plan
from requant.convert.cli import main
plan.COPY_BATCH_PIECES = 1
def slowly(name):
    real = getattr(compute, name)
    def slow(*arguments, **named):
        time.sleep(0.02)
        return real(*arguments, **named)
    setattr(compute, name, slow)
slowly("write_all")
slowly("copy_range")
main(sys.argv[1:])
"""


def sha256s(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.glob("*.safetensors"))}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_an_interrupted_run_says_so_and_goes_on_next_time(kit, manifest, number, code):
    journal = kit.tmp / "out.partial" / ".requant" / "journal.jsonl"
    command = [sys.executable, "-c", SLOW, "run", str(manifest), "--quiet"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (journal.exists() and journal.read_bytes().count(b"\n") > 3):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, number)
    out, err = process.communicate()
    assert (process.returncode, out) == (code, "")
    if number == signal.SIGINT:
        assert err == "interrupted: run the same command again to go on where it stopped\n"
    assert not (kit.tmp / "out").exists()
    done = subprocess.run([*command, "--format", "json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["resumed_units"] >= 3
    whole, _ = kit.convert(kit.tmp / "src", output="whole")
    assert sha256s(kit.tmp / "out") == sha256s(whole)
