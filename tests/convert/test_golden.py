"""Our files against what nvidia-modelopt 0.47.0 exports from the same source, tensor by tensor."""

import json
from pathlib import Path

import numpy as np
import pytest
from requant.kernels.reference import dequantize_mxfp4, dequantize_nvfp4
from requant.validate.contract import check_contract
from requant.validate.numerics import check_numerics

GOLDENS = Path(__file__).resolve().parent.parent / "goldens" / "modelopt"
GPT_OSS_RULES = [{"match": "*.experts.*_proj", "to": "nvfp4"}, {"match": "*", "to": "keep"}]


def same_file(ours, golden, load):
    """Same names, dtypes, shapes and bytes."""
    mine, theirs = load(ours), load(golden)
    assert mine.keys() == theirs.keys()
    different = [name for name in theirs if mine[name] != theirs[name]]
    assert different == []


def stacked(entry):
    """uint8 [E, .., N] of a stacked tensor."""
    _, shape, data = entry
    return np.frombuffer(data, np.uint8).reshape(shape)


@pytest.fixture
def gpt_oss(kit):
    output, _ = kit.convert(GOLDENS / "_src_gptoss_mxfp4", GPT_OSS_RULES)
    return kit.load(GOLDENS / "_src_gptoss_mxfp4"), kit.load(output), kit.load(GOLDENS / "gptoss_nvfp4_cast"), output


def test_gpt_oss_has_modelopts_names_dtypes_and_shapes(gpt_oss):
    _, ours, theirs, _ = gpt_oss
    assert {n: t[:2] for n, t in ours.items()} == {n: t[:2] for n, t in theirs.items()}


def test_gpt_oss_scalars_and_plain_tensors_are_modelopts(gpt_oss):
    _, ours, theirs, _ = gpt_oss
    for name, (dtype, _, data) in theirs.items():
        if name.endswith("weight_scale_2") or dtype == "BF16":
            assert ours[name][2] == data, name


@pytest.mark.parametrize("leaf", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize("layer", [0, 1])
def test_gpt_oss_scales_and_codes_equal_modelopts_but_for_what_its_cast_loses(gpt_oss, layer, leaf):
    """In-range scale bytes equal; codes equal but for -0, which modelopt's way through BF16 turns into 0."""
    source, ours, theirs, _ = gpt_oss
    module = f"model.layers.{layer}.mlp.experts.{leaf}"
    scales = stacked(source[f"{module}_scales"]).astype(int)
    blocks = stacked(source[f"{module}_blocks"])
    live = ((blocks & 0x77) != 0).any(-1)
    inside = live & (scales[live].max() - scales <= 17)
    halves = np.repeat(inside, 2, axis=2).transpose(0, 2, 1)
    mine, his = stacked(ours[f"{module}_weight_scale"]), stacked(theirs[f"{module}_weight_scale"])
    assert (mine[halves] == his[halves]).all()
    assert inside.sum() == inside.size - (2 if layer else 0)
    codes, their_codes = stacked(ours[module]), stacked(theirs[module])
    low, high = codes & 15, codes >> 4
    without_negative_zero = np.where(low == 8, 0, low) | np.where(high == 8, 0, high) << 4
    bytes_inside = np.repeat(inside, 16, axis=2).transpose(0, 2, 1)
    assert (without_negative_zero[bytes_inside] == their_codes[bytes_inside]).all()
    original = blocks.reshape(*blocks.shape[:2], -1).transpose(0, 2, 1)
    assert (codes[bytes_inside] == original[bytes_inside]).all(), "-0 kept"
    assert (codes[bytes_inside] != their_codes[bytes_inside]).any(), "there are -0 to keep"


@pytest.mark.parametrize("leaf", ["gate_up_proj", "down_proj"])
def test_gpt_oss_is_never_worse_than_modelopt_in_any_block(gpt_oss, leaf):
    """Squared error per 16-block, in the layer with an out-of-range block and a dead one."""
    source, ours, theirs, _ = gpt_oss
    module = f"model.layers.1.mlp.experts.{leaf}"
    blocks, scales = stacked(source[f"{module}_blocks"]), stacked(source[f"{module}_scales"])
    experts, rows, groups, _ = blocks.shape
    want = dequantize_mxfp4(blocks.reshape(experts * rows, groups * 16), scales.reshape(experts * rows, groups))

    def error(file):
        s2 = float(np.frombuffer(file[f"{module}_weight_scale_2"][2], "<f4")[0])
        codes = stacked(file[module]).transpose(0, 2, 1).reshape(experts * rows, -1)
        plane = stacked(file[f"{module}_weight_scale"]).transpose(0, 2, 1).reshape(experts * rows, -1)
        got = dequantize_nvfp4(np.ascontiguousarray(codes), np.ascontiguousarray(plane), s2)
        return ((got - want) ** 2).reshape(experts * rows, -1, 16).sum(-1)

    mine, his = error(ours), error(theirs)
    assert (mine <= his).all()
    assert (mine > 0).sum() == 2, "only the two halves of the block 32 octaves down"


def test_gpt_oss_metadata_is_modelopts_the_producer_aside(gpt_oss):
    *_, output = gpt_oss
    golden = GOLDENS / "gptoss_nvfp4_cast"
    ours, theirs = (json.loads((f / "hf_quant_config.json").read_text()) for f in (output, golden))
    assert ours["quantization"] == theirs["quantization"]
    assert ours["producer"]["name"] == "modelopt"
    assert ours["producer"]["version"].startswith("requant-")
    mine, his = (json.loads((f / "config.json").read_text())["quantization_config"] for f in (output, golden))
    assert {k: v for k, v in mine.items() if k != "producer"} == {k: v for k, v in his.items() if k != "producer"}


LINEARS = [{"match": "*_proj", "to": "mxfp4"}, {"match": "*", "to": "keep"}]


def test_bf16_to_mxfp4_is_modelopts_byte_for_byte(kit):
    output, _ = kit.convert(GOLDENS / "_src_llama_bf16", LINEARS, format="mxfp4")
    same_file(output, GOLDENS / "llama_mxfp4", kit.load)
    ours, theirs = (json.loads((f / "config.json").read_text()) for f in (output, GOLDENS / "llama_mxfp4"))
    mine, his = ours["quantization_config"], theirs["quantization_config"]
    assert {k: v for k, v in mine.items() if k != "producer"} == {k: v for k, v in his.items() if k != "producer"}


def test_bf16_to_nvfp4_nearest_is_modelopts_byte_for_byte(kit):
    rules = [{"match": "*_proj", "to": "nvfp4", "scale": "nearest"}, {"match": "*", "to": "keep"}]
    output, _ = kit.convert(GOLDENS / "_src_llama_bf16", rules, format="nvfp4-w4a16")
    same_file(output, GOLDENS / "llama_w4a16_nvfp4", kit.load)


@pytest.mark.parametrize(
    ("source", "golden"), [("_src_llama_bf16", "llama_nvfp4_kvfp8"), ("_src_qwen3moe_bf16", "qwen3moe_nvfp4_experts")]
)
def test_weights_scales_and_input_scales_are_modelopts_given_its_calibration(kit, source, golden):
    """activations.input_scale {from: the export}: everything but KV scales is equal byte for byte."""
    match = "*.mlp.experts.*_proj" if "moe" in golden else "*_proj"
    rules = [{"match": match, "to": "nvfp4", "scale": "nearest"}, {"match": "*", "to": "keep"}]
    output, _ = kit.convert(GOLDENS / source, rules, activations={"input_scale": {"from": str(GOLDENS / golden)}})
    ours, theirs = kit.load(output), kit.load(GOLDENS / golden)
    wanted = {name: tensor for name, tensor in theirs.items() if not name.endswith((".k_scale", ".v_scale"))}
    assert ours.keys() == wanted.keys()
    assert [name for name in wanted if ours[name] != wanted[name]] == []


# --- KV scales, mixed formats, and the ways through BF16 --------------------------------------------------------------


@pytest.mark.parametrize("golden", ["llama_nvfp4_kvfp8", "qwen3moe_nvfp4_kvfp8"])
def test_kv_scales_are_taken_over_from_the_export_and_said_in_both_files(kit, golden):
    """C128: every tensor byte for byte, k_proj.k_scale and v_proj.v_scale among them."""
    source = "_src_qwen3moe_bf16" if "moe" in golden else "_src_llama_bf16"
    rules = [{"match": "*_proj", "to": "nvfp4", "scale": "nearest"}, {"match": "*", "to": "keep"}]
    given = {"input_scale": {"from": str(GOLDENS / golden)}}
    output, _ = kit.convert(GOLDENS / source, rules, activations=given, kv_cache="fp8")
    same_file(output, GOLDENS / golden, kit.load)
    for file, key in (("config.json", "quantization_config"), ("hf_quant_config.json", "quantization")):
        mine, his = (json.loads((folder / file).read_text())[key] for folder in (output, GOLDENS / golden))
        assert {k: v for k, v in mine.items() if k != "producer"} == {k: v for k, v in his.items() if k != "producer"}


def test_fp8_attention_beside_nvfp4_mlp_is_modelopts_mixed_precision(kit):
    """C61: each layer's own scales; weights, scales, input and KV scales and both config files."""
    golden = GOLDENS / "llama_mixed_fp8attn_nvfp4mlp"
    rules = [
        {"match": "*.self_attn.*_proj", "to": "fp8"},
        {"match": "*.mlp.*_proj", "to": "nvfp4", "scale": "nearest"},
        {"match": "*", "to": "keep"},
    ]
    given = {"input_scale": {"from": str(golden)}}
    output, _ = kit.convert(GOLDENS / "_src_llama_bf16", rules, activations=given, kv_cache="fp8")
    same_file(output, golden, kit.load)
    for file, key in (("config.json", "quantization_config"), ("hf_quant_config.json", "quantization")):
        mine, his = (json.loads((folder / file).read_text())[key] for folder in (output, golden))
        assert {k: v for k, v in mine.items() if k != "producer"} == {k: v for k, v in his.items() if k != "producer"}


def test_fp8_in_blocks_is_modelopts_weight_only_export(kit):
    """FP8_PB_WO: scales [N/128, 1, K/128, 1], ragged edges, and both config files."""
    golden = GOLDENS / "llama_fp8_pb_wo"
    rules = [{"match": "*_proj", "to": "fp8", "granularity": "block"}, {"match": "*", "to": "keep"}]
    output, _ = kit.convert(GOLDENS / "_src_llama_144_bf16", rules, format="fp8")
    same_file(output, golden, kit.load)
    for file, key in (("config.json", "quantization_config"), ("hf_quant_config.json", "quantization")):
        mine, his = (json.loads((folder / file).read_text())[key] for folder in (output, golden))
        assert {k: v for k, v in mine.items() if k != "producer"} == {k: v for k, v in his.items() if k != "producer"}
    result = check_contract(output, ["vllm"])
    assert [finding for finding in result.findings if finding.severity == "error"] == []
    assert check_numerics(GOLDENS / "_src_llama_144_bf16", output, None).status == "passed"


def test_fp8_blocks_of_modelopt_and_deepseek_are_the_same_bytes(kit):
    """A re-layout moves codes and scales, and comes back."""
    rules = [{"match": "*_proj", "to": "fp8", "granularity": "block"}, {"match": "*", "to": "keep"}]
    golden = GOLDENS / "llama_fp8_pb_wo"
    there, _ = kit.convert(golden, rules, output="there", format="fp8", layout="deepseek-v3")
    ours, theirs = kit.load(there), kit.load(golden)
    module = "model.layers.0.mlp.down_proj"
    assert ours[f"{module}.weight"] == theirs[f"{module}.weight"]
    assert ours[f"{module}.weight_scale_inv"] == ("F32", (2, 2), theirs[f"{module}.weight_scale"][2])
    back, _ = kit.convert(there, rules, output="back", format="fp8")
    same_file(back, golden, kit.load)


def test_gpt_oss_by_way_of_bf16_is_modelopts_requantization(kit):
    """MXFP4 -> BF16 stacks [E, K, N] -> NVFP4 nearest, as modelopt's own script goes: every byte of every tensor."""
    golden = GOLDENS / "gptoss_nvfp4_requant"
    middle, _ = kit.convert(
        GOLDENS / "_src_gptoss_mxfp4", [{"match": "*", "to": "bf16"}], output="middle", format="bf16"
    )
    assert kit.load(middle)["model.layers.0.mlp.experts.gate_up_proj"][:2] == ("BF16", (4, 64, 192))
    rules = [{"match": "*.experts.*_proj", "to": "nvfp4", "scale": "nearest"}, {"match": "*", "to": "keep"}]
    output, _ = kit.convert(middle, rules, activations={"input_scale": {"from": str(golden)}})
    same_file(output, golden, kit.load)
