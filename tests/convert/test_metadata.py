"""config.json, hf_quant_config.json, the index and the sidecars, key by key."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest
from requant.convert.metadata import aliases, exclude_modules
from requant.manifests.errors import UsageError

GOLDENS = Path(__file__).resolve().parent.parent / "goldens"
HUB = GOLDENS / "hub_configs"
CT = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
PRODUCER = {"name": "modelopt", "version": f"requant-{version('requant')}"}


def read(path):
    return json.loads(path.read_text())


def flat(value, prefix=""):
    """Dotted key -> leaf, the producers' version aside."""
    if not isinstance(value, dict):
        return {prefix: value}
    found = {}
    for key, item in value.items():
        found |= flat(item, f"{prefix}.{key}" if prefix else key)
    return {k: v for k, v in found.items() if not k.endswith("producer.version")}


@pytest.fixture
def flash(kit):
    """An output for a checkpoint with the 43 layers and the config of DeepSeek-V4-Flash, one tiny expert in each."""
    tensors = kit.deepseek(kit.rng, experts=1, layers=43, hidden=32, inter=32)
    config = read(HUB / "deepseek-ai--DeepSeek-V4-Flash_config.json")
    return kit.convert(kit.write_checkpoint(kit.tmp / "src", [tensors], config))[0]


def test_the_deepseek_hybrid_has_nvidias_config_key_by_key(flash):
    ours, theirs = read(flash / "config.json"), read(HUB / "nvidia--DeepSeek-V4-Flash-NVFP4_config.json")
    assert flat(ours) == flat(theirs)
    assert len(ours["quantization_config"]["quantized_layers"]) == 43
    assert ours["quantization_config"]["producer"] == PRODUCER


def test_the_deepseek_hybrid_has_nvidias_hf_quant_config_key_by_key(flash):
    ours, theirs = (
        read(flash / "hf_quant_config.json"),
        read(HUB / "nvidia--DeepSeek-V4-Flash-NVFP4_hf_quant_config.json"),
    )
    assert flat(ours) == flat(theirs)
    assert ours["producer"] == PRODUCER


def test_the_deepseek_hybrid_keeps_source_names_and_draft_experts(flash, kit):
    """C70."""
    tensors, source = kit.load(flash), kit.load(kit.tmp / "src")
    assert {n: t for n, t in tensors.items() if n.startswith("mtp.")} == {
        n: t for n, t in source.items() if n.startswith("mtp.")
    }
    assert "layers.42.ffn.experts.0.w1.scale" not in tensors
    assert tensors["layers.42.ffn.experts.0.w1.weight"][:2] == ("U8", (32, 16))
    assert tensors["layers.42.attn.wo_b.scale"] == source["layers.42.attn.wo_b.scale"]


def test_the_weight_only_hybrid_is_refused(kit):
    """Beside DeepSeek-V4's FP8 blocks runtimes know NVFP4 with activation scales alone."""
    with pytest.raises(UsageError, match=r"read NVFP4 experts only, not nvfp4-w4a16"):
        kit.job(kit.dsv4(), format="nvfp4-w4a16")


def test_every_config_key_of_the_source_is_kept_but_the_quantization(kit):
    """C76."""
    config = {
        **kit.GPT_OSS_CONFIG,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
        "rope_scaling": {"factor": 32.0, "truncate": False, "nested": {"deep": [1, None, "\u00e4"]}},
        "big": 2**60,
        "tiny": 1e-20,
        "zzz_unknown": None,
    }
    tensors = kit.gpt_oss(kit.rng)
    output, _ = kit.convert(kit.write_checkpoint(kit.tmp / "src", [tensors], config), GPT_OSS_RULES)
    ours = read(output / "config.json")
    assert {k: v for k, v in ours.items() if k != "quantization_config"} == {
        k: v for k, v in config.items() if k != "quantization_config"
    }
    assert ours["quantization_config"]["quant_method"] == "modelopt"
    assert "modules_to_not_convert" not in ours["quantization_config"]


GPT_OSS_RULES = [{"match": "*.experts.*_proj", "to": "nvfp4"}, {"match": "*", "to": "keep"}]


@pytest.mark.parametrize("target", ["modelopt", "modelopt-experts"])
def test_the_exclude_list_names_what_was_left_plain_and_nothing_else(kit, target):
    """C50, C52: derived from what was written; routers too, attention as modelopt writes it."""
    source = kit.write_checkpoint(kit.tmp / "src", [kit.gpt_oss(kit.rng)], kit.GPT_OSS_CONFIG)
    output, _ = kit.convert(source, GPT_OSS_RULES, layout=target)
    expected = ["lm_head", "model.embed_tokens", "model.layers.0.mlp.router", "model.layers.0.self_attn*"]
    assert read(output / "config.json")["quantization_config"]["ignore"] == expected
    assert read(output / "hf_quant_config.json")["quantization"]["exclude_modules"] == expected


def ct_checkpoint(kit, extra=None, config=None, leaves=("self_attn.q_proj", "mlp.up_proj")):
    tensors = {"model.embed_tokens.weight": kit.bf16(kit.rng, 96, 64), "model.norm.weight": kit.bf16(kit.rng, 64)}
    for leaf in leaves:
        name = f"model.layers.0.{leaf}"
        tensors[f"{name}.weight_packed"], tensors[f"{name}.weight_scale"] = kit.mx(
            kit.rng, 16, 64, codes="U8", scales="U8"
        )
    tensors |= extra or {}
    return kit.write_checkpoint(kit.tmp / "src", [tensors], config or {"quantization_config": CT})


PACKED = [{"match": "model.layers.*", "to": "nvfp4", "optional": True}, {"match": "*", "to": "keep"}]


def test_one_converted_projection_keeps_the_attention_glob_out(kit):
    """C50: `self_attn*` would exclude the converted q_proj as well."""
    extra = {"model.layers.0.self_attn.o_proj.weight": kit.bf16(kit.rng, 64, 16)}
    output, _ = kit.convert(ct_checkpoint(kit, extra), [{"match": "*.o_proj", "to": "keep"}, *PACKED])
    assert read(output / "config.json")["quantization_config"]["ignore"] == [
        "model.embed_tokens",
        "model.layers.0.self_attn.o_proj",
    ]


def test_plain_weights_that_are_bare_parameters_are_listed(kit):
    """C52: a router without `.weight` by its name, stacked experts by the module that holds them."""
    extra = {
        "model.layers.0.mlp.router": kit.bf16(kit.rng, 4, 64),
        "model.layers.1.mlp.experts.gate_up_proj": kit.bf16(kit.rng, 2, 64, 32),
        "model.layers.1.mlp.experts.gate_up_proj_bias": kit.bf16(kit.rng, 2, 32),
    }
    output, _ = kit.convert(ct_checkpoint(kit, extra), PACKED)
    assert read(output / "config.json")["quantization_config"]["ignore"] == [
        "model.embed_tokens",
        "model.layers.0.mlp.router",
        "model.layers.1.mlp.experts",
    ]


def test_excluded_names_are_whole_so_that_layer_1_is_not_layer_10(kit):
    """C55."""
    plain = [f"model.layers.{n}.mlp.up_proj" for n in (1, 10)]
    assert exclude_modules(plain, ["model.layers.11.mlp.up_proj"]) == sorted(plain)
    attention = [f"model.layers.{n}.self_attn.q_proj" for n in (1, 10)]
    assert exclude_modules(attention, ["model.layers.10.self_attn.k_proj"]) == [
        "model.layers.1.self_attn*",
        "model.layers.10.self_attn.q_proj",
    ]


def test_names_stay_in_the_checkpoints_own_space(kit):
    """C53."""
    tensors = {"model.visual.blocks.0.mlp.fc1.weight": kit.bf16(kit.rng, 64, 64)}
    name = "model.language_model.layers.0.mlp.up_proj"
    tensors[f"{name}.weight_packed"], tensors[f"{name}.weight_scale"] = kit.mx(kit.rng, 16, 64, codes="U8", scales="U8")
    source = kit.write_checkpoint(kit.tmp / "src", [tensors], {"quantization_config": CT})
    output, _ = kit.convert(source, [{"match": "*.up_proj", "to": "nvfp4"}, {"match": "*", "to": "keep"}])
    assert read(output / "config.json")["quantization_config"]["ignore"] == ["model.visual.blocks.0.mlp.fc1"]


def test_modelopt_nvfp4_and_its_weight_only_form(kit):
    """C44, C45, formats.md 3."""
    source = ct_checkpoint(kit)
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    for target, algo, activations in (
        ("nvfp4", "NVFP4", {"input_activations": weights}),
        ("nvfp4-w4a16", "W4A16_NVFP4", {}),
    ):
        output, _ = kit.convert(source, PACKED, output=target, format=target)
        assert read(output / "config.json")["quantization_config"] == {
            "quant_method": "modelopt",
            "quant_algo": algo,
            "producer": PRODUCER,
            "ignore": ["model.embed_tokens"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, **activations}},
        }
        assert read(output / "hf_quant_config.json") == {
            "producer": PRODUCER,
            "quantization": {
                "quant_algo": algo,
                "kv_cache_quant_algo": None,
                "group_size": 16,
                "exclude_modules": ["model.embed_tokens"],
            },
        }
        assert any(n.endswith("input_scale") for n in kit.load(output)) == (target == "nvfp4")


@pytest.mark.parametrize(("target", "golden"), [("mxfp4", "llama_mxfp4"), ("nvfp4-w4a16", "llama_w4a16_nvfp4")])
def test_dense_metadata_is_modelopts_own_the_producer_aside(kit, target, golden):
    rules = [{"match": "*_proj", "to": target.removesuffix("-w4a16"), "scale": "nearest"}, {"match": "*", "to": "keep"}]
    output, _ = kit.convert(GOLDENS / "modelopt" / "_src_llama_bf16", rules, format=target)
    theirs = GOLDENS / "modelopt" / golden
    for file in ("config.json", "hf_quant_config.json"):
        assert flat(read(output / file)) == flat(read(theirs / file))


def test_compressed_tensors_nvfp4(kit):
    """C31: globals are divisors there; formats.md 3."""
    source = ct_checkpoint(kit)
    output, _ = kit.convert(source, PACKED, layout="compressed-tensors", activations={"input_scale": 0.25})
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn",
    }
    quant = read(output / "config.json")["quantization_config"]
    (group,) = quant["config_groups"].values()
    assert quant["quant_method"] == "compressed-tensors"
    assert quant["format"] == group["format"] == "nvfp4-pack-quantized"
    assert quant["quantization_status"] == "compressed"
    assert group["targets"] == ["Linear"]
    assert group["weights"] == weights
    assert group["input_activations"] == {**weights, "dynamic": "local"}
    assert quant["kv_cache_scheme"] is None
    assert not (output / "hf_quant_config.json").exists()
    tensors = kit.load(output)
    name = "model.layers.0.mlp.up_proj"
    assert tensors[f"{name}.input_global_scale"] == ("F32", (1,), b"\x00\x00\x80\x40")  # 4.0 = 1 / 0.25
    assert {n.rpartition(".")[2] for n in tensors if n.startswith(name)} == {
        "weight_packed",
        "weight_scale",
        "weight_global_scale",
        "input_global_scale",
    }


@pytest.mark.parametrize("place", ["top", "text_config"])
def test_a_nested_quantization_config_never_survives_beside_the_new_one(kit, place):
    """C65, C66."""
    nested = {"hidden_size": 64, "quantization_config": CT} if place == "text_config" else {"hidden_size": 64}
    config = {"model_type": "wrapper", "text_config": nested}
    if place == "top":
        config["quantization_config"] = CT
    output, _ = kit.convert(ct_checkpoint(kit, config=config), PACKED)
    ours = read(output / "config.json")
    assert ours["text_config"] == {"hidden_size": 64}
    assert ours["quantization_config"]["quant_algo"] == "NVFP4"


NOTHING = [{"match": "no.such.*", "to": "nvfp4", "optional": True}, {"match": "*", "to": "keep"}]


def test_an_output_without_conversions_has_the_sources_tensors_and_config(kit):
    """C66, C67."""
    source = kit.dsv4()
    output, _ = kit.convert(source, NOTHING)
    assert read(output / "config.json") == read(source / "config.json")
    assert kit.load(output) == kit.load(source)


@pytest.mark.parametrize("both", [True, False])
def test_an_output_without_conversions_keeps_both_statements_where_they_stood(kit, both):
    """C60, C65."""
    plain = {"a.weight": kit.bf16(kit.rng, 4, 64)}
    config = {"text_config": {"quantization_config": {"quant_method": "modelopt", "quant_algo": "mxfp4"}}}
    source = kit.write_checkpoint(kit.tmp / "src", [plain], config if both else {})
    (source / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "mxfp4"}}')
    output, _ = kit.convert(source, NOTHING)
    assert read(output / "config.json") == read(source / "config.json")
    assert read(output / "hf_quant_config.json") == read(source / "hf_quant_config.json")


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (
            "language_model.model.layers.1.block_sparse_moe.experts",
            {
                f"{prefix}layers.1.{block}.experts"
                for prefix in ("language_model.model.", "model.", "")
                for block in ("block_sparse_moe", "mlp")
            },
        ),
    ],
)
def test_aliases_cover_every_prefix_and_block_name(module, names):
    """C53."""
    assert set(aliases(module)) == names
    assert aliases(module)[0] == module
    assert len(aliases(module)) == len(names)


# --- index and sidecars -----------------------------------------------------------------------------------------------


def test_the_index_counts_what_was_written(kit):
    """C88, C95: not the source's index, not file sizes."""
    source = kit.dsv4(shards=3)
    index = read(source / "model.safetensors.index.json")
    index["metadata"] = {"total_size": 12345, "total_parameters": 1}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    output, _ = kit.convert(source, shard_size="20KB")
    ours = read(output / "model.safetensors.index.json")
    tensors = kit.load(output)
    assert ours["metadata"] == {"total_size": sum(len(data) for _, _, data in tensors.values())}
    found = {}
    for path in output.glob("*.safetensors"):
        raw = path.read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        assert header.pop("__metadata__") == {"format": "pt"}
        found |= dict.fromkeys(header, path.name)
    assert ours["weight_map"] == found
    assert len(set(found.values())) > 2


def test_one_shard_has_no_index(kit):
    """C88."""
    output, _ = kit.convert(kit.dsv4(shards=3))
    assert [p.name for p in output.glob("model*")] == ["model.safetensors"]


def test_sidecars_are_copied_byte_for_byte_and_the_rest_is_reported(kit):
    """C98, C106, C109."""
    source = kit.dsv4()
    sidecars = {
        "tokenizer.model": b"\x00\x01\xff",
        "tokenizer_config.json": b'{ "a":1 }\r\n',
        "generation_config.json": b'{"eos_token_id": [1, 2]}',
        "chat_template.jinja": b"{{ x }}",
        "modeling_x.py": b"import this",
        "encoding/x.py": b"y",
        "assets/deep/er.png": b"\x89PNG",
        ".gitattributes": b"*.safetensors filter=lfs",
        "LICENSE": b"MIT",
    }
    left = {
        "consolidated.safetensors": "a weight file that the index does not name",
        "pytorch_model.bin": "a weight file that the index does not name",
        "nested/other.gguf": "a weight file that the index does not name",
        "old/hf_quant_config.json": "SGLang takes any such file",
        "sub/model.safetensors.index.json": "an index of weights that are not taken",
        "requant.lock.json": "an earlier run's record",
        "requant.signoff.json": "an earlier run's record",
    }
    for name, content in {**sidecars, **dict.fromkeys(left, b"x")}.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(content)
    for folder in (".cache/huggingface", "original", "metal", "__pycache__", ".git"):
        (source / folder).mkdir(parents=True)
        (source / folder / "x.json").write_text("{}")
    (source / "linked").symlink_to(source / "encoding")
    output, _ = kit.convert(source)
    written = {"config.json", "hf_quant_config.json", "model.safetensors", "requant.lock.json", "requant.manifest.yaml"}
    files = {p.relative_to(output).as_posix(): p.read_bytes() for p in output.rglob("*") if p.is_file()}
    files = {name: content for name, content in files.items() if not name.startswith(".requant-local/")}
    assert {n: c for n, c in files.items() if n not in written} == sidecars
    ignored = dict(read(output / "requant.lock.json")["ignored_files"])
    cache = dict.fromkeys([".cache/", "original/", "metal/", "__pycache__/", ".git/"], "cache or the producer's second")
    for name, reason in {**left, **cache, "linked/": "a link to a folder"}.items():
        assert ignored.pop(name).startswith(reason), name
    assert ignored == {}


def test_the_lock_ties_the_output_to_its_source(kit):
    """C119."""
    source = kit.dsv4()
    output, _ = kit.convert(source)
    lock = read(output / "requant.lock.json")
    stat = (source / "model-00001-of-00002.safetensors").stat()
    entry = lock["source"]["files"]["model-00001-of-00002.safetensors"]
    assert (entry["size"], entry["mtime_ns"]) == (stat.st_size, stat.st_mtime_ns)
    assert lock["source"]["layout"] == "deepseek-v4"
    assert lock["tool"] == f"requant {version('requant')}"
    assert lock["complete"] is True
    blocks = 2 * 3 * 64 * 32 // 16
    assert (lock["groups"]["groups"], lock["groups"]["exact"], lock["groups"]["lossy"]) == (4, blocks, 0)


@pytest.mark.parametrize(
    ("embedding", "head"),
    [
        ("model.embed_tokens", "lm_head"),
        ("language_model.model.embed_tokens", "language_model.lm_head"),
        ("model.language_model.embed_tokens", "lm_head"),
    ],
)
@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_a_tied_head_is_excluded_although_it_has_no_tensor(kit, embedding, head, layout):
    """C73: runtimes build it from the config alone, as FP4 unless the list names it."""
    prefix = embedding.removesuffix("embed_tokens")
    tensors = {
        f"{embedding}.weight": kit.bf16(kit.rng, 96, 64),
        f"{prefix}layers.0.mlp.down_proj.weight": kit.bf16(kit.rng, 64, 64),
    }
    source = kit.write_checkpoint(kit.tmp / "src", [tensors], {"model_type": "llama", "tie_word_embeddings": True})
    rules = [{"match": "*.down_proj", "to": "mxfp4"}, {"match": "*", "to": "keep"}]
    output, _ = kit.convert(source, rules, format="mxfp4", layout=layout)
    ignore = json.loads((output / "config.json").read_text())["quantization_config"]["ignore"]
    assert head in ignore
