"""A skip that CONTRIBUTING.md does not list fails the run, in one process and over several."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUITE = """
import pytest

@pytest.mark.parametrize("case", [1, 2, 3])
def test_skips(case):
    pytest.skip("no such device")

@pytest.mark.xfail(reason="known")
def test_expected_to_fail():
    assert False

def test_passes():
    pass
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "tests")
    (tmp_path / "tests" / "test_x.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")

    def run(listed, *options):
        rows = "".join(f"| `{test}` | {count} | the device is rare |\n" for test, count in listed.items())
        (tmp_path / "CONTRIBUTING.md").write_text(
            f"# C\n\n## Skipped tests\n| test | cases | reason |\n|---|---|---|\n{rows}\n## Next\n"
        )
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, "tests"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    run.folder = tmp_path
    return run


@pytest.mark.parametrize("options", [(), ("-n", "2", "--dist", "loadgroup")])
def test_listed_skips_pass_and_one_more_fails(project, options):
    within = project({"tests/test_x.py::test_skips": 3}, *options)
    assert within.returncode == 0, within.stdout
    beyond = project({"tests/test_x.py::test_skips": 2}, *options)
    assert beyond.returncode == 1
    assert "tests/test_x.py::test_skips: 3 skipped, 2 listed" in beyond.stdout


def test_an_unlisted_skip_fails(project):
    done = project({})
    assert done.returncode == 1
    assert "tests/test_x.py::test_skips: 3 skipped, 0 listed" in done.stdout


@pytest.mark.parametrize("options", [(), ("-n", "2")])
def test_a_whole_file_that_skips_itself_is_counted_once(project, options):
    (project.folder / "tests" / "test_y.py").write_text("import pytest\npytest.importorskip('no_such_module_at_all')\n")
    done = project({"tests/test_x.py::test_skips": 3}, *options)
    assert done.returncode == 1
    assert "tests/test_y.py: 1 skipped, 0 listed" in done.stdout
    assert project({"tests/test_x.py::test_skips": 3, "tests/test_y.py": 1}, *options).returncode == 0
