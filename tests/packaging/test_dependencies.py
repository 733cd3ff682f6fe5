"""Each dependency has its reason in CONTRIBUTING.md, and the version one place."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NAME = re.compile(r"[\w.-]+")


def section(text, title):
    assert f"\n## {title}\n" in text
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_every_dependency_has_one_line_of_reason():
    text = section((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), "Dependencies")
    listed = re.findall(r"^\| `([^`]+)` \| \S.{10,} \|$", text, re.MULTILINE)
    declared = {
        NAME.match(line)[0]
        for lines in [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
        for line in lines
        if not line.startswith("requant[")
    }
    assert sorted(listed) == sorted(declared)


def test_the_constraints_name_only_what_the_project_depends_on():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    assert "torch==2.13.0" in lines
    declared = {NAME.match(line)[0] for line in PROJECT["dependencies"]}
    assert {NAME.match(line)[0] for line in lines} <= declared


def test_the_changelogs_newest_release_is_the_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## \[(\d+\.\d+\.\d+)\]", text, re.MULTILINE)[1] == PROJECT["version"]
    assert importlib.metadata.version("requant") == PROJECT["version"]


def test_the_demo_extra_is_part_of_the_development_environment():
    extras = PROJECT["optional-dependencies"]
    assert set(extras["demo"]) <= set(extras["dev"])
