"""Sign-offs for the tests of the HTML page: a real one, and one of a large model with every stage in it."""

from __future__ import annotations

import random
from pathlib import Path

from requant.validate.numerics import COLUMNS, check_numerics
from requant.validate.results import Finding, StageResult, Status
from requant.validate.signoff import sign_off
from requant.validate.verdict import SignOff

GOLDENS = Path(__file__).parents[1] / "goldens" / "modelopt"
CAST = GOLDENS / "gptoss_nvfp4_cast"
CONTRACT = StageResult(
    "contract", Status.PASSED, "vllm", data={"runtimes": {"vllm": "simulated: would load", "trtllm": "unverified"}}
)
HOSTILE = "</script><script>document.title='owned'</script>"


def real() -> SignOff:
    """modelopt's own cast of the gpt-oss golden, judged by us."""
    return sign_off(CAST, None, [CONTRACT, check_numerics(GOLDENS / "_src_gptoss_mxfp4", CAST, None)])


def large(layers: int = 61, experts: int = 164) -> SignOff:
    """30,000 tensors with invented numbers, one with a hostile name; all stages, one of them failed."""
    numerics = check_numerics(GOLDENS / "_src_gptoss_mxfp4", CAST, None)
    data = {
        **numerics.data,
        "tensors": {"columns": list(COLUMNS), "rows": _rows(layers, experts)},
        "block_scales": {"first_exponent": -9, "octaves": [3, 12, 90, *(10**n for n in range(9)), 0, 0, 7, 6, 5, 1]},
    }
    hint = "lossless: required allows none"
    findings = tuple(
        Finding("lossy-blocks", "error", "7 of 917,504 blocks lossy", where=f"model.layers.{n}.x", hint=hint)
        for n in range(30)
    )
    failed = StageResult("numerics", Status.FAILED, "30 tensors are lossy", findings, data, "cpu", 321.5)
    return sign_off(CAST, None, [CONTRACT, failed, _model(), _speed(), _serving()])


def _rows(layers: int, experts: int) -> list[list[object]]:
    rng = random.Random(0)
    names = [f"self_attn.{leaf}_proj" for leaf in ("q_a", "q_b", "kv_b", "o")]
    names += [f"mlp.experts.{e}.{leaf}_proj" for e in range(experts) for leaf in ("gate", "up", "down")]
    rows: list[list[object]] = []
    for layer in range(layers):
        for name in names:
            lossy = rng.random() < 0.02
            row: dict[str, object] = dict.fromkeys(COLUMNS, 0)
            row |= {"tensor": f"model.layers.{layer}.{name}", "source": "mxfp4", "target": "nvfp4", "span": 3}
            row |= {"weights": 14_680_064, "blocks": 917_504, "exact": 917_497, "lossy": 7 * lossy, "fused_span": 4}
            row |= {"sqnr_db": round(60 + rng.gauss(0, 8), 3) if lossy else None, "max_error": 1e-4 * lossy}
            rows.append([row[column] for column in COLUMNS])
    rows[-1][0] = HOSTILE
    return rows


def _model() -> StageResult:
    data = {
        "complete": True,
        "tokens": 4096,
        "sequence_length": 511,
        "kl": {"mean": 0.1921, "stderr": 0.007, "median": 0.11, "p99": 1.4, "max": 6.1, "by_position": [0.3, 0.2, 0.1]},
        "top1_agreement": {"mean": 0.82, "stderr": 0.006},
        "perplexity": {"ratio": 1.187, "ratio_low": 1.15, "ratio_high": 1.22, "source": 17.3, "target": 20.5},
        "greedy": {"prompts": 8, "identical": 2, "steps": 64, "of": "chat prompts"},
        "answers": {"tokens": 512, "kl_mean": 0.21, "kl_stderr": 0.02, "top1_agreement": 0.84},
        "limits": {"max_kl": 0.35, "max_ppl_ratio": 1.5, "identical_greedy": False, "origin": "default"},
        "text": {"file": "text.txt"},
        "path": "GPU: FP4 weights by the chip's kernels",
        "lm_eval": {
            "version": "0.4.13",
            "tasks": {
                f"questions, {metric}": {
                    "questions": 400,
                    "source": 0.61,
                    "source_stderr": 0.024,
                    "target": 0.60,
                    "target_stderr": 0.025,
                    "difference": -0.01,
                    "difference_stderr": 0.008,
                    "margin": 0.03,
                    "judged": metric == "acc",
                    "verdict": "not inferior",
                }
                for metric in ("acc", "acc_norm")
            },
        },
    }
    return StageResult("model", Status.PASSED, "KL 0.1921 nats", data=data)


def _speed() -> StageResult:
    points = [
        {
            "shape": f"nvfp4 {n}x{n}", "path": "w4a16", "tokens": tokens, "gbps": 1000.0,
            "us": n / 800 * (1 + tokens / 20),
            "bytes": n * n * 9 // 16, "flops": 2 * n * n * tokens, "bf16_us": n / 250,
            "against_bf16": 3 / (1 + tokens / 20),
            "of_ceiling": 0.4, "of_floor": 0.4, "against_mxfp4": None,
        }
        for n in (4096, 8192)
        for tokens in (1, 8, 64)
    ]  # fmt: skip
    ceilings = {"read_gbps": 4420.0, "copy_gbps": 4290.0, "peak_tflops": 800.0}
    kernels = {"device": "cuda:0 H200", "path": "w4a16: fastest", "ceilings": ceilings, "points": points}
    data = {"kernels": kernels, "runs": [_run("converted (NVFP4)", 600.0), _run("bf16 (BF16)", 430.0)]}
    data |= {key: data["runs"][0]["points"][0][key] for key in ("breakdown", "bottleneck")}
    return StageResult("speed", Status.NOT_RUN, "the kernels ran", data=data, device="cuda:0 H200")


def _run(label: str, rate: float) -> dict:
    """One model that decodes: a stream's tokens per second fall as streams are added."""
    points = []
    for streams in (1, 8, 16):
        step = 1e6 / rate * streams**0.45
        points.append(
            {
                "concurrency": streams, "batch": streams, "completed": 8 * streams, "errors": 0,
                "stream_tokens_per_s": 1e6 / step, "decode_tokens_per_s": streams * 1e6 / step,
                "output_tokens_per_s": streams * 9e5 / step, "step_us_median": step, "step_us_p95": 1.02 * step,
                "itl_ms_median": step / 1e3, "itl_ms_p95": 1.02 * step / 1e3, "prefill_ms_median": 21.0,
                "prefill_ms_p95": 24.0, "ttft_ms_median": 11.0 * streams, "ttft_ms_p95": 21.0 * streams,
                "bytes": 3_789_000_000, "of_roofline": 0.5, "bottleneck": f"With {streams} streams the experts do.",
                "breakdown": [
                    {"kind": kind, "us": share * step, "launches": 48, "tensor_cores": 0.9, "kernels": ["k: 1 us, 48x"]}
                    for kind, share in (("moe", 0.5), ("dense", 0.3), ("attention", 0.1), ("norm", 0.1))
                ],
            }
        )  # fmt: skip
    return {"label": label, "points": points}


def _serving() -> StageResult:
    def points(scale: float) -> list[dict[str, float]]:
        return [
            {
                "concurrency": c, "requests": 4 * c, "completed": 4 * c, "errors": 0,
                "output_tokens_per_s": scale * c, "ttft_ms_median": 30.0 + c, "itl_ms_median": 8.0,
            }
            for c in (1, 8, 16)
        ]  # fmt: skip

    where = {"server": "vLLM 0.30.0", "card": "NVIDIA B200", "kernels": ["MoE: FLASHINFER_CUTLASS"], "fp4_native": True}
    runs = [{"label": name, **where, "points": points(rate)} for name, rate in (("nvfp4", 100), ("mxfp4 source", 90))]
    return StageResult("serving", Status.PASSED, "two runs", data={"runs": runs})
