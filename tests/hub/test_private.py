"""What may be published holds no path, token or address of the machine; what stays behind finds the source again."""

import json

import pytest
from requant.convert.private import LOCAL_MANIFEST, LOCATIONS, local_manifest, public_manifest, redact
from requant.manifests.load import load_manifest
from requant.manifests.schema import Manifest


def locations(model, prefix=()):
    """Every key of the schema that is a Location, known by its validator."""
    found = []
    for name, info in model.model_fields.items():
        path = (*prefix, info.alias or name)
        text = repr(info.annotation) + repr(info.metadata)
        if "expanduser" in text:
            found.append(path)
        for kind in getattr(info.annotation, "__args__", (info.annotation,)):
            if hasattr(kind, "model_fields"):
                found += locations(kind, path)
    return found


def test_every_place_that_a_manifest_can_name_is_known():
    assert set(locations(Manifest)) == set(LOCATIONS)


def test_a_published_manifest_names_folders_by_their_last_part_only(kit):
    loaded = load_manifest(kit.manifest(kit.tmp / "m", "out"))
    public = public_manifest(loaded.manifest)
    assert str(kit.tmp) not in public
    assert "path: m\n" in public
    assert "output: out\n" in public
    assert str(kit.tmp / "m") in local_manifest(loaded.manifest)


def test_source_and_output_of_one_name_stay_two_folders(kit, tmp_path):
    path = kit.manifest(kit.tmp / "m", "out")
    loaded = load_manifest(path, [f"source.path={tmp_path}/a/model", f"target.output={tmp_path}/b/model"])
    (tmp_path / "p.yaml").write_text(public_manifest(loaded.manifest))
    again = load_manifest(tmp_path / "p.yaml").manifest
    assert (again.source.path, again.target.output) == ("model", "out/model")


def test_servers_are_not_named(kit, tmp_path):
    path = kit.manifest(kit.tmp / "m", "out")
    sets = ["validate.serving.endpoint=http://10.0.0.7:8000/v1", "execute.engine=ray", "execute.ray_address=ray://h:1"]
    public = public_manifest(load_manifest(path, sets).manifest)
    assert "10.0.0.7" not in public
    assert "ray://" not in public


@pytest.mark.parametrize(
    ("said", "left"),
    [
        ("401 for hf_abcdefghijklmnopqrstuvwxyz012345", "401 for ***"),
        ("https://s3.example/x?X-Amz-Signature=abc&y=1 failed", "https://s3.example/x failed"),
        ("https://user:password@proxy.example:80/", "https://proxy.example:80/"),
        ("nothing to hide", "nothing to hide"),
    ],
)
def test_messages_lose_tokens_and_signatures(said, left):
    assert redact(said) == left


def test_an_output_holds_no_path_and_is_validated_again_from_anywhere(kit, monkeypatch, tmp_path):
    output = kit.signed()
    lock = json.loads((output / "requant.lock.json").read_text())
    assert lock["source"]["folder"] == "src"
    published = {p for p in output.rglob("*") if p.is_file() and ".requant-local" not in p.parts}
    for path in published:
        assert str(tmp_path).encode() not in path.read_bytes(), path.name
    assert sorted(lock["outputs"]) == sorted(
        str(p.relative_to(output)) for p in published if not p.name.startswith("requant.signoff")
    )
    monkeypatch.chdir("/")
    assert kit.requant("validate", output, "--quiet") == 0
    assert kit.requant("report", output) == 0


def test_an_output_from_elsewhere_says_how_to_find_its_source(kit, capsys, monkeypatch, tmp_path):
    output = kit.signed()
    (output / LOCAL_MANIFEST).unlink()
    monkeypatch.chdir("/")
    assert kit.requant("validate", output, "--quiet") == 3
    assert "--set source.path=FOLDER" in capsys.readouterr().err
    assert kit.requant("validate", output, "--quiet", "--set", f"source.path={tmp_path}/src") == 0
