"""Metadata: the two files, algorithms, activations, KV, MTP, tied heads. Each test breaks one sound export once."""

import copy

import pytest
import torch

DOWN = "model.layers.0.mlp.down_proj"


def test_packed_weights_without_any_config_are_refused(export, hits):
    """C62: 3,528 scale tensors dropped without a word."""
    one = export("llama_nvfp4_kvfp8")
    del one.config["quantization_config"]
    one.hf_quant = None
    finding = hits(one.check(), "quantization-config-missing")[0]
    assert "model.layers.0.mlp.down_proj.weight U8[64, 64]" in finding.message


def test_config_only_in_hf_quant_config_is_refused(export, hits):
    """C60: SGLang and transformers read config.json."""
    one = export("llama_nvfp4_kvfp8")
    del one.config["quantization_config"]
    assert hits(one.check()) == {"quantization-config-one-sided"}


def test_config_only_in_config_json_is_a_warning(export, hits):
    one = export("llama_nvfp4_kvfp8")
    one.hf_quant = None
    result = one.check("vllm", "sglang")
    assert result.errors == ()
    assert len(hits(result, "hf-quant-config-missing", "warning")) == 1


@pytest.mark.parametrize(
    ("key", "value", "where"),
    [
        ("quant_algo", "FP8", "quant_algo"),
        ("kv_cache_quant_algo", None, "kv cache"),
        ("group_size", 32, "group_size"),
        ("exclude_modules", ["lm_head"], "exclude list"),
        ("quantized_layers", {"a": {"quant_algo": "NVFP4"}}, "quantized_layers"),
    ],
)
def test_the_two_files_say_the_same(export, hits, key, value, where):
    """C60: each fact, changed in hf_quant_config.json only."""
    one = export("llama_nvfp4_kvfp8")
    one.hf_quant["quantization"][key] = value
    assert [f.where for f in hits(one.check(), "metadata-disagree")] == [where]


def test_the_two_files_name_the_same_producer(export, hits):
    one = export("llama_nvfp4_kvfp8")
    one.hf_quant["producer"]["name"] = "someone"
    assert [f.where for f in hits(one.check(), "metadata-disagree")] == ["producer"]


def test_hf_quant_config_of_modelopt_beside_compressed_tensors_is_refused(export, hits, to_compressed_tensors):
    one = export("llama_nvfp4_kvfp8")
    hf_quant = one.hf_quant
    to_compressed_tensors(one).hf_quant = hf_quant
    assert "metadata-disagree" in hits(one.check())


def test_nested_copy_that_contradicts_is_refused(export, hits):
    """C65, C66: the source's quantization_config stayed under text_config."""
    one = export("llama_nvfp4_kvfp8")
    one.config["text_config"] = {"quantization_config": {"quant_method": "compressed-tensors", "format": "x"}}
    assert [f.where for f in hits(one.check(), "quantization-config-conflict")] == ["text_config.quantization_config"]


def test_nested_copy_that_agrees_is_a_warning(export, hits):
    """C65: twice is once too often, but not wrong."""
    one = export("llama_nvfp4_kvfp8")
    one.config["text_config"] = {"quantization_config": copy.deepcopy(one.quant)}
    result = one.check()
    assert result.errors == ()
    assert len(hits(result, "quantization-config-twice", "warning")) == 1


def test_config_under_text_config_only_is_refused(export, hits):
    """C65: wrappers are asked at the top level."""
    one = export("llama_nvfp4_kvfp8")
    one.config["text_config"] = {"quantization_config": one.config.pop("quantization_config")}
    one.hf_quant = None
    assert [f.where for f in hits(one.check(), "quantization-config-nested")] == ["text_config.quantization_config"]


@pytest.mark.parametrize("nested", [False, True])
def test_bf16_output_does_not_say_quantized(export, hits, nested):
    """C66: a leftover key of the MXFP4 source."""
    one = export("_src_llama_bf16")
    leftover = {"quant_method": "mxfp4"}
    one.config.update(
        {"text_config": {"quantization_config": leftover}} if nested else {"quantization_config": leftover}
    )
    assert hits(one.check()) == {"leftover-quantization-config"}


def test_bf16_output_has_no_hf_quant_config(export, hits):
    one = export("_src_llama_bf16")
    one.hf_quant = {"quantization": {"quant_algo": "NVFP4"}}
    assert hits(one.check()) == {"leftover-quantization-config"}


def test_quantization_config_that_is_no_object_is_named(export, hits):
    one = export("llama_nvfp4_kvfp8")
    one.config["quantization_config"] = "nvfp4"
    assert "quantization-config-malformed" in hits(one.check())


def test_unknown_model_types_and_absent_architectures_are_fine(export):
    """C68: files are judged without the model's code."""
    one = export("llama_nvfp4_kvfp8")
    one.config.update(model_type="zzz_v9", architectures=None)
    assert one.check("vllm", "sglang").errors == ()


def test_fp8_under_an_nvfp4_config_is_refused(export, hits):
    """C80: the weights were never packed."""
    one = export("llama_nvfp4_kvfp8")
    one.drop(f"{DOWN}.weight_scale_2")
    one.tensors[f"{DOWN}.weight"] = torch.zeros(64, 128, dtype=torch.uint8).view(torch.float8_e4m3fn)
    one.tensors[f"{DOWN}.weight_scale"] = torch.tensor(0.01)
    finding = hits(one.check(), "declared-algo-mismatch")[0]
    assert (finding.where, finding.message) == (DOWN, "is fp8 and declared nvfp4")


def test_nvfp4_under_an_mxfp4_config_is_refused(export, hits):
    one = export("llama_nvfp4_kvfp8")
    one.declare("mxfp4")
    assert "declared-algo-mismatch" in hits(one.check())


def test_group_size_belongs_to_the_format(export, hits):
    one = export("llama_nvfp4_kvfp8")
    one.quant["config_groups"]["group_0"]["weights"]["group_size"] = 32
    one.hf_quant["quantization"]["group_size"] = 32
    assert hits(one.check()) == {"group-size"}


def test_mixed_map_lists_every_quantized_module(export, hits):
    one = export("llama_mixed_fp8attn_nvfp4mlp")
    for layers in (one.quant["quantized_layers"], one.hf_quant["quantization"]["quantized_layers"]):
        del layers[DOWN]
    assert [f.where for f in hits(one.check(), "quantized-not-listed")] == [DOWN]


def test_mixed_map_lists_nothing_else(export, hits):
    one = export("llama_mixed_fp8attn_nvfp4mlp")
    for layers in (one.quant["quantized_layers"], one.hf_quant["quantization"]["quantized_layers"]):
        layers["lm_head"] = {"quant_algo": "FP8"}
    assert [f.where for f in hits(one.check(), "listed-not-quantized")] == ["lm_head"]


def test_mixed_map_gives_each_module_its_format(export, hits):
    one = export("llama_mixed_fp8attn_nvfp4mlp")
    for layers in (one.quant["quantized_layers"], one.hf_quant["quantization"]["quantized_layers"]):
        layers[DOWN] = {"quant_algo": "FP8"}
    assert hits(one.check(), "declared-algo-mismatch")[0].message == "is nvfp4 and declared fp8"


def test_mixed_precision_of_one_format_is_a_warning(export, hits):
    """C58: runtimes choose slower kernels for MIXED_PRECISION."""
    one = export("llama_nvfp4_kvfp8")
    layers = {
        name.removesuffix(".weight_scale_2"): {"quant_algo": "NVFP4"} for name in one.tensors if "scale_2" in name
    }
    one.declare("MIXED_PRECISION")
    one.quant["quantized_layers"] = one.hf_quant["quantization"]["quantized_layers"] = layers
    result = one.check()
    assert result.errors == ()
    assert len(hits(result, "mixed-precision-uniform", "warning")) == 1


def test_w4a4_without_input_scales_is_refused(export, hits):
    """C44, C45: vLLM folds an uninitialised scale into every expert."""
    one = export("qwen3moe_nvfp4_experts")
    number = one.drop(".input_scale")
    result = one.check()
    assert hits(result) == {"input-scale-missing"}
    assert result.data["rules"]["input-scale-missing"] == number


def test_weight_only_output_has_no_input_scales(export, hits):
    """C45: declared W4A16, and still an input scale."""
    one = export("llama_w4a16_nvfp4")
    one.tensors[f"{DOWN}.input_scale"] = torch.tensor(1.0)
    assert [f.where for f in hits(one.check(), "w4a16-has-input-scale")] == [f"{DOWN}.input_scale"]


def test_weight_only_output_is_called_w4a16(export, hits):
    """C44: quant_algo NVFP4 with no input_activations."""
    one = export("llama_w4a16_nvfp4")
    one.declare("NVFP4")
    assert "w4a16-not-declared" in hits(one.check())


def test_w4a16_does_not_quantize_activations(export, hits):
    one = export("llama_w4a16_nvfp4")
    group = one.quant["config_groups"]["group_0"]
    group["input_activations"] = dict(group["weights"])
    assert hits(one.check()) == {"w4a16-not-declared"}


@pytest.mark.parametrize("activations", [True, False])
def test_compressed_tensors_agrees_with_its_input_scales(export, hits, to_compressed_tensors, activations):
    """C44: `input_activations: null` if and only if there are no input scales."""
    good = to_compressed_tensors(export("llama_nvfp4_kvfp8"), activations=activations)
    assert good.check("vllm", "sglang", "transformers").errors == ()
    bad = to_compressed_tensors(export("llama_nvfp4_kvfp8"), activations=activations)
    bad.folder = bad.folder.with_name("bad")
    group = bad.quant["config_groups"]["group_0"]
    group["input_activations"] = None if activations else dict(group["weights"])
    assert hits(bad.check()) == {"w4a16-has-input-scale" if activations else "input-scale-missing"}


def test_declared_kv_format_needs_scales(export, hits):
    """C60: runtimes would use 1.0."""
    one = export("llama_nvfp4_kvfp8")
    one.drop(".k_scale", ".v_scale")
    assert hits(one.check()) == {"kv-scales-missing"}


def test_kv_scales_need_a_declared_format(export, hits):
    one = export("llama_nvfp4_kvfp8")
    del one.quant["kv_cache_scheme"]
    one.hf_quant["quantization"]["kv_cache_quant_algo"] = None
    assert hits(one.check()) == {"kv-scales-undeclared"}


def test_kv_scales_come_in_pairs(export, hits):
    one = export("llama_nvfp4_kvfp8")
    one.drop("layers.1.self_attn.v_proj.v_scale")
    assert hits(one.check(), "kv-scales-unpaired")[0].message == "2 k_scale and 1 v_scale"


def test_kv_scales_of_one_are_a_warning(export, hits):
    """C128: were they calibrated at all?"""
    one = export("llama_nvfp4_kvfp8")
    for name in [n for n in one.tensors if n.endswith(("k_scale", "v_scale"))]:
        one.scalar(name, 1.0)
    result = one.check()
    assert result.errors == ()
    assert result.data["kv_scales"] == 4
    assert len(hits(result, "kv-scales-all-one", "warning")) == 1


@pytest.mark.parametrize(("head", "known"), [("self_attn.attn", True), ("self_attn.cache", False)])
def test_kv_scales_have_names_that_loaders_remap(export, hits, head, known):
    """C128: k_proj.k_scale and attn.k_scale are known."""
    one = export("llama_nvfp4_kvfp8")
    one.rename("self_attn.k_proj.k_scale", f"{head}.k_scale")
    one.rename("self_attn.v_proj.v_scale", f"{head}.v_scale")
    result = one.check()
    assert result.errors == ()
    assert len(hits(result, "kv-scale-name")) == (0 if known else 4)


def test_promised_mtp_layers_are_there(export, hits):
    """C72: num_nextn_predict_layers is 1 and no tensor of such a layer exists."""
    one = export("llama_nvfp4_kvfp8")
    one.config["num_nextn_predict_layers"] = 1
    assert [f.severity for f in hits(one.check(), "mtp-declared-absent")] == ["warning"]


@pytest.mark.parametrize("name", ["mtp.0.e_proj.weight", "model.layers.2.eh_proj.weight"])
def test_mtp_layers_are_recognised_by_name_and_by_layer_index(export, hits, name):
    """C69: `mtp.*`, or a layer past num_hidden_layers."""
    one = export("llama_nvfp4_kvfp8")
    one.config["num_nextn_predict_layers"] = 1
    one.tensors[name] = torch.zeros(64, 64, dtype=torch.bfloat16)
    one.exclude([*one.quant["ignore"], name.removesuffix(".weight")])
    assert hits(one.check("vllm", "sglang"), "mtp-declared-absent") == []
    del one.config["num_nextn_predict_layers"]
    one.folder = one.folder.with_name("undeclared")
    assert [f.severity for f in hits(one.check(), "mtp-undeclared")] == ["info"]


@pytest.mark.parametrize("module", ["lm_head", "model.embed_tokens"])
def test_tied_head_stays_plain(export, hits, module):
    """C73: one of the two would be wrong."""
    one = export("llama_nvfp4_kvfp8")
    one.config["tie_word_embeddings"] = True
    for part in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
        one.tensors[f"{module}.{part}"] = one.tensors[f"{DOWN}.{part}"]
    one.exclude([name for name in one.quant["ignore"] if name != module])
    assert [f.where for f in hits(one.check(), "tied-head-quantized")] == [module]


def test_tied_head_may_be_absent_and_an_untied_one_may_not(export, hits):
    """C73: missing lm_head."""
    one = export("llama_nvfp4_kvfp8")
    one.drop("lm_head.weight")
    one.config["tie_word_embeddings"] = True
    assert one.check("vllm", "sglang").errors == ()
    other = export("llama_nvfp4_kvfp8")
    other.folder = other.folder.with_name("other")
    other.drop("lm_head.weight")
    assert hits(other.check()) == {"lm-head-missing"}


def test_tied_head_without_a_tensor_must_be_excluded(export, hits):
    """C73's other half: transformers builds the tied head as FP4, and finds no weight, unless the list names it."""
    one = export("llama_nvfp4_kvfp8")
    one.drop("lm_head.weight")
    one.config["tie_word_embeddings"] = True
    one.exclude(["model.embed_tokens"])
    assert hits(one.check()) == {"tied-head-not-excluded"}


def test_padded_planes_show_in_the_bits_per_weight(export, hits):
    """C79: 4.5 within 0.1 over everything declared NVFP4."""
    one = export("llama_nvfp4_kvfp8")
    for name in [n for n in one.tensors if n.endswith("weight_scale")]:
        rows, columns = one.tensors[name].shape
        padded = torch.full((rows, columns * 4), 0x38, dtype=torch.uint8)
        one.tensors[name] = padded.view(torch.float8_e4m3fn)
    result = one.check()
    assert "bits-per-weight" in hits(result)
    assert result.data["bits_per_weight"] == 6.0
