"""Targets: FP8 in all its granularities, re-layouts that touch no number, families that stay plain together."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from requant.convert.scalars import turned_over
from requant.manifests.errors import ManifestError, SourceError, UsageError

GOLDENS = Path(__file__).resolve().parent.parent / "goldens" / "modelopt"
LLAMA = GOLDENS / "_src_llama_bf16"
KEEP = {"match": "*", "to": "keep"}
NVFP4 = [{"match": "*_proj", "to": "nvfp4"}, KEEP]
NEAREST = [{"match": "*_proj", "to": "nvfp4", "scale": "nearest"}, KEEP]


def values_of(entry):
    """A BF16 tensor as float32."""
    _, shape, data = entry
    return np.frombuffer(data, ml_dtypes.bfloat16).astype(np.float32).reshape(shape)


def quant_of(folder):
    return json.loads((folder / "config.json").read_text()).get("quantization_config")


# --- re-layouts ----------------------------------------------------------


@pytest.mark.parametrize("golden", ["llama_nvfp4_kvfp8", "qwen3moe_nvfp4_experts", "llama_w4a16_nvfp4"])
def test_modelopt_to_compressed_tensors_and_back_is_every_bit(kit, golden):
    """C31: planes byte for byte, scalars turned over, the activation scales the export's own."""
    target = {"format": "nvfp4-w4a16" if "w4a16" in golden else "nvfp4"}
    rules = [{"match": "*.experts.*_proj" if "experts" in golden else "*_proj", "to": "nvfp4"}, KEEP]
    there, _ = kit.convert(GOLDENS / golden, rules, output="there", layout="compressed-tensors", **target)
    ours, theirs = kit.load(there), kit.load(GOLDENS / golden)
    module = next(name.removesuffix(".weight_packed") for name in ours if name.endswith(".weight_packed"))
    assert ours[f"{module}.weight_packed"] == theirs[f"{module}.weight"]
    assert ours[f"{module}.weight_scale"] == theirs[f"{module}.weight_scale"]
    s2 = np.frombuffer(theirs[f"{module}.weight_scale_2"][2], "<f4")[0]
    dtype, shape, data = ours[f"{module}.weight_global_scale"]
    assert (dtype, shape) == ("F32", (1,))
    assert np.frombuffer(data, "<f4")[0] == turned_over(s2)
    back, _ = kit.convert(there, rules, output="back", **target)
    again = kit.load(back)
    assert again.keys() == theirs.keys()
    assert [name for name in theirs if again[name] != theirs[name]] == []
    assert {k: v for k, v in quant_of(back).items() if k != "producer"} == {
        k: v for k, v in quant_of(GOLDENS / golden).items() if k != "producer"
    }


def test_compressed_tensors_to_modelopt_and_back_is_every_bit(kit):
    first, _ = kit.convert(LLAMA, NEAREST, output="first", layout="compressed-tensors")
    middle, _ = kit.convert(first, NVFP4, output="middle")
    last, _ = kit.convert(middle, NVFP4, output="last", layout="compressed-tensors")
    assert kit.load(last) == kit.load(first)
    assert quant_of(last) == quant_of(first)


@pytest.mark.parametrize("amax", [0.0371, 1.0, 448.0, 3e-5])
def test_scalars_that_come_from_a_bf16_amax_come_back(amax):
    """2688 / amax and amax / 2688, whichever is stored; 1/(1/x) alone would lose a bit in one of seven."""
    amax = np.float32(ml_dtypes.bfloat16(amax))
    for room in (np.float32(2688), np.float32(1536)):
        for eighths in (8, *range(12, 24)):
            swept = amax * np.float32(eighths / 8)
            for stored in (swept / room, room / swept):
                assert turned_over(turned_over(stored)) == stored
    assert turned_over(amax / np.float32(2688)) == np.float32(2688) / amax


def test_ordinary_reciprocals_do_not_come_back():
    """Why `turned_over` is there."""
    scales = [np.float32(ml_dtypes.bfloat16(0.01 + i / 999)) / np.float32(2688) for i in range(100)]
    one = np.float32(1)
    assert sum(one / (one / s) != s for s in scales) > 5
    assert all(turned_over(turned_over(s)) == s for s in scales)


def test_a_written_input_scale_wins_over_the_sources_own(kit):
    golden = GOLDENS / "llama_nvfp4_kvfp8"
    output, _ = kit.convert(golden, NVFP4, activations={"input_scale": 0.5})
    found = {v[2] for n, v in kit.load(output).items() if n.endswith("input_scale")}
    assert found == {kit.f32(0.5)}


def test_mxfp4_changes_its_names_and_no_byte(kit):
    rules = [{"match": "*_proj", "to": "mxfp4"}, KEEP]
    there, _ = kit.convert(GOLDENS / "llama_mxfp4", rules, output="there", format="mxfp4", layout="compressed-tensors")
    assert quant_of(there)["format"] == "mxfp4-pack-quantized"
    back, _ = kit.convert(there, rules, output="back", format="mxfp4")
    assert kit.load(back) == kit.load(GOLDENS / "llama_mxfp4")
    module = "model.layers.0.mlp.up_proj"
    assert kit.load(there)[f"{module}.weight_packed"] == kit.load(GOLDENS / "llama_mxfp4")[f"{module}.weight"]


# --- FP8 ----------------------------------------------------------

FP8 = {
    ("modelopt", "tensor"): (".weight_scale", lambda n, k: ()),
    ("modelopt", "channel"): (".weight_scale", lambda n, k: (n,)),
    ("modelopt", "block"): (".weight_scale", lambda n, k: (-(-n // 128), 1, -(-k // 128), 1)),
    ("compressed-tensors", "tensor"): (".weight_scale", lambda n, k: (1,)),
    ("compressed-tensors", "channel"): (".weight_scale", lambda n, k: (n, 1)),
    ("compressed-tensors", "block"): (".weight_scale", lambda n, k: (-(-n // 128), -(-k // 128))),
    ("deepseek-v3", "block"): (".weight_scale_inv", lambda n, k: (-(-n // 128), -(-k // 128))),
}


@pytest.mark.parametrize(("layout", "granularity"), list(FP8))
def test_fp8_has_the_scale_of_every_block_and_the_nearest_codes(kit, layout, granularity):
    n, k = 200, 336
    tensors = {"a.up_proj.weight": kit.bf16(kit.rng, n, k), "norm.weight": kit.bf16(kit.rng, 64)}
    source = kit.write_checkpoint(kit.tmp / "src", [tensors], {"model_type": "llama"})
    rules = [{"match": "*_proj", "to": "fp8", "granularity": granularity}, KEEP]
    output, _ = kit.convert(source, rules, format="fp8", layout=layout)
    found = kit.load(output)
    suffix, shape = FP8[layout, granularity]
    high, wide = {"tensor": (n, k), "channel": (1, k), "block": (128, 128)}[granularity]
    w = values_of(tensors["a.up_proj.weight"])
    tops = [[np.abs(w[i : i + high, j : j + wide]).max() for j in range(0, k, wide)] for i in range(0, n, high)]
    scales = np.array(tops, np.float32) / np.float32(448)
    quotient = w / np.repeat(np.repeat(scales, high, 0), wide, 1)[:n, :k]
    if granularity == "tensor":  # as modelopt: a 0-d scale leaves the quotient BF16
        quotient = quotient.astype(ml_dtypes.bfloat16).astype(np.float32)
    codes = quotient.astype(ml_dtypes.float8_e4m3fn)
    assert found["a.up_proj.weight"] == ("F8_E4M3", (n, k), codes.tobytes())
    assert found[f"a.up_proj{suffix}"] == ("F32", shape(n, k), scales.tobytes())
    assert ("a.up_proj.input_scale" in found) == ((layout, granularity) == ("modelopt", "tensor"))


@pytest.mark.parametrize(
    ("layout", "granularity", "facts"),
    [
        ("modelopt", None, {"quant_algo": "FP8", "quant_method": "modelopt"}),
        ("modelopt", "channel", {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}),
        ("modelopt", "block", {"quant_algo": "fp8_pb_wo", "quant_method": "modelopt"}),
        ("compressed-tensors", None, {"format": "float-quantized", "quant_method": "compressed-tensors"}),
        (
            "deepseek-v3",
            None,
            {
                "quant_method": "fp8",
                "weight_block_size": [128, 128],
                "activation_scheme": "dynamic",
                "modules_to_not_convert": ["lm_head"],
            },
        ),
    ],
)
def test_fp8_metadata_says_what_was_written(kit, layout, granularity, facts):
    rule = {"match": "*_proj", "to": "fp8"} | ({"granularity": granularity} if granularity else {})
    output, _ = kit.convert(LLAMA, [rule, KEEP], format="fp8", layout=layout)
    quant = quant_of(output)
    assert {key: quant.get(key) for key in facts} == facts
    assert (output / "hf_quant_config.json").exists() == (layout == "modelopt")
    if layout == "compressed-tensors":
        assert quant["config_groups"]["group_0"]["weights"]["strategy"] == "channel"
        assert quant["config_groups"]["group_0"]["input_activations"]["dynamic"] is True


@pytest.mark.parametrize(("layout", "granularity"), [("deepseek-v3", "channel"), ("deepseek-v3", "tensor")])
def test_a_granularity_that_the_layout_lacks_is_refused(kit, layout, granularity):
    rules = [{"match": "*_proj", "to": "fp8", "granularity": granularity}, KEEP]
    with pytest.raises(UsageError, match=f"{layout} has no FP8 with one scale per {granularity}"):
        kit.job(LLAMA, rules, format="fp8", layout=layout)


# --- what a target can say ----------------------------------------------------------


@pytest.mark.parametrize(
    ("formats", "target"),
    [
        (("fp8", "nvfp4"), {"layout": "compressed-tensors"}),
        (("fp8", "nvfp4"), {"format": "nvfp4-w4a16"}),
        (("fp8", "mxfp4"), {"format": "mxfp4"}),
    ],
)
def test_two_formats_need_a_target_that_can_say_so(kit, formats, target):
    attention, mlp = formats
    scale = {"scale": "nearest"} if mlp == "nvfp4" else {}
    rules = [{"match": "*.self_attn.*_proj", "to": attention}, {"match": "*.mlp.*_proj", "to": mlp, **scale}, KEEP]
    with pytest.raises(UsageError, match="more than one format"):
        kit.job(LLAMA, rules, **target)


def test_fused_partners_must_share_a_fate(kit):
    """C36: q in one format, k and v in another."""
    rules = [{"match": "*.q_proj", "to": "fp8"}, {"match": "*_proj", "to": "nvfp4", "scale": "nearest"}, KEEP]
    with pytest.raises(UsageError, match=r"fused group model.layers.0.self_attn.q_proj\+k_proj\+v_proj"):
        kit.job(LLAMA, rules)


def test_packed_weights_may_not_stay_behind(kit):
    """C67."""
    with pytest.raises(UsageError, match="would stay NVFP4 in a mxfp4 checkpoint"):
        kit.job(GOLDENS / "llama_w4a16_nvfp4", [{"match": "*.mlp.*_proj", "to": "mxfp4"}, KEEP], format="mxfp4")


def test_other_packed_layers_can_become_bf16_beside(kit):
    rules = [{"match": "*.mlp.*_proj", "to": "nvfp4"}, {"match": "*_proj", "to": "bf16"}, KEEP]
    output, _ = kit.convert(GOLDENS / "llama_w4a16_nvfp4", rules, format="nvfp4-w4a16")
    found = kit.load(output)
    assert found["model.layers.0.self_attn.q_proj.weight"][:2] == ("BF16", (64, 64))
    assert "model.layers.0.self_attn.q_proj.weight_scale" not in found
    assert "model.layers.0.self_attn*" in quant_of(output)["ignore"]
    original = kit.load(GOLDENS / "llama_w4a16_nvfp4")
    assert found["model.layers.1.mlp.up_proj.weight"] == original["model.layers.1.mlp.up_proj.weight"]


def test_deepseek_v4_as_bf16_forgets_that_its_experts_were_fp4(kit):
    """C66."""
    output, _ = kit.convert(kit.dsv4(), [{"match": "*", "to": "bf16"}], format="bf16")
    config = json.loads((output / "config.json").read_text())
    assert "quantization_config" not in config
    assert "expert_dtype" not in config
    found = kit.load(output)
    assert {dtype for dtype, _, _ in found.values()} == {"BF16", "F32"}
    assert not [name for name in found if name.endswith(".scale")]


# --- families and parts that stay plain ----------------------------------------------------------


def experts(kit, inter):
    rng = kit.rng
    tensors = {"model.layers.0.mlp.gate.weight": kit.bf16(rng, 2, 64)}
    for expert in range(2):
        for leaf, shape in (("gate_proj", (inter, 64)), ("up_proj", (inter, 64)), ("down_proj", (64, inter))):
            tensors[f"model.layers.0.mlp.experts.{expert}.{leaf}.weight"] = kit.bf16(rng, *shape)
    tensors["model.layers.0.mlp.shared_expert.up_proj.weight"] = kit.bf16(rng, 32, 64)
    return kit.write_checkpoint(kit.tmp / "src", [tensors], {"model_type": "qwen3_moe", "num_hidden_layers": 1})


def test_experts_of_which_one_part_does_not_fit_stay_plain_together(kit):
    """C85: I = 40 is down_proj's K; gate and up would fit, and runtimes load the three as one."""
    job = kit.job(experts(kit, 40), NEAREST, format="nvfp4-w4a16")
    assert job.plan.converted == ("model.layers.0.mlp.shared_expert.up_proj",)
    notes = job.plan.rules[0].notes
    assert notes["K is not a multiple of 16: kept plain"] == 2
    assert notes["fused with a weight whose K is not a multiple of 16: kept plain"] == 4


def test_a_part_named_in_full_is_an_error_where_its_family_cannot_follow(kit):
    rules = [
        {"match": "model.layers.0.mlp.experts.0.gate_proj", "to": "nvfp4", "scale": "nearest"},
        *NEAREST,
    ]
    with pytest.raises(SourceError, match=r"load together with it has a K that is not a multiple of 16"):
        kit.job(experts(kit, 40), rules, format="nvfp4-w4a16")


def test_routers_stay_and_shared_experts_go(kit):
    """C52, C77."""
    job = kit.job(experts(kit, 48), [{"match": "*", "to": "nvfp4", "scale": "nearest"}], format="nvfp4-w4a16")
    assert "model.layers.0.mlp.shared_expert.up_proj" in job.plan.converted
    assert "model.layers.0.mlp.gate" not in job.plan.converted
    assert job.plan.rules[0].notes == {"router: kept (name it in full to convert it)": 1}


def fp8_model(kit, layers=2):
    """DeepSeek-V3: everything FP8 but embedding, head, router; a draft layer past the last one."""
    tensors = {"model.embed_tokens.weight": kit.bf16(kit.rng, 96, 64), "lm_head.weight": kit.bf16(kit.rng, 96, 64)}
    for layer in range(layers):
        for leaf in ("self_attn.o_proj", "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "mlp.up_proj"):
            name = f"model.layers.{layer}.{leaf}"
            tensors[f"{name}.weight"] = ("F8_E4M3", (64, 64), bytes([0x38]) * 4096)
            tensors[f"{name}.weight_scale_inv"] = ("F32", (1, 1), kit.f32(0.5))
    quant = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 1, "num_nextn_predict_layers": 1}
    return kit.write_checkpoint(kit.tmp / "src", [tensors], {**config, "quantization_config": quant})


def test_a_wildcard_makes_draft_layers_and_low_rank_projections_bf16(kit):
    """C69, C71: what nvidia's DeepSeek-V3.1-NVFP4 leaves plain; FP8 cannot stay beside NVFP4."""
    source = fp8_model(kit)
    rules = [{"match": "*", "to": "nvfp4", "scale": "nearest"}]
    job = kit.job(source, rules, format="nvfp4-w4a16")
    assert set(job.plan.converted) == {"model.layers.0.self_attn.o_proj", "model.layers.0.mlp.up_proj"}
    notes = job.plan.rules[0].notes
    assert notes["draft (MTP) layer: made BF16 (name it in full to convert it)"] == 4
    assert notes["low-rank projection of MLA: made BF16 (name it in full to convert it)"] == 8
    output, _ = kit.convert(source, rules, format="nvfp4-w4a16")
    found = kit.load(output)
    assert found["model.layers.1.mlp.up_proj.weight"] == (
        "BF16", (64, 64), np.full(4096, 0.5, ml_dtypes.bfloat16).tobytes()
    )  # fmt: skip
    assert not [name for name in found if "scale_inv" in name]
    ignored = quant_of(output)["ignore"]
    assert "model.layers.1.mlp.up_proj" in ignored
    assert "model.layers.0.self_attn.q_a_proj" in ignored


def test_a_tied_embedding_is_never_quantized(kit):
    """C73."""
    tensors = {"model.embed_tokens.weight": kit.bf16(kit.rng, 96, 64), "a.up_proj.weight": kit.bf16(kit.rng, 32, 64)}
    source = kit.write_checkpoint(kit.tmp / "src", [tensors], {"model_type": "llama", "tie_word_embeddings": True})
    rules = [{"match": "model.embed_tokens", "to": "nvfp4", "scale": "nearest"}, NEAREST[0]]
    with pytest.raises(UsageError, match="is the embedding and, tied to it, the output head"):
        kit.job(source, rules, format="nvfp4-w4a16")


def test_bf16_reaches_embeddings_and_heads_too(kit):
    """What is protected from quantization is not protected from being BF16."""
    values = kit.rng.standard_normal((96, 64)).astype("<f2")
    tensors = {"model.embed_tokens.weight": ("F16", (96, 64), values.tobytes())}
    source = kit.write_checkpoint(kit.tmp / "src", [tensors], {"model_type": "llama"})
    output, _ = kit.convert(source, [{"match": "*", "to": "bf16"}], format="bf16")
    wanted = values.astype(np.float32).astype(ml_dtypes.bfloat16).tobytes()
    assert kit.load(output)["model.embed_tokens.weight"] == ("BF16", (96, 64), wanted)


# --- KV scales ----------------------------------------------------------


def test_kv_fp8_without_scales_is_refused(kit):
    """C60, C128: never 1.0 for want of a number."""
    with pytest.raises(SourceError, match="kv_cache: fp8 needs k_scale and v_scale tensors, and there are none"):
        kit.job(LLAMA, NEAREST, kv_cache="fp8")


def test_kv_scales_of_another_model_are_refused(kit):
    tensors = {"a.q_proj.weight": kit.bf16(kit.rng, 32, 64)}
    source = kit.write_checkpoint(kit.tmp / "src", [tensors], {"model_type": "llama"})
    given = {"input_scale": {"from": str(GOLDENS / "llama_nvfp4_kvfp8")}}
    with pytest.raises(SourceError, match=r"the source has no such module|no input_scale for"):
        kit.job(source, [NEAREST[0]], activations=given, kv_cache="fp8")


def test_kv_scales_of_the_source_stay_and_are_said(kit):
    output, _ = kit.convert(GOLDENS / "llama_nvfp4_kvfp8", NVFP4, layout="compressed-tensors")
    assert quant_of(output)["kv_cache_scheme"]["num_bits"] == 8
    name = "model.layers.0.self_attn.k_proj.k_scale"
    assert kit.load(output)[name] == kit.load(GOLDENS / "llama_nvfp4_kvfp8")[name]


def test_an_fp8_exports_activation_scales_are_restated_for_nvfp4(kit):
    """amax / 448 and amax / 2688 are the same amax."""
    golden = GOLDENS / "llama_mixed_fp8attn_nvfp4mlp"
    output, _ = kit.convert(LLAMA, NEAREST, activations={"input_scale": {"from": str(golden)}})
    name = "model.layers.0.self_attn.q_proj.input_scale"
    theirs, ours = (np.frombuffer(kit.load(f)[name][2], "<f4")[0] for f in (golden, output))
    assert ours == np.float32(float(theirs) * 448 / 2688)


def test_granularity_belongs_to_fp8(kit):
    with pytest.raises(ManifestError, match="granularity has no meaning with to: nvfp4"):
        kit.job(LLAMA, [{"match": "*_proj", "to": "nvfp4", "scale": "nearest", "granularity": "tensor"}, KEEP])
