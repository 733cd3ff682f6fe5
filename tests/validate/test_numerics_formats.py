"""The numerics stage over all source and target formats: what the converter makes is judged right, one fault found.

The outputs are made by the converter; the judging shares no code with it.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from module_files import load
from requant.convert.pipeline import prepare, run_job
from requant.manifests.schema import NumericsGate
from requant.validate.numerics import check_numerics
from requant.validate.results import Status

HERE = Path(__file__).resolve().parent
GOLDENS = HERE.parent / "goldens" / "modelopt"
KEEP = {"match": "*", "to": "keep"}


KIT, SOURCES = load("convert/conftest.py"), load("convert/test_sources.py")


@pytest.fixture
def kit(tmp_path):
    return KIT.Kit(tmp_path)


def convert(kit, source, rules, output="out", **target):
    path = kit.tmp / f"{output}.yaml"
    path.write_text(KIT.manifest_text(source, kit.tmp / output, rules, **target))
    job = prepare(str(path))
    run_job(job)
    return job.plan.output


def judged(source, output, **gate):
    result = check_numerics(source, output, NumericsGate(**gate) if gate else None)
    return result, sorted({f.rule for f in result.findings if f.severity == "error"})


def rows_of(result):
    columns = result.data["tensors"]["columns"]
    return [dict(zip(columns, row, strict=True)) for row in result.data["tensors"]["rows"]]


LABELS = {"deepseek_v3": "fp8", "small_blocks": "fp8", "mxfp8": "fp8", "modelopt_fp8": "fp8", "channels": "fp8",
          "modelopt_nvfp4": "nvfp4", "quark_nvfp4": "nvfp4", "ct_nvfp4": "nvfp4", "kimi_int4": "int4",
          "asymmetric_int4": "int4", "gptq": "gptq", "gptq_v2": "gptq", "awq": "awq", "half": "bf16"}  # fmt: skip
TARGETS = {
    "bf16": ({"to": "bf16"}, {"format": "bf16"}, 45),
    "fp8": ({"to": "fp8"}, {"format": "fp8"}, 25),
    "fp8-block": ({"to": "fp8"}, {"format": "fp8", "layout": "deepseek-v3"}, 25),
    "mxfp4": ({"to": "mxfp4"}, {"format": "mxfp4"}, 10),
    "nvfp4": ({"to": "nvfp4", "scale": "nearest"}, {"format": "nvfp4-w4a16"}, 12),
}


@pytest.mark.parametrize("target", list(TARGETS))
@pytest.mark.parametrize("make", SOURCES.SOURCES)
def test_every_source_under_every_target_passes_with_its_sqnr(kit, make, target):
    rule, settings, floor = TARGETS[target]
    label = LABELS[make.__name__]
    same_names = {("nvfp4", "nvfp4"), ("deepseek_v3", "fp8-block"), ("modelopt_fp8", "fp8")}
    if target == "nvfp4" and label == "nvfp4":
        rule = {"to": "nvfp4"}
    tensors, _, quant = make(kit.rng)
    source = SOURCES.checkpoint(kit, tensors, quant)
    output = convert(kit, source, [{"match": "*_proj", **rule}, KEEP], **settings)
    result, errors = judged(source, output)
    assert errors == []
    assert result.status is Status.PASSED
    if make.__name__ != "ct_nvfp4" and {(label, target), (make.__name__, target)} & same_names:
        assert rows_of(result) == []
        assert result.data["census"]["copied"] > 2
        return
    (row,) = rows_of(result)
    assert row["source"] == label
    assert row["tensor"] == "model.layers.0.mlp.up_proj"
    if label == target == "nvfp4":
        assert (row["lossy"], row["sqnr_db"]) == (0, None)
    elif row["sqnr_db"] is not None:
        assert row["sqnr_db"] > floor
    assert result.data["census"]["copied"] == 1


@pytest.mark.parametrize("make", [SOURCES.channels, SOURCES.kimi_int4, SOURCES.gptq, SOURCES.awq])
@pytest.mark.parametrize("target", ["bf16", "fp8-block"])
def test_one_wrong_code_is_found(kit, make, target):
    """The rows of two weights swapped, or one bit of a byte: no longer the nearest."""
    rule, settings, _ = TARGETS[target]
    tensors, _, quant = make(kit.rng)
    source = SOURCES.checkpoint(kit, tensors, quant)
    output = convert(kit, source, [{"match": "*_proj", **rule}, KEEP], **settings)
    path = output / "model.safetensors"
    raw = bytearray(path.read_bytes())
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    begin = header["model.layers.0.mlp.up_proj.weight"]["data_offsets"][0] + 8 + int.from_bytes(raw[:8], "little")
    raw[begin + 1] ^= 0x28
    path.write_bytes(raw)
    assert "misrounded" in judged(source, output)[1]


@pytest.mark.parametrize(("model_type", "turned", "interleaved"), SOURCES.STACKS)
def test_stacked_experts_are_paired_with_their_halves(kit, model_type, turned, interleaved):
    """C25, C28: gate against gate; a swap of gate and up would be misrounded in most weights."""
    source, _ = SOURCES.stack(kit, model_type, turned, interleaved)
    rules = [{"match": "*.experts.*", "to": "nvfp4", "scale": "nearest"}]
    layout = "modelopt-experts" if interleaved else "modelopt"
    output = convert(kit, source, rules, format="nvfp4-w4a16", layout=layout)
    result, errors = judged(source, output)
    assert errors == []
    rows = rows_of(result)
    assert len(rows) == 9
    assert min(row["sqnr_db"] for row in rows) > 15
    path = output / "model.safetensors"
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    base = "model.layers.0.mlp.experts.0"
    gate, up = header[f"{base}.gate_proj.weight"], header[f"{base}.up_proj.weight"]
    gate["data_offsets"], up["data_offsets"] = up["data_offsets"], gate["data_offsets"]
    text = json.dumps(header, separators=(",", ":")).encode().ljust(int.from_bytes(raw[:8], "little"))
    path.write_bytes(raw[:8] + text + raw[8 + len(text) :])
    assert "misrounded" in judged(source, output)[1]


@pytest.mark.parametrize("golden", ["llama_nvfp4_kvfp8", "qwen3moe_nvfp4_experts"])
def test_a_relayout_is_lossless_by_every_count(kit, golden):
    """Reciprocals that FP32 cannot say exactly are the source's scale all the same."""
    match = "*.experts.*_proj" if "experts" in golden else "*_proj"
    rules = [{"match": match, "to": "nvfp4"}, KEEP]
    output = convert(kit, GOLDENS / golden, rules, layout="compressed-tensors")
    result, errors = judged(GOLDENS / golden, output, lossless="required")
    assert errors == []
    totals = result.data["totals"]
    assert totals["lossy"] == totals["shifted"] == totals["changed"] == 0
    assert totals["exact"] == totals["blocks"] > 0


def test_a_global_scale_off_by_more_than_a_step_is_a_loss(kit):
    output = convert(kit, GOLDENS / "llama_nvfp4_kvfp8", [{"match": "*_proj", "to": "nvfp4"}, KEEP],
                     layout="compressed-tensors")  # fmt: skip
    path = output / "model.safetensors"
    raw = bytearray(path.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    name = "model.layers.0.mlp.up_proj.weight_global_scale"
    begin = json.loads(raw[8 : 8 + length])[name]["data_offsets"][0] + 8 + length
    value = np.frombuffer(raw[begin : begin + 4], "<f4")[0] * np.float32(1.00001)
    raw[begin : begin + 4] = np.float32(value).tobytes()
    path.write_bytes(raw)
    assert "lossy-blocks" in judged(GOLDENS / "llama_nvfp4_kvfp8", output, lossless="required")[1]


def test_gpt_oss_as_bf16_is_exact(kit):
    source = GOLDENS / "_src_gptoss_mxfp4"
    output = convert(kit, source, [{"match": "*", "to": "bf16"}], format="bf16")
    result, errors = judged(source, output, lossless="required")
    assert errors == []
    assert result.data["totals"]["changed"] == 0
    assert len(rows_of(result)) == 4


def test_mixed_precision_is_judged_layer_by_layer(kit):
    source, golden = GOLDENS / "_src_llama_bf16", GOLDENS / "llama_mixed_fp8attn_nvfp4mlp"
    result, errors = judged(source, golden)
    assert errors == []
    targets = {row["tensor"]: (row["target"], row["sqnr_db"]) for row in rows_of(result)}
    assert targets["model.layers.0.self_attn.q_proj"][0] == "fp8"
    assert targets["model.layers.0.self_attn.q_proj"][1] > 30
    assert targets["model.layers.0.mlp.up_proj"][0] == "nvfp4"
    assert 18 < targets["model.layers.0.mlp.up_proj"][1] < 24
