"""Each built-in manifest against a tiny checkpoint with the names, dtypes and config of the published one."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from requant.convert.pipeline import prepare, run_job
from requant.kernels.reference import dequantize_mxfp4, dequantize_nvfp4
from requant.manifests.load import library_names

HUB = Path(__file__).resolve().parent.parent / "goldens" / "hub_configs"


def fp8(n, k):
    return ("F8_E4M3", (n, k), bytes([0x38]) * (n * k)), ("F8_E8M0", (-(-n // 128), -(-k // 128)), b"\x7f")


def deepseek_v4(kit):
    """Tensors of deepseek-ai/DeepSeek-V4: FP4 experts, FP8 attention and shared experts, a draft layer."""
    tensors = kit.deepseek(kit.rng, experts=2, layers=2)
    for prefix in ("layers.0", "layers.1", "mtp.0"):
        for leaf in (
            "attn.wq_a",
            "attn.wkv",
            "ffn.shared_experts.w1",
            "ffn.shared_experts.w2",
            "ffn.shared_experts.w3",
        ):
            tensors[f"{prefix}.{leaf}.weight"], tensors[f"{prefix}.{leaf}.scale"] = fp8(64, 64)
        tensors[f"{prefix}.attn.attn_sink"] = ("F32", (4,), bytes(16))
        tensors[f"{prefix}.hc_attn_fn"] = ("F32", (8, 64), bytes(2048))
        tensors[f"{prefix}.attn_norm.weight"] = kit.bf16(kit.rng, 64)
    tensors["layers.0.ffn.gate.tid2eid"] = ("I64", (96, 2), bytes(1536))
    tensors["mtp.0.e_proj.weight"], tensors["mtp.0.e_proj.scale"] = fp8(64, 64)
    tensors["norm.weight"] = kit.bf16(kit.rng, 64)
    return tensors


def gpt_oss(kit):
    tensors = kit.gpt_oss(kit.rng, experts=2, hidden=96, inter=64)
    tensors["model.layers.0.self_attn.sinks"] = kit.bf16(kit.rng, 4)
    for leaf in "qkvo":
        tensors[f"model.layers.0.self_attn.{leaf}_proj.bias"] = kit.bf16(kit.rng, 96)
    tensors["model.layers.0.input_layernorm.weight"] = kit.bf16(kit.rng, 96)
    return tensors


def kimi(kit):
    """Tensors of moonshotai/Kimi-K3: a dense first layer, experts as compressed-tensors packs them, a vision tower."""
    model = "language_model.model"
    tensors = {
        f"{model}.embed_tokens.weight": kit.bf16(kit.rng, 96, 64),
        f"{model}.layers.0.mlp.gate_proj.weight": kit.bf16(kit.rng, 64, 64),
        f"{model}.layers.1.block_sparse_moe.gate.weight": kit.bf16(kit.rng, 2, 64),
        f"{model}.layers.1.block_sparse_moe.gate.e_score_correction_bias": ("F32", (2,), bytes(8)),
        f"{model}.layers.1.block_sparse_moe.shared_experts.down_proj.weight": kit.bf16(kit.rng, 64, 64),
        f"{model}.layers.1.self_attn.q_proj.weight": kit.bf16(kit.rng, 64, 64),
        "language_model.lm_head.weight": kit.bf16(kit.rng, 96, 64),
        "vision_tower.encoder.blocks.0.mlp.fc0.weight": kit.bf16(kit.rng, 64, 64),
        "mm_projector.proj.0.weight": kit.bf16(kit.rng, 64, 64),
    }
    for expert in range(2):
        for leaf in ("w1", "w2", "w3"):
            name = f"{model}.layers.1.block_sparse_moe.experts.{expert}.{leaf}"
            codes, scales = kit.mx(kit.rng, 64, 64, codes="U8", scales="U8")
            tensors[f"{name}.weight_packed"], tensors[f"{name}.weight_scale"] = codes, scales
    return tensors


LIBRARY = {
    "deepseek-v4-flash": (deepseek_v4, "deepseek-ai--DeepSeek-V4-Flash_config.json", 8),
    "deepseek-v4-pro": (deepseek_v4, "deepseek-ai--DeepSeek-V4-Pro_config.json", 8),
    "gpt-oss-20b": (gpt_oss, "openai--gpt-oss-20b_config.json", 2),
    "gpt-oss-120b": (gpt_oss, "openai--gpt-oss-120b_config.json", 2),
    "kimi-k3": (kimi, "moonshotai--Kimi-K3_config.json", 4),
}


def test_every_library_manifest_is_here():
    assert sorted(LIBRARY) == sorted(library_names())


def convert(kit, name, *sets):
    make, config, _ = LIBRARY[name]
    source = kit.tmp / "src"
    if not source.exists():
        kit.write_checkpoint(source, [make(kit)], json.loads((HUB / config).read_text()))
    job = prepare(name, [f"source.path={source}", f"target.output={kit.tmp / 'out'}", *sets])
    run_job(job)
    return job, kit.load(source), kit.load(job.plan.output), json.loads((job.plan.output / "config.json").read_text())


def array(entry):
    return np.frombuffer(entry[2], np.uint8).reshape(entry[1])


def scalar(entry):
    assert entry[:2] == ("F32", ())
    return struct.unpack("<f", entry[2])[0]


def same_values(codes, scales, ours, module):
    """The output's NVFP4 weight has exactly the values of the source's MXFP4 one."""
    got = dequantize_nvfp4(
        array(ours[f"{module}.weight"]), array(ours[f"{module}.weight_scale"]), scalar(ours[f"{module}.weight_scale_2"])
    )
    assert ours[f"{module}.weight_scale"][0] == "F8_E4M3"
    assert scalar(ours[f"{module}.input_scale"]) == 1.0
    return np.array_equal(got, dequantize_mxfp4(codes, scales))


@pytest.mark.parametrize("name", sorted(LIBRARY))
def test_every_rule_finds_its_weights_and_everything_else_is_copied_byte_for_byte(kit, name):
    job, source, ours, _ = convert(kit, name)
    assert len(job.plan.groups) == LIBRARY[name][2]
    assert all(use.tensors for use in job.plan.rules)
    kept = {n for n in source if n in ours and ours[n] == source[n]}
    converted = set(source) - kept
    assert converted
    assert all(".experts." in n and not n.startswith("mtp.") and "shared" not in n for n in converted)
    assert {n for n in ours if n not in source} == {
        n
        for n in ours
        if n.endswith(("weight_scale", "weight_scale_2", "input_scale", ".weight", "_proj")) and n not in kept
    } - set(source)


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "deepseek-v4-pro"])
def test_deepseek_experts_have_the_sources_values_and_the_draft_its_bytes(kit, name):
    job, source, ours, config = convert(kit, name)
    for layer in (0, 1):
        for expert in (0, 1):
            for leaf in ("w1", "w2", "w3"):
                module = f"layers.{layer}.ffn.experts.{expert}.{leaf}"
                assert same_values(array(source[f"{module}.weight"]), array(source[f"{module}.scale"]), ours, module)
    assert ours["mtp.0.ffn.experts.0.w1.weight"] == source["mtp.0.ffn.experts.0.w1.weight"]
    quant = config["quantization_config"]
    assert list(quant["quantized_layers"]) == ["layers.0.ffn.experts", "layers.1.ffn.experts"]
    assert (quant["quant_method"], quant["quant_algo"], quant["moe_quant_algo"]) == ("fp8", "MIXED_PRECISION", "NVFP4")
    assert job.plan.manifest.target.runtimes == ("sglang", "vllm")


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b"])
def test_gpt_oss_is_written_stacked_and_per_expert_on_demand(kit, name):
    """C23, C24, C82."""
    _, source, ours, _ = convert(kit, name)
    base = "model.layers.0.mlp.experts"
    assert {n: t[:2] for n, t in ours.items() if n.startswith(base)} == {
        f"{base}.gate_up_proj": ("U8", (2, 48, 128)),
        f"{base}.gate_up_proj_weight_scale": ("F8_E4M3", (2, 6, 128)),
        f"{base}.gate_up_proj_weight_scale_2": ("F32", ()),
        f"{base}.gate_up_proj_input_scale": ("F32", ()),
        f"{base}.gate_up_proj_bias": ("BF16", (2, 128)),
        f"{base}.down_proj": ("U8", (2, 32, 96)),
        f"{base}.down_proj_weight_scale": ("F8_E4M3", (2, 4, 96)),
        f"{base}.down_proj_weight_scale_2": ("F32", ()),
        f"{base}.down_proj_input_scale": ("F32", ()),
        f"{base}.down_proj_bias": ("BF16", (2, 96)),
    }
    _, source, ours, config = convert(kit, name, "target.layout=modelopt-experts", f"target.output={kit.tmp / 'cut'}")
    blocks, scales = array(source[f"{base}.gate_up_proj_blocks"]), array(source[f"{base}.gate_up_proj_scales"])
    bias = array((*source[f"{base}.gate_up_proj_bias"][:1], (2, 128, 2), source[f"{base}.gate_up_proj_bias"][2]))
    for expert in (0, 1):
        for offset, leaf in enumerate(("gate_proj", "up_proj")):
            module = f"{base}.{expert}.{leaf}"
            codes = blocks[expert, offset::2].reshape(64, 48)
            assert same_values(codes, scales[expert, offset::2], ours, module)
            assert ours[f"{module}.bias"] == ("BF16", (64,), bias[expert, offset::2].tobytes())
        assert ours[f"{base}.{expert}.gate_proj.weight_scale_2"] == ours[f"{base}.{expert}.up_proj.weight_scale_2"]
    assert config["quantization_config"]["quant_algo"] == "NVFP4"


def test_kimi_experts_have_the_sources_values_and_are_named_under_every_alias(kit):
    """C65, C77."""
    _, source, ours, config = convert(kit, "kimi-k3")
    base = "language_model.model.layers.1.block_sparse_moe.experts"
    for expert in (0, 1):
        for leaf in ("w1", "w2", "w3"):
            module = f"{base}.{expert}.{leaf}"
            codes, scales = array(source[f"{module}.weight_packed"]), array(source[f"{module}.weight_scale"])
            assert same_values(codes, scales, ours, module)
            assert f"{module}.weight_packed" not in ours
    shared = "language_model.model.layers.1.block_sparse_moe.shared_experts.down_proj.weight"
    assert ours[shared] == source[shared]
    quant = config["quantization_config"]
    assert quant["quant_method"] == "modelopt_mixed"
    assert "quantization_config" not in config["text_config"]
    assert set(quant["quantized_layers"]) == {
        f"{prefix}layers.1.{block}.experts"
        for prefix in ("language_model.model.", "model.", "")
        for block in ("block_sparse_moe", "mlp")
    }
    assert quant["ignore"] == [
        "language_model.lm_head",
        "language_model.model.embed_tokens",
        "language_model.model.layers.0.mlp.gate_proj",
        "language_model.model.layers.1.block_sparse_moe.gate",
        "language_model.model.layers.1.block_sparse_moe.shared_experts.down_proj",
        "language_model.model.layers.1.self_attn*",
        "mm_projector.proj.0",
        "vision_tower.encoder.blocks.0.mlp.fc0",
    ]
