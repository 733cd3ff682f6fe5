"""What launches cost: their kinds by name, the breakdown of a step, the tables and the page that show it."""

import re
from pathlib import Path

import pytest
from requant.validate.decode_profile import Kernel, breakdown, kind_of
from requant.validate.decode_speed import bottleneck


@pytest.mark.parametrize(
    ("name", "kind", "unit"),
    [
        (
            "void requant::w4a16_kernel<(requant::Format)0, 0, 1, 3, (requant::Alignment)1, 512, 1>",
            "moe",
            "tensor cores",
        ),
        (
            "void requant::w4a16_kernel<(requant::Format)0, 8, 1, 3, (requant::Alignment)1, 512, 1>",
            "dense",
            "tensor cores",
        ),
        ("void requant::w4a16_stream_kernel<(requant::Format)0, 4, 12>", "moe", "tensor cores"),
        ("void requant::w4a16_split_kernel<(requant::Format)0, 15, 4>(requant::Params)", "moe", "tensor cores"),
        ("void requant::w4a16_split_turns_kernel<(requant::Format)0, 3, 15, 4, 4>", "moe", "tensor cores"),
        ("void requant::w4a16_wgmma_kernel<(requant::Format)0, 16>", "dense", "tensor cores"),
        ("requant::(anonymous namespace)::route_kernel(int const*, int, int)", "moe", "CUDA cores"),
        ("w4a16_triton_kernel", "dense", "tensor cores"),
        ("w4a16_grouped_kernel", "moe", "tensor cores"),
        ("attend", "attention", "tensor cores"),
        ("ampere_sgemm_128x64_tn", "dense", "CUDA cores"),
        ("void cutlass::Kernel<cutlass_80_simt_sgemm_128x64_8x5_tn_align1>", "dense", "CUDA cores"),
        ("void gemmSN_TN_kernel<float, 128, 16, 2, 4, 8>", "dense", "CUDA cores"),
        ("sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize32x32x64", "dense", "tensor cores"),
        ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_32x6_tn", "dense", "tensor cores"),
        ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_splitK_TNT", "dense", "tensor cores"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", "dense", "CUDA cores"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "dense", "tensor cores"),
        ("vector", "dense", "CUDA cores"),
        ("void gemv2T_kernel_val<int, __nv_bfloat16>", "dense", "CUDA cores"),
        ("choose", "norm", "CUDA cores"),
        ("void at::native::reduce_kernel<512, 1, ArgMaxOps>", "other", "CUDA cores"),
    ],
)
def test_a_kernels_kind_follows_from_its_name(name, kind, unit):
    assert kind_of(name) == (kind, unit)


def test_every_kernel_of_ours_has_a_kind():
    """Names as they stand in the sources; what picks the token is all that is `other`."""
    root = Path(__file__).resolve().parents[2] / "kernels"
    cuda = [
        name
        for path in sorted([*(root / "csrc").glob("w4a16*.cu*"), *(root / "csrc").glob("decode_*.cuh")])
        for name in re.findall(
            r"__global__[^;{]*?\b((?:w4a16|route|decode)\w*_?kernel)\s*\(", path.read_text(encoding="utf-8")
        )
    ]
    known = {"w4a16_kernel", "w4a16_split_kernel", "w4a16_stream_kernel", "w4a16_dense_resident_kernel", "route_kernel"}
    assert known | {"decode_attend_kernel", "decode_choose_kernel"} <= set(cuda)
    for name in cuda:
        grouped = name != "w4a16_kernel" and not any(part in name for part in ("wgmma", "dense"))
        kind = {"decode_attend_kernel": "attention", "decode_choose_kernel": "norm"}.get(
            name, "moe" if grouped else "dense"
        )
        assert kind_of(f"void requant::{name}<(requant::Format)0, 8, 1>")[0] == kind, name
    triton = [
        name
        for file in ("decode", "bf16", "prompt", "dequantize")
        for name in re.findall(
            r"@triton\.jit[^\n]*\ndef ([a-z]\w*)\(", (root / f"triton/{file}.py").read_text(encoding="utf-8")
        )
    ]
    triton.remove("arrived_last")  # a part of others
    assert len(triton) == 11
    assert [name for name in triton if kind_of(name)[0] == "other"] == ["largest"]


def test_the_breakdown_adds_up_and_the_sentence_names_the_largest_part():
    kernels = [
        Kernel("w4a16_kernel<(F)0, 0, 1>", "moe", "tensor cores", 300.0, 48),
        Kernel("gate", "moe", "CUDA cores", 100.0, 24),
        Kernel("vector", "dense", "CUDA cores", 350.0, 49),
    ]
    parts = breakdown(kernels)
    assert [(p["kind"], p["us"], p["launches"], p["tensor_cores"]) for p in parts] == [
        ("moe", 400.0, 72, 0.75),
        ("dense", 350.0, 49, 0.0),
    ]
    point = {"step_us_median": 790.0, "of_roofline": 0.512}
    assert bottleneck("converted", 1, point, parts) == (
        "With 1 stream a step of the converted model takes 790 us, 51% of its bandwidth roofline; the experts now hold "
        "it up: 53% of the kernel time, by kernels on tensor cores."
    )


def test_the_tables_show_every_concurrency_and_why_one_is_missing():
    from requant.validate.decode_report import decoding_rows, step_rows

    part = {"kind": "moe", "us": 300.0, "launches": 72, "tensor_cores": 0.75, "kernels": ["a", "b"]}
    point = {
        "concurrency": 16, "batch": 8, "stream_tokens_per_s": 606.1, "decode_tokens_per_s": 4849.0,
        "output_tokens_per_s": 4000.4, "step_us_median": 1650.0, "step_us_p95": 1700.0, "prefill_ms_median": 20.25,
        "prefill_ms_p95": 22.0, "ttft_ms_median": 90.0, "ttft_ms_p95": 160.0, "bytes": 3_789_000_000,
        "of_roofline": 0.502, "of_reference": {"error": 0.0067, "routing": 0.0},
        "breakdown": [part, {**part, "kind": "dense", "us": 100.0}], "bottleneck": "It is so.",
    }  # fmt: skip
    data = {
        "runs": [{"label": "converted (NVFP4)", "points": [point]}],
        "not_measured": {"source": "it is FP8"},
        "speedups": {"source": {}, "bf16": {"16": 1.8}},
        "seconds": {"load": 7.3, "waves": 1.4},
    }
    columns, rows, note = decoding_rows(data)
    assert rows == (
        ("converted (NVFP4)", "16 (in batches of 8)", "606", "4,849", "4,000", "1,650 / 1,700", "20.2 / 22.0",
         "90.0 / 160", "3.789", "50%"),
    )  # fmt: skip
    assert len(columns) == len(rows[0])
    assert note == (
        "source: not measured, it is FP8; steps per second as a multiple of bf16's: 1.80 at 16; logits of a few layers "
        "are within 0.0067 of float64's, relatively; measured in seconds: load 7.3, waves 1.4"
    )
    columns, rows, note = step_rows(data)
    assert rows[0] == ("16 (in batches of 8)", "moe", "300", "75%", "72", "75%", "a; b")
    assert (len(columns), note) == (len(rows[0]), "It is so.")
    assert decoding_rows({}) is step_rows({}) is None


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        (
            "void requant::w4a16_kernel<(requant::Format)0, 0, 1, (requant::Alignment)2 (tensor cores): 217.3 us, 8x",
            "w4a16_kernel<0, 0, 1, 2 (tensor cores): 217.3 us, 8x",
        ),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<c10::BFloat16, at::n (CUDA cores): 9.1 us, 1x",
            "reduce_kernel<512, 1, ReduceOp<BFloat1... (CUDA cores): 9.1 us, 1x",
        ),
        ("gate (CUDA cores): 81.6 us, 4x", "gate (CUDA cores): 81.6 us, 4x"),
    ],
)
def test_the_page_tells_kernels_by_short_names(told, shown):
    from requant.validate.decode_report import step_rows

    part = {"kind": "moe", "us": 1.0, "launches": 1, "tensor_cores": 0.0, "kernels": [told]}
    _, rows, _ = step_rows({"runs": [{"points": [{"concurrency": 1, "batch": 1, "breakdown": [part]}]}]})
    assert rows[0][-1] == shown
