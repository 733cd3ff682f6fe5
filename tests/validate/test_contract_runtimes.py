"""What each runtime's loader would do with a layout: simulated, or said to be unverified."""

import copy

import pytest
import torch
from requant.validate.output_view import aliases

RUNTIMES = ("vllm", "sglang", "trtllm", "transformers")


def test_tensorrt_llm_is_unverified_and_never_ok(export, hits):
    result = export("llama_nvfp4_kvfp8").check("trtllm")
    assert result.data["runtimes"] == {"trtllm": "unverified"}
    assert [f.severity for f in hits(result, "runtime-unverified")] == ["info"]


def test_tensorrt_llm_is_warned_of_quantized_layers(export, hits):
    """C59: it has refused that key."""
    result = export("llama_mixed_fp8attn_nvfp4mlp").check("trtllm")
    assert [f.severity for f in hits(result, "trtllm-quantized-layers")] == ["warning"]


def test_plain_output_is_fine_everywhere_but_unverified_in_tensorrt_llm(export):
    data = export("_src_llama_bf16").check(*RUNTIMES).data
    assert data["runtimes"] == dict.fromkeys(RUNTIMES, "simulated: ok") | {"trtllm": "unverified"}


def test_modelopt_layout_is_refused_for_transformers(export, hits):
    assert hits(export("llama_nvfp4_kvfp8").check("transformers")) == {"transformers-modelopt"}


def test_dense_compressed_tensors_is_fine_for_transformers(export, to_compressed_tensors):
    result = to_compressed_tensors(export("llama_nvfp4_kvfp8")).check("transformers", "vllm", "sglang")
    assert result.data["runtimes"] == dict.fromkeys(("transformers", "vllm", "sglang"), "simulated: ok")


def test_compressed_tensors_experts_are_refused_for_transformers(export, hits, to_compressed_tensors):
    """transformers fuses the experts and drops the global scale without a word."""
    result = to_compressed_tensors(export("qwen3moe_nvfp4_kvfp8")).check("transformers", "vllm")
    assert hits(result) == {"transformers-moe-global-scale"}
    assert result.data["runtimes"] == {"transformers": "simulated: would fail", "vllm": "simulated: ok"}


@pytest.mark.parametrize("runtimes", [(), ("vllm",)])
@pytest.mark.parametrize(("golden", "said"), [("qwen3moe_nvfp4_kvfp8", ["warning"]), ("llama_nvfp4_kvfp8", [])])
def test_whoever_does_not_declare_transformers_is_warned_about_experts(
    export, hits, to_compressed_tensors, golden, said, runtimes
):
    result = to_compressed_tensors(export(golden)).check(*runtimes)
    assert [finding.severity for finding in hits(result, "transformers-moe-global-scale")] == said
    assert result.errors == ()


def test_compressed_tensors_mxfp4_is_sound(export, to_compressed_tensors):
    result = to_compressed_tensors(export("llama_mxfp4")).check("vllm", "sglang", "transformers")
    assert result.errors == ()
    expected = {"vllm": "simulated: ok", "sglang": "unverified", "transformers": "unverified"}
    assert result.data["runtimes"] == expected


def test_weight_only_nvfp4_is_unverified_in_sglang(export):
    data = export("llama_w4a16_nvfp4").check("vllm", "sglang").data
    assert data["runtimes"] == {"vllm": "simulated: ok", "sglang": "unverified"}


def test_vllm_does_not_read_an_nvfp4_kv_scheme(export, hits):
    one = export("llama_nvfp4_kvnvfp4")
    assert [f.severity for f in hits(one.check("vllm"), "kv-scheme-ignored")] == ["warning"]
    assert hits(one.check("sglang"), "kv-scheme-ignored") == []


@pytest.mark.parametrize("key", ["group_size", "kv_cache_quant_algo", "exclude_modules"])
def test_vllm_requires_three_keys_of_the_nested_form(export, hits, key):
    one = export("llama_nvfp4_kvfp8")
    del one.hf_quant["quantization"][key]
    finding = hits(one.check("vllm"), "nested-keys-missing")[0]
    assert key in finding.message


@pytest.mark.parametrize(("name", "fine"), [("modelopt", True), ("modelopt-like", True), ("requant", False)])
def test_sglang_checks_the_producer(export, hits, name, fine):
    one = export("llama_nvfp4_kvfp8")
    one.quant["producer"]["name"] = one.hf_quant["producer"]["name"] = name
    assert bool(hits(one.check("sglang"), "sglang-producer")) is not fine


def test_sglang_needs_a_group_size_in_config_json(export, hits):
    one = export("llama_nvfp4_kvfp8")
    del one.quant["config_groups"]["group_0"]["weights"]["group_size"]
    assert hits(one.check("sglang")) == {"sglang-group-size"}


def test_gpt_oss_layouts_are_refused_where_a_runtime_is_named(export, hits):
    """C23: neither runtime maps the stacked names."""
    one = export("gptoss_nvfp4_cast")
    result = one.check("vllm", "sglang", "trtllm")
    assert {f.runtime for f in hits(result, "gpt-oss-layout-unloadable", "error")} == {"vllm", "sglang", "trtllm"}
    assert [f.severity for f in hits(one.check(), "gpt-oss-layout-unloadable")] == ["info"]


def test_gpt_oss_per_expert_layout_is_refused_too(export, hits):
    one = export("qwen3moe_nvfp4_kvfp8")
    one.config["model_type"] = "gpt_oss"
    assert hits(one.check("vllm")) == {"gpt-oss-layout-unloadable"}


class TestDeepSeekV4Hybrid:
    """The published hybrid: quant_method fp8, NVFP4 experts, FP8 rest, MXFP4 draft experts."""

    def test_the_published_form_passes(self, deepseek_v4):
        result = deepseek_v4().check("vllm", "sglang", "trtllm", "transformers")
        assert result.errors == ()
        assert result.data["bits_per_weight"] == 4.5
        assert result.data["runtimes"] == {
            "vllm": "simulated: ok",
            "sglang": "simulated: ok",
            "trtllm": "unverified",
            "transformers": "unverified",
        }

    @pytest.mark.parametrize("key", ["moe_quant_algo", "group_size", "quantized_layers"])
    def test_every_key_stands_in_config_json(self, deepseek_v4, hits, key):
        one = deepseek_v4()
        del one.quant[key]
        assert "hybrid-keys-missing" in hits(one.check())

    def test_hf_quant_config_alone_is_not_enough(self, deepseek_v4, hits):
        one = deepseek_v4()
        for key in ("quant_algo", "moe_quant_algo", "group_size", "quantized_layers", "config_groups", "ignore"):
            del one.quant[key]
        result = one.check("sglang")
        assert "dialect-unknown" in hits(result)
        assert result.data["runtimes"]["sglang"] == "simulated: would fail"

    def test_algorithm_of_the_experts_is_nvfp4(self, deepseek_v4, hits):
        one = deepseek_v4()
        one.quant["moe_quant_algo"] = "W4A16_NVFP4"
        assert "hybrid-keys-missing" in hits(one.check())

    def test_expert_that_stayed_mxfp4_is_found(self, deepseek_v4, hits):
        """C18: one expert of the main model was skipped."""
        one = deepseek_v4()
        name = "layers.0.ffn.experts.1.w2"
        one.drop(f"{name}.weight_scale_2", f"{name}.input_scale")
        one.tensors[f"{name}.weight_scale"] = torch.full((64, 1), 120, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        assert name in {f.where for f in hits(one.check(), "scale-is-e8m0")}

    def test_mtp_experts_stay_mxfp4(self, deepseek_v4, hits):
        """C70: a transcoded draft block loses its acceptance rate; it is in no list either."""
        one = deepseek_v4()
        for name in [n for n in one.tensors if n.startswith("mtp.")]:
            del one.tensors[name]
        for name, tensor in list(one.tensors.items()):
            if name.startswith("layers.0.ffn.experts."):
                one.tensors[name.replace("layers.0", "mtp.0")] = tensor
        assert hits(one.check(), "declared-algo-mismatch")[0].where.startswith("mtp.0.ffn.experts.")

    def test_vllm_is_known_to_build_the_draft_from_the_targets_format(self, deepseek_v4, hits):
        """C71, C18: warned of, because without speculative decoding nothing is wrong."""
        one = deepseek_v4()
        assert [f.severity for f in hits(one.check("vllm"), "mtp-draft-inherits-target")] == ["warning"]
        assert hits(one.check("sglang"), "mtp-draft-inherits-target") == []

    def test_unconverted_layer_is_not_listed(self, deepseek_v4, hits):
        one = deepseek_v4()
        for layers in (one.quant["quantized_layers"], one.hf_quant["quantization"]["quantized_layers"]):
            layers["layers.1.ffn.experts"] = {"quant_algo": "NVFP4", "group_size": 16}
        assert [f.where for f in hits(one.check(), "listed-not-quantized")] == ["layers.1.ffn.experts"]

    def test_its_ignore_list_is_exempt(self, deepseek_v4):
        """The four published globs match neither the router nor the embedding, and need not."""
        one = deepseek_v4()
        one.quant["ignore"] = one.hf_quant["quantization"]["exclude_modules"] = []
        assert one.check("vllm", "sglang").errors == ()


class TestKimiK3:
    """modelopt_mixed: no published example exists, so that every runtime is unverified."""

    def build(self, export, names=aliases):
        one = export("qwen3moe_nvfp4_experts")
        one.rename("model.layers.0.mlp.experts", "language_model.model.layers.0.block_sparse_moe.experts")
        one.rename("model.layers.0.mlp.gate", "language_model.model.layers.0.block_sparse_moe.gate")
        one.rename("model.layers", "language_model.model.layers")
        one.rename("language_model.language_model", "language_model")
        parent = "language_model.model.layers.0.block_sparse_moe.experts"
        layers = {name: {"quant_algo": "NVFP4", "group_size": 16} for name in names(parent)}
        one.quant.update(
            quant_method="modelopt_mixed", quant_algo="MIXED_PRECISION", quantized_layers=layers, ignore=[]
        )
        one.quant.pop("config_groups")
        one.hf_quant["quantization"].update(
            quant_algo="MIXED_PRECISION", quantized_layers=copy.deepcopy(layers), exclude_modules=[]
        )
        return one

    def test_it_is_unverified(self, export):
        result = self.build(export).check("vllm", "sglang")
        assert result.errors == ()
        assert result.data["runtimes"] == {"vllm": "unverified", "sglang": "unverified"}

    def test_six_aliases(self):
        names = aliases("language_model.model.layers.3.block_sparse_moe.experts")
        expected = {
            f"{prefix}layers.3.{block}.experts"
            for prefix in ("language_model.model.", "model.", "")
            for block in ("block_sparse_moe", "mlp")
        }
        assert set(names) == expected

    def test_missing_alias_is_a_warning(self, export, hits):
        result = self.build(export, names=lambda parent: [parent]).check()
        assert result.errors == ()
        assert len(hits(result, "mixed-alias-missing", "warning")) == 1

    def test_unlisted_experts_are_found(self, export, hits):
        result = self.build(export, names=lambda parent: ["somewhere.else"]).check()
        assert "quantized-not-listed" in hits(result)

    def test_quantization_config_of_the_text_part_is_gone(self, export, hits):
        one = self.build(export)
        one.config["text_config"] = {"quantization_config": {"quant_method": "compressed-tensors"}}
        assert "quantization-config-conflict" in hits(one.check())


@pytest.mark.parametrize(
    ("width", "groups", "cutlass"),
    [
        (1856, {1: True, 2: True, 4: True, 8: False}, {1: True, 2: False, 4: False, 8: False}),
        (704, {1: True, 2: True, 4: True, 8: False}, {1: True, 2: False, 4: False, 8: False}),
        (640, {1: True, 2: True, 4: True, 8: True}, {1: True, 2: True, 4: False, 8: False}),
        (2880, {1: True, 2: True, 4: True, 8: False}, {1: True, 2: False, 4: False, 8: False}),
        (2048, {1: True, 2: True, 4: True, 8: True}, {1: True, 2: True, 4: True, 8: True}),
    ],
)
def test_tensor_parallel_degrees_that_split_16_groups(export, hits, width, groups, cutlass):
    """C83: 1856 / 8 = 232 is no multiple of 16; flashinfer's kernels want (2I/TP) % 128 == 0."""
    one = export("qwen3moe_nvfp4_experts")
    for name in list(one.tensors):
        if name.endswith("down_proj.weight"):
            one.tensors[name] = torch.zeros(64, width // 2, dtype=torch.uint8)
        elif name.endswith("down_proj.weight_scale"):
            scale = torch.full((64, width // 16), 0x38, dtype=torch.uint8)
            one.tensors[name] = scale.view(torch.float8_e4m3fn)
    result = one.check("sglang")
    table = result.data["tensor_parallel"]
    assert result.errors == ()
    assert {int(tp): row["expert_groups_ok"] for tp, row in table.items()} == groups
    assert {int(tp): row["cutlass_moe_ok"] for tp, row in table.items()} == cutlass
    assert {int(tp): row["row_parallel_ok"] for tp, row in table.items()} == groups
    assert len(hits(result, "tensor-parallel-splits-groups", "warning")) == list(groups.values()).count(False)


def test_unaligned_experts_are_a_warning_for_sglang(export, hits):
    """qwen3moe golden: I = 48, 2*I = 96."""
    assert len(hits(export("qwen3moe_nvfp4_experts").check("sglang"), "cutlass-moe-alignment", "warning")) == 1
    assert hits(export("qwen3moe_nvfp4_experts").check("vllm"), "cutlass-moe-alignment") == []
