"""Two runs: refused where they are not alike, "no difference" where the interval holds 1, right where it does not."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
from requant.manifests.errors import SourceError, UsageError
from requant.validate.compare import compare_runs, comparison_text, load_run


def make(label="a", speed=1.0, seed=0, count=48, streams=(1, 8)):
    """A run whose requests take 1 s / speed, spread by 10%, for 128 tokens."""
    rng = np.random.default_rng(seed)
    points = []
    for c in streams:
        latency = (1 + 0.1 * rng.standard_normal(count)).clip(0.5) / speed
        samples = {
            "latency_s": latency.tolist(),
            "ttft_ms": (100 * latency).tolist(),
            "itl_ms": (7 * latency).tolist(),
            "output_tokens": [128.0] * count,
        }
        points.append({"concurrency": c, "requests": count, "samples": samples})
    return {
        "kind": "requant serving run",
        "label": label,
        "complete": True,
        "server": "vLLM 0.30.0",
        "flags": "vllm serve {model} --port {port}",
        "prompts": {"synthetic_tokens": 512, "output_tokens": 128, "fixed_lengths": True, "seed": 42},
        "card": "NVIDIA H200",
        "kernels": ["MoE: VLLM_CUTLASS"],
        "fp4_native": True,
        "points": points,
    }


def test_a_real_difference_is_found_with_the_right_sign_and_size() -> None:
    result = compare_runs(make("mxfp4"), make("nvfp4", speed=1.5, seed=1))
    by_name = {(r.concurrency, r.measure): r for r in result.ratios}
    assert len(by_name) == 6
    rate = by_name[8, "output tokens/s"]
    assert rate.a == pytest.approx(8 * 128, rel=0.05)
    assert rate.low < 1.5 < rate.high
    assert rate.high - rate.low < 0.2
    assert {r.verdict for r in result.ratios} == {"faster"}
    latency = by_name[1, "time to first token, ms"]
    assert latency.low < 1 / 1.5 < latency.high
    back = compare_runs(make("nvfp4", speed=1.5, seed=1), make("mxfp4"))
    assert {r.verdict for r in back.ratios} == {"slower"}
    assert "B = nvfp4 against A = mxfp4" in comparison_text(result)


@pytest.mark.parametrize("count", [5, 16])
def test_the_interval_covers_the_truth_as_often_as_it_says_and_no_difference_is_said(monkeypatch, count) -> None:
    monkeypatch.setattr("requant.validate.compare._RESAMPLES", 1000)
    held, runs = 0, 40
    for seed in range(runs):
        rate = compare_runs(
            make(seed=seed, count=count, streams=(1,)), make(seed=900 + seed, count=count, streams=(1,))
        )
        held += rate.ratios[0].verdict == "no difference"
    assert held >= 36  # 38 expected; with percentiles as they are 34 of 5 requests


def test_a_run_equals_itself() -> None:
    for ratio in compare_runs(make(), make()).ratios:
        assert ratio.ratio == 1
        assert ratio.low < 1 < ratio.high
        assert ratio.verdict == "no difference"


def test_few_requests_tell_nothing() -> None:
    result = compare_runs(make(count=3), make(count=3, speed=9))
    assert {(r.low, r.verdict) for r in result.ratios} == {(None, "too few requests")}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("server", "vLLM 0.29.0", "version differ: 'vLLM 0.30.0' and 'vLLM 0.29.0'"),
        ("server", "", "version of one is not known"),
        ("flags", "vllm serve {model} --port {port} --enforce-eager", "flags differ"),
        ("card", "NVIDIA H100", "card differ: 'NVIDIA H200' and 'NVIDIA H100'"),
        ("prompts", {"synthetic_tokens": 256, "output_tokens": 128}, "prompts or lengths differ"),
        ("complete", False, "'b' is not complete"),
    ],
)
def test_runs_that_are_not_alike_are_refused(key, value, said) -> None:
    other = {**make("b"), key: value}
    with pytest.raises(UsageError, match=said):
        compare_runs(make("a"), other)
    if key != "complete":
        result = compare_runs(make("a"), other, allow=[key])
        assert len(result.allowed) == 1
        assert said in result.allowed[0]
        assert said in comparison_text(result)


def test_every_reason_is_given_at_once_and_unknown_on_both_sides_is_not_alike() -> None:
    a, b = {**make("a"), "card": ""}, {**make("b", streams=(4,)), "card": "", "flags": "x"}
    with pytest.raises(UsageError) as error:
        compare_runs(a, b)
    for said in ("card of both are not known", "flags differ", "no concurrency in common"):
        assert said in str(error.value)
    with pytest.raises(UsageError, match="nothing is called 'model'"):
        compare_runs(a, b, allow=["model"])


def test_run_files_and_sign_offs_are_read_and_other_files_are_refused(tmp_path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(make()))
    assert load_run(tmp_path / "run.json")["label"] == "a"
    stage = {"stage": "serving", "data": {"runs": [make("signed")]}}
    (tmp_path / "requant.signoff.json").write_text(json.dumps({"stages": [{"stage": "contract", "data": {}}, stage]}))
    assert load_run(tmp_path)["label"] == "signed"
    bare = copy.deepcopy(stage)
    bare["data"] = {}
    (tmp_path / "requant.signoff.json").write_text(json.dumps({"stages": [bare]}))
    with pytest.raises(SourceError, match="holds no run of a server"):
        load_run(tmp_path)
    for text in ("", "[]", "{}", "3"):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(SourceError, match="no run file and no sign-off"):
            load_run(tmp_path / "x.json")
    with pytest.raises(SourceError, match="No such file"):
        load_run(tmp_path / "absent.json")
