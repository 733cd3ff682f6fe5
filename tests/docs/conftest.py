"""The demo, run once for all tests that look at what it leaves."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def demo(tmp_path_factory):
    """(folder with the three checkpoints, what the command printed)."""
    out = tmp_path_factory.mktemp("demo") / "out" / "demo"
    prefix = Path(sys.prefix)
    environ = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    done = subprocess.run(
        ["make", "demo", f"VENV={prefix}", f"DEMO_OUT={out}", "-o", f"{prefix}/.stamp-demo"],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done.stdout
