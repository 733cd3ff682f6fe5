"""The bench on a CPU, its tables and plot, the shapes it takes, and the verdict of the speed stage."""

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from requant.kernels.formats import NumberFormat
from requant.manifests.errors import EnvironmentFault, SourceError, UsageError
from requant.manifests.gates import SpeedGate
from requant.validate import speed
from requant.validate.collector import Collector
from requant.validate.fp4_weights import Shape, layers_of, packed_weights, read_packed, shapes_of
from requant.validate.numerics_read import MappedReader
from requant.validate.opened import open_folder
from requant.validate.results import Finding, Status
from requant.validate.roofline import Ceilings
from requant.validate.speed import check_speed
from requant.validate.speed_bench import Bench, Point, bench_kernels
from requant.validate.speed_report import bench_markdown, bench_text, run_bench, write_bench

GOLDENS = Path(__file__).resolve().parents[1] / "goldens" / "modelopt"
LLAMA, MOE = GOLDENS / "llama_nvfp4_kvfp8", GOLDENS / "qwen3moe_nvfp4_kvfp8"
NVFP4 = NumberFormat.NVFP4


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


# --- shapes ---------------------------------------------------------------------------------------------------------


def shapes(golden):
    return shapes_of(layers_of(open_folder(GOLDENS / golden, Collector())))


def test_q_k_v_and_gate_up_are_joined_as_a_runtime_joins_them():
    found = shapes("llama_nvfp4_kvfp8")
    assert {str(shape): layers[0].name for shape, layers in found.items()} == {
        "64 x 128 nvfp4": "model.layers.0.mlp.down_proj",
        "256 x 64 nvfp4": "model.layers.0.mlp.gate_up_proj",
        "128 x 64 nvfp4": "model.layers.0.self_attn.qkv_proj",
        "64 x 64 nvfp4": "model.layers.0.self_attn.o_proj",
    }
    qkv = found[Shape(NVFP4, 128, 64)][0]
    assert [p.name.rpartition(".")[2] for p in qkv.parts[0]] == ["q_proj", "k_proj", "v_proj"]


def test_experts_are_one_shape_with_the_configs_top_k():
    found = shapes("qwen3moe_nvfp4_kvfp8")
    gate_up = found[Shape(NVFP4, 96, 64, experts=4, top_k=2)][0]
    assert gate_up.name == "model.layers.0.mlp.experts.gate_up_proj"
    assert [[p.name for p in expert] for expert in gate_up.parts][3] == [
        "model.layers.0.mlp.experts.3.gate_proj",
        "model.layers.0.mlp.experts.3.up_proj",
    ]


def test_stacked_experts_give_the_same_shapes_as_single_ones():
    stacked, source = shapes("gptoss_nvfp4_requant"), shapes("_src_gptoss_mxfp4")
    assert [(s.n, s.k, s.experts, s.top_k) for s in stacked] == [(64, 96, 4, 2), (192, 64, 4, 2)]
    assert {s.format for s in stacked} == {NVFP4}
    assert {s.format for s in source} == {NumberFormat.MXFP4}


def test_a_transposed_stack_is_read_as_rows():
    """modelopt stores experts as [E, K/2, N]; kernels want [N, K/2]."""
    folder = open_folder(GOLDENS / "gptoss_nvfp4_requant", Collector())
    named = packed_weights(folder)[1]
    from safetensors import safe_open

    with safe_open(str(GOLDENS / "gptoss_nvfp4_requant" / named.weight.codes.tensor.file), framework="pt") as handle:
        stored = handle.get_tensor(named.weight.codes.tensor.name)
    packed = read_packed(MappedReader(folder), named.weight)
    np.testing.assert_array_equal(packed.codes, stored[1].numpy().T)
    assert packed.codes.flags.c_contiguous


# --- the bench on a CPU ---------------------------------------------------------------------------------------------


def test_the_cpu_path_is_timed_and_checked_and_labelled(no_gpu):
    bench = bench_kernels(MOE, tokens=(1, 8))
    assert (bench.on_gpu, bench.ceilings) == (False, None)
    assert bench.device.startswith("cpu")
    assert len(bench.points) == 2 * len(shapes("qwen3moe_nvfp4_kvfp8"))
    assert {p.path for p in bench.points} == {"cpu"}
    assert all(p.us > 0 and 0 < p.of_bound < 0.01 and p.bf16_us > 0 for p in bench.points)
    assert all(p.of_ceiling is None for p in bench.points)
    point = next(p for p in bench.points if p.shape == "128 x 64 nvfp4" and p.tokens == 8)
    assert point.bytes == 128 * 64 * 9 // 16 + 4 + 8 * (128 + 64) * 2
    assert point.gbps == pytest.approx(point.bytes / point.us / 1e3)
    text = bench_text(bench)
    assert "CPU path: the numbers are right, the times say nothing about decoding; GPU gates were not run" in text
    assert "of read ceiling" not in text
    json.dumps(bench.to_json(), allow_nan=False)


def test_a_wrong_output_is_called_wrong(no_gpu, monkeypatch):
    from requant.kernels import matmul as module

    right = module.cpu_matmul
    monkeypatch.setattr(module, "cpu_matmul", lambda x, w: right(x, w) * np.float32(1.01))
    bench = bench_kernels(LLAMA, tokens=(1,))
    assert len(bench.wrong) == len(bench.points) == 4
    assert "outputs: 4 of 4 WRONG" in bench_text(bench)


def test_bad_requests(no_gpu):
    with pytest.raises(SourceError, match="holds no FP4 weight"):
        bench_kernels(GOLDENS / "_src_llama_bf16")
    with pytest.raises(SourceError, match="is not a folder"):
        bench_kernels(GOLDENS / "absent")
    with pytest.raises(EnvironmentFault, match="GPU"):
        run_bench(LLAMA, "1", "cuda", "auto")
    for tokens, device, path, message in [
        ("1,x", "cpu", "auto", "no list of numbers"),
        ("0", "cpu", "auto", "at least 1"),
        ("1", "tpu", "auto", "no device is called 'tpu'"),
        ("1", "cpu", "w4a99", "no path is called 'w4a99'"),
        ("1", "auto", "w4a4-emulated", "its speed means nothing, so it is not timed"),
    ]:
        with pytest.raises(UsageError, match=message):
            run_bench(LLAMA, tokens, device, path)


def test_the_command_prints_writes_and_exits(no_gpu, tmp_path, capsys, monkeypatch):
    from requant.convert.cli import main

    def command(*arguments):
        with pytest.raises(SystemExit) as stop:
            main(["bench", *arguments, "--quiet"])
        return stop.value.code or 0, capsys.readouterr()

    code, said = command(str(LLAMA), "--tokens", "1,2", "--format", "json", "--out", str(tmp_path / "b"))
    assert code == 0
    printed = json.loads(said.out)
    assert [p["tokens"] for p in printed["points"]] == [1, 2] * 4
    assert json.loads((tmp_path / "b" / "bench.json").read_text())["points"] == printed["points"]
    assert "no plot: a CPU's times have no roofline" in said.err
    assert command(str(tmp_path / "absent"))[0] == 3
    assert command(str(LLAMA), "--path", "w4a16")[0] == 6
    assert command(str(LLAMA), "--device", "gpu")[0] == 2
    wrong = replace(bench_kernels(LLAMA, tokens=(1,)).points[0], of_bound=9.0)
    monkeypatch.setattr(
        "requant.validate.speed_report.bench_kernels",
        lambda *a, **k: replace(gpu_bench(), on_gpu=False, points=(wrong,)),
    )
    code, said = command(str(LLAMA))
    assert (code, "1 timed outputs are beyond their bound" in said.err) == (5, True)


# --- the speed stage ------------------------------------------------------------------------------------------------


def test_without_a_gpu_the_speed_gate_is_not_run(no_gpu):
    result = check_speed(LLAMA, SpeedGate())
    assert (result.status, result.reason) == (
        Status.NOT_RUN,
        "no GPU: a CPU's times say nothing about decoding",
    )


def test_the_kernel_part_alone_never_passes_the_gate(no_gpu, monkeypatch):
    from requant.kernels.empty_model import ModelUnavailableError
    from requant.validate import decode_speed

    def no_transformers(*_, **__):
        raise ModelUnavailableError("transformers is not installed: pip install 'requant[eval]'")

    monkeypatch.setattr(decode_speed, "load_decoder", no_transformers)
    result = check_speed(LLAMA, SpeedGate(device="cpu", concurrency=(1, 2), requests=(1, 2), baseline="bf16"))
    assert result.status is Status.NOT_RUN
    assert "tokens per second were not measured: transformers is not installed" in result.reason
    assert len(result.data["kernels"]["points"]) == 8


def test_kernels_that_break_off_are_a_reason_and_not_a_crash(no_gpu, monkeypatch):
    def broken(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")

    monkeypatch.setattr(speed, "bench_kernels", broken)
    result = check_speed(LLAMA, SpeedGate(device="cpu"))
    assert (result.status, result.device) == (Status.NOT_RUN, "")
    assert result.reason == (
        "timing the kernels broke off with OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    )


def test_wrong_outputs_fail_the_gate(no_gpu, monkeypatch):
    bench = bench_kernels(LLAMA, tokens=(1,))
    bad = replace(bench, points=(replace(bench.points[0], of_bound=float("inf")), *bench.points[1:]))
    monkeypatch.setattr(speed, "bench_kernels", lambda *args, **more: bad)
    result = check_speed(LLAMA, SpeedGate(device="cpu"))
    assert (result.status, result.reason) == (Status.FAILED, "1 of 4 timed outputs are wrong")
    assert result.findings[0].rule == "beyond-bound"
    json.dumps(result.to_json(), allow_nan=False)


def test_what_was_found_wrong_fails_whatever_else_could_not_be_measured(no_gpu, monkeypatch):
    def model_part(output, source, gate, bench, data, findings, progress):
        findings.append(Finding("reference-differs", "error", "off by 0.3 of the logits' size", where="converted"))
        return "min_speedup needs source: it broke off"

    monkeypatch.setattr(speed, "_model_part", model_part)
    result = check_speed(LLAMA, SpeedGate(device="cpu", concurrency=(1,), requests=(1,)))
    assert (result.status, result.reason) == (Status.FAILED, "off by 0.3 of the logits' size")


# --- tables and plot, from a made-up run on a GPU --------------------------------------------------------------------


def gpu_bench():
    def point(tokens, us, experts=0):
        return Point(
            layer="layers.0.w", shape="4096 x 4096 nvfp4" + (", 8 experts, top 2" if experts else ""), n=4096, k=4096,
            experts=experts, top_k=2, format="nvfp4", tokens=tokens, path="w4a16", kernel="csrc/w4a16.cu", us=us,
            spread_us=0.1, touched=2.0, bytes=9_437_188, flops=2 * tokens * 4096**2, gbps=9437.188 / us,
            of_ceiling=0.5, of_floor=0.45, of_bound=0.3, bf16_us=2 * us, mxfp4_us=0.9 * us,
        )  # fmt: skip

    points = (*(point(m, 5.0 + m / 10) for m in (1, 8, 64)), point(1, 9.0, experts=8))
    return Bench("cuda:0 Card (SM90)", True, "w4a16: why", Ceilings(4400.0, 4290.0, 780.0), points, 1.0, "torch 2")


def test_the_table_says_what_it_was_measured_on():
    page = bench_markdown(gpu_bench(), "T", ["commit: abc"])
    assert page.startswith("# T\n\n- commit: abc\n- device: cuda:0 Card (SM90); torch 2\n")
    assert "read 4.40 TB/s, copy 4.29 TB/s, BF16 torch.matmul 780 TFLOP/s" in page
    assert "| 1 | 5.10 | 0.10 | 9.44 | 1850 | 50% | 45% | 10.20 | 2.00 | 4.59 | 0.90 | 0.3 |" in page
    assert "outputs: all 4 that were timed are within their bound" in page
    moe = page[page.index("## 4096 x 4096 nvfp4, 8 experts") :]
    assert "| 1 | 9.00 | 0.10 | 9.44 | 1049 | 50% | 45% | 18.00 | 2.00 | 8.10 | 0.90 | 2.0 | 0.3 |" in moe


def test_the_roofline_is_drawn_as_svg_and_png(tmp_path):
    bench = gpu_bench()
    files, missing = write_bench(bench, "model", tmp_path)
    assert missing == ""
    assert sorted(f.name for f in files) == ["bench.json", "bench.md", "roofline.png", "roofline.svg"]
    text = (tmp_path / "roofline.svg").read_text()
    assert ET.fromstring(text).tag.endswith("svg")
    assert "#0072b2" in text
    assert "#d55e00" in text
    assert "along a line 1 to " in text
    assert (tmp_path / "roofline.png").read_bytes().startswith(b"\x89PNG")
    first = text
    write_bench(bench, "model", tmp_path)
    assert (tmp_path / "roofline.svg").read_text() == first, "the same run gives the same picture"
    assert json.loads((tmp_path / "bench.json").read_text())["ceilings"]["read_gbps"] == 4400.0


def test_the_roofs_colours_stand_out_on_white_and_on_black():
    from requant.validate import speed_plot

    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light = luminance(speed_plot._GREY)
    assert 1.05 / (light + 0.05) > 3.9
    assert (light + 0.05) / 0.05 > 5
    assert len(set(speed_plot._COLOURS)) == len(set(speed_plot._MARKERS)) == 8


def test_there_is_no_roofline_without_a_gpu(no_gpu, tmp_path):
    files, missing = write_bench(bench_kernels(LLAMA, tokens=(1,)), "m", tmp_path)
    assert [f.name for f in files] == ["bench.json", "bench.md"]
    assert missing == "a CPU's times have no roofline"


# --- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("golden", ["llama_nvfp4_kvfp8", "llama_mxfp4", "gptoss_nvfp4_requant"])
def test_the_bench_runs_and_every_output_is_right(golden):
    bench = bench_kernels(GOLDENS / golden, tokens=(1, 5, 64))
    assert bench.on_gpu
    assert not bench.wrong
    assert bench.ceilings.read_gbps > 100
    for point in bench.points:
        assert 0 < point.of_bound <= 1
        assert 0 < point.of_ceiling < 1.2
        assert point.bf16_us > 0


@pytest.mark.gpu
def test_the_same_codes_under_e8m0_scales_are_the_same_numbers():
    from requant.kernels.w4a4_operands import Fp4Tensor
    from requant.validate.speed_gpu import as_mxfp4, decode

    codes = torch.randint(0, 256, (8, 64), dtype=torch.uint8, device="cuda")
    exponent = torch.randint(1, 15, (8, 4), device="cuda", dtype=torch.uint8).repeat_interleave(2, dim=1)
    nvfp4 = Fp4Tensor.weight(codes, (exponent << 3).contiguous(), 2.0**-5)
    assert torch.equal(decode(nvfp4), decode(as_mxfp4(nvfp4)))


# --- the GPU harness with its kernels played by float64 on the CPU ----------------------------------------------------


@pytest.fixture
def played(monkeypatch):
    """speed_gpu on the CPU: `timed` calls each launch once; the W4A16 kernels are float64, and may be spoilt."""
    from types import SimpleNamespace

    from requant.validate import gpu_clock, speed_gpu

    state = SimpleNamespace(spoil=lambda y: y, launches=[], poisoned=[], module=speed_gpu)

    def timed(calls, launches=48, *, poison):
        for output in poison:
            output.fill_(torch.nan)
        state.poisoned.append(len(poison))
        for call in calls:
            call()
        state.launches.append(len(calls))
        return 10.0, 0.5

    def packed(codes, scales, scale, fmt):
        from requant.kernels.w4a4_operands import Fp4Tensor

        if fmt is NumberFormat.MXFP4:
            return Fp4Tensor(fmt, codes, scales, None)
        return Fp4Tensor(fmt, codes, scales, torch.as_tensor(scale).reshape(-1))

    def dense(x, codes, scales, scale, *, fmt, out, constant_weights, path):
        w = speed_gpu.decode(packed(codes, scales, scale, fmt))
        out.copy_(state.spoil((x.double() @ w.T).bfloat16()))

    def route_experts(ids, experts, *, path):
        return ids

    def moe(x, codes, scales, scale, *, fmt, routing, out, path):
        w = packed(codes, scales, scale, fmt)
        for token, row in enumerate(routing.tolist()):
            for slot, expert in enumerate(row):
                out[token, slot] = (x[token].double() @ speed_gpu.decode(w, expert).T).bfloat16()
        out.copy_(state.spoil(out))

    monkeypatch.setattr(speed_gpu, "_DEVICE", "cpu")
    monkeypatch.setattr(speed_gpu, "timed", timed)
    for module in (gpu_clock, speed_gpu):
        monkeypatch.setattr(module, "copies_past_l2", lambda nbytes: 3)
    monkeypatch.setattr(
        speed_gpu, "w4a16", SimpleNamespace(w4a16_matmul=dense, w4a16_moe=moe, route_experts=route_experts)
    )
    return state


def fp4(rng, *shape):
    from requant.kernels.w4a4_operands import Fp4Tensor

    *lead, n, k = shape
    codes = torch.from_numpy(rng.integers(0, 256, (*lead, n, k // 2), dtype=np.uint8))
    scales = torch.from_numpy((rng.integers(1, 15, (*lead, n, k // 32)) << 3).astype(np.uint8)).repeat_interleave(2, -1)
    return Fp4Tensor.weight(codes, scales.contiguous(), torch.full((lead[0] if lead else 1,), 2.0**-7))


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_dense_product_is_rotated_and_checked(played, tokens):
    from requant.kernels.dispatch import Path as KernelPath

    weight = fp4(np.random.default_rng(0), 24, 64)
    measured = played.module.time_fp4(KernelPath.W4A16, weight, tokens, 0)
    assert (measured.us, measured.spread_us, measured.touched) == (10.0, 0.5, 1.0)
    assert 0 < measured.of_bound <= 1
    assert played.launches == played.poisoned == [3], "three copies take turns, each with an output of its own"
    bf16 = played.module.Bf16(weight).time(tokens, 0)
    assert (bf16.us, bf16.of_bound) == (10.0, 0.0)


@pytest.mark.parametrize(("tokens", "top_k"), [(1, 2), (6, 2), (3, 4)])
def test_a_grouped_product_is_rotated_and_checked(played, tokens, top_k):
    from requant.kernels.dispatch import Path as KernelPath

    weight = fp4(np.random.default_rng(1), 4, 16, 64)
    weight.global_scale[:] = torch.tensor([1.0, 2.0, 4.0, 8.0])  # of each expert its own
    measured = played.module.time_fp4(KernelPath.W4A16, weight, tokens, top_k)
    assert 0 < measured.of_bound <= 1
    assert top_k <= measured.touched <= min(4, tokens * top_k)
    assert played.launches == played.poisoned == [3]
    bf16 = played.module.Bf16(weight).time(tokens, top_k)
    assert (bf16.touched, bf16.of_bound) == (measured.touched, 0.0), "the same routings"
    assert played.poisoned[-1] == sum(
        len(played.module.random_routing(tokens, 4, top_k, seed).unique()) for seed in range(played.launches[-1])
    )


@pytest.mark.parametrize("shape", [(24, 64), (4, 16, 64)])
def test_an_output_nobody_wrote_and_a_wrong_one_are_found(played, shape):
    from requant.kernels.dispatch import Path as KernelPath

    weight = fp4(np.random.default_rng(2), *shape)

    def one_off(y):
        y = y.clone()
        y.view(-1)[-1] *= 1.02
        return y

    for spoil in (lambda y: torch.full_like(y, torch.nan), one_off, lambda y: y.roll(1, -1)):
        played.spoil = spoil
        assert played.module.time_fp4(KernelPath.W4A16, weight, 2, 2).of_bound > 1


@pytest.mark.parametrize("shape", [(24, 64), (4, 16, 64)])
def test_a_baseline_that_was_not_written_is_found(played, shape, monkeypatch):
    weight = fp4(np.random.default_rng(2), *shape)
    real, left_out = torch.matmul, []

    def all_but_the_first(x, w, out):
        left_out.append(out)
        return out if len(left_out) == 1 else real(x, w, out=out)

    monkeypatch.setattr(torch, "matmul", all_but_the_first)
    monkeypatch.setattr(played.module, "copies_past_l2", lambda nbytes: 1)
    assert played.module.Bf16(weight).time(2, 2).of_bound == float("inf")


def test_the_sources_format_holds_the_same_numbers_where_scales_are_powers_of_two(played):
    weight = fp4(np.random.default_rng(3), 4, 16, 64)
    weight.global_scale[:] = torch.tensor([1.0, 0.5, 4.0, 2.0**-20])
    source = played.module.as_mxfp4(weight)
    assert source.format is NumberFormat.MXFP4
    for expert in range(4):
        assert torch.equal(played.module.decode(weight, expert), played.module.decode(source, expert))
    odd = fp4(np.random.default_rng(3), 4, 64)
    assert played.module.as_mxfp4(replace(odd, codes=odd.codes[:, :24], scales=odd.scales[:, :3])) is None


def test_a_routing_names_distinct_experts_and_is_seeded(played):
    ids = played.module.random_routing(50, 8, 3, seed=4)
    assert ids.dtype == torch.int32
    assert all(len(set(row)) == 3 and set(row) <= set(range(8)) for row in ids.tolist())
    assert torch.equal(ids, played.module.random_routing(50, 8, 3, seed=4))
    assert not torch.equal(ids, played.module.random_routing(50, 8, 3, seed=5))
