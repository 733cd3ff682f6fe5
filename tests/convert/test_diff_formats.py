"""`requant diff` across layouts and formats: the same numbers are told from others, and how far those are off."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from requant.convert.checkpoint import open_checkpoint
from requant.convert.cli import main
from requant.convert.diff import compare, diff_text

GOLDENS = Path(__file__).resolve().parent.parent / "goldens" / "modelopt"
KEEP = {"match": "*", "to": "keep"}


def diff(a, b):
    return compare(open_checkpoint(a), open_checkpoint(b))


def test_two_dialects_of_one_nvfp4_are_the_same_numbers(kit):
    golden = GOLDENS / "llama_nvfp4_kvfp8"
    output, _ = kit.convert(golden, [{"match": "*_proj", "to": "nvfp4"}, KEEP], layout="compressed-tensors")
    found = diff(golden, output)
    assert len(found.weights) == 14
    assert all(w.equal and (w.a, w.b, w.max_error, w.sqnr_db) == ("nvfp4", "nvfp4", 0.0, None) for w in found.weights)
    assert not (found.changed or found.reshaped or found.missing or found.extra)
    assert found.equal == len(kit.load(golden)) - 14 * 3, "block scales have one name in both"
    assert "14 of 14 weights stored in two ways are the same numbers" in diff_text(found, verbose=False)


def test_a_wrong_global_scale_is_other_numbers(kit):
    golden = GOLDENS / "llama_nvfp4_kvfp8"
    output, _ = kit.convert(golden, [{"match": "*_proj", "to": "nvfp4"}, KEEP], layout="compressed-tensors")
    path = output / "model.safetensors"
    raw = bytearray(path.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    name = "model.layers.1.mlp.up_proj"
    begin = json.loads(raw[8 : 8 + length])[f"{name}.weight_global_scale"]["data_offsets"][0] + 8 + length
    value = np.frombuffer(raw[begin : begin + 4], "<f4")[0]
    raw[begin : begin + 4] = np.float32(value / 2).tobytes()
    path.write_bytes(raw)
    (wrong,) = [w for w in diff(golden, output).weights if not w.equal]
    assert wrong.module == name
    assert wrong.sqnr_db == pytest.approx(0.0, abs=1e-4)  # twice the weights: the error is as large as they are


def test_mxfp4_repacked_is_the_same_numbers_and_nvfp4_nearest_is_20_db(kit):
    source = GOLDENS / "_src_llama_bf16"
    nearest, _ = kit.convert(
        source, [{"match": "*_proj", "to": "nvfp4", "scale": "nearest"}, KEEP], output="n", format="nvfp4-w4a16"
    )
    repacked, _ = kit.convert(
        GOLDENS / "llama_mxfp4", [{"match": "*_proj", "to": "nvfp4"}, KEEP], output="r", format="nvfp4-w4a16"
    )
    assert all(w.equal and (w.a, w.b) == ("mxfp4", "nvfp4") for w in diff(GOLDENS / "llama_mxfp4", repacked).weights)
    for weight in diff(source, nearest).weights:
        assert (weight.a, weight.b) == ("bf16", "nvfp4")
        assert 18 < weight.sqnr_db < 23
        a = np.frombuffer(kit.load(source)[f"{weight.module}.weight"][2], "<u2").astype(np.uint32) << 16
        assert 0 < weight.max_error < np.abs(a.view(np.float32)).max() / 6
        assert math.isfinite(weight.max_error)


def test_stacked_experts_meet_the_single_ones(kit):
    source = GOLDENS / "_src_gptoss_mxfp4"
    rules = [{"match": "*.experts.*_proj", "to": "nvfp4"}, KEEP]
    output, _ = kit.convert(source, rules, layout="modelopt-experts")
    found = diff(source, output)
    assert len(found.weights) == 2 * 4 * 3
    lossy = [w for w in found.weights if not w.equal]
    assert len(lossy) == 2, "the out-of-range block of each tensor of layer 1"
    assert {w.module.rpartition(".")[2] for w in lossy} <= {"gate_proj", "up_proj", "down_proj"}
    assert all(w.sqnr_db > 60 for w in lossy)


def test_what_cannot_be_read_is_said(kit):
    tensors = {"a.weight": kit.bf16(kit.rng, 16, 64)}
    a = kit.write_checkpoint(kit.tmp / "a", [tensors], {"model_type": "x"})
    b = kit.write_checkpoint(
        kit.tmp / "b",
        [{"a.weight": ("I8", (16, 64), bytes(1024))}],
        {"model_type": "x", "quantization_config": {"quant_method": "bitsandbytes"}},
    )
    found = diff(a, b)
    assert "bitsandbytes" in found.unread
    assert found.reshaped == [("a.weight", "BF16 [16, 64]", "I8 [16, 64]")]
    assert "not compared as numbers" in diff_text(found, verbose=False)


def test_the_command_lists_the_worst_first_and_json_holds_all(kit, capsys):
    golden = GOLDENS / "llama_w4a16_nvfp4"
    with pytest.raises(SystemExit) as ended:
        main(["diff", str(GOLDENS / "_src_llama_bf16"), str(golden), "--format", "json", "--quiet"])
    assert ended.value.code == 0
    facts = json.loads(capsys.readouterr().out)
    assert len(facts["weights"]) == 14
    assert {(w["a"], w["b"], w["equal"]) for w in facts["weights"]} == {("bf16", "nvfp4", False)}
    with pytest.raises(SystemExit):
        main(["diff", str(GOLDENS / "_src_llama_bf16"), str(golden), "--quiet"])
    text = capsys.readouterr().out
    numbers = [float(line.partition("SQNR ")[2].partition(" dB")[0]) for line in text.splitlines() if "SQNR" in line]
    assert len(numbers) == 14
    assert numbers == sorted(numbers)
