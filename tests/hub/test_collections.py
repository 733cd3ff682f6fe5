"""Several manifests in one go: all are tried, the table tells them apart, the exit code is the worst one's."""

import json

import pytest
from requant.convert.collection import BEST_TO_WORST, Row, worst
from requant.manifests.errors import ExitCode


@pytest.fixture
def manifests(kit):
    """A folder with one that works, one whose source is missing, one that is no manifest, and one that works again."""
    source = kit.source()
    folder = kit.tmp / "manifests"
    folder.mkdir()
    for name, where in {"a": source, "b": kit.tmp / "nowhere", "d": source}.items():
        kit.manifest(where, name, name=name).rename(folder / f"{name}.yaml")
    (folder / "c.yml").write_text("version: 1\nnmae: x\n")
    (folder / "notes.txt").write_text("not a manifest")
    return folder


def test_a_folder_is_carried_through_whatever_fails(kit, manifests, capsys):
    assert kit.requant("convert", manifests, "--quiet") == 2
    said = capsys.readouterr()
    table = [line.split() for line in said.out.splitlines()[-7:-2]]
    assert [row[0] for row in table if row[0].startswith(("a.", "b.", "c.", "d."))] == [
        "a.yaml",
        "b.yaml",
        "c.yml",
        "d.yaml",
    ]
    assert said.out.rstrip().endswith("2 of 4 signed off")
    assert said.err.count("error: ") == 2
    assert (kit.tmp / "a" / "requant.signoff.json").exists()
    assert (kit.tmp / "d" / "requant.signoff.json").exists()


def test_as_json_there_is_one_row_for_each(kit, manifests, capsys):
    assert kit.requant("convert", manifests, "--quiet", "--format", "json") == 2
    rows = json.loads(capsys.readouterr().out)
    assert [(r["exit_code"], r["result"]) for r in rows] == [
        (0, "signed off"),
        (3, "source"),
        (2, "manifest"),
        (0, "signed off"),
    ]
    assert rows[0]["said"] == str(kit.tmp / "a")
    assert "is not a folder" in rows[1]["said"]


def test_a_list_that_succeeds_exits_with_zero(kit, manifests):
    assert kit.requant("convert", manifests / "a.yaml", manifests / "d.yaml", "--quiet") == 0


def test_a_missing_gate_among_good_ones_is_the_exit_code(kit, manifests):
    text = (manifests / "d.yaml").read_text()
    (manifests / "d.yaml").write_text(text + "validate: {serving: {endpoint: 'http://localhost:1'}}\n")
    assert kit.requant("convert", manifests / "a.yaml", manifests / "d.yaml", "--quiet") == 5


def test_a_bug_in_one_does_not_stop_the_next(kit, manifests, monkeypatch):
    from requant.convert import pipeline

    real = pipeline.prepare

    def broken(ref, *more, **options):
        if "a.yaml" in ref:
            raise ZeroDivisionError
        return real(ref, *more, **options)

    monkeypatch.setattr(pipeline, "prepare", broken)
    assert kit.requant("convert", manifests / "a.yaml", manifests / "d.yaml", "--quiet") == 1
    assert (kit.tmp / "d" / "requant.signoff.json").exists()


def test_an_empty_folder_and_a_repetition_are_refused(kit, manifests, capsys):
    (kit.tmp / "empty").mkdir()
    assert kit.requant("convert", kit.tmp / "empty") == 2
    assert "holds no manifest" in capsys.readouterr().err
    assert kit.requant("convert", manifests, manifests / "a.yaml") == 2
    assert "is named twice" in capsys.readouterr().err


def test_worst_is_furthest_from_done():
    assert set(BEST_TO_WORST) == set(ExitCode) - {ExitCode.INTERRUPTED}

    def of(*codes):
        return worst(Row("m", code, "", 0.0) for code in codes)

    assert of() == ExitCode.OK
    assert of(ExitCode.OK, ExitCode.PUBLISH, ExitCode.NOT_SIGNED_OFF) == ExitCode.NOT_SIGNED_OFF
    assert of(ExitCode.BUG, ExitCode.ENVIRONMENT) == ExitCode.BUG


def test_a_collection_is_pushed_one_by_one(hub, kit):
    source = kit.source()
    for name in ("a", "b"):
        kit.manifest(source, name, name=name, publish={"repo": f"tester/{name}"})
    assert kit.requant("convert", kit.tmp / "a.yaml", kit.tmp / "b.yaml", "--push", "--quiet") == 0
    assert [len(hub.repos[f"tester/{name}"].pulls) for name in ("a", "b")] == [1, 1]
