"""The models: what a manifest means once it is read, and the schema that editors read."""

import json
import string
from pathlib import Path

import jsonschema
import pytest
import requant.manifests.schema as schema_module
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from requant.manifests.load import LIBRARY, dump_manifest, load_manifest
from requant.manifests.schema import Manifest, json_schema
from requant.manifests.sizes import format_size, parse_size

FOLDER = Path(schema_module.__file__).parent
GOOD = {
    "version": 1,
    "name": "x",
    "source": {"path": "a"},
    "target": {"format": "nvfp4", "output": "o"},
    "layers": [{"match": "*", "to": "nvfp4"}],
}


def test_the_least_manifest_has_the_defaults_that_the_design_names():
    manifest = Manifest.model_validate(GOOD)
    assert manifest.source.model_dump() == {"repo": None, "path": "a", "revision": "main", "layout": "auto"}
    assert manifest.target.model_dump() == {
        "format": "nvfp4",
        "layout": "modelopt",
        "output": "o",
        "shard_size": 5_000_000_000,
        "runtimes": (),
    }
    assert manifest.layers[0].model_dump() == {
        "match": "*",
        "to": "nvfp4",
        "scale": "lossless",
        "granularity": None,
        "rounding": "nearest",
        "optional": False,
    }
    assert manifest.activations.model_dump() == {"input_scale": 1.0, "calibrate": None}
    assert manifest.execute.model_dump() == {
        "workers": "auto",
        "device": "auto",
        "engine": "local",
        "ray_address": None,
        "stream": False,
        "max_disk": None,
        "work": None,
    }
    assert manifest.validation.model_dump() == dict.fromkeys(("numerics", "kernels", "model", "speed", "serving"))
    assert (manifest.kv_cache, manifest.publish, manifest.include) == (None, None, ())


def test_a_gate_that_stands_there_is_required_on_any_device_and_speed_on_a_gpu():
    gates = {"numerics": {}, "kernels": {}, "model": {"text": "t"}, "speed": {}, "serving": {"launch": "x"}}
    validation = Manifest.model_validate({**GOOD, "validate": gates}).validation
    assert {name: (getattr(validation, name).required, getattr(validation, name).device) for name in gates} == {
        "numerics": (True, "any"),
        "kernels": (True, "any"),
        "model": (True, "any"),
        "speed": (True, "cuda"),
        "serving": (True, "any"),
    }
    assert (validation.kernels.modules, validation.kernels.max_rel_error) == (32, 5e-3)
    assert (validation.speed.concurrency, validation.speed.requests) == ((1, 8, 16), (8, 32, 48))


@pytest.mark.parametrize(
    ("to", "scale"),
    [("nvfp4", "lossless"), ("mxfp4", "nearest"), ("fp8", "nearest"), ("bf16", "lossless"), ("keep", "lossless")],
)
def test_the_default_scale_is_the_one_that_fits_the_format(to, scale):
    kind = to if to != "keep" else "nvfp4"
    layers = [{"match": "a", "to": kind}, {"match": "*", "to": to}]
    target = {"format": kind, "output": "o"}
    assert Manifest.model_validate({**GOOD, "target": target, "layers": layers}).layers[1].scale == scale


@pytest.mark.parametrize("kind", ["nvfp4-w4a16", "mxfp4", "bf16"])
@pytest.mark.parametrize("given_keys", [{}, {"activations": {}}, {"activations": {"input_scale": None}}])
def test_formats_without_activation_scales_have_none_by_default(kind, given_keys):
    layers = [{"match": "*", "to": kind.removesuffix("-w4a16")}]
    target = {"format": kind, "output": "o"}
    manifest = Manifest.model_validate({**GOOD, "target": target, "layers": layers, **given_keys})
    assert manifest.activations.input_scale is None


def test_calibration_takes_the_place_of_the_constant():
    activations = Manifest.model_validate({**GOOD, "activations": {"calibrate": {"text": "t"}}}).activations
    assert activations.input_scale is None
    assert activations.calibrate.model_dump() == {"text": "t", "samples": 512, "sequence_length": 512}


def test_scales_can_come_from_another_checkpoint():
    manifest = Manifest.model_validate({**GOOD, "activations": {"input_scale": {"from": "/c"}}})
    assert manifest.activations.input_scale.path == "/c"


def test_a_home_folder_is_written_out(monkeypatch):
    monkeypatch.setenv("HOME", "/home/u")
    manifest = Manifest.model_validate(
        {**GOOD, "source": {"path": "~/m"}, "target": {"format": "nvfp4", "output": "~"}}
    )
    assert (manifest.source.path, manifest.target.output) == ("/home/u/m", "/home/u")


def test_a_manifest_cannot_be_changed():
    manifest = Manifest.model_validate(GOOD)
    with pytest.raises(ValidationError, match="frozen"):
        manifest.name = "y"
    with pytest.raises(ValidationError, match="frozen"):
        manifest.target.format = "fp8"
    assert hash(manifest) == hash(Manifest.model_validate(GOOD))


def models(model=Manifest, seen=None):
    """Every model that a manifest is made of."""
    seen = {} if seen is None else seen
    if model.__name__ not in seen:
        seen[model.__name__] = model
        for info in model.model_fields.values():
            parts = [info.annotation]
            while parts:
                part = parts.pop()
                parts += list(getattr(part, "__args__", ()))
                if isinstance(part, type) and issubclass(part, BaseModel):
                    models(part, seen)
    return seen


def test_every_key_has_a_description_and_every_model_refuses_unknown_keys():
    found = models()
    assert len(found) == 16
    for name, model in found.items():
        assert model.model_config["extra"] == "forbid", name
        assert model.model_config["frozen"], name
        assert [key for key, info in model.model_fields.items() if len(info.description or "") < 10] == [], name


def test_the_committed_json_schema_is_the_one_of_the_models():
    committed = json.loads((FOLDER / "schema.json").read_text())
    assert committed == json_schema()
    assert (FOLDER / "schema.json").read_text() == json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


def test_the_json_schema_is_valid_and_describes_every_key():
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    for part in (schema, *schema["$defs"].values()):
        assert part["additionalProperties"] is False
        for key, value in part["properties"].items():
            assert value.get("description"), key


@pytest.mark.parametrize(
    "path", [*LIBRARY.glob("*.yaml"), *(FOLDER / "examples").glob("*.yaml")], ids=lambda path: path.stem
)
def test_our_manifests_are_valid_for_editors_too(path):
    jsonschema.validate(yaml.safe_load(path.read_text().replace("5e-3", "0.005")), json_schema())
    assert path.read_text().startswith("# yaml-language-server: $schema=../schema.json\n")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"layers": []}, "should be non-empty"),
        ({"surprise": 1}, "Additional properties"),
        ({"kv_cache": "fp7"}, "'fp8' was expected"),
        ({"target": {"format": "nvfp4", "output": "o", "shard_size": "5G"}}, "does not match"),
        ({"version": 2}, "1 was expected"),
    ],
)
def test_the_json_schema_refuses_what_the_models_refuse(change, fault):
    with pytest.raises(jsonschema.ValidationError, match=fault):
        jsonschema.validate({**GOOD, **change}, json_schema())
    with pytest.raises(ValidationError):
        Manifest.model_validate({**GOOD, **change})


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("5GB", 5 * 10**9),
        ("512MiB", 512 * 2**20),
        ("40gb", 40 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        ("900kB", 900_000),
        ("1TB", 10**12),
        ("7B", 7),
        ("0.001KB", 1),
    ],
)
def test_sizes_are_decimal_or_binary_by_their_unit(text, count):
    assert parse_size(text) == count


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("5", "did you mean '5GB'?"),
        ("5G", "did you mean '5GB'?"),
        ("20m", "did you mean '20MB'?"),
        ("GB", "not a size"),
        ("-5GB", "not a size"),
        ("1e3GB", "not a size"),
        ("5 G B", "not a size"),
        ("\N{ARABIC-INDIC DIGIT FIVE}GB", "not a size"),
        ("0.0001KB", "not a whole number of bytes"),
        ("", "not a size"),
    ],
)
def test_what_is_no_size_is_told(text, why):
    with pytest.raises(ValueError, match=why.replace("?", r"\?")):
        parse_size(text)


@given(st.integers(0, 10**15 - 1))
def test_a_formatted_size_reads_back(count):
    assert parse_size(format_size(count)) == count


WORDS = st.text(string.ascii_letters + string.digits + "._-*${}:#'\"\\/ é模~&!@%", min_size=1, max_size=20)
TRAPS = st.sampled_from(
    [
        "no",
        "on",
        "1e-3",
        "010",
        "1:30",
        "null",
        "~",
        "0x1f",
        "2024-01-01",
        "${env:X}",
        "$${",
        "=",
        "<<",
        ".nan",
        "- a",
        "a: b",
    ]
)


@given(
    text=st.one_of(WORDS, TRAPS), scale=st.floats(1e-30, 1e30), workers=st.one_of(st.just("auto"), st.integers(1, 999))
)
def test_a_resolved_manifest_reads_back_to_the_same_manifest(tmp_path_factory, text, scale, workers):
    manifest = Manifest.model_validate(
        {
            **GOOD,
            "source": {"path": f"/{text}", "layout": "plain"},
            "layers": [{"match": "x" + text, "to": "nvfp4", "scale": "mse"}] if not text.endswith(".weight") else [],
            "activations": {"input_scale": scale},
            "execute": {"workers": workers},
            "validate": {"model": {"text": "/" + text, "max_kl": 1e-7}, "serving": {"launch": text}},
            "publish": {"repo": "a/b"},
        }
    )
    path = tmp_path_factory.mktemp("m") / "m.yaml"
    path.write_text(dump_manifest(manifest))
    loaded = load_manifest(path, environ={})
    assert loaded.manifest == manifest
    assert loaded.resolved_yaml == path.read_text()


def test_the_hash_for_resuming_ignores_how_and_where_and_sees_what(tmp_path):
    path = tmp_path / "m.yaml"
    path.write_text(json.dumps(GOOD))
    plain = load_manifest(path, environ={})
    same = ["execute.workers=2", "target.output=p", "target.runtimes=[vllm]", "validate.numerics={}", "name=y"]
    other = [
        "target.shard_size=6GB",
        "layers.0.scale=mse",
        "activations.input_scale=2",
        "source.revision=main2",
        "kv_cache=fp8",
    ]
    for argument in same:
        loaded = load_manifest(path, [argument], environ={})
        assert loaded.conversion_sha256 == plain.conversion_sha256, argument
        assert loaded.sha256 != plain.sha256, argument
    for argument in other:
        extra = ["source.repo=a/b"] if "revision" in argument else []
        assert load_manifest(path, [*extra, argument], environ={}).conversion_sha256 != plain.conversion_sha256, (
            argument
        )


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"endpoint": "http://h:1", "native_fp4": True}, "of an endpoint no log is seen"),
        ({"launch": "s {port}", "max_ttft_ms": (1.0, 2.0)}, "2 bounds for 3 concurrencies; give one, or one for each"),
        ({"launch": "s {port}", "min_output_tokens_per_s": 0.0}, "greater than 0"),
    ],
)
def test_bounds_of_a_server_that_could_never_hold_are_faults(fields, told):
    from requant.manifests.gates import ServingGate

    with pytest.raises(ValidationError, match=told):
        ServingGate(**fields)
    assert ServingGate(launch="s {port}", max_itl_ms=(1.0, 2.0, 3.0)).max_itl_ms == (1.0, 2.0, 3.0)
    assert ServingGate(launch="s {port}", max_itl_ms=4.0).max_itl_ms == 4.0


@pytest.mark.parametrize(("tasks", "told"), [((), "at least one task"), (("a", "a"), "stands here twice")])
def test_tasks_are_named_once(tasks, told):
    from requant.manifests.gates import LmEval

    with pytest.raises(ValidationError, match=told):
        LmEval(tasks=tasks, folder="evals")
