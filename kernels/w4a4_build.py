"""Builds the W4A4 CUDA kernels once and keeps them: nvcc -> one shared library with a C interface, loaded by ctypes.

Why not a torch extension: the entry points take plain pointers, so one binary serves every torch version, builds in
half a minute and needs neither ninja nor torch's headers.

The library lies in `$REQUANT_CACHE_DIR` (default `$XDG_CACHE_HOME/requant`, `~/.cache/requant`) under a name that holds
the hash of its sources and flags, so a changed source is never served by an old binary. It is written beside and then
renamed: two processes that build at once both end with a whole file.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Final

from requant.kernels.availability import KernelUnavailableError

__all__ = ["NATIVE_ARCHITECTURES", "build_cubin", "build_library", "find_cuda_tool", "load_library"]

NATIVE_ARCHITECTURES: Final = {(12, 0): "120a", (12, 1): "121a"}
"""Compute capabilities with a warp-level FP4 mma, and the only targets for which ptxas takes it (CUDA 13.0)."""

_CSRC: Final = Path(__file__).parent / "csrc"
_SOURCE: Final = _CSRC / "w4a4.cu"
_HEADERS: Final = ("fp4_mma.cuh", "w4a4_encode.cuh", "w4a4_gemm.cuh", "w4a4_quantize.cuh")
_FLAGS: Final = ("-std=c++17", "-O3")
"""No fast-math: the quantizer's divisions are IEEE, or its bytes would differ from the CPU's."""


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


def _nvcc() -> Path:
    nvcc = find_cuda_tool("nvcc")
    if nvcc is None:
        raise KernelUnavailableError(
            "no nvcc: the W4A4 kernels are compiled once on the machine. Install CUDA 12.8 or later and set CUDA_HOME"
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


def _target(architecture: str) -> str:
    return f"-gencode=arch=compute_{architecture},code=sm_{architecture}"


def _fingerprint(flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256("\0".join(flags).encode())
    for path in (_SOURCE, *(_CSRC / name for name in _HEADERS)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def build_library(architecture: str, *, emulate: bool) -> Path:
    """The shared library for one target ("120a", "90a", ...), built unless the cache has it.

    emulate: replace the FP4 instruction by its emulation even where it exists; other chips have no choice.
    Raises KernelUnavailableError without nvcc, or with its message where it fails.
    """
    flags = (*_FLAGS, _target(architecture), *(("-DREQUANT_FP4_EMULATE",) if emulate else ()))
    library = _cache_folder() / f"w4a4-sm_{architecture}-{_fingerprint(flags)}.so"
    if library.exists():
        return library
    nvcc = _nvcc()
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="w4a4-") as folder:
        made = Path(folder) / library.name
        link = ["-shared", "-Xcompiler", "-fPIC", "-cudart", "static"]
        _run([str(nvcc), *flags, *link, str(_SOURCE), "-o", str(made)])
        made.replace(library)
    return library


def build_cubin(architecture: str, output: Path) -> None:
    """Machine code alone, for inspection: no GPU is needed to make it."""
    _run([str(_nvcc()), *_FLAGS, _target(architecture), "-cubin", str(_SOURCE), "-o", str(output)])


@lru_cache(maxsize=8)
def load_library(architecture: str, *, emulate: bool) -> ctypes.CDLL:
    """The library with its entry points typed (see csrc/w4a4.cu)."""
    library = ctypes.CDLL(str(build_library(architecture, emulate=emulate)))
    library.requant_w4a4_gemm.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_void_p,
    ]
    library.requant_w4a4_quantize.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    library.requant_w4a4_error.argtypes = [ctypes.c_int]
    library.requant_w4a4_error.restype = ctypes.c_char_p
    return library
