"""Modules: parts, dtypes, shapes, experts. Each test breaks one sound export in one way."""

import pytest
import torch

DOWN = "model.layers.0.mlp.down_proj"
EXPERT = "model.layers.0.mlp.experts.3"


def test_missing_block_scale_is_an_error_although_vllm_loads_it(export, hits):
    one = export("llama_nvfp4_kvfp8")
    del one.tensors[f"{DOWN}.weight_scale"]
    assert [f.where for f in hits(one.check(), "block-scale-missing")] == [DOWN]


def test_missing_global_scale_is_an_error(export, hits):
    """C22: E4M3 scales and no second scale is a file of unknown magnitude."""
    one = export("llama_nvfp4_kvfp8")
    del one.tensors[f"{DOWN}.weight_scale_2"]
    assert [f.where for f in hits(one.check(), "global-scale-missing")] == [DOWN]


def test_packed_weight_without_any_scale_is_an_error(export, hits):
    """C20: nothing tells what the bytes are."""
    one = export("llama_nvfp4_kvfp8")
    one.drop(f"{DOWN}.weight_scale", f"{DOWN}.weight_scale_2")
    assert [f.where for f in hits(one.check(), "packed-without-scale")] == [DOWN]


def test_scales_without_their_weight_are_an_error(export, hits):
    one = export("llama_nvfp4_kvfp8")
    del one.tensors[f"{DOWN}.weight"]
    assert [f.where for f in hits(one.check(), "scale-without-weight")] == [DOWN]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_e8m0_scales_under_nvfp4_are_found_by_dtype(export, hits, dtype):
    """C18: the draft experts stayed MXFP4 and load as NVFP4 without an error."""
    one = export("llama_nvfp4_kvfp8")
    one.tensors[f"{DOWN}.weight_scale"] = one.tensors[f"{DOWN}.weight_scale"].view(torch.uint8).view(dtype)
    assert [f.where for f in hits(one.check(), "scale-is-e8m0")] == [f"{DOWN}.weight_scale"]


def test_native_mxfp4_expert_under_nvfp4_is_found(export, hits):
    """C18: one expert carries U8 [N, K/32] scales and no second scale."""
    one = export("qwen3moe_nvfp4_kvfp8")
    name = f"{EXPERT}.gate_proj"
    one.tensors[f"{name}.weight_scale"] = torch.full((48, 2), 120, dtype=torch.uint8)
    del one.tensors[f"{name}.weight_scale_2"]
    result = one.check("vllm", "sglang")
    assert name in [f.where for f in hits(result, "scale-is-e8m0")]
    assert "fused-mixed-formats" in hits(result)


def test_one_scale_per_32_is_not_nvfp4(export, hits):
    """C18: dtype E4M3 and still a group of 32."""
    one = export("llama_nvfp4_kvfp8")
    scale = one.tensors[f"{DOWN}.weight_scale"]
    one.tensors[f"{DOWN}.weight_scale"] = scale[:, : scale.shape[1] // 2]
    assert hits(one.check()) == {"scale-group-32"}


def test_swizzled_scale_plane_is_refused(export, hits):
    """C32: a kernel's 128x4 tiles leaked to disk."""
    one = export("llama_nvfp4_kvfp8")
    one.tensors[f"{DOWN}.weight_scale"] = torch.full((128, 8), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finding = hits(one.check(), "scale-swizzled")[0]
    assert finding.where == f"{DOWN}.weight_scale"
    assert "[64, 8]" in finding.message


def test_scale_plane_of_any_other_shape_is_refused(export, hits):
    one = export("llama_nvfp4_kvfp8")
    one.tensors[f"{DOWN}.weight_scale"] = one.tensors[f"{DOWN}.weight_scale"].T
    assert "scale-shape" in hits(one.check())


def test_scale_of_a_wider_dtype_is_refused(export, hits):
    one = export("llama_nvfp4_kvfp8")
    one.tensors[f"{DOWN}.weight_scale"] = one.tensors[f"{DOWN}.weight_scale"].float()
    assert "scale-dtype" in hits(one.check())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float4_e2m1fn_x2])
def test_codes_are_written_as_u8(export, hits, dtype):
    """C101, C102: F4 and I8 are left to other tools; loaders take U8."""
    one = export("llama_nvfp4_kvfp8")
    one.tensors[f"{DOWN}.weight"] = one.tensors[f"{DOWN}.weight"].view(dtype)
    assert hits(one.check()) == {"codes-dtype"}


def test_int32_tiles_of_a_runtime_are_refused(export, hits):
    """C33: an expert weight I32 [2, 4, 256] in a folder that claims NVFP4."""
    one = export("qwen3moe_nvfp4_kvfp8")
    one.tensors[f"{EXPERT}.gate_proj.weight"] = torch.zeros(2, 4, 256, dtype=torch.int32)
    assert "packed-int32" in hits(one.check())


def test_k_must_be_a_multiple_of_16(export, hits):
    """C85: K = 40; a floor division would lose the last half block."""
    one = export("llama_nvfp4_kvfp8")
    one.tensors[f"{DOWN}.weight"] = torch.zeros(64, 20, dtype=torch.uint8)
    one.tensors[f"{DOWN}.weight_scale"] = torch.full((64, 2), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finding = hits(one.check(), "k-not-multiple-of-16")[0]
    assert finding.message == "K = 40 is no multiple of 16"


def test_k_must_be_a_multiple_of_32_in_mxfp4(export, hits):
    """C85: K = 48 in MXFP4."""
    one = export("llama_mxfp4")
    one.tensors[f"{DOWN}.weight"] = torch.zeros(64, 24, dtype=torch.uint8)
    one.tensors[f"{DOWN}.weight_scale"] = torch.full((64, 1), 120, dtype=torch.uint8)
    assert "k-not-multiple-of-32" in hits(one.check())


def test_mxfp4_scale_plane_of_a_wrong_shape_is_refused(export, hits):
    one = export("llama_mxfp4")
    one.tensors[f"{DOWN}.weight_scale"] = torch.full((64, 8), 120, dtype=torch.uint8)
    assert "scale-shape" in hits(one.check())


def test_mxfp4_layouts_hold_u8_and_u8(export, hits):
    one = export("llama_mxfp4")
    one.tensors[f"{DOWN}.weight"] = one.tensors[f"{DOWN}.weight"].view(torch.int8)
    assert hits(one.check()) == {"codes-dtype"}


def test_scalars_are_zero_dimensional_in_modelopt(export, hits):
    one = export("llama_nvfp4_kvfp8")
    one.tensors[f"{DOWN}.weight_scale_2"] = one.tensors[f"{DOWN}.weight_scale_2"].reshape(1)
    assert [f.where for f in hits(one.check(), "scalar-shape")] == [f"{DOWN}.weight_scale_2"]


def test_scalars_have_one_element_in_compressed_tensors(export, hits, to_compressed_tensors):
    one = to_compressed_tensors(export("llama_nvfp4_kvfp8"))
    name = f"{DOWN}.weight_global_scale"
    one.tensors[name] = one.tensors[name].reshape(())
    assert [f.where for f in hits(one.check(), "scalar-shape")] == [name]


def test_scalars_are_f32(export, hits):
    one = export("llama_nvfp4_kvfp8")
    one.tensors[f"{DOWN}.input_scale"] = one.tensors[f"{DOWN}.input_scale"].bfloat16()
    assert [f.where for f in hits(one.check(), "scalar-dtype")] == [f"{DOWN}.input_scale"]


def test_stacked_experts_may_carry_one_scalar_or_one_per_expert(export, hits):
    """C82: fused exports exist in both forms."""
    one = export("gptoss_nvfp4_cast")
    name = "model.layers.0.mlp.experts.down_proj_weight_scale_2"
    one.tensors[name] = one.tensors[name].repeat(4)
    assert one.check().errors == ()
    other = export("gptoss_nvfp4_cast")
    other.folder = other.folder.with_name("other")
    other.tensors[name] = other.tensors[name].repeat(3)
    assert hits(other.check()) == {"scalar-shape"}


def test_names_of_two_dialects_in_one_module_are_refused(export, hits):
    """C31: weight_scale_2 multiplies, weight_global_scale divides."""
    one = export("llama_nvfp4_kvfp8")
    one.tensors[f"{DOWN}.weight_packed"] = one.tensors.pop(f"{DOWN}.weight")
    assert "mixed-dialect" in hits(one.check())


@pytest.mark.parametrize("part", ["weight_scale_inv", "scale"])
def test_leftover_scale_of_the_source_is_refused(export, hits, part):
    """C61: a converted module still carries the source's scale."""
    one = export("llama_nvfp4_kvfp8")
    one.tensors[f"{DOWN}.{part}"] = torch.full((64, 4), 120, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert [f.where for f in hits(one.check(), "leftover-source-scale")] == [f"{DOWN}.{part}"]


def test_plain_module_with_a_scale_is_refused(export, hits):
    """C49: an excluded module has a plain weight and nothing else."""
    one = export("llama_nvfp4_kvfp8")
    one.tensors["lm_head.input_scale"] = torch.tensor(1.0)
    assert [f.where for f in hits(one.check(), "leftover-source-scale")] == ["lm_head.input_scale"]


def test_fp8_weight_without_a_scale_is_refused(export, hits):
    """C20: raw FP8 values are thousands of times too large."""
    one = export("llama_mixed_fp8attn_nvfp4mlp")
    del one.tensors["model.layers.0.self_attn.o_proj.weight_scale"]
    assert [f.where for f in hits(one.check(), "fp8-scale-missing")] == ["model.layers.0.self_attn.o_proj"]


def test_fp8_block_grid_is_ceil_divided(deepseek_v4, hits):
    """C87: [200, 130] in blocks of 128 needs a [2, 2] grid."""
    good = deepseek_v4()
    assert good.check().errors == ()
    bad = deepseek_v4()
    bad.folder = bad.folder.with_name("bad")
    bad.tensors["layers.0.attn.wq_a.scale"] = (
        bad.tensors["layers.0.attn.wq_a.scale"].view(torch.uint8)[:1].view(torch.float8_e8m0fnu)
    )
    assert "[2, 2]" in hits(bad.check(), "fp8-scale-shape")[0].message


def test_expert_without_input_scale_is_found(export, hits):
    """C43: experts 0..2 carry input_scale, expert 3 was never routed to."""
    one = export("qwen3moe_nvfp4_kvfp8")
    one.drop(f"{EXPERT}.gate_proj.input_scale")
    finding = hits(one.check(), "expert-keys-differ")[0]
    assert finding.where == "model.layers.0.mlp.experts.3"
    assert "gate_proj.input_scale" in finding.message


def test_absent_expert_is_found(export, hits):
    one = export("qwen3moe_nvfp4_kvfp8")
    one.tensors = {name: t for name, t in one.tensors.items() if ".experts.1." not in name}
    assert "experts 1 are missing" in hits(one.check(), "expert-missing")[0].message


def test_number_of_experts_agrees_with_the_config(export, hits):
    one = export("qwen3moe_nvfp4_kvfp8")
    one.tensors = {name: t for name, t in one.tensors.items() if ".experts.3." not in name}
    assert hits(one.check(), "expert-count")[0].message == "3 experts, the config says 4"


def test_experts_without_a_gate_are_complete_too(export):
    """C78: non-gated MoE has up and down only."""
    one = export("qwen3moe_nvfp4_kvfp8")
    one.tensors = {name: t for name, t in one.tensors.items() if not (".experts." in name and "gate_proj" in name)}
    assert one.check("vllm", "sglang").errors == ()


def test_shared_experts_are_no_routed_experts(export):
    """C77: `shared_experts.` has no index and no siblings."""
    one = export("qwen3moe_nvfp4_kvfp8")
    for name, tensor in list(one.tensors.items()):
        if ".experts.0." in name:
            one.tensors[name.replace(".experts.0.", ".shared_experts.")] = tensor
    assert one.check("vllm", "sglang").errors == ()


def test_stacked_experts_left_plain_are_called_out(export, hits):
    """C79: 46 GB instead of 16, because only nn.Linear was quantized."""
    one = export("qwen3moe_nvfp4_kvfp8")
    one.tensors = {name: t for name, t in one.tensors.items() if ".experts." not in name}
    one.tensors["model.layers.0.mlp.experts.gate_up_proj"] = torch.zeros(4, 128, 64, dtype=torch.bfloat16)
    one.tensors["model.layers.0.mlp.experts.down_proj"] = torch.zeros(4, 64, 64, dtype=torch.bfloat16)
    result = one.check("vllm")
    assert {"bits-per-weight", "plain-not-excluded"} <= hits(result)
    assert result.data["bits_per_weight"] > 10
    assert len(hits(result, "stacked-experts-left-plain")) == 2


def test_dimensions_come_from_the_tensors(export):
    """C34: three experts, hidden 96, intermediate 32 are as good as 2880."""
    one = export("gptoss_nvfp4_cast")
    tensors = {}
    for name, tensor in one.tensors.items():
        for part, (k, n) in (("gate_up_proj", (96, 64)), ("down_proj", (32, 96))):
            if name.endswith(part):
                tensors[name] = torch.zeros(3, k // 2, n, dtype=torch.uint8)
            elif name.endswith(f"{part}_weight_scale"):
                tensors[name] = torch.full((3, k // 16, n), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
        tensors.setdefault(name, tensor)
    one.tensors = tensors
    assert one.check().errors == ()
