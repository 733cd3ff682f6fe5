"""The shape of the tree: import names, dependency directions, and what the type checker is shown."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS = PROJECT["tool"]["setuptools"]["package-dir"]  # requant.kernels -> kernels
MAY_IMPORT = {
    "manifests": {"manifests"},
    "kernels": {"kernels"},
    "convert": {"convert", "manifests", "kernels"},
    "validate": {"validate", "manifests", "kernels"},
}
# the command line, and publishing, which reads the sign-off
SEES_ALL = {f"convert/cli{part}.py" for part in ("", "_convert", "_judge", "_look", "_options", "_stages")}
SEES_ALL |= {"convert/card.py", "convert/publish.py"}
MODULES = {  # distribution -> the modules that come with it, where that is not its own name
    "PyYAML": {"yaml"},
    "pydantic": {"pydantic", "pydantic_core"},  # custom errors are documented as coming from its core
    "torch": {"torch", "triton"},  # its CUDA builds bring Triton
}


def sources(folder):
    return sorted((ROOT / folder).rglob("*.py"))


def imported_modules(path):
    """Absolute names of the modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.module
            if node.module == "requant":
                yield from (f"requant.{alias.name}" for alias in node.names)


def test_the_walk_sees_every_form_of_import(tmp_path):
    (tmp_path / "m.py").write_text("import a.b as c\nfrom requant import kernels\ndef f():\n    from d.e import g\n")
    assert set(imported_modules(tmp_path / "m.py")) == {"a.b", "requant", "requant.kernels", "d.e"}


def test_kernels_has_no_init_file():
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_the_hugging_face_kernels_package_wins_over_our_folder(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("NAME = 'theirs'\n")
    done = subprocess.run(
        [sys.executable, "-c", "import kernels; print(kernels.NAME)"],
        cwd=ROOT,  # `-c` puts the working directory first on sys.path
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout.strip(), done.returncode) == ("theirs", 0), done.stderr


@pytest.mark.parametrize("folder", sorted(MAY_IMPORT))
def test_dependencies_point_one_way(folder):
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in sources(folder)
        for module in imported_modules(path)
        if path.relative_to(ROOT).as_posix() not in SEES_ALL
        and module.startswith("requant.")
        and module.split(".")[1] not in MAY_IMPORT[folder]
    ]
    assert not wrong


def test_every_import_is_declared_as_a_dependency():
    extras = PROJECT["project"]["optional-dependencies"]
    declared = {
        re.match(r"[\w.-]+", requirement)[0]
        for requirement in [
            *PROJECT["project"]["dependencies"],
            *(line for name, lines in extras.items() if name != "dev" for line in lines),
        ]
    }
    known = {"requant", *sys.stdlib_module_names}.union(*(MODULES.get(name, {name}) for name in declared))
    undeclared = {
        f"{path.relative_to(ROOT)}: {module}"
        for folder in MAY_IMPORT
        for path in sources(folder)
        for module in imported_modules(path)
        if module.partition(".")[0] not in known
    }
    assert not undeclared


def test_the_package_map_and_the_type_checkers_links_agree():
    links = {path.name: path.resolve() for path in (ROOT / ".typing" / "requant").iterdir()}
    assert links == {folder: ROOT / folder for folder in MAY_IMPORT}
    assert {f"requant.{folder}": folder for folder in MAY_IMPORT} == FOLDERS


def test_every_folder_with_modules_is_packaged():
    packages = set(PROJECT["tool"]["setuptools"]["packages"])
    data = PROJECT["tool"]["setuptools"]["package-data"]
    for folder in MAY_IMPORT:
        for path in sources(folder):
            package = ".".join(["requant", *path.parent.relative_to(ROOT).parts])
            pattern = f"{path.parent.name}/*.py"
            assert package in packages or pattern in data[f"requant.{folder}"], path
