"""Activation scales of a streamed conversion: judged with the weight, wherever the scale is written."""

import json
from pathlib import Path

import pytest
import yaml
from requant.convert import stream
from safetensors.torch import load_file

GOLDEN = Path(__file__).parents[1] / "goldens/modelopt/llama_mixed_fp8attn_nvfp4mlp"
SOURCE = "upstream/fp8"


@pytest.mark.parametrize("activations", [None, {"input_scale": 1.0}], ids=["the source's", "a constant"])
def test_a_streamed_conversion_judges_activation_scales_as_an_ordinary_one(hub, kit, monkeypatch, activations):
    monkeypatch.setattr(stream, "WINDOW_MIN", 1)
    hub.put_folder(SOURCE, GOLDEN)
    for name, source in (("ordinary", {"path": str(GOLDEN)}), ("streamed", {"repo": SOURCE})):
        manifest = {
            "version": 1,
            "name": name,
            "source": source,
            "target": {"format": "nvfp4", "layout": "modelopt", "output": str(kit.tmp / name), "shard_size": "20kB"},
            "layers": [
                {"match": "*self_attn*", "to": "nvfp4", "scale": "nearest"},
                {"match": "*mlp*", "to": "nvfp4"},
                {"match": "*", "to": "keep"},
            ],
        }
        if activations:
            manifest["activations"] = activations
        if name == "streamed":
            manifest["execute"] = {"stream": True}
        (kit.tmp / f"{name}.yaml").write_text(yaml.safe_dump(manifest))
        assert kit.requant("convert", kit.tmp / f"{name}.yaml", "--quiet") == 0
        signed = json.loads((kit.tmp / name / "requant.signoff.json").read_text())
        numerics = next(stage for stage in signed["stages"] if stage["stage"] == "numerics")
        assert (numerics["status"], numerics["findings"]) == ("passed", [])
    shards = [sorted((kit.tmp / name).glob("*.safetensors")) for name in ("ordinary", "streamed")]
    assert [file.read_bytes() for file in shards[0]] == [file.read_bytes() for file in shards[1]]
    tensors = {name: float(t) for file in shards[1] for name, t in load_file(file).items() if "input_scale" in name}
    assert len(tensors) == 14
    assert (set(tensors.values()) == {1.0}) == bool(activations)
