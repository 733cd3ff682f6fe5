"""Against the source: config keys kept, sidecars there. Each test loses one thing."""

import json
import shutil

import pytest

KEEP = ("config-key-lost", "config-key-changed", "sidecar-missing", "sidecar-differs")


@pytest.fixture
def pair(export, tmp_path):
    """A source folder with sidecars of every kind, and an output that kept them."""
    one = export("llama_nvfp4_kvfp8")
    one.config.update(swiglu_limit=7.0, rope_scaling={"type": "yarn", "factor": 16}, zzz_unknown=[1, 2])
    one.write()
    source = tmp_path / "source"
    shutil.copytree(one.folder, source)
    config = {key: value for key, value in one.config.items() if key != "quantization_config"}
    (source / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    for folder in (source, one.folder):
        (folder / "encoding").mkdir()
        (folder / "encoding" / "x.py").write_text("X = 1\n")
        (folder / "chat_template.jinja").write_text("{{ x }}")
        (folder / "tokenizer.model").write_bytes(bytes(range(256)))
    return one, source


def test_output_that_kept_everything_passes(pair, hits):
    """C106, C109: tokenizer, template, code in folders."""
    one, source = pair
    (source / "README.md").write_text("the source's card")
    (source / ".cache").mkdir()
    (source / ".cache" / "x").write_text("")
    (source / "original").mkdir()
    (source / "original" / "config.json").write_text("{}")
    (source / "model.safetensors.index.json").write_text("{}")
    (source / "requant.signoff.json").write_text("{}")
    result = one.check("vllm", source=source)
    assert result.errors == ()
    assert result.data["sidecars_compared"] == 3


def test_without_a_source_nothing_is_compared(pair):
    assert pair[0].check().data["sidecars_compared"] is None


@pytest.mark.parametrize("name", ["chat_template.jinja", "encoding/x.py", "tokenizer.model"])
def test_missing_sidecar_is_found(pair, hits, name):
    """C106."""
    one, source = pair
    (one.folder / name).unlink()
    assert [f.where for f in hits(one.check(source=source), "sidecar-missing")] == [name]


def test_rewritten_sidecar_is_found(pair, hits):
    """C109: generation_config saved anew with one eos id of two; same length, other bytes."""
    one, source = pair
    (source / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    (one.folder / "generation_config.json").write_text('{"eos_token_id": [1, 3]}')
    assert [f.where for f in hits(one.check(source=source), "sidecar-differs")] == ["generation_config.json"]


@pytest.mark.parametrize("key", ["swiglu_limit", "zzz_unknown", "rope_scaling"])
def test_lost_config_key_is_found(pair, hits, key):
    """C76: the clamp is gone and the activation is another function."""
    one, source = pair
    config = json.loads((one.folder / "config.json").read_text())
    del config[key]
    (one.folder / "config.json").write_text(json.dumps(config))
    assert [f.where for f in hits(one.check(source=source), "config-key-lost")] == [key]


def test_changed_value_deep_inside_is_found(pair, hits):
    """C76: key by key, at every depth."""
    one, source = pair
    config = json.loads((one.folder / "config.json").read_text())
    config["rope_scaling"]["factor"] = 8
    (one.folder / "config.json").write_text(json.dumps(config))
    finding = hits(one.check(source=source), "config-key-changed")[0]
    assert (finding.where, finding.message) == ("rope_scaling.factor", "is 8, the source says 16")


def test_quantization_config_may_change_at_any_depth(pair, hits):
    one, source = pair
    config = json.loads((source / "config.json").read_text())
    config["text_config"] = {"hidden_size": 64, "quantization_config": {"quant_method": "compressed-tensors"}}
    (source / "config.json").write_text(json.dumps(config))
    mine = json.loads((one.folder / "config.json").read_text())
    mine["text_config"] = {"hidden_size": 64}
    (one.folder / "config.json").write_text(json.dumps(mine))
    assert not hits(one.check(source=source)) & set(KEEP)
