"""tests/gpu/sanitize.sh without a GPU: its tools are stand-ins, and the table tells clean from not clean."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = '#!/bin/bash\necho "ok"; echo done\n'
PYTHON = """#!/bin/bash
[ "$1" = -c ] && { echo 90; exit; }
case "$*" in *wgmma*) [ "$NO_CLUSTER" ] && exec sleep 60;; *decode_fused*) exit 3;; esac
echo "right${NO_CLUSTER:+, no cluster}"
"""
SANITIZER = """#!/bin/bash
[ "$1" = --version ] && { echo "Version 1.2"; exit; }
tool=$2; shift 4
echo "========= COMPUTE-SANITIZER"
"$@" || status=$?
case "$tool $*" in
  memcheck*quantize_sanitize*) echo "========= ERROR SUMMARY: 2 errors";;
  memcheck*) echo "========= ERROR SUMMARY: 0 errors";;
  *) echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)";;
esac
exit ${status:-0}
"""


@pytest.mark.skipif(sys.platform != "linux", reason="bash and GNU coreutils")
def test_the_table_says_which_runs_are_clean(tmp_path):
    tools = {"python3": PYTHON, "compute-sanitizer": SANITIZER, "nvidia-smi": "#!/bin/bash\necho Card, 1.0\n"}
    tools |= {"w4a4_sanitize": PROGRAM, "quantize_sanitize": PROGRAM}
    for name, text in tools.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "BIN": str(tmp_path), "LIMIT": "2"}
    done = subprocess.run(
        [ROOT / "tests/gpu/sanitize.sh", tmp_path / "table.md", "abc123", tmp_path / "logs"],
        cwd=ROOT,
        env=environment | {"REQUANT_W4A16_LIBRARY": "given.so"},
        capture_output=True,
        text=True,
        check=False,
    )
    table = (tmp_path / "table.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[6:]]
    results = {(row[1], row[5].strip("`")): (row[2], row[3]) for row in rows}
    assert "Card, 1.0, Version 1.2, commit abc123" in table
    assert len(rows) == len(results) == 14
    assert {tool for tool, _ in results} == {"memcheck", "racecheck"}
    assert results["memcheck", "python3 -P tests/gpu/w4a16_sweep.py sanitize"] == ("0 errors", "right")
    hazards = "0 hazards displayed (0 errors, 0 warnings)"
    assert results["racecheck", "NO_CLUSTER=1 python3 -P tests/gpu/w4a16_sweep.py sanitize"] == (
        hazards,
        "right, no cluster",
    )
    assert results["memcheck", "quantize_sanitize"] == ("2 errors", "done")
    late = results["racecheck", "NO_CLUSTER=1 python3 -P tests/gpu/w4a16_wgmma_sweep.py sanitize"]
    assert late[0] == "not finished in 2 s; the program ended with 124"
    failed = [result for (_, command), (result, _) in results.items() if "decode_fused" in command]
    assert failed == ["0 errors; the program ended with 3", f"{hazards}; the program ended with 3"]
    assert done.returncode == 4, done.stdout
    assert done.stdout.endswith("not clean: 4\n")
