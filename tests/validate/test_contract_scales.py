"""Values: block scales, scalars, fused groups. Each test breaks one sound export in one byte or one number."""

import math

import pytest
import torch
from requant.validate.contract_scales import check_scales
from requant.validate.opened import Tensor

DOWN = "model.layers.0.mlp.down_proj"
SCALE = f"{DOWN}.weight_scale"


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_one_nan_byte_is_found(export, hits, byte):
    """C01: a handful of NaN bytes poison the whole model."""
    one = export("llama_nvfp4_kvfp8")
    one.byte(SCALE, byte, index=37)
    finding = hits(one.check(), "scale-nan")[0]
    assert (finding.where, finding.message) == (SCALE, "1 block scales are NaN (0x7F or 0xFF)")


@pytest.mark.parametrize("byte", [0x80, 0x81, 0xFE])
def test_negative_scale_is_found(export, hits, byte):
    one = export("llama_nvfp4_kvfp8")
    one.byte(SCALE, byte)
    assert [f.where for f in hits(one.check(), "scale-negative")] == [SCALE]
    assert "scale-nan" not in hits(one.check())


def test_e8m0_bytes_labelled_e4m3_are_found(export, hits):
    """C18: E8M0 bytes 118 to 130 read as E4M3 are large, NaN or negative."""
    one = export("llama_nvfp4_kvfp8")
    count = one.tensors[SCALE].numel()
    e8m0 = (118 + torch.arange(count, dtype=torch.int64) % 13).to(torch.uint8)
    one.tensors[SCALE] = e8m0.reshape(one.tensors[SCALE].shape).view(torch.float8_e4m3fn)
    result = one.check()
    assert {"scale-nan", "scale-negative"} <= hits(result)
    assert hits(result, "scale-negative")[0].hint == "are these E8M0 bytes of an MXFP4 source?"


@pytest.mark.parametrize("byte", [0x01, 0x08, 0x7E])
def test_smallest_and_largest_scales_are_legal(export, hits, byte):
    one = export("llama_nvfp4_kvfp8")
    one.byte(SCALE, byte)
    assert hits(one.check()) == set()


def test_zero_scale_over_live_codes_is_found(export, hits):
    """C03: those sixteen weights became zero."""
    one = export("llama_nvfp4_kvfp8")
    one.byte(SCALE, 0, index=9)  # row 1, block 1 of [64, 8]
    finding = hits(one.check(), "scale-zero-over-live-codes")[0]
    assert finding.message == "1 block scales are 0 over nonzero codes: those weights became 0"


@pytest.mark.parametrize("zero", [0x00, 0x88, 0x08, 0x80])
def test_zero_scale_over_zero_codes_is_legal(export, hits, zero):
    """C03: codes 0x0 and 0x8 are both zeros."""
    one = export("llama_nvfp4_kvfp8")
    one.byte(SCALE, 0, index=9)
    for byte in range(8):
        one.byte(f"{DOWN}.weight", zero, index=64 + 8 + byte)  # row 1 of [64, 64], block 1
    assert hits(one.check()) == set()


def test_zero_scale_over_live_codes_is_found_in_stacked_experts(export, hits):
    """The transposed stack: groups of 16 lie along the middle axis."""
    one = export("gptoss_nvfp4_cast")
    name = "model.layers.0.mlp.experts.down_proj"
    scale = one.tensors[f"{name}_weight_scale"].view(torch.uint8).clone()
    codes = one.tensors[name].clone()
    scale[2, 3, 5] = 0
    codes[2, 24:32, 5] = 0x80
    one.tensors[f"{name}_weight_scale"], one.tensors[name] = scale.view(torch.float8_e4m3fn), codes
    assert hits(one.check()) == set()
    other = export("gptoss_nvfp4_cast")
    other.folder = other.folder.with_name("other")
    codes[2, 31, 5] = 0x10
    other.tensors[f"{name}_weight_scale"], other.tensors[name] = scale.view(torch.float8_e4m3fn), codes
    assert [f.where for f in hits(other.check(), "scale-zero-over-live-codes")] == [f"{name}_weight_scale"]


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize(
    ("part", "rule"),
    [
        (f"{DOWN}.weight_scale_2", "global-scale-invalid"),
        (f"{DOWN}.input_scale", "input-scale-invalid"),
        ("model.layers.0.self_attn.k_proj.k_scale", "kv-scale-invalid"),
    ],
)
def test_scalars_are_finite_and_positive(export, hits, part, rule, value):
    """C05, C46: a zero or infinite global is inverted by the kernels."""
    one = export("llama_nvfp4_kvfp8")
    one.scalar(part, value)
    assert [f.where for f in hits(one.check(), rule)] == [part]


def test_nan_exponent_in_mxfp4_is_found(export, hits):
    """C10: E8M0 byte 255."""
    one = export("llama_mxfp4")
    one.byte(SCALE, 255, index=3)
    assert hits(one.check(), "scale-nan")[0].message == "1 block scales are 255, E8M0's NaN"


@pytest.mark.parametrize("byte", [0, 100, 112, 254])
def test_every_other_exponent_is_legal_in_mxfp4(export, hits, byte):
    """C17: subnormal exponents are numbers."""
    one = export("llama_mxfp4")
    one.byte(SCALE, byte)
    assert hits(one.check()) == set()


def test_fp8_scale_must_be_positive(export, hits):
    one = export("llama_mixed_fp8attn_nvfp4mlp")
    one.scalar("model.layers.0.self_attn.o_proj.weight_scale", 0.0)
    assert "fp8-scale-invalid" in hits(one.check())


@pytest.mark.parametrize(
    ("member", "group"),
    [
        ("model.layers.1.self_attn.v_proj", "q_proj/k_proj/v_proj"),
        ("model.layers.1.mlp.up_proj", "gate_proj/up_proj"),
    ],
)
@pytest.mark.parametrize(
    ("part", "rule"),
    [("weight_scale_2", "fused-global-scale-differs"), ("input_scale", "fused-input-scale-differs")],
)
def test_fused_weights_share_their_scales(export, hits, member, group, part, rule):
    """C36, C41: runtimes keep one scale of the three and apply it to all."""
    one = export("llama_nvfp4_kvfp8")
    one.scalar(f"{member}.{part}", 2.0**-10)
    result = one.check()
    assert hits(result) == {rule}
    assert group in hits(result, rule)[0].message


def test_w1_and_w3_of_an_expert_share_their_scales(deepseek_v4, hits):
    """C37: the engine takes w1's."""
    one = deepseek_v4()
    one.scalar("layers.0.ffn.experts.2.w3.weight_scale_2", 2.0**-12)
    finding = hits(one.check(), "fused-global-scale-differs")[0]
    assert (finding.where, finding.severity) == ("layers.0.ffn.experts.2", "error")


def test_fused_weights_share_their_scales_across_shards(export, hits):
    """C39: q in one shard, k and v in another."""
    one = export("llama_nvfp4_kvfp8")
    one.scalar("model.layers.1.self_attn.q_proj.weight_scale_2", 2.0**-10)
    assert hits(one.write(shards=5).check()) == {"fused-global-scale-differs"}


def test_projections_that_only_some_models_fuse_are_a_warning(export, hits):
    one = export("llama_nvfp4_kvfp8")
    one.rename("self_attn.q_proj", "self_attn.q_a_proj")
    one.rename("self_attn.k_proj", "self_attn.kv_a_proj_with_mqa")
    one.scalar("model.layers.0.self_attn.q_a_proj.weight_scale_2", 2.0**-10)
    result = one.check()
    assert [f.severity for f in hits(result, "fused-global-scale-differs")] == ["warning"]


def test_reciprocal_global_scale_is_sniffed(export, hits):
    """C31: compressed-tensors' divisor under modelopt's name."""
    one = export("llama_nvfp4_kvfp8")
    for name in [n for n in one.tensors if n.endswith("weight_scale_2")]:
        one.tensors[name] = 1 / one.tensors[name]
    result = one.check()
    assert hits(result) == {"global-scale-reciprocal"}
    assert result.data["rules"]["global-scale-reciprocal"] == 14


def test_reciprocal_global_scale_is_sniffed_in_compressed_tensors(export, hits, to_compressed_tensors):
    """C31: modelopt's multiplier under compressed-tensors' name."""
    one = to_compressed_tensors(export("llama_nvfp4_kvfp8"))
    assert one.check().errors == ()
    bad = to_compressed_tensors(export("llama_nvfp4_kvfp8"))
    bad.folder = bad.folder.with_name("bad")
    for name in [n for n in bad.tensors if n.endswith("weight_global_scale")]:
        bad.tensors[name] = 1 / bad.tensors[name]
    assert hits(bad.check()) == {"global-scale-reciprocal"}


def test_global_scale_of_one_over_tiny_block_scales_is_a_warning(export, hits):
    """C04: nobody chose a global scale; block scales of 2^-7."""
    one = export("llama_nvfp4_kvfp8")
    one.fill(SCALE, 0x04)
    one.scalar(f"{DOWN}.weight_scale_2", 1.0)
    result = one.check()
    assert [f.severity for f in hits(result, "global-scale-unset")] == ["warning"]
    assert hits(result) == set()


def test_all_zero_weight_may_have_a_global_scale_of_one(export, hits):
    """C05: dead groups carry global scale 1 and block scale 2^-6."""
    one = export("llama_nvfp4_kvfp8")
    one.fill(f"{DOWN}.weight", 0x08)
    one.fill(SCALE, 0x08)
    one.scalar(f"{DOWN}.weight_scale_2", 1.0)
    assert hits(one.check(), "global-scale-unset") == []


def test_marlin_counts_every_scale_below_its_window(export, hits):
    """Marlin flushes bytes 0x01 to 0x07, and not 0x08."""
    one = export("llama_nvfp4_kvfp8")
    for index, byte in enumerate([0x01, 0x07, 0x04, 0x08]):
        one.byte(SCALE, byte, index=index)
    result = one.check()
    assert result.errors == ()
    assert [f.severity for f in hits(result, "marlin-scale-flush")] == ["warning"]
    assert result.data["marlin"]["below_2^-6"] == 3
    assert result.data["marlin"]["modules"] == {DOWN: 3}


def test_marlin_is_told_of_in_a_real_export(export):
    """The golden cast holds one out-of-range block per tensor of layer 1: two 16-blocks each."""
    table = export("gptoss_nvfp4_cast").check().data["marlin"]
    head = "model.layers.1.mlp.experts"
    assert table["modules"] == {f"{head}.down_proj": 2, f"{head}.gate_up_proj": 2}
    assert table["block_scales"] == 2 * (4 * 6 * 64 + 4 * 4 * 192)


@pytest.mark.parametrize(("exponent", "warned"), [(8, False), (9, True)])
def test_marlin_needs_global_scales_below_512(export, hits, exponent, warned):
    one = export("llama_nvfp4_kvfp8")
    one.fill(SCALE, 0x01)
    one.scalar(f"{DOWN}.weight_scale_2", 2.0**exponent)
    assert bool(hits(one.check(), "marlin-global-scale")) is warned


def test_powers_of_two_are_not_rounded_by_sglang(export, hits):
    one = export("llama_nvfp4_kvfp8")
    for name in [n for n in one.tensors if n.endswith("weight_scale_2")]:
        one.scalar(name, 2.0**-15)
    assert hits(one.check("sglang"), "marlin-global-scale-rounded") == []
    other = export("llama_nvfp4_kvfp8")
    other.folder = other.folder.with_name("other")
    assert hits(other.check("sglang"), "marlin-global-scale-rounded")[0].message.startswith("14 global scales")


def test_planes_are_read_in_chunks_of_rows(export, monkeypatch):
    """A plane longer than a chunk is read to its end, and counted right in every chunk."""
    from requant.validate import opened
    from requant.validate.collector import Collector
    from requant.validate.output_view import view_of

    original = opened.TensorReader.chunks
    monkeypatch.setattr(opened.TensorReader, "chunks", lambda self, tensor: original(self, tensor, nbytes=8 * 7))
    one = export("llama_nvfp4_kvfp8")
    rows = one.tensors[SCALE].shape[0]
    one.byte(SCALE, 0x03, index=0)
    one.byte(SCALE, 0x7F, index=rows * 8 - 1)
    one.write()
    found = Collector()
    facts = check_scales(view_of(opened.open_folder(one.folder, found), found), found)
    assert facts.below_marlin == {DOWN: 1}
    assert found.counts == {"scale-nan": 1}


def test_elements_of_a_scalar_are_one():
    assert Tensor("x", "F32", (), "f", 4).elements == 1
    assert Tensor("x", "U8", (3, 5), "f", 15).elements == 15
