"""tests/gpu/run.sh without a GPU: a step that there is not is an error, and no run without failures."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(sys.platform != "linux", reason="bash and GNU coreutils")
def test_a_step_that_there_is_not_ends_the_script_before_anything_is_made(tmp_path):
    done = subprocess.run(
        [ROOT / "tests/gpu/run.sh", tmp_path / "out", "abc123", tmp_path / "work"],
        cwd=ROOT,
        env=os.environ | {"STEPS": "doctor sanitise"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("STEPS: no step is called sanitise; there are: doctor sanitize quantizers ")
    assert list(tmp_path.iterdir()) == []
