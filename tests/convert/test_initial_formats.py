"""`init` and `inspect` on every source format: a manifest that plans as it stands, and the formats by name."""

import pytest
from module_files import load
from requant.convert.checkpoint import open_checkpoint
from requant.convert.initial import initial_manifest
from requant.convert.inspect import census, census_text
from requant.convert.pipeline import prepare

SOURCES = load("convert/test_sources.py")

FORMATS = {"deepseek_v3": "fp8", "modelopt_nvfp4": "nvfp4", "ct_nvfp4": "nvfp4", "kimi_int4": "int4", "gptq": "gptq",
           "awq": "awq", "channels": "fp8", "quark_nvfp4": "nvfp4"}  # fmt: skip


@pytest.mark.parametrize("name", list(FORMATS))
def test_init_writes_what_plans_and_inspect_names_the_format(kit, name, monkeypatch):
    monkeypatch.chdir(kit.tmp)
    tensors, _, quant = getattr(SOURCES, name)(kit.rng)
    folder = SOURCES.checkpoint(kit, tensors, quant)
    path = kit.tmp / "m.yaml"
    path.write_text(initial_manifest(str(folder)))
    plan = prepare(str(path)).plan
    assert plan.converted == ("model.layers.0.mlp.up_proj",)
    kinds = {unit.kind for unit in plan.groups}
    assert kinds == ({"relayout"} if FORMATS[name] == "nvfp4" else {"encode"})
    facts = census(open_checkpoint(folder))
    assert list(facts["formats"]) == [FORMATS[name]]
    assert facts["formats"][FORMATS[name]]["weights"] == 1
    assert f"1 {FORMATS[name].upper()} weights" in census_text(facts, verbose=False)
