"""What README.md shows works: its commands run, its manifest loads, its links lead somewhere.

The commands run in a folder that looks like the repository after `make demo`.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from requant.manifests.errors import ExitCode
from requant.manifests.load import load_manifest

pytestmark = pytest.mark.xdist_group("demo")

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ELSEWHERE = {
    "make demo": "tests/docs/test_demo.py runs it",
    "make test": "runs this test",
    "pip install .": "tests/packaging/test_distributions.py installs the wheel, the sdist and the tree",
}


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands():
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    return [line.split("  #")[0].strip() for line in lines if line.strip() and not line.startswith("#")]


@pytest.fixture
def after_demo(tmp_path, demo):
    """A working folder with the repository's manifests and the demo's output."""
    (tmp_path / "manifests").symlink_to(ROOT / "manifests")
    (tmp_path / "out").symlink_to(demo[0].parent)
    return tmp_path


def test_the_readme_opens_with_the_two_commands():
    assert commands()[:2] == ["make demo", "make test"]


@pytest.mark.parametrize("command", [c for c in commands() if c not in ELSEWHERE])
def test_a_command_of_the_readme_runs(command, after_demo):
    if "/models/" in command:  # a checkpoint that is not here: its manifest and flags are checked
        command = re.sub(r"^(convert|requant \w+)", "requant check", command)
    environ = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-ec", command], cwd=after_demo, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() or ">" in shlex.split(command), "said nothing"


def test_the_manifest_of_the_readme_is_valid(tmp_path):
    [text] = blocks("yaml")
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    manifest = load_manifest(path).manifest
    assert (manifest.target.format, manifest.target.layout) == ("nvfp4", "modelopt")
    assert len(text.splitlines()) <= 12


def test_the_exit_codes_are_those_of_the_program():
    rows = dict(re.findall(r"^\| (\d+) \| (\S.*) \|$", README, re.MULTILINE))
    assert {int(code) for code in rows} == {int(code) for code in ExitCode}


def test_the_excerpt_of_the_sign_off_is_what_the_demo_prints(demo):
    [excerpt] = blocks("text")
    printed = re.sub(r"\d+(\.\d+)? s\b", "", demo[1])
    for line in excerpt.splitlines():
        assert re.sub(r"\d+(\.\d+)? s\b", "", line).strip() in printed, line


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\((?!https?:)([^)#]+)", README))))
def test_links_lead_to_files(target):
    assert (ROOT / target).exists()


def test_built_in_manifests_named_in_the_readme_exist():
    sentence = re.search(r"`[\w.-]+` is a built-in manifest; so are .*? One of your own", README, re.DOTALL)[0]
    library = {path.stem for path in (ROOT / "manifests" / "library").glob("*.yaml")}
    assert set(re.findall(r"`([^`]+)`", sentence)) == library
