"""nvcc -> one shared library with a C interface, loaded by ctypes; built once and kept.

Why not a torch extension: the entry points take plain pointers, so one binary serves every torch version, builds in
half a minute and needs neither ninja nor torch's headers.

A library lies in `$REQUANT_CACHE_DIR` (default `$XDG_CACHE_HOME/requant`, `~/.cache/requant`) under a name that holds
the hash of its sources and flags, so a changed source is never served by an old binary. It is written beside and then
renamed: two processes that build at once both end with a whole file.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from requant.kernels.availability import KernelUnavailableError

__all__ = ["CSRC", "FLAGS", "architecture", "build_cubin", "build_library", "find_cuda_tool"]

CSRC: Final = Path(__file__).parent / "csrc"
FLAGS: Final = ("-std=c++17", "-O3")
"""No fast-math: the quantizers' divisions are IEEE, or their bytes would differ from the CPU's."""


def find_cuda_tool(name: str) -> Path | None:
    """nvcc, cuobjdump, ...: from $CUDA_HOME, PATH, /usr/local/cuda, or the copy inside Triton's wheel."""
    folders = [Path(os.environ[var]) / "bin" for var in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(var)]
    on_path = shutil.which(name)
    if on_path:
        folders.append(Path(on_path).parent)
    folders.append(Path("/usr/local/cuda/bin"))
    triton = importlib.util.find_spec("triton")
    if triton and triton.origin:
        folders.append(Path(triton.origin).parent / "backends" / "nvidia" / "bin")
    return next((folder / name for folder in folders if os.access(folder / name, os.X_OK)), None)


def architecture(capability: tuple[int, int]) -> str:
    """The target of a compute capability: "90a", "80". From 9.0 on, chips have instructions of their own (the "a")."""
    major, minor = capability
    return f"{major}{minor}{'a' if major >= 9 else ''}"


def build_library(source: Path, headers: Sequence[str], target: str, *, flags: Sequence[str] = ()) -> Path:
    """The shared library of `source` for one target ("120a", "90a", ...), built unless the cache has it.

    headers: names beside the source that go into the hash. flags: beyond FLAGS. Raises KernelUnavailableError
    without nvcc, or with its message where it fails.
    """
    given = (*FLAGS, _gencode(target), *flags)
    digest = hashlib.sha256("\0".join(given).encode())
    for path in (source, *(source.parent / name for name in headers)):
        digest.update(path.read_bytes())
    library = _cache_folder() / f"{source.stem}-sm_{target}-{digest.hexdigest()[:16]}.so"
    if library.exists():
        return library
    nvcc = _nvcc(source)
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=f"{source.stem}-") as folder:
        made = Path(folder) / library.name
        link = ["-shared", "-Xcompiler", "-fPIC", "-cudart", "static"]
        _run([str(nvcc), *given, *link, str(source), "-o", str(made)])
        made.replace(library)
    return library


def build_cubin(source: Path, target: str, output: Path) -> None:
    """Machine code alone, for inspection: no GPU is needed to make it."""
    _run([str(_nvcc(source)), *FLAGS, _gencode(target), "-cubin", str(source), "-o", str(output)])


def _gencode(target: str) -> str:
    return f"-gencode=arch=compute_{target},code=sm_{target}"


def _nvcc(source: Path) -> Path:
    nvcc = find_cuda_tool("nvcc")
    if nvcc is None:
        raise KernelUnavailableError(
            f"no nvcc: {source.name} is compiled once on the machine. Install CUDA 12.8 or later and set CUDA_HOME"
        )
    return nvcc


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise KernelUnavailableError(f"nvcc could not be started: {error}") from error
    if done.returncode:
        raise KernelUnavailableError(
            f"nvcc failed (exit {done.returncode}): {' '.join(command)}\n{done.stderr.strip()[-2000:]}"
        )


def _cache_folder() -> Path:
    base = os.environ.get("REQUANT_CACHE_DIR")
    if base:
        return Path(base)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "requant"
