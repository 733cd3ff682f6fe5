"""The kernels stage, without a GPU: honest verdicts on good weights, wrong kernels, and scales that Marlin flushes."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from requant.kernels import availability, dispatch, reference_w4a4
from requant.kernels.formats import E2M1_VALUES, E4M3_VALUES
from requant.kernels.matmul import Product
from requant.manifests.errors import SourceError
from requant.manifests.gates import KernelsGate
from requant.validate import kernel_check, kernel_measure
from requant.validate.kernel_cases import edge_weight
from requant.validate.kernel_check import COLUMNS, check_kernels
from requant.validate.report import render_text
from requant.validate.results import Status
from requant.validate.signoff import sign_off
from safetensors.torch import load_file, save_file

GOLDENS = Path(__file__).resolve().parents[1] / "goldens" / "modelopt"
LLAMA, MOE = GOLDENS / "llama_nvfp4_kvfp8", GOLDENS / "qwen3moe_nvfp4_experts"
UP = "model.layers.0.mlp.up_proj"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def rows(result):
    return [dict(zip(COLUMNS, row, strict=True)) for row in result.data["rows"]]


def altered(folder, golden, change):
    """A copy of a golden whose tensors went through `change`."""
    shutil.copytree(golden, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("golden", "matrices", "layers"),
    [
        ("llama_nvfp4_kvfp8", 14, 0),
        ("llama_mxfp4", 14, 0),
        ("qwen3moe_nvfp4_experts", 12, 2),  # gate and up joined; down
        ("gptoss_nvfp4_requant", 16, 2),  # stacked and transposed
        ("_src_gptoss_mxfp4", 16, 2),
    ],
)
def test_the_cpu_path_is_right_on_every_layout(golden, matrices, layers):
    result = check_kernels(GOLDENS / golden, KernelsGate(modules="all"))
    assert (result.status, result.device) == (Status.PASSED, "cpu")
    assert result.data["modules"] == {"checked": matrices, "of": matrices, "seed": 0}
    assert set(result.data["worst"]) == {"cpu"}
    assert 0 < result.data["worst"]["cpu"] < 1e-6
    found = rows(result)
    assert len(found) == 3 * matrices + 2 * layers
    assert result.data["layers_of_experts"] == {"checked": layers, "experts_of_each": 4}
    assert {row["activations"] for row in found} - {"experts"} == {"random", "wide", "edges"}
    assert [row["m"] for row in found if row["activations"] == "experts"] == [1, 16] * layers
    assert {row["m"] for row in found} == {1, 2, 4, 8, 16, 32, 64}
    assert max(row["of_bound"] for row in found) < 0.01
    json.dumps(result.to_json(), allow_nan=False)


def test_every_path_is_listed_with_its_kernel_and_why():
    listed = check_kernels(LLAMA, KernelsGate(modules=1)).data["paths"]
    assert [row["path"] for row in listed] == [p.value for p in dispatch.Path]
    assert all(row["kernel"] and row["reason"] for row in listed)
    assert {row["path"] for row in listed if row["state"] == "runs"} == {"cpu", "reference"}


def test_the_sample_is_seeded_and_holds_every_shape():
    first, again = (check_kernels(LLAMA, KernelsGate(modules=6)) for _ in range(2))
    assert first.data["rows"] == again.data["rows"]
    assert first.data["modules"]["checked"] == 6
    shapes = {(row["n"], row["k"]) for row in rows(first) if row["activations"] == "random"}
    assert shapes == {(64, 128), (128, 64), (32, 64), (64, 64)}
    other = check_kernels(LLAMA, KernelsGate(modules=6), seed=1)
    assert {r["module"] for r in rows(other)} != {r["module"] for r in rows(first)}


def test_a_gate_for_a_gpu_is_not_run_here_though_the_cpu_path_is():
    result = check_kernels(LLAMA, KernelsGate(device="cuda", modules=2))
    assert (result.status, result.device) == (Status.NOT_RUN, "cpu")
    said = (
        "the gate asks for a GPU, and no GPU path runs here: there is no GPU; the CPU path is right on 2 of 14 matrices"
    )
    assert result.reason.startswith(said)
    assert len(rows(result)) == 6
    assert 0 < result.data["worst"]["cpu"] < 1e-6


def test_a_gate_for_a_gpu_fails_here_by_what_the_cpu_path_finds(monkeypatch):
    wrong_kernel(monkeypatch, lambda y: y * np.float32(1.5))
    result = check_kernels(LLAMA, KernelsGate(device="cuda", modules=2))
    assert result.status is Status.FAILED
    assert {finding.rule for finding in result.errors} == {"beyond-bound", "rel-error"}


def pretended(monkeypatch, fails, *more):
    """A GPU path that is said to run and fails, beside the CPU path."""
    runs = availability.Availability(availability.State.RUNS, "pretended")
    states = [dispatch.PathState(path, runs) for path in (dispatch.Path.W4A16, *more, dispatch.Path.CPU)]
    monkeypatch.setattr(kernel_check, "paths", lambda: tuple(states))
    right, tried = kernel_measure.Dense._multiply, []

    def multiply(subject, path):
        if path is dispatch.Path.W4A16:
            tried.append(subject.name)
            raise fails
        on_cpu = right(subject, dispatch.Path.CPU)
        return (on_cpu[0], "Card") if path.on_gpu else on_cpu

    monkeypatch.setattr(kernel_measure.Dense, "_multiply", multiply)
    return tried


def test_a_gpu_path_that_cannot_be_built_is_no_pass_and_its_reason_is_told(monkeypatch):
    pretended(monkeypatch, availability.KernelUnavailableError("nvcc failed (exit 1): nvcc x.cu\nmore"))
    asked = check_kernels(LLAMA, KernelsGate(device="cuda", modules=2))
    assert (asked.status, asked.device) == (Status.NOT_RUN, "cpu")
    assert asked.reason.startswith(
        "the gate asks for a GPU, and no GPU path computed anything (w4a16: nvcc failed (exit 1): nvcc x.cu); the CPU"
    )
    anywhere = check_kernels(LLAMA, KernelsGate(modules=2))
    assert anywhere.status is Status.PASSED
    assert anywhere.data["refused"] == {"w4a16": "nvcc failed (exit 1): nvcc x.cu"}
    (said,) = [f for f in anywhere.findings if f.rule == "path-refused"]
    assert said.severity == "warning"
    assert said.message.startswith("w4a16 runs on this machine, and took none of these weights: nvcc failed")


def test_emulation_alone_does_not_pass_a_gate_for_a_gpu(monkeypatch):
    refused = availability.KernelUnavailableError("no nvcc")
    pretended(monkeypatch, refused, dispatch.Path.W4A4_EMULATED)
    monkeypatch.setattr(dispatch.Path, "rounds_activations", property(lambda path: False))  # played by the CPU path
    result = check_kernels(LLAMA, KernelsGate(device="cuda", modules=2))
    assert result.status is Status.NOT_RUN
    assert {row["path"] for row in rows(result)} == {"cpu", "w4a4-emulated"}
    pretended(monkeypatch, refused, dispatch.Path.W4A4_EMULATED, dispatch.Path.W4A16_TRITON)
    result = check_kernels(LLAMA, KernelsGate(device="cuda", modules=2))
    assert (result.status, result.device) == (Status.PASSED, "cuda:0 Card")


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory.\nmore"), RuntimeError("CUDA error: 700")]
)
def test_a_path_that_breaks_off_fails_and_is_not_tried_again(monkeypatch, error):
    tried = pretended(monkeypatch, error)
    result = check_kernels(LLAMA, KernelsGate(modules=3))
    assert result.status is Status.FAILED
    assert tried == ["random"]
    (said,) = [f for f in result.errors if f.rule == "broke-off"]
    first = str(error).splitlines()[0]
    assert said.message == f"w4a16, random activations, M = 1: {type(error).__name__}: {first}"
    assert {row["path"] for row in rows(result)} == {"cpu"}
    assert len(rows(result)) == 9, "the other paths go on"


def test_a_folder_without_fp4_is_not_run():
    result = check_kernels(GOLDENS / "_src_llama_bf16", None)
    assert (result.status, result.reason) == (Status.NOT_RUN, "the checkpoint holds no FP4 weight")


def wrong_kernel(monkeypatch, spoil):
    right = kernel_measure.matmul

    def matmul(x, w, path, input_scale=None):
        y, choice = right(x, w, path)
        return type(right(x, w, path))(spoil(y), choice)

    monkeypatch.setattr(kernel_measure, "matmul", matmul)


def test_one_wrong_output_in_a_corner_fails_the_bound_but_not_the_norm(monkeypatch):
    def spoil(y):
        y = y.copy()
        y[0, -1] += 2e-3 * np.abs(y).max()
        return y

    wrong_kernel(monkeypatch, spoil)
    result = check_kernels(LLAMA, KernelsGate(modules=1))
    assert result.status is Status.FAILED
    assert {finding.rule for finding in result.errors} == {"beyond-bound"}
    assert "times its bound" in result.reason


def test_a_small_error_everywhere_fails_the_gates_number(monkeypatch):
    wrong_kernel(monkeypatch, lambda y: y * np.float32(1 + 2.0**-10))
    assert check_kernels(LLAMA, KernelsGate(modules=1)).status is Status.PASSED
    result = check_kernels(LLAMA, KernelsGate(modules=1, max_rel_error=5e-4))
    assert [finding.rule for finding in result.errors] == ["rel-error"]
    assert result.errors[0].message == "cpu: relative error 0.000977, the gate allows 0.0005"


def test_experts_multiplied_by_one_anothers_weights_are_found(monkeypatch):
    right, given = kernel_measure.grouped_matmul, []

    def shifted(x, experts, ids, path):
        given.append(len(experts))
        return right(x, experts, (ids + 1) % len(experts), path)

    monkeypatch.setattr(kernel_measure, "grouped_matmul", shifted)
    result = check_kernels(MOE, KernelsGate(modules=2))
    assert result.status is Status.FAILED
    assert {f.where for f in result.errors if f.rule == "beyond-bound"} == {
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.experts.down_proj",
    }
    assert set(given) == {4}
    assert "experts activations, M = 1" in result.errors[0].message


def test_an_unwritten_output_is_no_pass(monkeypatch):
    wrong_kernel(monkeypatch, lambda y: np.full_like(y, np.nan))
    result = check_kernels(LLAMA, KernelsGate(modules=1))
    assert {finding.rule for finding in result.errors} == {"beyond-bound", "rel-error"}
    assert rows(result)[0]["of_bound"] == "inf"
    json.dumps(result.to_json(), allow_nan=False)


def test_marlins_flush_is_counted_and_its_error_simulated(tmp_path):
    def change(tensors):
        scales = tensors[f"{UP}.weight_scale"].view(torch.uint8)
        scales[:] = 0x38
        scales[0, 0], scales[0, 1], scales[5, 2] = 0x07, 0x08, 0x01  # 2^-6 itself is kept
        tensors[f"{UP}.weight"][:] = 0x22  # every code is 1

    folder = altered(tmp_path / "out", LLAMA, change)
    before, after = (check_kernels(f, KernelsGate(modules="all")) for f in (LLAMA, folder))
    assert before.data["marlin"]["flushed"] == 0
    marlin = after.data["marlin"]
    assert (marlin["flushed"], marlin["matrices"], marlin["simulated"]) == (2, 1, True)
    assert marlin["block_scales"] == before.data["marlin"]["block_scales"]
    assert 0 < marlin["worst_rel_error"] < 0.01
    assert [f.rule for f in after.warnings] == ["marlin-flush"]
    assert after.status is Status.PASSED, "a warning, not a failure"


def test_weights_that_marlin_loses_altogether_show_as_lost(tmp_path):
    folder = altered(tmp_path / "out", LLAMA, lambda t: t[f"{UP}.weight_scale"].view(torch.uint8).fill_(0x05))
    assert check_kernels(folder, KernelsGate(modules="all")).data["marlin"]["worst_rel_error"] == 1.0


def test_the_edge_weight_stands_at_every_edge():
    from requant.kernels.formats import NumberFormat, PackedTensor

    w = PackedTensor(
        NumberFormat.NVFP4, np.full((3, 64), 0x22, np.uint8), np.full((3, 8), 0x38, np.uint8), np.float32(1)
    )
    edge = edge_weight(w)
    values = {float(v) for v in E4M3_VALUES[edge.block_scales].ravel()}
    assert values >= {0.0, 2.0**-9, 7 * 2.0**-9, 2.0**-6, 240.0, 256.0, 448.0}
    assert E2M1_VALUES[2] == 1.0


def test_nan_scales_are_named(tmp_path):
    def change(tensors):
        tensors[f"{UP}.weight_scale"].view(torch.uint8)[3, 1] = 0x7F

    folder = altered(tmp_path / "out", LLAMA, change)
    result = check_kernels(folder, KernelsGate(modules="all"))
    assert [(f.rule, f.where) for f in result.errors] == [("nan-scale", UP)]


def test_a_global_scale_that_cannot_be_is_a_finding_and_no_crash(tmp_path):
    folder = altered(tmp_path / "out", LLAMA, lambda t: t[f"{UP}.weight_scale_2"].fill_(-1.0))
    result = check_kernels(folder, KernelsGate(modules="all"))
    assert {(f.rule, f.where) for f in result.errors} == {("operand-refused", UP)}
    assert "not a positive finite number" in result.errors[0].message


def test_captured_activations_are_used_where_there_are_any(tmp_path):
    captured = {UP: torch.randn(100, 64), "model.layers.0.self_attn.q_proj": torch.randn(5, 99)}  # of another model
    save_file(captured, tmp_path / "captured.safetensors")
    result = check_kernels(LLAMA, KernelsGate(modules="all"), activations=tmp_path / "captured.safetensors")
    assert [(r["module"], r["m"]) for r in rows(result) if r["activations"] == "captured"] == [(UP, 64)]
    assert result.data["captured"] == {"file": "captured.safetensors", "matrices": 1}
    with pytest.raises(SourceError, match="cannot be read"):
        check_kernels(LLAMA, None, activations=tmp_path / "absent.safetensors")


@pytest.mark.parametrize("path", [dispatch.Path.W4A4, dispatch.Path.SCALED_MM, dispatch.Path.DOT_SCALED])
@pytest.mark.parametrize("other", [False, True])
def test_a_path_with_fp4_activations_is_judged_by_what_it_multiplies(monkeypatch, path, other):
    """Played by the oracle: under its own global scales it passes, under another path's it is beyond the bound."""
    scales = set()
    granularity = path.granularity if not other else {"token": "tensor", "tensor": "token"}[path.granularity]

    def matmul(x, w, asked, input_scale=None):
        scales.add(input_scale)
        y = reference_w4a4.matmul(x.float().numpy(), w, input_scale=input_scale, granularity=granularity)
        return Product(torch.from_numpy(y), dispatch.Choice(asked, asked.kernel, "Card", ""))

    runs = availability.Availability(availability.State.RUNS, "pretended")
    monkeypatch.setattr(kernel_check, "paths", lambda: (dispatch.PathState(path, runs),))
    monkeypatch.setattr(kernel_measure, "matmul", matmul)
    monkeypatch.setattr(kernel_measure.Held, "on_gpu", lambda held: held.packed)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    result = check_kernels(LLAMA, KernelsGate(modules=4))
    assert result.status is (Status.FAILED if other else Status.PASSED)
    if other:
        assert {finding.rule for finding in result.errors} >= {"beyond-bound"}
    else:
        assert result.data["worst"][path.value] < 1e-9
        assert 0.01 < max(row["rounding_error"] for row in rows(result)) < 1
        assert [row["activations"] for row in rows(result)] == ["random", "wide", "edges", "static"] * 4
        assert len(scales) == 5, "none, and the static one of each of the four"


def test_the_static_scale_of_activations_is_the_checkpoints(tmp_path):
    from requant.validate.fp4_weights import packed_weights, read_input_scale
    from requant.validate.numerics_read import MappedReader
    from requant.validate.opened import open_folder

    def scale_of(folder):
        opened = open_folder(folder, kernel_check.Collector())
        named = {n.name: n for n in packed_weights(opened)}
        return read_input_scale(MappedReader(opened), named[UP])

    assert scale_of(LLAMA) == load_file(LLAMA / "model.safetensors")[f"{UP}.input_scale"].item()
    assert scale_of(GOLDENS / "llama_w4a16_nvfp4") is None
    folder = altered(tmp_path / "out", LLAMA, lambda t: t.update({f"{UP}.input_scale": torch.tensor([1.0, 2.0])}))
    assert scale_of(folder) is None


def test_the_report_names_paths_kernels_and_reasons():
    result = check_kernels(MOE, KernelsGate(modules=4))
    text = render_text(sign_off(MOE, None, [result]))
    assert "Kernels against float64" in text
    assert "csrc/w4a16.cu" in text
    assert "cpu.py (numba, BLAS)" in text
    assert "Simulated: Marlin would flush 0 of" in text


def test_the_stage_runs_if_it_is_asked_for_by_name(monkeypatch, tmp_path):
    """`validate --only kernels` needs no gate in the manifest; the gate is then optional."""
    from contextlib import nullcontext

    from requant.manifests.schema import Manifest
    from requant.validate.stages import validate_output

    out = tmp_path / "out"
    shutil.copytree(LLAMA, out)
    manifest = Manifest.model_validate(
        {
            "version": 1,
            "name": "t",
            "source": {"path": str(GOLDENS / "_src_llama_bf16")},
            "target": {"format": "nvfp4", "layout": "modelopt", "output": str(out)},
            "layers": [{"match": "*", "to": "nvfp4", "scale": "nearest"}],
        }
    )
    signed = validate_output(
        out,
        GOLDENS / "_src_llama_bf16",
        manifest,
        only=["kernels"],
        bar=lambda label: nullcontext(lambda done, total: None),
    )
    gates = {gate.name: gate for gate in signed.gates}
    assert (gates["kernels"].status, gates["kernels"].required) == (Status.PASSED, False)
    assert gates["contract"].status is Status.NOT_RUN
    assert availability.gpu()[1] is None
