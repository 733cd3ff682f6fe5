"""The SLURM recipe, run to its end with a stand-in for SLURM: srun starts its command here."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from requant.convert.pipeline import prepare, run_job

pytestmark = pytest.mark.ray

RECIPE = Path(__file__).resolve().parents[2] / "docs" / "cluster" / "requant.sbatch"
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
SCONTROL = """#!/bin/bash
[ "$1 $2 $3" = "show hostnames node[1-2]" ] || exit 1
printf '127.0.0.1\\nnode2\\n'
"""


def sha256s(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.glob("*.safetensors"))}


def test_the_slurm_recipe_converts_on_all_nodes_of_the_job(kit):
    (kit.tmp / "m.yaml").write_text(kit.manifest_text(kit.dsv4(experts=8), kit.tmp / "out", kit.EXPERTS))
    run_job(prepare(str(kit.tmp / "m.yaml")))
    reference = sha256s(kit.tmp / "out")
    tools = kit.tmp / "bin"
    tools.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (tools / "requant").write_text(f'#!/bin/bash\nexec {sys.executable} -m requant.convert.cli "$@"\n')
    (tools / "requant").chmod(0o755)
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_ADDRESS")},
        "PATH": os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "HOME": str(kit.tmp),  # the recipe makes a token there
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "1",
    }
    command = ["bash", str(RECIPE), str(kit.tmp / "m.yaml"), "--force", "--quiet", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(done.stdout[done.stdout.index("\n{\n") :])["run"]
    assert record["engine"] == "ray"
    assert record["bytes"] > 0
    assert sha256s(kit.tmp / "out") == reference
