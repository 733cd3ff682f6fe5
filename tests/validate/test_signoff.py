"""The sign-off: what it needs to say yes, what it covers, and what it must never carry to the Hub."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from requant.manifests.errors import SourceError
from requant.manifests.schema import Manifest
from requant.validate.results import Finding, StageResult, Status
from requant.validate.signoff import (
    JSON_NAME,
    MARKDOWN_NAME,
    load_signoff,
    sign_off,
    verify_signoff,
    write_signoff,
)

PASSED = (
    StageResult("contract", Status.PASSED, "would load"),
    StageResult("numerics", Status.PASSED, "all blocks equal"),
)


def manifest(**gates: object) -> Manifest:
    return Manifest.model_validate(
        {
            "version": 1,
            "name": "tiny",
            "source": {"path": "src"},
            "target": {"format": "nvfp4", "layout": "modelopt", "output": "out"},
            "layers": [{"match": "*", "to": "nvfp4"}],
            "validate": gates,
        }
    )


@pytest.fixture
def output(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    (folder / "encoding").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights" * 300_000)
    (folder / "encoding" / "x.py").write_text("pass\n")
    lock = {
        "tool": "requant 9.9",
        "source": {"path": "/home/someone/models/x", "repo": "acme/x", "commit": "c0ffee", "layout": "gpt-oss"},
        "plan_sha256": "ab" * 32,
    }
    (folder / "requant.lock.json").write_text(json.dumps(lock))
    return folder


def test_contract_and_numerics_alone_are_enough_without_other_gates(output: Path) -> None:
    assert sign_off(output, None, PASSED).signed_off
    assert sign_off(output, manifest(), PASSED).signed_off


@pytest.mark.parametrize("missing", [0, 1])
def test_contract_and_numerics_are_required_even_if_nobody_asked(output: Path, missing: int) -> None:
    one = sign_off(output, manifest(), PASSED[1 - missing : 2 - missing])
    assert not one.signed_off
    assert [(g.name, g.status) for g in one.unmet] == [(PASSED[missing].stage, Status.NOT_RUN)]
    optional = manifest(numerics={"required": False})
    assert not sign_off(output, optional, PASSED[:1]).signed_off


def test_a_failed_stage_fails_its_gate_with_its_own_reason(output: Path) -> None:
    failed = StageResult("numerics", Status.FAILED, "12 of 96 blocks lossy")
    verdict = sign_off(output, None, [PASSED[0], failed])
    assert not verdict.signed_off
    assert [(g.name, g.reason) for g in verdict.unmet] == [("numerics", "12 of 96 blocks lossy")]


def test_a_required_gate_that_did_not_run_is_not_a_pass(output: Path) -> None:
    gates = manifest(kernels={"modules": 4})
    absent = sign_off(output, gates, PASSED)
    assert not absent.signed_off
    skipped = StageResult("kernels", Status.NOT_RUN, "no GPU of compute capability 12.0")
    told = sign_off(output, gates, [*PASSED, skipped])
    assert [(g.name, g.status, g.reason) for g in told.unmet] == [("kernels", Status.NOT_RUN, skipped.reason)]
    optional = manifest(kernels={"modules": 4, "required": False})
    assert sign_off(output, optional, [*PASSED, skipped]).signed_off


def test_a_gate_measured_on_the_wrong_device_did_not_run(output: Path) -> None:
    gates = manifest(kernels={"device": "cuda"})
    on_cpu = StageResult("kernels", Status.PASSED, "worst 1e-4", device="cpu")
    verdict = sign_off(output, gates, [*PASSED, on_cpu])
    assert [(g.name, g.status) for g in verdict.unmet] == [("kernels", Status.NOT_RUN)]
    assert "the gate asks for cuda" in verdict.unmet[0].reason
    on_gpu = StageResult("kernels", Status.PASSED, "worst 1e-4", device="cuda:0 NVIDIA B200")
    assert sign_off(output, gates, [*PASSED, on_gpu]).signed_off


def test_every_file_is_hashed_and_a_report_round_trips(output: Path) -> None:
    seen: list[tuple[int, int]] = []
    verdict = sign_off(output, None, PASSED, progress=lambda done, total: seen.append((done, total)))
    expected = {
        p.relative_to(output).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in output.rglob("*")
        if p.is_file()
    }
    assert {f.name: f.sha256 for f in verdict.files} == expected
    total = sum(f.size for f in verdict.files)
    assert seen[-1] == (total, total)
    write_signoff(output, verdict)
    assert load_signoff(output).to_json() == verdict.to_json()
    assert verify_signoff(output) == []
    assert not list(output.glob(".*"))
    write_signoff(output, sign_off(output, None, PASSED))  # a second sign-off does not cover the first
    assert verify_signoff(output) == []


def test_any_change_after_the_judgement_is_named(output: Path) -> None:
    write_signoff(output, sign_off(output, None, PASSED))
    weights = bytearray((output / "model.safetensors").read_bytes())
    weights[1000] ^= 1
    (output / "model.safetensors").write_bytes(weights)
    (output / "encoding" / "x.py").unlink()
    (output / "extra.txt").write_text("new")
    lock = output / "requant.lock.json"
    lock.write_text(lock.read_text() + "\n")
    wrong = verify_signoff(output)
    assert len(wrong) == 4
    assert "encoding/x.py: was judged and is gone" in wrong
    assert "extra.txt: is not covered by the sign-off" in wrong
    assert "model.safetensors: has changed since it was judged" in wrong
    assert any(line.startswith("requant.lock.json: was ") for line in wrong)


def test_nothing_that_names_a_machine_or_a_person_is_written(output: Path) -> None:
    findings = (
        Finding(
            "shard-unreadable",
            "error",
            "cannot open '/home/someone/models/x/model-1.safetensors' with hf_abcdefghijklmnopqrst",
            where="/home/someone/models/x/model-1.safetensors",
            hint="see https://huggingface.co/docs/x and layers.0.ffn/experts, 96/4 = 24, 3 tok/s",
        ),
    )
    stage = StageResult("numerics", Status.FAILED, "in /var/data/x/y.safetensors", findings, {"at": ["/srv/a/b"]})
    write_signoff(output, sign_off(output, None, [PASSED[0], stage]))
    for name in (JSON_NAME, MARKDOWN_NAME):
        text = (output / name).read_text()
        assert "someone" not in text
        assert "/var/data" not in text
        assert "/srv/a" not in text
        assert "hf_abc" not in text
    text = (output / JSON_NAME).read_text()
    assert ".../model-1.safetensors" in text
    assert "https://huggingface.co/docs/x and layers.0.ffn/experts, 96/4 = 24, 3 tok/s" in text
    assert json.loads(text)["source"] == {
        "repo": "acme/x",
        "commit": "c0ffee",
        "layout": "gpt-oss",
        "tool": "requant 9.9",
        "plan_sha256": "ab" * 32,
    }


def test_the_environment_says_with_what_it_was_judged(output: Path) -> None:
    environment = sign_off(output, None, PASSED).environment
    assert {"python", "system", "cpu", "requant", "numpy", "torch", "safetensors"} <= set(environment)
    assert environment["python"].count(".") == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no sign-off"),
        ("{", "cannot be read"),
        ('{"version": 2}', "version 2"),
        ("[]", "cannot be read"),
    ],
)
def test_a_missing_or_foreign_sign_off_is_one_clear_error(output: Path, text: str | None, message: str) -> None:
    if text is not None:
        (output / JSON_NAME).write_text(text)
    with pytest.raises(SourceError, match=message):
        verify_signoff(output)


def test_an_interrupted_write_leaves_the_old_report_and_no_fragment(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_signoff(output, sign_off(output, None, PASSED))
    before = (output / JSON_NAME).read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_signoff(output, sign_off(output, None, PASSED[:1]))
    assert (output / JSON_NAME).read_bytes() == before
    assert not list(output.glob(".*"))
