"""tests/gpu/sanitize.sh without a GPU: its tools are stand-ins, and the table tells clean from not clean."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = '#!/bin/bash\necho "ok"; echo done\n'
PYTHON = r"""#!/bin/bash
[ "$1" = -c ] && { echo 90; exit; }
case "$*" in
  *wgmma*)
    said="========= Error: Race reported\n=========     at 0x10\n========= Program hit cudaErrorInvalidValue"
    [ "$NO_CLUSTER" ] && { echo -e "$said"; exec sleep 60; };;
  *decode_fused*) exit 3;;
esac
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


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="bash and GNU coreutils")


@pytest.fixture
def sanitize(tmp_path):
    """Runs the script on the stand-ins; variables of the environment as keywords."""
    tools = {"python3": PYTHON, "compute-sanitizer": SANITIZER, "nvidia-smi": "#!/bin/bash\necho Card, 1.0\n"}
    tools |= {"w4a4_sanitize": PROGRAM, "quantize_sanitize": PROGRAM}
    for name, text in tools.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "BIN": str(tmp_path), "LIMIT": "2"}
    environment["REQUANT_W4A16_LIBRARY"] = "given.so"

    def run(**more):
        command = [ROOT / "tests/gpu/sanitize.sh", tmp_path / "table.md", "abc123", tmp_path / "logs"]
        return subprocess.run(command, cwd=ROOT, env=environment | more, capture_output=True, text=True, check=False)

    return run


def test_no_run_is_not_clean_and_an_earlier_runs_rows_are_not_its_own(sanitize, tmp_path):
    assert sanitize(ONLY="quantize_sanitize").stdout.endswith("not clean: 1\n")
    good = sanitize(ONLY="racecheck.*quantize_sanitize")
    assert (good.returncode, (tmp_path / "table.md").read_text().count("quantize_sanitize")) == (0, 1), good.stdout
    none = sanitize(ONLY="quantise")
    assert (none.returncode, none.stdout.splitlines()[0]) == (1, "ONLY='quantise' names no run")
    assert "quantize_sanitize" not in (tmp_path / "table.md").read_text()


def test_a_run_that_leaves_no_row_is_not_clean(sanitize, tmp_path):
    (tmp_path / "grep").write_text("#!/bin/bash\nkill -9 $PPID\n")  # the shell that would write the row
    (tmp_path / "grep").chmod(0o755)
    done = sanitize(ONLY="racecheck.*quantize_sanitize")
    assert (done.returncode, done.stdout.endswith("not clean: 1\n")) == (1, True), done.stdout


def test_the_table_says_which_runs_are_clean(sanitize, tmp_path):
    done = sanitize()
    table = (tmp_path / "table.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[6:]]
    results = {(row[1], row[5].strip("`")): (row[2], row[3]) for row in rows}
    assert "Card, 1.0, Version 1.2, commit abc123" in table
    assert len(rows) == len(results) == 20
    assert {tool for tool, _ in results} == {"memcheck", "racecheck"}
    assert results["memcheck", "python3 -P tests/gpu/w4a16_sweep.py sanitize"] == ("0 errors", "right")
    hazards = "0 hazards displayed (0 errors, 0 warnings)"
    assert results["racecheck", "NO_CLUSTER=1 python3 -P tests/gpu/w4a16_sweep.py sanitize"] == (
        hazards,
        "right, no cluster",
    )
    assert results["memcheck", "quantize_sanitize"] == ("2 errors", "done")
    late = results["racecheck", "NO_CLUSTER=1 python3 -P tests/gpu/w4a16_wgmma_sweep.py sanitize"]
    assert late[0] == "not finished in 2 s; errors until then: 2; the program ended with 124"
    failed = [result for (_, command), (result, _) in results.items() if "decode_fused" in command]
    assert failed == ["0 errors; the program ended with 3", f"{hazards}; the program ended with 3"]
    assert done.returncode == 4, done.stdout
    assert done.stdout.endswith("not clean: 4\n")
