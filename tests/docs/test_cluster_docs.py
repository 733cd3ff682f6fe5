"""docs/cluster.md and its recipes: commands that the program takes, files that exist, three commands each."""

import re
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from requant.manifests.load import load_manifest

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = (DOCS / "cluster.md").read_text(encoding="utf-8")
JOB = yaml.safe_load((DOCS / "cluster" / "rayjob.yaml").read_text(encoding="utf-8"))
COMMANDS = [
    line.partition("  #")[0] for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL) for line in block.splitlines()
]


def section(title):
    return TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("title", ["SLURM", "Kubernetes"])
def test_each_recipe_has_three_commands(title):
    block = re.findall(r"```sh\n(.*?)```", section(title), re.DOTALL)
    assert [len(lines.splitlines()) for lines in block] == [3]


def test_linked_files_exist():
    links = re.findall(r"\]\(([^)]+)\)", TEXT)
    assert links
    assert [link for link in links if not (DOCS / link).exists()] == []


def sets_of(command):
    words = shlex.split(command)
    return [value for flag, value in pairwise(words) if flag == "--set"]


def test_the_entrypoint_of_the_job_is_a_command_that_the_manifest_takes():
    words = shlex.split(JOB["spec"]["entrypoint"])
    assert words[:3] == ["requant", "run", "deepseek-v4-flash"]
    manifest = load_manifest(words[2], sets_of(JOB["spec"]["entrypoint"])).manifest
    assert (manifest.execute.engine, manifest.execute.ray_address) == ("ray", "auto")


def test_the_job_mounts_one_volume_everywhere_and_keeps_tasks_off_the_driver():
    cluster = JOB["spec"]["rayClusterSpec"]
    head, worker = cluster["headGroupSpec"], cluster["workerGroupSpecs"][0]
    assert head["rayStartParams"] == {"num-cpus": "0"}
    assert cluster["authOptions"] == {"mode": "token"}
    specs = [group["template"]["spec"] for group in (head, worker)]
    assert specs[0]["volumes"] == specs[1]["volumes"]
    for spec in specs:
        (container,) = spec["containers"]
        assert container["volumeMounts"] == [{"name": spec["volumes"][0]["name"], "mountPath": "/models"}]
        assert container["resources"]["requests"] == container["resources"]["limits"]
    sets = dict(entry.split("=", 1) for entry in sets_of(JOB["spec"]["entrypoint"]))
    assert sets["source.path"].startswith("/models/")
    assert sets["target.output"].startswith("/models/")


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("requant plan")])
def test_flags_of_the_plan_are_flags_of_the_program(command):
    import typer.main
    from requant.convert.cli import app

    known = {name for p in typer.main.get_command(app).commands["plan"].params for name in p.opts}
    assert {word for word in shlex.split(command) if word.startswith("--")} <= known


def test_the_documents_speak_of_two_plans():
    assert sum(c.startswith("requant plan") for c in COMMANDS) == 2


def test_the_slurm_recipe_is_a_script_that_bash_can_read():
    recipe = DOCS / "cluster" / "requant.sbatch"
    assert subprocess.run(["bash", "-n", str(recipe)], check=False).returncode == 0
    text = recipe.read_text(encoding="utf-8")
    assert "RAY_AUTH_MODE=token" in text
    assert "execute.engine=ray" in text
