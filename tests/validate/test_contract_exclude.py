"""Exclude lists against tensors, under both runtimes' matchers. Each test breaks one sound export's list once."""

import pytest
import torch

RUNTIMES = ("vllm", "sglang")
DOWN = "model.layers.0.mlp.down_proj"


def both(findings):
    return {(finding.runtime, finding.where) for finding in findings}


def everywhere(name):
    return {(runtime, name) for runtime in RUNTIMES}


def plain(shape):
    return torch.zeros(*shape, dtype=torch.bfloat16)


def layers(one, number, quantized=()):
    """Copies of layer 0 up to `number`, so that two-digit layers exist."""
    for layer in range(1, number):
        for name, tensor in list(one.tensors.items()):
            if name.startswith("model.layers.0."):
                one.tensors[name.replace("layers.0.", f"layers.{layer}.", 1)] = tensor
    one.config["num_hidden_layers"] = number


def test_plain_module_absent_from_the_list_is_found(export, hits):
    """C50: o_proj is BF16 and not excluded: NaN."""
    one = export("llama_nvfp4_kvfp8")
    head = "model.layers.0.self_attn.o_proj"
    one.drop(f"{head}.weight_scale", f"{head}.weight_scale_2", f"{head}.input_scale")
    one.tensors[f"{head}.weight"] = plain((64, 64))
    result = one.check(*RUNTIMES)
    assert both(hits(result, "plain-not-excluded")) == everywhere(head)
    one.folder = one.folder.with_name("listed")
    one.exclude([*one.quant["ignore"], head])
    assert one.check(*RUNTIMES).errors == ()


def test_quantized_module_in_the_list_is_found(export, hits):
    """C49: lm_head quantized and excluded: load error `lm_head.input_scale`."""
    one = export("llama_nvfp4_kvfp8")
    for part in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
        one.tensors[f"lm_head.{part}"] = one.tensors[f"{DOWN}.{part}"]
    one.exclude(["lm_head*", "model.embed_tokens"])
    assert both(hits(one.check(), "quantized-excluded")) == everywhere("lm_head")


def test_listed_layer_1_swallows_layer_10_in_vllm_only(export, hits):
    """C55: eleven layers, `model.layers.1` listed as if it were a module name."""
    one = export("llama_nvfp4_kvfp8")
    layers(one, 11)
    one.exclude([*one.quant["ignore"], "model.layers.1"])
    found = hits(one.check(), "quantized-excluded")
    swallowed = {f.where.partition(".self_attn")[0].partition(".mlp")[0] for f in found if f.where}
    assert {f.runtime for f in found} == {"vllm"}
    assert swallowed == {"model.layers.1", "model.layers.10"}
    assert "because 'model.layers.1' is a part of its name" in found[0].message


def test_router_name_swallows_gate_up_proj_in_vllm_only(export, hits):
    """C55: `mlp.gate` is a part of `mlp.gate_up_proj` where a layer has both."""
    one = export("llama_nvfp4_kvfp8")
    one.tensors["model.layers.1.mlp.gate.weight"] = plain((4, 64))
    one.exclude([*one.quant["ignore"], "model.layers.1.mlp.gate"])
    head = "model.layers.1.mlp"
    expected = {("vllm", f"{head}.gate_proj"), ("vllm", f"{head}.gate_up_proj")}
    assert both(hits(one.check(), "quantized-excluded")) == expected


def test_router_left_out_of_the_list_is_found(export, hits):
    """C52: bare `mlp.gate.weight`."""
    one = export("qwen3moe_nvfp4_experts")
    one.exclude([name for name in one.quant["ignore"] if not name.endswith("mlp.gate")])
    assert both(hits(one.check(), "plain-not-excluded")) == everywhere("model.layers.0.mlp.gate")


def test_nested_router_needs_its_own_name(export, hits):
    """C52: `router.proj` under a listed `router`: the parent's exact name does not match in SGLang."""
    one = export("qwen3moe_nvfp4_experts")
    one.rename("mlp.gate.weight", "mlp.router.proj.weight")
    one.exclude(["lm_head", "model.embed_tokens", "model.layers.0.mlp.router", "model.layers.0.self_attn*"])
    expected = {("sglang", "model.layers.0.mlp.router.proj")}
    assert both(hits(one.check(), "plain-not-excluded")) == expected


def test_half_a_fused_module_in_the_list_is_found(export, hits):
    one = export("qwen3moe_nvfp4_experts")
    names = [f"model.layers.0.self_attn.{p}_proj" for p in "qo"]
    one.exclude(["lm_head", "model.embed_tokens", "model.layers.0.mlp.gate", *names])
    result = one.check()
    assert both(hits(result, "exclude-splits-fused")) == everywhere("model.layers.0.self_attn.qkv_proj")


def test_all_parts_of_a_fused_module_in_the_list_are_enough(export):
    one = export("qwen3moe_nvfp4_experts")
    names = [f"model.layers.0.self_attn.{p}_proj" for p in "qkvo"]
    one.exclude(["lm_head", "model.embed_tokens", "model.layers.0.mlp.gate", *names])
    assert one.check(*RUNTIMES).errors == ()


def test_glob_over_the_experts_excludes_nothing(export, hits):
    """The runtimes ask about `mlp.experts`, which `*.mlp.experts.*` does not match."""
    one = export("qwen3moe_nvfp4_experts")
    for name, tensor in list(one.tensors.items()):
        if ".experts." in name and name.endswith(".weight"):
            one.tensors[name] = plain((tensor.shape[0], tensor.shape[1] * 2))
    one.drop(".weight_scale", ".weight_scale_2", ".input_scale")
    for part in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
        one.tensors[f"model.layers.0.extra.{part}"] = export("llama_nvfp4_kvfp8").tensors[f"{DOWN}.{part}"]
    one.exclude([*one.quant["ignore"], "*.mlp.experts.*"])
    assert both(hits(one.check(), "plain-not-excluded")) == everywhere("model.layers.0.mlp.experts")
    one.folder = one.folder.with_name("listed")
    one.exclude([*one.quant["ignore"][:-1], "model.layers.0.mlp.experts*"])
    assert one.check(*RUNTIMES).errors == ()


def test_experts_of_a_layer_share_one_format(export, hits):
    """A down_proj whose K does not divide was left plain, gate and up were not: no list can say so."""
    one = export("qwen3moe_nvfp4_experts")
    for name, tensor in list(one.tensors.items()):
        if name.endswith("down_proj.weight") and tensor.dtype == torch.uint8:
            one.tensors[name] = plain((tensor.shape[0], tensor.shape[1] * 2))
    one.drop("down_proj.weight_scale", "down_proj.weight_scale_2", "down_proj.input_scale")
    result = one.check(*RUNTIMES)
    assert hits(result) == {"experts-mixed-formats", "bits-per-weight"}
    assert hits(result, "experts-mixed-formats")[0].message.startswith("4 of its 12 weights are plain")


def test_embeddings_need_no_entry(export):
    """Published lists of older exports do not name embed_tokens."""
    one = export("llama_nvfp4_kvfp8")
    one.exclude(["lm_head"])
    assert one.check(*RUNTIMES).errors == ()


def test_vision_tower_left_plain_is_known_to_vllm_only(export, hits):
    """C54, C53: vLLM skips vision towers by name, SGLang wants them listed."""
    one = export("llama_nvfp4_kvfp8")
    name = "model.vision_tower.encoder.layers.0.mlp.fc1"
    one.tensors[f"{name}.weight"] = plain((64, 64))
    assert both(hits(one.check(), "plain-not-excluded")) == {("sglang", name)}


def test_names_of_a_wrapper_are_matched_as_the_checkpoint_spells_them(export, hits):
    """C53: `model.language_model.` in the tensors, `model.` in the list: nothing matches."""
    one = export("qwen3moe_nvfp4_experts")
    one.rename("model.layers", "model.language_model.layers")
    assert "plain-not-excluded" in hits(one.check())
    one.folder = one.folder.with_name("listed")
    one.exclude([name.replace("model.layers", "model.language_model.layers") for name in one.quant["ignore"]])
    assert one.check(*RUNTIMES).errors == ()


def test_absent_list_is_found(export, hits):
    one = export("llama_nvfp4_kvfp8")
    del one.quant["ignore"]
    assert "exclude-list-missing" in hits(one.check())


def test_norms_biases_and_convolutions_need_no_entry(export):
    one = export("llama_nvfp4_kvfp8")
    one.tensors["model.layers.0.mixer.conv1d.weight"] = plain((64, 1, 4))
    one.tensors["model.layers.0.mlp.down_proj.bias"] = plain((64,))
    one.tensors["model.layers.0.self_attn.sinks"] = plain((4,))
    assert one.check(*RUNTIMES).errors == ()


@pytest.mark.parametrize("kind", ["llama_nvfp4_kvfp8", "llama_mxfp4"])
def test_compressed_tensors_list_is_matched_by_name_and_expression(export, hits, to_compressed_tensors, kind):
    one = to_compressed_tensors(export(kind))
    assert hits(one.check()) == set()
    one.folder = one.folder.with_name("expression")
    one.quant["ignore"] = ["re:.*head"]
    assert hits(one.check()) == set()
    one.folder = one.folder.with_name("wrong")
    one.quant["ignore"] = ["re:head"]
    assert both(hits(one.check(), "plain-not-excluded")) == everywhere("lm_head")


def test_compressed_tensors_expression_that_takes_too_much_is_found(export, hits, to_compressed_tensors):
    """C51: one resolver for what is plain and what the list says."""
    one = to_compressed_tensors(export("llama_nvfp4_kvfp8"))
    one.quant["ignore"] = ["lm_head", "re:.*down_proj"]
    found = both(hits(one.check(), "quantized-excluded"))
    assert found == everywhere(DOWN) | everywhere("model.layers.1.mlp.down_proj")


def test_mixed_precision_needs_no_list_but_must_not_exclude_what_it_lists(export, hits):
    one = export("llama_mixed_fp8attn_nvfp4mlp")
    assert one.quant["ignore"] == []
    one.quant["ignore"] = ["model.layers.0.mlp*"]
    one.hf_quant["quantization"]["exclude_modules"] = ["model.layers.0.mlp*"]
    result = one.check()
    assert hits(result) == {"quantized-excluded"}
    assert {f.runtime for f in hits(result, "quantized-excluded")} == set(RUNTIMES)


def test_lists_are_judged_whether_or_not_a_runtime_is_declared(export, hits):
    """Both matchers always run: an output is often served by another runtime than the one it was made for."""
    one = export("llama_nvfp4_kvfp8")
    one.exclude([])
    assert both(hits(one.check(), "plain-not-excluded")) == everywhere("lm_head")
