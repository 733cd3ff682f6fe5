"""Producers: how each is recognised, which weights it has, and what in each of them is refused."""

import json

import pytest
from requant.convert.checkpoint import open_checkpoint
from requant.convert.layouts.reading import LAYOUTS, recognise
from requant.convert.layouts.writing import FUSED_SETS, fuse_key
from requant.manifests.errors import ManifestError, SourceError, UsageError

CT = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "mxfp4"}
QUARK = {"quant_method": "quark"}


def packed(kit, name, n, k, codes=".weight_packed", scales=".weight_scale", dtype="U8", scale_dtype="U8"):
    """Codes and scales of one weight under the suffixes of a producer."""
    values, plane = kit.mx(kit.rng, n, k, codes=dtype, scales=scale_dtype)
    return {f"{name}{codes}": values, f"{name}{scales}": plane}


def checkpoint(kit, tensors, quantization=None, name="src", **config):
    if quantization is not None:
        config["quantization_config"] = quantization
    return kit.write_checkpoint(kit.tmp / name, [tensors], {"model_type": "llama", **config})


def sources(kit):
    """Layout -> (folder, reason that must be given, {module: (format, N, K)})."""
    ct = packed(kit, "model.layers.0.mlp.up_proj", 16, 64)
    quark = packed(kit, "model.layers.0.mlp.up_proj", 16, 64, codes=".weight")
    plain = {"model.layers.0.mlp.up_proj.weight": kit.bf16(kit.rng, 16, 64), "model.norm.weight": kit.bf16(kit.rng, 64)}
    gpt_oss = kit.gpt_oss(kit.rng, experts=3, hidden=96, inter=32)
    experts = "model.layers.0.mlp.experts"
    one = {"model.layers.0.mlp.up_proj": ("mxfp4", 16, 64)}
    return {
        "deepseek-v4": (
            kit.dsv4(experts=1),
            "config.json: expert_dtype is fp4",
            {
                "embed": ("plain", 96, 64),
                "head": ("plain", 96, 64),
                **{
                    name: value
                    for p in ("layers.0", "mtp.0")
                    for name, value in {
                        f"{p}.ffn.experts.0.w1": ("mxfp4", 32, 64),
                        f"{p}.ffn.experts.0.w2": ("mxfp4", 64, 32),
                        f"{p}.ffn.experts.0.w3": ("mxfp4", 32, 64),
                        f"{p}.attn.wo_b": ("fp8", 64, 64),
                        f"{p}.ffn.gate": ("plain", 1, 64),
                    }.items()
                },
            },
        ),
        "gpt-oss": (
            kit.write_checkpoint(kit.tmp / "gpt-oss", [gpt_oss], kit.GPT_OSS_CONFIG),
            f"{experts}.gate_up_proj_blocks and _scales beside it",
            {
                "model.embed_tokens": ("plain", 96, 96),
                "lm_head": ("plain", 96, 96),
                f"{experts}.gate_up_proj": ("mxfp4", 64, 96),
                f"{experts}.down_proj": ("mxfp4", 96, 32),
                "model.layers.0.mlp.router": ("plain", 3, 96),
                **{f"model.layers.0.self_attn.{x}_proj": ("plain", 96, 96) for x in "qkvo"},
            },
        ),
        "compressed-tensors": (
            checkpoint(kit, ct, CT, "ct"),
            "quantization_config: quant_method compressed-tensors, format mxfp4-pack-quantized",
            one,
        ),
        "quark": (checkpoint(kit, quark, QUARK, "quark"), "quantization_config: quant_method quark", one),
        "modelopt": (checkpoint(kit, quark, MODELOPT, "modelopt"), "quant_algo mxfp4", one),
        "deepseek-v3": (
            checkpoint(
                kit,
                {
                    "model.layers.0.mlp.up_proj.weight": ("F8_E4M3", (130, 300), bytes(130 * 300)),
                    "model.layers.0.mlp.up_proj.weight_scale_inv": ("F32", (2, 3), kit.f32(*[1.0] * 6)),
                },
                {"quant_method": "fp8", "weight_block_size": [128, 128]},
                "deepseek-v3",
            ),
            "quantization_config: quant_method fp8, blocks [128, 128]",
            {"model.layers.0.mlp.up_proj": ("fp8", 130, 300)},
        ),
        **{
            method: (
                checkpoint(
                    kit,
                    {
                        "a.qweight": ("I32", codes, bytes(4 * codes[0] * codes[1])),
                        "a.qzeros": ("I32", (2, 2), bytes(16)),
                        "a.scales": ("F16", (2, 16), bytes(64)),
                    },
                    {"quant_method": method, "bits": 4},
                    method,
                ),
                f"quantization_config: quant_method {method}, 4 bits",
                {"a": (method, 16, 64)},
            )
            for method, codes in (("gptq", (8, 16)), ("awq", (64, 2)))
        },
        "plain": (
            checkpoint(kit, plain, name="plain"),
            "no quantization_config, all weights are floats",
            {"model.layers.0.mlp.up_proj": ("plain", 16, 64)},
        ),
    }


IN_SAFETENSORS = [name for name in LAYOUTS if name != "gguf"]  # which has tests of its own


@pytest.mark.parametrize("layout", IN_SAFETENSORS)
def test_each_producer_is_recognised_with_the_reason_and_its_weights_are_listed(kit, layout):
    folder, reason, weights = sources(kit)[layout]
    catalogue = open_checkpoint(folder)
    found, said = recognise(catalogue, "auto")
    assert (found.name, said) == (layout, reason)
    assert {w.module: (w.format, w.rows, w.cols) for w in found.weights(catalogue)} == weights


@pytest.mark.parametrize("layout", IN_SAFETENSORS)
def test_a_layout_recognises_no_other_producers_checkpoint(kit, layout):
    for name, (folder, _, _) in sources(kit).items():
        reason = LAYOUTS[layout].recognise(open_checkpoint(folder))
        assert (reason is not None) == (name == layout)


def test_a_named_layout_is_taken_at_its_word(kit):
    folder = checkpoint(kit, packed(kit, "a", 16, 64), {"quant_method": "none of yours"})
    layout, reason = recognise(open_checkpoint(folder), "compressed-tensors")
    assert (layout.name, reason) == ("compressed-tensors", "named by the manifest")


def test_stacked_experts_carry_their_bias_and_their_interleave(kit):
    folder = sources(kit)["gpt-oss"][0]
    found = {w.module.rpartition(".")[2]: w for w in LAYOUTS["gpt-oss"].weights(open_checkpoint(folder))}
    gate_up, down = found["gate_up_proj"], found["down_proj"]
    assert (gate_up.experts, gate_up.interleaved, gate_up.bias.shape) == (3, True, (3, 64))
    assert (down.experts, down.interleaved, down.bias.shape) == (3, False, (3, 96))
    assert [t.name.rpartition("_")[2] for t in down.tensors] == ["blocks", "scales", "bias"]


@pytest.mark.parametrize("nested", ["text_config", None])
def test_a_quantization_config_is_found_wherever_it_stands(kit, nested):
    """C65."""
    tensors = packed(kit, "language_model.model.layers.1.block_sparse_moe.experts.0.w1", 16, 64)
    config = {"text_config": {"quantization_config": CT}} if nested else {"quantization_config": CT}
    folder = kit.write_checkpoint(kit.tmp / "src", [tensors], config)
    assert recognise(open_checkpoint(folder), "auto")[0].name == "compressed-tensors"


@pytest.mark.parametrize("odd", [None, "text", [1], {"quantization_config": None}], ids=repr)
def test_an_odd_text_config_is_no_crash(kit, odd):
    """C68."""
    folder = kit.write_checkpoint(kit.tmp / "src", [packed(kit, "a", 16, 64)], {"text_config": odd})
    (folder / "config.json").write_text(json.dumps({"text_config": odd, "quantization_config": CT}))
    assert recognise(open_checkpoint(folder), "auto")[0].name == "compressed-tensors"


def test_an_unknown_model_type_without_architecture_converts(kit):
    """C68."""
    folder = checkpoint(kit, packed(kit, "a", 16, 64), CT, model_type="zzz_v9", architectures=None)
    output, _ = kit.convert(folder, [{"match": "*", "to": "nvfp4"}])
    config = json.loads((output / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("zzz_v9", None)
    assert kit.load(output)["a.weight_scale"][:2] == ("F8_E4M3", (16, 4))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "bitsandbytes", "bits": 4}, "quant_method 'bitsandbytes'"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, "format 'int-quantized'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "format 'NVFP4_AWQ'"),
    ],
)
def test_a_quantization_that_cannot_be_read_is_named_with_the_known_ones(kit, config, words):
    folder = checkpoint(kit, {"a.weight": kit.bf16(kit.rng, 4, 32)}, config)
    with pytest.raises(SourceError, match=words) as caught:
        recognise(open_checkpoint(folder), "auto")
    assert all(name in caught.value.hint for name in LAYOUTS)


def test_modelopts_two_files_must_agree(kit):
    """C60."""
    folder = checkpoint(kit, packed(kit, "a", 16, 64, codes=".weight"), MODELOPT)
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    with pytest.raises(SourceError, match=r"hf_quant_config.json: says quant_algo NVFP4, config.json says mxfp4"):
        recognise(open_checkpoint(folder), "auto")


@pytest.mark.parametrize("content", ['{"quantization": {"quant_algo": "MXFP4"}}', '{"quantization": 7}', "{}"])
def test_modelopt_is_known_by_either_file(kit, content):
    """C60."""
    known = "MXFP4" in content
    folder = checkpoint(kit, packed(kit, "a", 16, 64, codes=".weight"), None if known else MODELOPT)
    (folder / "hf_quant_config.json").write_text(content)
    assert recognise(open_checkpoint(folder), "auto")[0].name == "modelopt"


@pytest.mark.parametrize("version", ["0.9.4", "0.12.2", "0.13.0"])
def test_scales_of_early_compressed_tensors_are_refused_not_read_as_a_quarter(kit, version):
    """C15."""
    folder = checkpoint(kit, packed(kit, "a", 16, 64), {**CT, "version": version})
    with pytest.raises(SourceError, match=rf"compressed-tensors {version}, .* two exponents too low") as caught:
        recognise(open_checkpoint(folder), "auto")
    assert "source.layout: compressed-tensors" in caught.value.hint
    assert recognise(open_checkpoint(folder), "compressed-tensors")[1] == "named by the manifest"


@pytest.mark.parametrize("version", [None, "0.13.1.a20260115", "0.14.0", "0.20.0", "1.0"])
def test_scales_of_later_compressed_tensors_are_taken(kit, version):
    """C15."""
    folder = checkpoint(kit, packed(kit, "a", 16, 64), {**CT, "version": version})
    assert recognise(open_checkpoint(folder), "auto")[0].name == "compressed-tensors"


# --- what is refused in a weight --------------------------------------------------------------------------------------


def plan_error(kit, tensors, config, layout="auto", rules=None):
    folder = kit.write_checkpoint(kit.tmp / "src", [tensors], config)
    path = kit.tmp / "m.yaml"
    text = kit.manifest_text(folder, kit.tmp / "out", rules or [{"match": "*", "to": "nvfp4"}])
    path.write_text(text.replace("source:\n", f"source:\n  layout: {layout}\n"))
    from requant.convert.pipeline import prepare

    with pytest.raises(SourceError) as caught:
        prepare(str(path))
    return str(caught.value)


DSV4_EXPERT = "layers.0.ffn.experts.0.w1"


@pytest.mark.parametrize(
    ("layout", "suffix", "missing", "config"),
    [
        ("deepseek-v4", ".weight", ".scale", {"expert_dtype": "fp4"}),
        ("compressed-tensors", ".weight_packed", ".weight_scale", {"quantization_config": CT}),
        ("quark", ".weight", ".weight_scale", {"quantization_config": QUARK}),
        ("modelopt", ".weight", ".weight_scale", {"quantization_config": MODELOPT}),
    ],
)
def test_a_packed_weight_without_its_scales_is_an_error(kit, layout, suffix, missing, config):
    """C20."""
    codes, _ = kit.mx(kit.rng, 16, 64, codes="I8" if layout == "deepseek-v4" else "U8")
    message = plan_error(kit, {f"{DSV4_EXPERT}{suffix}": codes}, config)
    assert f"model.safetensors: {DSV4_EXPERT}{suffix}: has no scale tensor {DSV4_EXPERT}{missing}" in message


def test_an_fp8_weight_without_its_scale_is_an_error(kit):
    """C20: raw FP8 values read without their scale were 3,361 times too large."""
    tensors = kit.deepseek(kit.rng)
    del tensors["layers.0.attn.wo_b.scale"]
    message = plan_error(kit, tensors, kit.DSV4_CONFIG, rules=kit.EXPERTS)
    assert "layers.0.attn.wo_b.weight: F8_E4M3 weight has no scale tensor layers.0.attn.wo_b.scale" in message


def test_an_fp8_weight_whose_scale_has_another_name_is_an_error_too(kit):
    """C20."""
    tensors = kit.deepseek(kit.rng)
    tensors["layers.0.attn.wo_b.weight_scale_inv"] = tensors.pop("layers.0.attn.wo_b.scale")
    assert "has no scale tensor layers.0.attn.wo_b.scale" in plan_error(
        kit, tensors, kit.DSV4_CONFIG, rules=kit.EXPERTS
    )


def test_an_fp8_weight_of_one_dimension_is_an_error_not_a_crash(kit):
    tensors = kit.deepseek(kit.rng)
    tensors["layers.0.attn.wo_b.weight"] = ("F8_E4M3", (64 * 64,), bytes(64 * 64))
    assert "F8_E4M3 weight has shape [4096], expected [N, K]" in plan_error(
        kit, tensors, kit.DSV4_CONFIG, rules=kit.EXPERTS
    )


@pytest.mark.parametrize("suffix", ["_blocks", "_scales"])
def test_half_of_a_stacked_weight_is_an_error(kit, suffix):
    tensors = kit.gpt_oss(kit.rng)
    del tensors[f"model.layers.0.mlp.experts.down_proj{suffix}"]
    rules = [{"match": "*.experts.*", "to": "nvfp4"}, {"match": "*", "to": "keep"}]
    message = plan_error(kit, tensors, kit.GPT_OSS_CONFIG, rules=rules)
    other = {"_blocks": "_scales", "_scales": "_blocks"}[suffix]
    assert f"model.safetensors: model.layers.0.mlp.experts.down_proj{other}" in message
    assert ("has no scale tensor" if suffix == "_scales" else "a scale without its weight") in message


def test_a_scale_without_its_weight_is_an_error(kit):
    tensors = kit.deepseek(kit.rng)
    del tensors[f"{DSV4_EXPERT}.weight"]
    message = plan_error(kit, tensors, kit.DSV4_CONFIG, rules=kit.EXPERTS)
    assert f"model.safetensors: {DSV4_EXPERT}.scale: is F8_E8M0 [32, 2]" in message


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("blocks", ("U8", (2, 64, 2, 8)), "expected U8 [experts, N, K/32, 16], not empty"),
        ("blocks", ("I8", (2, 64, 2, 16)), "is I8 [2, 64, 2, 16], expected U8"),
        ("blocks", ("U8", (2, 64, 32)), "is U8 [2, 64, 32], expected U8 [experts, N, K/32, 16]"),
        ("blocks", ("U8", (0, 64, 2, 16)), "is U8 [0, 64, 2, 16], expected U8 [experts, N, K/32, 16], not empty"),
        ("scales", ("U8", (2, 64, 4)), "scale plane is U8 [2, 64, 4], expected U8 [2, 64, 2]"),
        ("scales", ("F8_E8M0", (2, 64, 2)), "scale plane is F8_E8M0 [2, 64, 2], expected U8 [2, 64, 2]"),
        ("scales", ("U8", (64, 2, 2)), "scale plane is U8 [64, 2, 2], expected U8 [2, 64, 2]"),
        ("bias", ("BF16", (2, 32)), "bias is [2, 32], expected [2, 64]"),
    ],
)
def test_stacked_planes_of_another_shape_or_dtype_are_errors(kit, field, value, words):
    """C34."""
    tensors = kit.gpt_oss(kit.rng)
    dtype, shape = value
    count = 1
    for n in shape:
        count *= n
    name = f"model.layers.0.mlp.experts.gate_up_proj_{field}"
    tensors[name] = (dtype, shape, bytes(count * (2 if dtype == "BF16" else 1)))
    message = plan_error(kit, tensors, kit.GPT_OSS_CONFIG, layout="gpt-oss")
    assert f"model.safetensors: {name}: " in message
    assert words in message


def test_an_odd_number_of_rows_cannot_alternate_gate_and_up(kit):
    blocks = {
        "e.gate_up_proj_blocks": ("U8", (1, 3, 1, 16), bytes(48)),
        "e.gate_up_proj_scales": ("U8", (1, 3, 1), b"\x7f" * 3),
    }
    assert "3 rows cannot alternate gate and up" in plan_error(kit, blocks, kit.GPT_OSS_CONFIG)


@pytest.mark.parametrize(
    ("plane", "words"),
    [
        (("F8_E4M3", (128, 4)), "scale plane is F8_E4M3 [128, 4], expected F8_E4M3 [40, 4]"),
        (("U8", (128, 4)), "scale plane is [128, 4], expected [40, 2] for codes [40, 32]"),
        (("U8", (40, 4)), "scale plane is [40, 4], expected [40, 2]"),
        (("U8", (2, 40)), "scale plane is [2, 40], expected [40, 2]"),
        (("U8", (80,)), "scale plane is [80], expected [40, 2]"),
    ],
    ids=["nvfp4's dtype", "padded and swizzled", "per 16", "transposed", "flat"],
)
def test_scale_planes_of_other_formats_are_told_by_dtype_and_shape(kit, plane, words):
    """C18, C22, C32."""
    dtype, shape = plane
    count = shape[0] * (shape[1] if len(shape) > 1 else 1)
    tensors = {
        "a.weight": ("U8", (40, 32), kit.rng.bytes(40 * 32)),
        "a.weight_scale": (dtype, shape, b"\x70" * count),
    }
    message = plan_error(kit, tensors, {"quantization_config": QUARK})
    assert f"model.safetensors: a.weight_scale: {words}" in message


@pytest.mark.parametrize("scale_dtype", ["U8", "F8_E8M0"])
@pytest.mark.parametrize("dtype", ["U8", "F4"])
def test_new_dtypes_of_safetensors_mean_the_same_bytes(kit, dtype, scale_dtype):
    """C101, C102: F4 [N, K] is U8 [N, K/2]; F8_E8M0 is U8; the output holds U8 and F8_E4M3."""
    codes, scales = kit.mx(kit.rng, 16, 64, codes="U8", scales="U8")
    shape = (16, 64) if dtype == "F4" else (16, 32)
    tensors = {"a.weight": (dtype, shape, codes[2]), "a.weight_scale": (scale_dtype, (16, 2), scales[2])}
    output, _ = kit.convert(checkpoint(kit, tensors, QUARK), [{"match": "*", "to": "nvfp4"}])
    found = kit.load(output)
    assert found["a.weight"] == ("U8", (16, 32), codes[2])
    assert found["a.weight_scale"][:2] == ("F8_E4M3", (16, 4))


def test_deepseek_nibbles_typed_f4_are_converted_too(kit):
    """C101: what is not claimed as a weight would be copied and taken for one."""
    tensors = kit.deepseek(kit.rng, experts=1)
    for name, (dtype, shape, data) in tensors.items():
        if dtype == "I8":
            tensors[name] = ("F4", (shape[0], shape[1] * 2), data)
    output, _ = kit.convert(kit.write_checkpoint(kit.tmp / "src", [tensors], kit.DSV4_CONFIG))
    found = kit.load(output)
    assert found[f"{DSV4_EXPERT}.weight"] == ("U8", (32, 32), tensors[f"{DSV4_EXPERT}.weight"][2])
    assert found["mtp.0.ffn.experts.0.w1.weight"][:2] == ("F4", (32, 64))


@pytest.mark.parametrize(("shape", "nbytes"), [((2, 33), 33), ((16, 16), 128), ((16, 33), 264)])
def test_an_f4_weight_of_odd_k_is_refused_not_cut(kit, shape, nbytes):
    """C102."""
    tensors = {"a.weight": ("F4", shape, bytes(nbytes)), "a.weight_scale": ("U8", (shape[0], 1), b"\x7f" * shape[0])}
    message = plan_error(kit, tensors, {"quantization_config": QUARK})
    assert f"a.weight: K = {shape[1]} is not a multiple of 32" in message


@pytest.mark.parametrize("shape", [(0, 32), (16, 0), (2, 16, 32), (512,)])
def test_packed_weights_that_are_empty_or_no_matrix_are_errors(kit, shape):
    """C113."""
    count = 1
    for n in shape:
        count *= n
    tensors = {"a.weight": ("U8", shape, bytes(count)), "a.weight_scale": ("U8", (16, 2), bytes(32))}
    message = plan_error(kit, tensors, {"quantization_config": QUARK})
    assert f"packed MXFP4 weight has shape {list(shape)}" in message


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("b.weight", ("F8_E5M2", (16, 64), bytes(1024))),
        ("b.weight", ("I8", (16, 64), bytes(1024))),
        ("b.qweight", ("U8", (16, 64), bytes(1024))),
        ("b.weight_packed", ("I8", (16, 64), bytes(1024))),
    ],
)
def test_a_second_quantized_format_is_refused_and_not_described_as_plain(kit, name, tensor):
    """C19, C61: the output's metadata would call these bytes plain, and a runtime would read them as such."""
    tensors = {**packed(kit, "a", 16, 64, codes=".weight"), name: tensor}
    rules = [{"match": "a", "to": "nvfp4"}, {"match": "*", "to": "keep"}]
    message = plan_error(kit, tensors, {"quantization_config": QUARK}, rules=rules)
    assert f"model.safetensors: {name}: is {tensor[0]} [16, 64], which layout quark has no use for" in message


def test_what_is_dropped_by_a_rule_needs_no_place_in_the_layout(kit):
    tensors = {**packed(kit, "a", 16, 64, codes=".weight"), "b.qweight": ("U8", (16, 64), bytes(1024))}
    rules = [{"match": "b", "to": "drop"}, {"match": "*", "to": "nvfp4"}]
    output, _ = kit.convert(checkpoint(kit, tensors, QUARK), rules)
    assert sorted(kit.load(output)) == ["a.input_scale", "a.weight", "a.weight_scale", "a.weight_scale_2"]
    assert json.loads((output / "requant.lock.json").read_text())["dropped"] == ["b.qweight"]


def test_integer_and_boolean_tables_are_no_weights(kit):
    tensors = {
        **packed(kit, "a", 16, 64, codes=".weight"),
        "hash.tid2eid": ("I64", (4, 2), bytes(64)),
        "mask": ("BOOL", (4, 4), bytes(16)),
    }
    rules = [{"match": "a", "to": "nvfp4"}, {"match": "*", "to": "keep"}]
    output, _ = kit.convert(checkpoint(kit, tensors, QUARK), rules)
    assert kit.load(output)["hash.tid2eid"] == tensors["hash.tid2eid"]
    assert kit.load(output)["mask"] == tensors["mask"]


# --- writing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "key"),
    [
        ("m.layers.0.self_attn.q_proj", "m.layers.0.self_attn.q_proj+k_proj+v_proj"),
        ("m.layers.0.self_attn.v_proj", "m.layers.0.self_attn.q_proj+k_proj+v_proj"),
        ("m.layers.0.self_attn.o_proj", "m.layers.0.self_attn.o_proj"),
        ("layers.1.ffn.experts.10.w3", "layers.1.ffn.experts.10.w1+w3"),
        ("layers.1.ffn.experts.10.w2", "layers.1.ffn.experts.10.w2"),
        ("w1", "w1+w3"),
    ],
)
def test_what_a_runtime_fuses_has_one_key(module, key):
    """C36."""
    assert fuse_key(module) == key


def test_no_module_is_in_two_fused_sets():
    leaves = [leaf for group in FUSED_SETS for leaf in group]
    assert len(leaves) == len(set(leaves))


def test_stacked_experts_have_no_place_in_compressed_tensors(kit):
    folder = sources(kit)["gpt-oss"][0]
    with pytest.raises(UsageError, match=r"target.layout compressed-tensors cannot hold stacked experts"):
        kit.job(folder, [{"match": "*.experts.*", "to": "nvfp4"}], layout="compressed-tensors")


def test_deepseeks_fp8_blocks_have_no_place_in_compressed_tensors(kit):
    with pytest.raises((UsageError, ManifestError), match="cannot hold DeepSeek-V4's FP8 blocks"):
        kit.job(kit.dsv4(), layout="compressed-tensors")


def test_experts_keep_their_number_whatever_the_dimensions(kit):
    """C34: nothing is taken from a known model's shapes."""
    folder = sources(kit)["gpt-oss"][0]
    rules = [{"match": "*.experts.*", "to": "nvfp4"}, {"match": "*", "to": "keep"}]
    output, _ = kit.convert(folder, rules, layout="modelopt-experts")
    found = kit.load(output)
    base = "model.layers.0.mlp.experts"
    assert {n.removeprefix(base).split(".")[1] for n in found if n.startswith(f"{base}.")} == {"0", "1", "2"}
    for expert in range(3):
        for leaf, rows, cols in (("gate_proj", 32, 96), ("up_proj", 32, 96), ("down_proj", 96, 32)):
            name = f"{base}.{expert}.{leaf}"
            assert found[f"{name}.weight"][:2] == ("U8", (rows, cols // 2))
            assert found[f"{name}.weight_scale"][:2] == ("F8_E4M3", (rows, cols // 16))
            assert found[f"{name}.bias"][:2] == ("BF16", (rows,))
