"""The model stage reads FP8 as every layout stores it: per tensor, channel or block, with or without static inputs."""

from pathlib import Path

import pytest
import yaml

pytest.importorskip("transformers", reason="needs the extra eval")

import torch
from requant.convert.pipeline import prepare, run_job
from requant.validate.load_model import load_model

SOURCE = Path(__file__).resolve().parent.parent / "goldens" / "modelopt" / "_src_llama_144_bf16"
KEEP = {"match": "*", "to": "keep"}
STORED = [
    ("modelopt", "tensor"),
    ("modelopt", "channel"),
    ("modelopt", "block"),
    ("compressed-tensors", "tensor"),
    ("compressed-tensors", "block"),
    ("deepseek-v3", "block"),
]


def convert(tmp, name, source, rules, **target):
    path = tmp / f"{name}.yaml"
    body = {
        "version": 1,
        "name": name,
        "source": {"path": str(source)},
        "target": {"output": str(tmp / name), **target},
        "layers": rules,
    }
    path.write_text(yaml.safe_dump(body))
    run_job(prepare(str(path)))
    return tmp / name


@pytest.mark.parametrize(("layout", "granularity"), STORED)
def test_weights_of_the_model_are_the_decoded_ones(tmp_path, layout, granularity):
    rules = [{"match": "*_proj", "to": "fp8", "granularity": granularity}, KEEP]
    packed = convert(tmp_path, "fp8", SOURCE, rules, format="fp8", layout=layout)
    plain = convert(tmp_path, "bf16", packed, [{"match": "*", "to": "bf16"}], format="bf16")
    ours, exact = (dict(load_model(folder).model.named_parameters()) for folder in (packed, plain))
    assert ours.keys() == exact.keys()
    for name, values in exact.items():
        assert torch.equal(ours[name].to(torch.bfloat16), values.to(torch.bfloat16)), name
