"""The W4A4 CUDA kernels as a library (see cuda_build.py), its entry points typed."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Final

from requant.kernels import cuda_build
from requant.kernels.cuda_build import CSRC, find_cuda_tool

__all__ = ["NATIVE_ARCHITECTURES", "build_cubin", "build_library", "find_cuda_tool", "load_library"]

NATIVE_ARCHITECTURES: Final = {(12, 0): "120a", (12, 1): "121a"}
"""Compute capabilities with a warp-level FP4 mma, and the only targets for which ptxas takes it (CUDA 13.0)."""

_SOURCE: Final = CSRC / "w4a4.cu"
_HEADERS: Final = ("fp4_mma.cuh", "w4a4_encode.cuh", "w4a4_gemm.cuh", "w4a4_quantize.cuh")


def build_library(architecture: str, *, emulate: bool) -> Path:
    """The shared library for one target ("120a", "90a", ...), built unless the cache has it.

    emulate: replace the FP4 instruction by its emulation even where it exists; other chips have no choice.
    Raises KernelUnavailableError without nvcc, or with its message where it fails.
    """
    flags = ("-DREQUANT_FP4_EMULATE",) if emulate else ()
    return cuda_build.build_library(_SOURCE, _HEADERS, architecture, flags=flags)


def build_cubin(architecture: str, output: Path) -> None:
    """Machine code alone, for inspection: no GPU is needed to make it."""
    cuda_build.build_cubin(_SOURCE, architecture, output)


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
