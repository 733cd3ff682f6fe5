"""`requant init --random`: what a family's checkpoint holds, the same bytes for a seed, layouts that recognise it."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from requant import manifests
from requant.convert import synthetic_write
from requant.convert.checkpoint import open_checkpoint
from requant.convert.cli import main
from requant.convert.layouts.reading import recognise
from requant.convert.synthetic import builtin_configs, config_of, specs_of
from requant.convert.synthetic_write import synthetic_bytes, write_synthetic
from requant.manifests.errors import EnvironmentFault, SourceError, UsageError
from safetensors import safe_open

SMALL = {
    "gpt-oss-20b": {
        "hidden_size": 64, "intermediate_size": 96, "vocab_size": 32, "num_local_experts": 4, "head_dim": 8,
    },
    "qwen3-30b-a3b": {
        "hidden_size": 64, "moe_intermediate_size": 32, "vocab_size": 32, "num_experts": 3, "head_dim": 8,
    },
    "llama-3.1-8b": {"hidden_size": 128, "intermediate_size": 96, "vocab_size": 32},
    "deepseek-v4-flash": {
        "hidden_size": 64, "moe_intermediate_size": 32, "vocab_size": 32, "n_routed_experts": 3, "head_dim": 16,
        "num_attention_heads": 8, "q_lora_rank": 32, "o_lora_rank": 16, "index_head_dim": 16, "index_n_heads": 4,
    },
}  # fmt: skip


@pytest.fixture
def small(tmp_path):
    def made(name, layers=3, **changes):
        config, _ = config_of(name, layers, None)
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({**config, **SMALL[name], **changes}))
        return path

    return made


def write(source, folder, form=None, seed=0, shard_size=10**9):
    config, chosen = config_of(str(source), None, form)
    return write_synthetic(folder, config, chosen, seed=seed, shard_size=shard_size)


# --- what there is ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "form", "gigabytes", "tensors"),
    [
        ("gpt-oss-20b", "mxfp4", 13.76, 459),
        ("gpt-oss-120b", "mxfp4", 65.25, 687),
        ("qwen3-30b-a3b", "bf16", 61.06, 18867),
        ("llama-3.1-8b", "bf16", 16.06, 291),
        ("smollm2-135m", "bf16", 0.269, 272),
        ("deepseek-v4-flash", "mxfp4", 159.6, 69_177),
    ],
)
def test_built_in_configs_have_the_published_sizes(name, form, gigabytes, tensors):
    """metadata.total_size of the published indexes (gpt-oss, Qwen3, Llama); parameters are 20.9 B, 30.5 B, 8.03 B."""
    config, chosen = config_of(name, None, None)
    assert chosen == form
    assert synthetic_bytes(config, chosen) / 1e9 == pytest.approx(gigabytes, rel=5e-3)
    specs = specs_of(config, chosen)
    assert len({s.name for s in specs}) == len(specs) == tensors


def test_all_built_in_configs_are_tested():
    assert set(builtin_configs()) == {
        "gpt-oss-20b", "gpt-oss-120b", "qwen3-30b-a3b", "llama-3.1-8b", "smollm2-135m", "deepseek-v4-flash",
    }  # fmt: skip


def test_fewer_layers_cut_the_lists_too():
    config, _ = config_of("deepseek-v4-flash", 5, None)
    assert (config["num_hidden_layers"], config["compress_ratios"]) == (5, [0, 0, 4, 128, 4, 0])
    config, _ = config_of("gpt-oss-20b", 3, None)
    assert config["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    assert "quantization_config" not in config_of("gpt-oss-20b", 3, "bf16")[0]


@pytest.mark.parametrize(
    ("name", "form", "layout", "kinds"),
    [
        ("gpt-oss-20b", "mxfp4", "gpt-oss", {"mxfp4": 6}),
        ("gpt-oss-20b", "bf16", "plain", {}),
        ("deepseek-v4-flash", "mxfp4", "deepseek-v4", {"mxfp4": 36}),
        ("qwen3-30b-a3b", "bf16", "plain", {}),
        ("llama-3.1-8b", "bf16", "plain", {}),
    ],
)
def test_our_layouts_recognise_and_read_what_is_written(small, tmp_path, name, form, layout, kinds):
    write(small(name), tmp_path / "out", form)
    catalogue = open_checkpoint(tmp_path / "out")
    found, _ = recognise(catalogue, "auto")
    assert found.name == layout
    counts = Counter(w.format for w in found.weights(catalogue))
    assert {kind: counts[kind] for kind in ("mxfp4",) if counts[kind]} == kinds


def test_a_made_gpt_oss_converts_without_loss(small, tmp_path, capsys):
    write(small("gpt-oss-20b"), tmp_path / "src")
    with pytest.raises(SystemExit) as stop:
        main(
            [
                "run",
                "gpt-oss-20b",
                "--quiet",
                "--set",
                f"source.path={tmp_path}/src",
                "--set",
                f"target.output={tmp_path}/o",
            ]
        )
    assert not stop.value.code
    assert "0 lossy" in capsys.readouterr().out


def test_the_example_with_output_projections_and_head_converts_these_and_the_experts(small, tmp_path):
    write(small("gpt-oss-20b"), tmp_path / "src")
    example = Path(manifests.__file__).parent / "examples" / "gpt-oss-20b-out-head.yaml"
    given = {"source.repo": "null", "source.path": tmp_path / "src", "target.output": tmp_path / "o"}
    with pytest.raises(SystemExit) as stop:
        main(["run", str(example), "--quiet", *(word for k, v in given.items() for word in ("--set", f"{k}={v}"))])
    assert not stop.value.code
    with safe_open(tmp_path / "o" / "model.safetensors", framework="pt") as file:
        dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    layer = "model.layers.0.self_attn"
    assert {dtypes["lm_head.weight"], dtypes[f"{layer}.o_proj.weight"]} == {"U8"}
    assert {dtypes[f"{layer}.{part}_proj.weight"] for part in "qkv"} == {"BF16"}
    excluded = json.loads((tmp_path / "o" / "hf_quant_config.json").read_text())["quantization"]["exclude_modules"]
    assert f"{layer}.q_proj" in excluded
    assert {"lm_head", f"{layer}.o_proj"}.isdisjoint(excluded)


# --- the bytes --------------------------------------------------------------------------------------------------------


def test_a_seed_decides_every_byte(small, tmp_path):
    for folder, seed in (("a", 7), ("b", 7), ("c", 8)):
        write(small("gpt-oss-20b"), tmp_path / folder, seed=seed)
    a, b, c = ((tmp_path / f / "model.safetensors").read_bytes() for f in "abc")
    assert a == b
    assert a != c


def test_values_are_finite_and_of_the_size_that_is_said(small, tmp_path):
    write(small("deepseek-v4-flash"), tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    embedding = tensors["embed.weight"].float()
    assert float(embedding.std()) == pytest.approx(0.02, rel=0.1)
    assert set(tensors["layers.0.attn_norm.weight"].float().tolist()) == {1.0}
    exponents = tensors["layers.0.ffn.experts.0.w1.scale"].view(torch.uint8)
    assert (int(exponents.min()), int(exponents.max())) == (113, 120)
    fp8 = tensors["layers.0.attn.wq_a.weight"].float()
    assert 0 < float(fp8.abs().max()) <= 2
    ids = tensors["layers.0.ffn.gate.tid2eid"]
    assert (int(ids.min()), int(ids.max())) == (0, 2)


def test_shards_hold_whole_tensors_and_the_index_names_them(small, tmp_path):
    names = write(small("gpt-oss-20b"), tmp_path / "out", shard_size=40_000)
    assert len(names) > 3
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    seen, size = {}, 0
    for name in names:
        with safe_open(tmp_path / "out" / name, framework="np") as file:
            for tensor in file.keys():  # noqa: SIM118
                seen[tensor] = name
        size += (tmp_path / "out" / name).stat().st_size
    assert index["weight_map"] == seen
    config, form = config_of(str(tmp_path / "out"), None, None)
    assert index["metadata"]["total_size"] == synthetic_bytes(config, form) < size
    assert form == "mxfp4"


def test_long_tensors_go_round_the_pool(small, tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic_write, "_POOL", 4096)
    monkeypatch.setattr(synthetic_write, "_CHUNK", 1000)
    seen = []
    config, form = config_of(str(small("gpt-oss-20b")), None, None)
    write_synthetic(tmp_path / "out", config, form, seed=0, shard_size=10**9, progress=seen.append)
    assert sum(seen) == synthetic_bytes(config, form)
    assert max(seen) <= 1000
    with safe_open(tmp_path / "out" / "model.safetensors", framework="np") as file:
        blocks = file.get_tensor("model.layers.0.mlp.experts.down_proj_blocks").reshape(-1)
    assert len(blocks) > 4096
    np.testing.assert_array_equal(blocks[4096:], blocks[:-4096])


# --- bad input --------------------------------------------------------------------------------------------------------


def test_bad_requests_say_what_would_do(small, tmp_path):
    for arguments, error, message in [
        (("nothing", None, None), UsageError, "neither a file nor a built-in config"),
        (("llama-3.1-8b", None, "mxfp4"), UsageError, "nobody ships llama in MXFP4"),
        (("deepseek-v4-flash", None, "bf16"), UsageError, "nobody ships deepseek_v4 in BF16"),
        (("gpt-oss-20b", 25, None), UsageError, "25 layers of 24"),
        (("gpt-oss-20b", None, "int4"), UsageError, "no format is called 'int4'"),
    ]:
        with pytest.raises(error, match=message):
            config_of(*arguments)
    bad = tmp_path / "bad.json"
    for text, message in [("{", "is no JSON"), ("[]", "no JSON object"), ('{"model_type": "t5"}', "'t5'")]:
        bad.write_text(text)
        with pytest.raises(SourceError, match=message):
            config_of(str(bad), None, None)
    for name, wrong, message in [
        ("llama-3.1-8b", {"vocab_size": "many"}, "vocab_size is 'many'"),
        ("llama-3.1-8b", {"num_attention_heads": 0, "head_dim": None}, "num_attention_heads is 0"),
        ("deepseek-v4-flash", {"o_groups": 0}, "o_groups is 0"),
        ("deepseek-v4-flash", {"compress_ratios": [0, 4]}, "compress_ratios has 2 entries for 3 layers"),
    ]:
        with pytest.raises(SourceError, match=message):
            write(small(name, **wrong), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_half_made_keeps_the_name(small, tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    with pytest.raises(UsageError, match="exists already"):
        write(small("gpt-oss-20b"), tmp_path / "there")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(synthetic_write, "_header", full)
    with pytest.raises(EnvironmentFault, match="No space left"):
        write(small("gpt-oss-20b"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    write(small("gpt-oss-20b"), tmp_path / "out")
    assert [p.name for p in tmp_path.glob("out*")] == ["out"]
    assert not (tmp_path / "out" / ".requant-random").exists()


def test_an_unfinished_conversion_of_that_name_is_not_removed(small, tmp_path):
    (tmp_path / "out.partial" / ".requant").mkdir(parents=True)
    (tmp_path / "out.partial" / "model.safetensors.part").write_bytes(b"hours of work")
    with pytest.raises(UsageError, match=r"out\.partial: is in the way"):
        write(small("gpt-oss-20b"), tmp_path / "out")
    assert (tmp_path / "out.partial" / "model.safetensors.part").read_bytes() == b"hours of work"


def test_a_disk_that_is_too_small_is_known_before(small, tmp_path, monkeypatch):
    from types import SimpleNamespace

    monkeypatch.setattr(synthetic_write.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(EnvironmentFault, match="GB are free"):
        write(small("gpt-oss-20b"), tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_the_command(small, tmp_path, capsys):
    def command(*arguments):
        with pytest.raises(SystemExit) as stop:
            main(["init", *arguments])
        return stop.value.code or 0, capsys.readouterr()

    code, said = command("--random", str(small("gpt-oss-20b")), str(tmp_path / "out"), "--quiet", "--layers", "2")
    assert (code, "mxfp4, random" in said.out) == (0, True)
    code, said = command(str(tmp_path / "out"))
    assert (code, "layout: gpt-oss" in said.out) == (0, True)
    assert command("--random", "gpt-oss-20b")[0] == 2
    assert command(str(tmp_path / "out"), str(tmp_path / "more"))[0] == 2
    assert command("--random", "gpt-oss-20b", str(tmp_path / "x"), "--shard-size", "big")[0] == 2
