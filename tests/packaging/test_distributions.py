"""sdist, wheel and editable install: each holds all files and works in an environment of its own.

The environments see the dependencies of the one that runs the tests through a path file, so no network is needed.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("distributions")

ROOT = Path(__file__).resolve().parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
FOLDERS = ("manifests", "convert", "kernels", "validate")
USE = """
import importlib.util, json, sys
from requant.kernels.formats import E4M3_VALUES
from requant.manifests.errors import ExitCode
import requant.convert, requant.validate
places = [sys.modules[n].__file__ for n in ("requant.kernels.formats", "requant.manifests.errors")]
strangers = [n for n in ("kernels", "convert", "validate", "manifests") if importlib.util.find_spec(n)]
print(json.dumps([places, strangers, float(E4M3_VALUES[0x7E]), int(ExitCode.NOT_SIGNED_OFF)]))
"""


def run(*command, **options):
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def package_files(tree):
    """Every file of the four folders, as the wheel should name it."""
    return {
        f"requant/{path.relative_to(tree).as_posix()}"
        for folder in FOLDERS
        for path in (tree / folder).rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of what the build reads, so that building leaves nothing in the working tree."""
    copy = tmp_path_factory.mktemp("tree") / "requant"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return copy


@pytest.fixture(scope="module")
def built(tree, tmp_path_factory):
    """(sdist, wheel), the wheel built from the unpacked sdist."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(tree))
    return out / f"requant-{VERSION}.tar.gz", out / f"requant-{VERSION}-py3-none-any.whl"


@pytest.fixture
def environment(tmp_path):
    """Python of a new virtual environment that also sees the packages of this one, editable installs excepted."""
    folder = tmp_path / "env"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    site = Path(run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    paths = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    (site / "dependencies.pth").write_text("\n".join(paths) + "\n")
    return python


def install(python, *arguments):
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--disable-pip-version-check"]
    run(*command, "--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed", *arguments)


def check_use(python, home, cwd):
    """Modules come from `home`, no top-level name is claimed, and the two programs answer."""
    import json

    places, strangers, largest, code = json.loads(run(str(python), "-c", USE, cwd=cwd))
    assert all(Path(place).is_relative_to(home) for place in places), places
    assert strangers == []
    assert (largest, code) == (448.0, 5)
    for program in ("requant", "convert"):
        assert "manifest" in run(str(python.with_name(program)), "--help", cwd=cwd).lower()


def test_the_wheel_holds_every_file_of_the_packages_and_nothing_else(tree, built):
    with zipfile.ZipFile(built[1]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == package_files(tree)


def test_the_sdist_holds_the_project_files(built):
    with tarfile.open(built[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "kernels/formats.py", "convert/py.typed"} <= names
    assert "kernels/__init__.py" not in names


def test_the_wheel_carries_licence_and_readme(built):
    with zipfile.ZipFile(built[1]) as wheel:
        info = f"requant-{VERSION}.dist-info"
        metadata = wheel.read(f"{info}/METADATA").decode()
        assert "License-Expression: Apache-2.0" in metadata
        assert (ROOT / "README.md").read_text(encoding="utf-8").strip() in metadata
        assert f"{info}/licenses/LICENSE" in wheel.namelist()


def test_the_installed_wheel_works_away_from_the_source(built, environment, tmp_path):
    install(environment, str(built[1]))
    check_use(environment, environment.parents[1], tmp_path)


def test_the_installed_sdist_works_away_from_the_source(built, environment, tmp_path):
    install(environment, str(built[0]))
    check_use(environment, environment.parents[1], tmp_path)


def test_an_editable_install_reads_the_tree_and_sees_a_new_module(tree, environment, tmp_path):
    install(environment, "--editable", str(tree))
    check_use(environment, tree, tmp_path)
    (tree / "kernels" / "added_later.py").write_text("VALUE = 7\n")
    try:
        probe = "from requant.kernels.added_later import VALUE; print(VALUE)"
        assert run(str(environment), "-c", probe, cwd=tmp_path).strip() == "7"
    finally:
        (tree / "kernels" / "added_later.py").unlink()
