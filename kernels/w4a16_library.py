"""The compiled W4A16 kernels: built once with nvcc, cached by content, loaded with ctypes.

A plain shared library with a C interface, not a torch extension: it needs no torch headers and no C++ ABI match, builds
in a minute or so, and one file serves every torch version. The cache key is the text of the sources, the compiler's
version and the target, so an edit or another chip never meets an old binary.

`REQUANT_W4A16_LIBRARY` names a library that was built elsewhere (for machines without a compiler);
`REQUANT_KERNEL_CACHE` moves the cache (default `~/.cache/requant/kernels`).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Final

__all__ = [
    "Call",
    "KernelBuildError",
    "Library",
    "architecture",
    "build",
    "defines",
    "find_nvcc",
    "given_library",
    "launch",
    "load",
    "route",
    "routing_ints",
    "routing_shared_bytes",
    "start",
]

SOURCES: Final = Path(__file__).parent / "csrc"
SOURCE_FILES: Final = (
    "w4a16.cu",
    "w4a16_core.cuh",
    "w4a16_dense.cuh",
    "w4a16_dense_resident.cuh",
    "w4a16_dense_weights.cuh",
    "w4a16_dense_x.cuh",
    "w4a16_types.cuh",
    "w4a16_ring.cuh",
    "w4a16_x.cuh",
    "w4a16_tile.cuh",
    "w4a16_sums.cuh",
    "w4a16_routing.cuh",
    "w4a16_split.cuh",
    "w4a16_split_launch.cuh",
    "w4a16_split_outputs.cuh",
    "w4a16_split_tile.cuh",
    "w4a16_split_turns.cuh",
    "w4a16_stream.cuh",
    "w4a16_stream_copies.cuh",
    "w4a16_stream_launch.cuh",
    "w4a16_wgmma.cuh",
    "w4a16_wgmma_types.cuh",
    "w4a16_wgmma_fetch.cuh",
    "w4a16_wgmma_tile.cuh",
    "w4a16_wgmma_launch.cuh",
    "decode_attend.cuh",
    "decode_choose.cuh",
    "fp4_decode.cuh",
    "hopper.cuh",
    "ptx.cuh",
)
WGMMA_ARCHITECTURE: Final = "90a"
"""Where csrc/w4a16.cu needs no kernel of `mma.sync` for what w4a16_wgmma_configs.applies says."""
ROUTING_HEADER: Final = 4
"""kRoutingHeader of w4a16_types.cuh."""
STREAM_TOKENS: Final = 4
"""kStreamTokens of w4a16_types.cuh."""
GROUPED_TILE_TOKENS: Final = 16
"""kGroupedTileTokens of w4a16_types.cuh."""
MESSAGES: Final = {
    -1: "this variant is not compiled in",
    -2: "this configuration needs more shared memory than a block has",
    -3: "this configuration needs more warps than the kernel was compiled for",
    -4: "a cluster's blocks can do one unit each: dense only, and as many blocks as row groups",
    -5: "a block needs two warps or more",
    -6: "the driver cannot encode tensor maps",
    -7: "experts may have more tokens than a stream takes at a time",
    -8: "the block scales of an expert do not fill whole 16-byte pieces, which this stream needs",
    -12: "these heads, or so many keys, are not what one block a KV head takes: ask decode_cuda.attends before",
    -11: "this layer has more columns or experts than the choice in a cluster takes: ask decode_cuda.chooses before",
    -10: "this division has fewer warps than the layer stages of K",
    -9: "rows do not fill whole tiles of 16, which a bias, an activation and an early start need",
}


Library = ctypes.CDLL


class KernelBuildError(RuntimeError):
    """The kernels cannot be built or loaded here; the message says what is missing and what to do."""


class Call(ctypes.Structure):
    """One launch: RequantCall of csrc/w4a16.cu, field by field."""

    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("block_scales", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("global_scales", ctypes.c_void_p),
        ("routing", ctypes.c_void_p),
        ("slot_weights", ctypes.c_void_p),
        ("global_scale", ctypes.c_float),
        *(
            (name, ctypes.c_int)
            for name in (
                "format",
                "alignment",
                "tokens",
                "rows",
                "k",
                "experts",
                "slots",
                "x_row_per_slot",
                "output_is_float",
                "row_tiles",
                "depth",
                "column_warps",
                "row_warps",
                "cluster",
                "x_stages",
                "blocks",
                "early_start",
                "wgmma",
                "stream",
                "settled",
                "gating",
            )
        ),
        ("limit", ctypes.c_float),
        ("alpha", ctypes.c_float),
        ("bias", ctypes.c_void_p),
    )


def find_nvcc() -> str | None:
    """Path of the CUDA compiler: $CUDA_HOME/bin, then PATH, then /usr/local/cuda/bin; None where there is none."""
    home = os.environ.get("CUDA_HOME")
    candidates = [Path(home) / "bin" / "nvcc"] if home else []
    on_path = shutil.which("nvcc")
    candidates += [Path(on_path)] if on_path else []
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    return next((str(c) for c in candidates if c.is_file()), None)


def given_library() -> str | None:
    """The prebuilt library that $REQUANT_W4A16_LIBRARY names, if it does."""
    return os.environ.get("REQUANT_W4A16_LIBRARY") or None


def architecture(major: int, minor: int) -> str:
    """The target to compile for: sm_90a, sm_100a ... have instructions of their own; older chips have no suffix."""
    return f"{major}{minor}a" if major >= 9 else f"{major}{minor}"


def defines(arch: str) -> list[str]:
    """What the sources are told about the target."""
    return ["-DREQUANT_WGMMA"] if arch == WGMMA_ARCHITECTURE else []


def build(arch: str) -> Path:
    """Compile csrc/w4a16.cu for `arch` ("90a", "80") unless the cache has it; returns the library's path."""
    nvcc = find_nvcc()
    if nvcc is None:
        raise KernelBuildError(
            "W4A16 kernels: nvcc was not found in $CUDA_HOME/bin, on PATH or in /usr/local/cuda/bin. Install the CUDA "
            "toolkit (12.8 or later), set CUDA_HOME, or use path='triton', which needs no compiler."
        )
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256(version.encode())
    for name in SOURCE_FILES:
        digest.update((SOURCES / name).read_bytes())
    root = Path(os.environ.get("REQUANT_KERNEL_CACHE", Path.home() / ".cache" / "requant" / "kernels"))
    target = root / f"w4a16-sm{arch}-{digest.hexdigest()[:16]}.so"
    if target.is_file():
        return target
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root) as scratch:
        out = Path(scratch) / "w4a16.so"
        gencode = f"arch=compute_{arch},code=sm_{arch}"
        flags = ["-std=c++17", "-O3", "-gencode", gencode, "-Xcompiler", "-fPIC", "-shared", "--threads", "0"]
        flags += defines(arch)
        run = subprocess.run(
            [nvcc, *flags, "-o", str(out), str(SOURCES / "w4a16.cu")], capture_output=True, text=True, check=False
        )
        if run.returncode != 0:
            raise KernelBuildError(f"W4A16 kernels: {nvcc} failed for sm_{arch}:\n{run.stderr[-4000:]}")
        out.replace(target)  # atomic: two processes may build at once
    return target


@cache
def load(arch: str) -> ctypes.CDLL:
    """The library for `arch`, built if need be, with its functions typed."""
    given = given_library()
    path = Path(given) if given else build(arch)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelBuildError(f"W4A16 kernels: {path} cannot be loaded: {error}") from error
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    library.requant_w4a16.argtypes = (ctypes.POINTER(Call), pointer)
    library.requant_w4a16_route.argtypes = (pointer, integer, integer, integer, pointer, pointer)
    library.requant_decode_choose.argtypes = library.requant_decode_attend.argtypes = (pointer, integer, pointer)
    library.requant_w4a16_error.argtypes = (integer,)
    library.requant_w4a16_error.restype = ctypes.c_char_p
    return library


def _check(library: ctypes.CDLL, code: int, what: str) -> None:
    if code == 0:
        return
    reason = MESSAGES.get(code) or library.requant_w4a16_error(code).decode()
    raise RuntimeError(f"{what}: {reason}")


def launch(library: ctypes.CDLL, call: Call, stream: int) -> None:
    """Queue one GEMM on `stream` (a cudaStream_t as an integer)."""
    _check(library, library.requant_w4a16(ctypes.byref(call), stream), "w4a16 launch")


def start(name: str, library: ctypes.CDLL, call: int, stream: int, *, early: bool) -> None:
    """Start one of the decode step's kernels (decode_cuda.py); `call`: the address of its parameters."""
    _check(library, getattr(library, name)(call, int(early), stream), name)


def tile_tokens(slots: int, experts: int) -> int:
    """Tokens of one expert that share a pass over its weights: routing_tile_tokens of w4a16_routing.cuh."""
    return STREAM_TOKENS if slots <= 2 * experts else GROUPED_TILE_TOKENS


def routing_ints(slots: int, experts: int) -> int:
    """Size in int32 of the buffer that `route` fills."""
    return ROUTING_HEADER + 4 * min(slots, experts + slots // tile_tokens(slots, experts)) + 2 * slots


def routing_shared_bytes(slots: int, experts: int) -> int:
    """Shared memory of the one block that sorts the slots: requant_w4a16_route of csrc/w4a16.cu."""
    return 4 * (-(-slots // 4) * 4 + 2 * (-(-(experts + 1) // 4) * 4))


def route(
    library: ctypes.CDLL, expert_ids: int, slots: int, slots_per_token: int, experts: int, routing: int, stream: int
) -> None:
    """Queue the sort of slots by expert; pointers as integers."""
    code = library.requant_w4a16_route(expert_ids, slots, slots_per_token, experts, routing, stream)
    _check(library, code, "w4a16 routing")
