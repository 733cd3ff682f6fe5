"""A skip that CONTRIBUTING.md does not list fails the run, in one process and over several."""

import ast
import re
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


def test_gpu_tests_run_where_other_tests_modules_are_missing(project):
    (project.folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs one\n")
    (project.folder / "tests" / "test_y.py").write_text("import no_such_module_at_all\n")
    marked = "import pytest\n\n@pytest.mark.gpu\ndef test_of_the_gpu():\n    pass\n\ndef test_other():\n    pass\n"
    (project.folder / "tests" / "test_z.py").write_text(marked)
    done = project({}, "-m", "gpu")
    assert done.returncode == 0, done.stdout
    assert "1 passed, 1 deselected" in done.stdout
    assert "No module named 'no_such_module_at_all'" in project({}, "-m", "not gpu").stdout


def skipping(path):
    """Names of the tests and fixtures of a file that may skip; "" if the whole file may."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        said = ast.unparse(node)
        marked = isinstance(node, ast.FunctionDef) and any("skipif" in ast.unparse(d) for d in node.decorator_list)
        if isinstance(node, ast.FunctionDef):
            if marked or re.search(r"pytest\.(skip|importorskip)\(", said):
                yield node.name
        elif re.search(r"pytest\.(mark\.skipif|skip|importorskip)\(", said):
            named = re.match(r"([A-Z]\w*) = pytest\.mark", said)  # a mark with a name: those that carry it
            yield from carrying(path, named[1]) if named else [""]


def carrying(path, mark):
    functions = [n for n in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(n, ast.FunctionDef)]
    return [node.name for node in functions if any(ast.unparse(d) == mark for d in node.decorator_list)]


def test_every_test_that_may_skip_stands_in_the_table():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("\n## Skipped tests\n")[2]
    listed = set(re.findall(r"^\| `([^`]+)` \| \d+ \|", text, re.MULTILINE))
    found = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        file = path.relative_to(ROOT).as_posix()
        if path.name != Path(__file__).name:
            found |= {(file, name): f"{file}::{name}" if name else file for name in skipping(path)}
    assert ("tests/kernels/test_w4a4.py", "test_sm120_machine_code_uses_the_fp4_tensor_cores") in found
    files = {one.partition("::")[0] for one in listed}
    missing = {name for (file, function), name in found.items() if name not in listed and file not in listed}
    # a fixture skips the tests that use it, and a mark for a whole file each of its tests: their file must be there
    missing = {n for n in missing if n.partition("::")[2].startswith("test_") or n.partition("::")[0] not in files}
    assert not missing
