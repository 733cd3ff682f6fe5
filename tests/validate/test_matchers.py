"""The exclude-list matchers of vLLM, SGLang and compressed-tensors, on made-up names and on published lists."""

import json
from pathlib import Path

import pytest
from requant.validate.matchers import (
    Verdict,
    compressed_tensors_matcher,
    runtime_prefixes,
    sglang_matcher,
    vllm_matcher,
)

HUB = Path(__file__).resolve().parent.parent / "goldens" / "hub_configs"
KEPT, OUT, SPLIT = Verdict.QUANTIZED, Verdict.EXCLUDED, Verdict.SPLIT
MATCHERS = {"vllm": vllm_matcher, "sglang": sglang_matcher}


def hub_list(name):
    return json.loads((HUB / name).read_text())["quantization"]["exclude_modules"]


@pytest.mark.parametrize(
    ("prefix", "pattern", "vllm", "sglang"),
    [
        ("model.layers.10.mlp.down_proj", "model.layers.1", OUT, KEPT),
        ("model.layers.1.mlp.gate_up_proj", "model.layers.1.mlp.gate", OUT, KEPT),
        ("model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.q_proj", SPLIT, SPLIT),
        ("model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn*", OUT, OUT),
        ("model.layers.0.mlp.experts", "*.mlp.experts.*", KEPT, KEPT),
        ("model.layers.0.mlp.experts", "model.layers.0.mlp.experts*", OUT, OUT),
        ("lm_head", "lm_head", OUT, OUT),
        ("model.layers.0.self_attn.o_proj", "*.o_proj", OUT, OUT),
        ("language_model.model.layers.3.mlp.down_proj", "model.layers.3.mlp.down_proj", OUT, OUT),
        ("model.layers.0.mlp.gate_up_proj", "model.layers.0.mlp.gate_up_proj", OUT, OUT),
        ("mtp.layers.0.mlp.down_proj", "mtp*", OUT, OUT),
    ],
)
def test_each_runtime_reads_a_pattern_in_its_own_way(prefix, pattern, vllm, sglang):
    """C55: the observed table; vLLM takes any list entry as a substring."""
    assert vllm_matcher([pattern])(prefix) is vllm
    assert sglang_matcher([pattern])(prefix) is sglang


@pytest.mark.parametrize("make", [vllm_matcher, sglang_matcher])
def test_fused_module_is_excluded_when_all_its_parts_are_listed(make):
    parts = [f"model.layers.0.self_attn.{p}_proj" for p in "qkv"]
    assert make(parts)("model.layers.0.self_attn.qkv_proj") is OUT
    assert make(parts[1:])("model.layers.0.self_attn.qkv_proj") is SPLIT
    assert make(parts)("model.layers.1.self_attn.qkv_proj") is KEPT


@pytest.mark.parametrize("make", [vllm_matcher, sglang_matcher])
def test_full_names_of_one_layer_leave_its_decimal_neighbours_alone(make):
    """C55: eleven layers, and every module of layer 1 listed by its full name."""
    names = [f"model.layers.1.{m}" for m in ("self_attn.o_proj", "mlp.down_proj")]
    matcher = make(names)
    assert matcher("model.layers.1.mlp.down_proj") is OUT
    assert [matcher(f"model.layers.{i}.mlp.down_proj") for i in (0, 10, 11)] == [KEPT] * 3


def test_listed_single_expert_excludes_all_experts_in_vllm_only():
    pattern = "model.layers.0.mlp.experts.3.gate_proj"
    assert vllm_matcher([pattern])("model.layers.0.mlp.experts") is OUT
    assert sglang_matcher([pattern])("model.layers.0.mlp.experts") is KEPT


def test_sglang_looks_for_mla_tails_in_every_layer():
    matcher = sglang_matcher(["model.layers.0.self_attn.kv_a_proj_with_mqa", "model.layers.0.self_attn.q_a_proj"])
    assert matcher("model.layers.7.self_attn.fused_qkv_a_proj_with_mqa") is OUT
    assert matcher("model.layers.7.self_attn.o_proj") is KEPT


def test_pattern_that_is_no_expression_does_not_break_sglangs_matcher():
    assert sglang_matcher(["model.(broken", "lm_head"])("lm_head") is OUT


def test_compressed_tensors_matches_whole_names_and_anchored_expressions():
    matcher = compressed_tensors_matcher(["lm_head", "re:.*self_attn.*", "re:mlp"])
    assert matcher("lm_head") is OUT
    assert matcher("model.lm_head") is KEPT
    assert matcher("model.layers.0.self_attn.qkv_proj") is OUT
    assert matcher("model.layers.0.mlp.down_proj") is KEPT
    assert compressed_tensors_matcher(["a.q_proj"])("a.qkv_proj") is SPLIT


def test_compressed_tensors_asks_about_expert_zero():
    matcher = compressed_tensors_matcher(["re:.*experts.*"])
    assert matcher("model.layers.0.mlp.experts") is OUT
    assert compressed_tensors_matcher(["re:.*experts$"])("model.layers.0.mlp.shared_experts.down_proj") is KEPT


def test_runtime_prefixes_fuse_what_runtimes_fuse():
    modules = [
        *(f"model.layers.0.self_attn.{p}_proj" for p in "qkvo"),
        *(f"model.layers.0.mlp.experts.{e}.{p}_proj" for e in (0, 1) for p in ("gate", "up", "down")),
        "model.layers.0.mlp.shared_experts.gate_proj",
        "model.layers.0.mlp.shared_experts.up_proj",
    ]
    prefixes = {entry.prefix: entry.modules for entry in runtime_prefixes(modules)}
    assert prefixes["model.layers.0.self_attn.qkv_proj"] == tuple(modules[:3])
    assert prefixes["model.layers.0.self_attn.o_proj"] == (modules[3],)
    assert prefixes["model.layers.0.mlp.experts"] == tuple(modules[4:10])
    assert prefixes["model.layers.0.mlp.shared_experts.gate_up_proj"] == tuple(modules[10:])
    assert "model.layers.0.mlp.experts.0.gate_proj" not in prefixes


def test_missing_part_is_not_fused():
    assert [p.prefix for p in runtime_prefixes(["a.q_proj", "a.k_proj"])] == ["a.q_proj", "a.k_proj"]


@pytest.mark.parametrize("runtime", MATCHERS)
class TestPublishedLists:
    """The lists that NVIDIA ships must read as NVIDIA means them."""

    def test_qwen3_moe_excludes_routers_and_keeps_experts(self, runtime):
        """C52: 94 routers by full name; experts and attention stay quantized under the names that runtimes use."""
        matcher = MATCHERS[runtime](hub_list("nvidia--Qwen3-235B-A22B-NVFP4_hf_quant_config.json"))
        for layer in range(94):
            assert matcher(f"model.layers.{layer}.mlp.gate") is OUT
            assert matcher(f"model.layers.{layer}.mlp.experts") is KEPT
            assert matcher(f"model.layers.{layer}.self_attn.qkv_proj") is KEPT
        assert matcher("lm_head") is OUT

    def test_deepseek_v31_excludes_mla_and_keeps_o_proj(self, runtime):
        matcher = MATCHERS[runtime](hub_list("nvidia--DeepSeek-V3.1-NVFP4_hf_quant_config.json"))
        for layer in (0, 1, 10, 60):
            assert matcher(f"model.layers.{layer}.self_attn.fused_qkv_a_proj") is OUT
            assert matcher(f"model.layers.{layer}.self_attn.fused_qkv_a_proj_with_mqa") is OUT
            assert matcher(f"model.layers.{layer}.self_attn.kv_b_proj") is OUT
            assert matcher(f"model.layers.{layer}.self_attn.o_proj") is KEPT
            assert matcher(f"model.layers.{layer}.mlp.experts") is KEPT

    def test_kimi_k26_excludes_layer_0_and_attention_only(self, runtime):
        """C53: names of the wrapper (`language_model.model.`) are what the list and the runtime share."""
        matcher = MATCHERS[runtime](hub_list("nvidia--Kimi-K2.6-NVFP4_hf_quant_config.json"))
        head = "language_model.model.layers"
        assert matcher(f"{head}.0.mlp.gate_up_proj") is OUT
        for layer in (1, 10, 60):
            assert matcher(f"{head}.{layer}.self_attn.o_proj") is OUT
            assert matcher(f"{head}.{layer}.mlp.shared_experts.gate_up_proj") is OUT
            assert matcher(f"{head}.{layer}.mlp.experts") is KEPT

    def test_gemma_excludes_every_attention_block(self, runtime):
        matcher = MATCHERS[runtime](hub_list("nvidia--Gemma-4-31B-IT-NVFP4_hf_quant_config.json"))
        for layer in (0, 1, 11, 59):
            assert matcher(f"model.language_model.layers.{layer}.self_attn.qkv_proj") is OUT
            assert matcher(f"model.language_model.layers.{layer}.mlp.gate_up_proj") is KEPT

    def test_qwen36_excludes_mtp_only(self, runtime):
        """C71: the draft head is listed in a form that both runtimes match."""
        matcher = MATCHERS[runtime](hub_list("nvidia--Qwen3.6-35B-A3B-NVFP4_hf_quant_config.json"))
        assert matcher("mtp.layers.0.mlp.experts") is OUT
        assert matcher("mtp.fc") is OUT
        assert matcher("model.language_model.layers.0.mlp.experts") is KEPT

    def test_a_bare_layer_entry_would_swallow_its_decimal_neighbours_in_vllm(self, runtime):
        """C55: the published list plus one careless entry."""
        careless = [*hub_list("nvidia--Qwen3-235B-A22B-NVFP4_hf_quant_config.json"), "model.layers.1"]
        verdict = MATCHERS[runtime](careless)("model.layers.10.mlp.experts")
        assert verdict is (OUT if runtime == "vllm" else KEPT)
