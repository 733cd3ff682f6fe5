"""Calibration on real transformers classes: what is seen is what the model computes, and it reaches the output."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers", reason="needs the extra eval")

import torch
from requant.convert import calibrate as module
from requant.convert.calibrate import calibrate, calibration_path, hessian_of, load_calibration, moment_of
from requant.convert.checkpoint import open_checkpoint
from requant.convert.layouts.reading import recognise
from requant.convert.pipeline import prepare, run_job
from requant.manifests.errors import EnvironmentFault, SourceError, UsageError
from requant.manifests.schema import Calibrate
from safetensors.torch import load_file, save_file

LENGTH = 32


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def wanted(text, samples=6):
    return Calibrate(text=text, samples=samples, sequence_length=LENGTH)


def measure(folder, text, samples=6, **options):
    catalogue = open_checkpoint(folder)
    layout, _ = recognise(catalogue, "auto")
    return calibrate(folder, catalogue, layout, wanted(text, samples), **options)


def inputs_by_hand(folder, text, samples=6):
    """Input of every nn.Linear of the model that from_pretrained makes, and keys and values with the cache's own."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    characters = Path(text).read_text()[: samples * LENGTH]
    ids = torch.tensor([ord(c) for c in characters]).reshape(samples, LENGTH)
    seen = {}
    for name, linear in model.named_modules():
        if isinstance(linear, torch.nn.Linear):
            linear.register_forward_pre_hook(
                lambda _m, x, name=name: seen.__setitem__(name, x[0].reshape(-1, x[0].shape[-1]).clone())
            )
    with torch.inference_mode():
        out = model(input_ids=ids, use_cache=True)
    return seen, out.cache if "cache" in out else out.past_key_values  # transformers before 5.24


def test_amax_moments_and_hessians_are_those_of_the_whole_model(golden, text):
    folder = golden("_src_llama_bf16")
    made = measure(folder, text, hessian=lambda name: name.endswith(("_proj", "lm_head")))
    seen, cache = inputs_by_hand(folder, text)
    assert set(made.amax) == set(seen)
    for name, x in seen.items():
        assert made.amax[name] == pytest.approx(float(x.abs().max()), rel=1e-4)
        np.testing.assert_allclose(moment_of(made.path, name), x.square().mean(0).numpy(), rtol=1e-3, atol=1e-7)
        if name != "lm_head":
            np.testing.assert_allclose(hessian_of(made.path, name), (x.T @ x / len(x)).numpy(), rtol=1e-2, atol=1e-4)
    for index, layer in enumerate(cache.layers):
        attention = f"model.layers.{index}.self_attn"
        assert made.kv[f"k.{attention}"] == pytest.approx(float(layer.keys.abs().max()), rel=1e-4)  # rotated
        assert made.kv[f"v.{attention}"] == pytest.approx(float(layer.values.abs().max()), rel=1e-4)
    assert made.uncovered == ()


def test_the_same_text_gives_the_same_file_and_another_text_another(golden, text, tmp_path):
    folder = golden("_src_llama_bf16")
    first = measure(folder, text)
    before = first.path.read_bytes()
    first.path.unlink()
    assert measure(folder, text).path.read_bytes() == before
    other = tmp_path / "other.txt"
    other.write_text("Something else entirely, and long enough for a few sequences of characters. " * 10)
    assert calibration_path(open_checkpoint(folder), wanted(str(other))) != first.path
    assert calibration_path(open_checkpoint(folder), wanted(text, 5)) != first.path


@pytest.mark.parametrize("source", ["_src_qwen3moe_bf16", "_src_gptoss_mxfp4", "llama_mxfp4", "qwen3moe_nvfp4_experts"])
def test_packed_sources_and_experts_are_seen(golden, text, source):
    made = measure(golden(source), text)
    assert all(0 < value < 100 for value in made.amax.values())
    if "moe" in source:
        experts = {name for name in made.amax if ".experts." in name}
        assert {f"model.layers.0.mlp.experts.{e}.down_proj" for e in range(4)} <= experts
    if "gptoss" in source:
        assert {"model.layers.0.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"} <= set(made.amax)


def test_experts_without_tokens_are_listed_and_get_their_groups_maximum(golden, text):
    folder = golden("_src_qwen3moe_bf16")
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith("mlp.gate.weight")]:
        tensors[name][0] = 0.0  # logit 0 for expert 0; the others' are pushed up together
        tensors[name][1:] = tensors[name][1:].abs()
        norm = name.replace("mlp.gate.weight", "post_attention_layernorm.weight")
        assert norm in tensors
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    made = measure(folder, text, samples=1)
    counts = load_file(made.path)
    unseen = {name.removeprefix("tokens.") for name, n in counts.items() if name.startswith("tokens.") and n == 0}
    assert set(made.uncovered) == unseen
    for name in unseen:
        parent, _, leaf = name.rpartition(".")
        stack = parent.rpartition(".")[0]
        group = [f"{stack}.{e}.{leaf}" for e in range(config["num_experts"])]
        assert made.amax[name] == max(made.amax[member] for member in group if member not in unseen)
        assert moment_of(made.path, name) is None


def test_an_expert_of_a_stack_that_no_token_reached_is_listed_too(golden, text):
    folder = golden("_src_gptoss_mxfp4")
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith("mlp.router.bias")]:
        tensors[name][1] = -1e4
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    made = measure(folder, text)
    assert {"model.layers.0.mlp.experts.1", "model.layers.1.mlp.experts.1"} <= set(made.uncovered)
    assert "experts saw no token" in made.note


def manifest(folder, text, out, rule, target, extra=""):
    path = folder.parent / "m.yaml"
    path.write_text(
        f"version: 1\nname: m\nsource: {{path: {folder}}}\ntarget: {{{target}, output: {out}}}\n"
        f"layers:\n  - {{match: 'model.layers.*_proj', {rule}}}\n  - {{match: '*', to: keep}}\n"
        f"activations: {{calibrate: {{text: {text}, samples: 6, sequence_length: {LENGTH}}}}}\n{extra}"
    )
    return str(path)


def test_scales_of_activations_and_of_the_cache_stand_in_the_output_as_modelopt_writes_them(golden, text, tmp_path):
    folder = golden("_src_llama_bf16")
    ref = manifest(folder, text, tmp_path / "out", "to: nvfp4, scale: nearest", "format: nvfp4", "kv_cache: fp8\n")
    run_job(prepare(ref))
    made = load_calibration(calibration_path(open_checkpoint(folder), wanted(text)))
    out = load_file(tmp_path / "out" / "model.safetensors")
    for leaf in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"):
        name = f"model.layers.1.{leaf}"
        assert float(out[f"{name}.input_scale"]) == np.float32(made.amax[name] / (6 * 448))
    key = out["model.layers.0.self_attn.k_proj.k_scale"]
    assert float(key) == np.float32(made.kv["k.model.layers.0.self_attn"] / 448)
    assert len([name for name in out if name.endswith((".k_scale", ".v_scale"))]) == 4
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["kv_cache_scheme"] == {"dynamic": False, "num_bits": 8, "type": "float"}
    nested = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
    assert nested["kv_cache_quant_algo"] == "FP8"
    lock = json.loads((tmp_path / "out" / "requant.lock.json").read_text())
    assert lock["input_scale"].startswith("calibrated: ")


def test_a_second_run_measures_nothing_and_plan_never_does(golden, text, tmp_path, monkeypatch):
    folder = golden("_src_llama_bf16")
    ref = manifest(folder, text, tmp_path / "out", "to: nvfp4, scale: nearest", "format: nvfp4")
    seen = prepare(ref, bar=None)
    assert "still to be measured" in seen.plan.input_scale_note
    with pytest.raises(UsageError, match="not measured"):
        run_job(seen)
    measured = prepare(ref)
    monkeypatch.setattr(module, "calibrate", lambda *_a, **_k: pytest.fail("measured again"))
    assert prepare(ref).plan.sha256 == measured.plan.sha256 != seen.plan.sha256
    assert prepare(ref, bar=None).plan.input_scale_note == measured.plan.input_scale_note


def output_error(folder, out, text):
    """Summed over the linears: squared error of the output on the calibration's own input, over its energy."""
    from requant.validate.load_model import load_model

    seen, _ = inputs_by_hand(folder, text)
    exact = load_file(folder / "model.safetensors")
    model = load_model(out).model
    total = 0.0
    for name, x in seen.items():
        if name == "lm_head":
            continue
        w = exact[f"{name}.weight"].float()
        missed = x @ (model.get_submodule(name).packed.decoded() - w).T
        total += float(missed.square().sum() / (x @ w.T).square().sum())
    return total


def test_gptq_and_weighted_scales_have_less_error_of_the_output_than_what_they_stand_on(golden, text, tmp_path):
    folder = golden("_src_llama_bf16")
    errors = {}
    for name, rule, target in (
        ("nearest", "to: nvfp4, scale: nearest", "format: nvfp4"),
        ("mse", "to: nvfp4, scale: mse", "format: nvfp4"),
        ("weighted", "to: nvfp4, scale: weighted", "format: nvfp4"),
        ("gptq", "to: nvfp4, scale: mse, rounding: gptq", "format: nvfp4"),
        ("mxfp4-gptq", "to: mxfp4, rounding: gptq", "format: mxfp4, layout: compressed-tensors"),
    ):
        run_job(prepare(manifest(folder, text, tmp_path / name, rule, target)))
        errors[name] = output_error(folder, tmp_path / name, text)
    assert errors["weighted"] < errors["mse"] < errors["nearest"]
    assert errors["gptq"] < 0.7 * errors["mse"]
    plain = manifest(folder, text, tmp_path / "mxfp4", "to: mxfp4", "format: mxfp4, layout: compressed-tensors")
    lines = Path(plain).read_text().splitlines(keepends=True)
    Path(plain).write_text("".join(line for line in lines if not line.startswith("activations")))
    run_job(prepare(plain))
    assert errors["mxfp4-gptq"] < 0.7 * output_error(folder, tmp_path / "mxfp4", text)


def test_gptq_writes_the_same_bytes_again_and_with_other_workers(golden, text, tmp_path):
    folder = golden("_src_llama_bf16")
    outputs = []
    for workers in (1, 3):
        out = tmp_path / f"out{workers}"
        rule, extra = "to: nvfp4, scale: weighted, rounding: gptq", f"execute: {{workers: {workers}}}\n"
        ref = manifest(folder, text, out, rule, "format: nvfp4", extra)
        run_job(prepare(ref))
        outputs.append((out / "model.safetensors").read_bytes())
    assert outputs[0] == outputs[1]
    assert struct.unpack("<Q", outputs[0][:8])[0] > 0


def test_what_keeps_calibration_from_running_is_told(golden, text, tmp_path):
    folder = golden("_src_llama_bf16")
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(SourceError, match="9 tokens"):
        measure(folder, str(short))
    with pytest.raises(SourceError, match="cannot be read"):
        measure(folder, str(tmp_path / "none.txt"))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(EnvironmentFault, match="tokenizer"):
        measure(folder, text)


def test_one_command_calibrates_converts_judges_and_signs_off(golden, text, tmp_path, capsys):
    from requant.convert.cli import main

    folder = golden("_src_llama_bf16")
    gates = f"validate: {{model: {{text: {text}, tokens: 512, sequence_length: 64}}}}\n"
    rule = "to: nvfp4, scale: weighted, rounding: gptq"
    ref = manifest(folder, text, tmp_path / "out", rule, "format: nvfp4", f"kv_cache: fp8\n{gates}")
    with pytest.raises(SystemExit) as stop:
        main([ref, "--quiet"])
    shown = capsys.readouterr()
    assert stop.value.code == 0, shown.out
    assert "Signed off: every required gate passed" in shown.out
    assert "ratio of perplexities" in shown.out
    with pytest.raises(SystemExit) as stop:
        main(["validate", str(tmp_path / "out"), "--quiet", "--set", "validate.model.max_kl=0.0"])
    shown = capsys.readouterr()
    assert stop.value.code == 5, shown.err
    assert "model" in shown.out.splitlines()[0]
