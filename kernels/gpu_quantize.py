"""MXFP4 -> NVFP4 and BF16 -> NVFP4 on a GPU, byte for byte as the CPU does it, at the speed of a copy.

    result = repack([(codes, scales), ...])              # a fused group; as repack.repack on the CPU
    result = quantize([w1, w3])                          # BF16 [N, K]; one global scale for both, scale = nearest

Layout. codes uint8 [.., N, K/2], low nibble = even k; E8M0 bytes uint8 [.., N, K/32] in, E4M3 bytes uint8 [.., N, K/16]
out; leading axes are free (stacked experts), all tensors contiguous and on one GPU.

Cost. repack reads the scales (1/17 of the weight) and waits for their range; if the range fits the window (step 1),
one pass copies the codes and rewrites the scales. Otherwise (step 2) the codes are counted first, the exponent is
chosen by the CPU's rule from 8192 numbers, and one pass rewrites both. quantize reads the weight twice, once for amax
and once to encode; what fits the L2 cache comes from there the second time. Only the check for infinities waits.

The kernels (csrc/quantize.cu) are compiled on first use and need SM80 or later. Errors: ValueError for operands,
KernelUnavailableError without a GPU or nvcc, quantize.NonFiniteError for an infinity or a NaN.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray
from requant.kernels import cuda_build
from requant.kernels.availability import Availability, KernelUnavailableError, State, gpu
from requant.kernels.formats import E8M0_NAN_BYTE, MXFP4_GROUP, NVFP4_GROUP
from requant.kernels.quantize import NonFiniteError
from requant.kernels.repack import Counts, choose_exponent, window_exponent

if TYPE_CHECKING:
    import torch

__all__ = ["Launcher", "Quantized", "Repacked", "availability", "load_library", "quantize", "repack", "repack_halves"]

_SOURCE: Final = cuda_build.CSRC / "quantize.cu"
_HEADERS: Final = ("quantize_bf16.cuh", "quantize_float.cuh", "quantize_repack.cuh", "w4a4_encode.cuh", "fp4_mma.cuh")
_OLDEST: Final = (8, 0)
"""redux.sync."""
_ALIGNMENT: Final = 16
"""Bytes; the widest load of the kernels."""


@dataclass(frozen=True, slots=True)
class Repacked:
    """A fused group in NVFP4 on the GPU: global scale 2^m, and per member codes and E4M3 bytes."""

    m: int
    members: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    counts: Counts


@dataclass(frozen=True, slots=True)
class Quantized:
    """A fused group in NVFP4 on the GPU: global_scale float32 [1], and per member codes and E4M3 bytes."""

    global_scale: torch.Tensor
    members: tuple[tuple[torch.Tensor, torch.Tensor], ...]


@lru_cache(maxsize=4)
def load_library(target: str) -> ctypes.CDLL:
    """The kernels for one target ("90a"), compiled on first use, their entry points typed (see csrc/quantize.cu)."""
    library = ctypes.CDLL(str(cuda_build.build_library(_SOURCE, _HEADERS, target)))
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.requant_scale_range.argtypes = [pointer, size, pointer, pointer]
    library.requant_repack_window.argtypes = [pointer, pointer, size, number, pointer, pointer, pointer]
    library.requant_repack_halves.argtypes = [pointer, pointer, size, number, pointer, pointer, pointer, pointer]
    library.requant_half_census.argtypes = [pointer, pointer, size, pointer, pointer]
    library.requant_lossy_error.argtypes = [pointer, pointer, size, number, pointer, pointer, pointer]
    library.requant_bf16_amax.argtypes = [pointer, size, pointer, pointer]
    library.requant_global_scale.argtypes = [pointer, pointer, pointer]
    library.requant_bf16_nvfp4.argtypes = [pointer, size, pointer, pointer, pointer, pointer]
    floats = [number, pointer, size, number, pointer, number, number, ctypes.c_longlong]
    library.requant_float_amax.argtypes = [*floats, pointer, pointer]
    library.requant_float_nvfp4.argtypes = [*floats, pointer, pointer, pointer, pointer]
    library.requant_tile.argtypes = [pointer]
    library.requant_quantize_error.argtypes = [number]
    library.requant_quantize_error.restype = ctypes.c_char_p
    return library


class Launcher:
    """Calls into the library on the current stream of one device. KernelUnavailableError where it cannot run."""

    def __init__(self, device: torch.device) -> None:
        import torch

        if device.type != "cuda":
            raise KernelUnavailableError(f"the GPU quantizers need tensors on an NVIDIA GPU, these are on {device}")
        capability = torch.cuda.get_device_capability(device)
        if capability < _OLDEST:
            raise KernelUnavailableError(f"{torch.cuda.get_device_name(device)} is older than SM80")
        self.device = device
        self._library = load_library(cuda_build.architecture(capability))

    def __call__(self, name: str, *arguments: torch.Tensor | int | None) -> None:
        """Queue requant_`name` (csrc/quantize.cu) with these operands. RuntimeError if CUDA refuses it."""
        import torch

        plain = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream(self.device).cuda_stream
            status: int = getattr(self._library, f"requant_{name}")(*plain, stream)
        self._check(name, status)

    def tile(self, tile: ctypes.Structure) -> None:
        """Queue a tile's way there and back: RequantTile of csrc/quantize.cu. RuntimeError if CUDA refuses it."""
        self._check("a tile", self._library.requant_tile(ctypes.addressof(tile)))

    def _check(self, what: str, status: int) -> None:
        if status:
            text: bytes = self._library.requant_quantize_error(status)
            raise RuntimeError(f"{what} failed: {text.decode()} (cudaError {status})")


def _check(tensor: torch.Tensor, what: str, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype or tensor.dim() < 2:
        raise ValueError(f"{what} must be {dtype} [.., N, columns], not {tensor.dtype} {list(tensor.shape)}")
    if not tensor.is_contiguous() or tensor.data_ptr() % _ALIGNMENT:
        raise ValueError(f"{what} must be contiguous and start at a multiple of {_ALIGNMENT} bytes: copy them first")


def _check_mxfp4(members: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    import torch

    if not members:
        raise ValueError("a fused group has at least one member")
    for codes, scales in members:
        _check(codes, "codes", torch.uint8)
        _check(scales, "block scales", torch.uint8)
        expected = [*codes.shape[:-1], codes.shape[-1] * 2 // MXFP4_GROUP]
        if codes.shape[-1] * 2 % MXFP4_GROUP or list(scales.shape) != expected:
            raise ValueError(f"scales {list(scales.shape)} do not fit codes {list(codes.shape)}: expected {expected}")
        if codes.device != members[0][0].device or scales.device != codes.device:
            raise ValueError("all members of a fused group must lie on one device")


def _outputs(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return codes.new_empty(codes.shape), scales.new_empty((*scales.shape[:-1], scales.shape[-1] * 2))


def _numbers(tensor: torch.Tensor) -> list[int]:
    """A few integers, read back (waits for the GPU)."""
    return [int(number) for number in tensor.cpu().numpy()]


def repack(members: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Repacked:
    """MXFP4 -> NVFP4 for a fused group: members are (codes, E8M0 bytes). The bytes of repack.repack.

    ValueError for a NaN scale (255) and for operands that do not fit.
    """
    import torch

    _check_mxfp4(members)
    launch = Launcher(members[0][0].device)
    span = torch.tensor([255, 0], dtype=torch.int32, device=launch.device)
    for _, scales in members:
        launch("scale_range", scales, scales.numel(), span)
    low, high = _numbers(span)
    if high == E8M0_NAN_BYTE:
        for index, (_, scales) in enumerate(members):
            hits = (scales == E8M0_NAN_BYTE).nonzero()
            if len(hits):
                raise ValueError(f"member {index}: E8M0 scale 255 (NaN) at {_numbers(hits[0])}")
    if low > high:  # no scale at all
        low = high = 0
    m = window_exponent(low, high)
    if m is None:
        return _repack_step_2(members, launch)
    out = [_outputs(codes, scales) for codes, scales in members]
    for (codes, scales), (new_codes, new_scales) in zip(members, out, strict=True):
        launch("repack_window", codes, scales, scales.numel(), m, new_codes, new_scales)
    return Repacked(m, tuple(out), Counts(exact=sum(scales.numel() for _, scales in out)))


def _repack_step_2(members: Sequence[tuple[torch.Tensor, torch.Tensor]], launch: Launcher) -> Repacked:
    import torch

    hist = torch.zeros((256, 4, 4, 2), dtype=torch.int64, device=launch.device)
    for codes, scales in members:
        launch("half_census", codes, scales, scales.numel(), hist)

    def lossy_cost(m: int) -> tuple[int, NDArray[np.int64]]:
        error = torch.zeros(256, dtype=torch.int64, device=launch.device)
        counts = torch.zeros(2, dtype=torch.int64, device=launch.device)
        for codes, scales in members:
            launch("lossy_error", codes, scales, scales.numel(), m, error, counts)
        below, impossible = _numbers(counts)
        _refuse_impossible(impossible, m)
        return below, error.cpu().numpy()

    choice = choose_exponent(hist.cpu().numpy(), lossy_cost)
    out, counts = _halves(members, choice.m, launch)
    return Repacked(choice.m, tuple(out), counts)


def repack_halves(codes: torch.Tensor, scales: torch.Tensor, m: int) -> tuple[torch.Tensor, torch.Tensor, Counts]:
    """Step 2 under a given global exponent: (codes, E4M3 bytes, counts), as repack_jit.repack_tile.

    ValueError where a half would need a scale over 2^8 that doubling cannot avoid: m is too small.
    """
    _check_mxfp4([(codes, scales)])
    out, counts = _halves([(codes, scales)], m, Launcher(codes.device))
    return *out[0], counts


def _halves(
    members: Sequence[tuple[torch.Tensor, torch.Tensor]], m: int, launch: Launcher
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], Counts]:
    import torch

    counts = torch.zeros(4, dtype=torch.int64, device=launch.device)
    out = [_outputs(codes, scales) for codes, scales in members]
    for (codes, scales), (new_codes, new_scales) in zip(members, out, strict=True):
        launch("repack_halves", codes, scales, scales.numel(), m, new_codes, new_scales, counts)
    shifted, lossy, below, impossible = _numbers(counts)
    _refuse_impossible(impossible, m)
    exact = sum(scales.numel() for _, scales in out) - shifted - lossy
    return out, Counts(exact, shifted, lossy, below)


def _refuse_impossible(halves: int, m: int) -> None:
    if halves:
        raise ValueError(
            f"global scale 2^{m} is too small: {halves} halves need a block scale above 2^8 and do not double"
        )


def quantize(
    weights: Sequence[torch.Tensor], global_scale: torch.Tensor | float | None = None, *, check: bool = True
) -> Quantized:
    """BF16 weights of a fused group to NVFP4; scale = nearest, the bytes of quantize.bf16_to_nvfp4.

    weights: bfloat16 [.., N, K], K a multiple of 16. global_scale: given, or amax of all weights / (6 * 448). With
    check=False nothing waits for the GPU, and a block with an infinity or a NaN is written with a NaN scale.
    """
    import torch

    if not weights:
        raise ValueError("a fused group has at least one member")
    for w in weights:
        _check(w, "weights", torch.bfloat16)
        if w.shape[-1] % NVFP4_GROUP:
            raise ValueError(f"K = {w.shape[-1]} is not a multiple of {NVFP4_GROUP}")
        if w.device != weights[0].device:
            raise ValueError("all members of a fused group must lie on one device")
    value = 1.0 if global_scale is None else float(global_scale)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"global scale {value} is not a positive finite number")
    launch = Launcher(weights[0].device)
    amax = torch.zeros(1, dtype=torch.int32, device=launch.device)
    if global_scale is None or check:
        for w in weights:
            launch("bf16_amax", w, w.numel() // NVFP4_GROUP, amax)
    if global_scale is None:
        scale = torch.empty(1, dtype=torch.float32, device=launch.device)
        launch("global_scale", amax, scale)
    else:
        scale = torch.full((1,), value, dtype=torch.float32, device=launch.device)
    out: list[tuple[torch.Tensor, torch.Tensor]] = []
    for w in weights:
        codes = torch.empty((*w.shape[:-1], w.shape[-1] // 2), dtype=torch.uint8, device=launch.device)
        scales = torch.empty((*w.shape[:-1], w.shape[-1] // NVFP4_GROUP), dtype=torch.uint8, device=launch.device)
        launch("bf16_nvfp4", w, scales.numel(), scale, codes, scales)
        out.append((codes, scales))
    if check and int(amax.item()) & 0xFFFFFFFF >= _INFINITY:
        _refuse_nonfinite(weights)
    return Quantized(scale, tuple(out))


_INFINITY: Final = 0x7F800000
"""FP32 bits; NaN is above it."""


def _refuse_nonfinite(weights: Sequence[torch.Tensor]) -> None:
    for w in weights:
        at = (~w.isfinite()).reshape(-1, w.shape[-1]).nonzero()
        if len(at):
            raise NonFiniteError(int(at[0][0]), int(at[0][1]))


def availability() -> Availability:
    """Can the GPU quantizers run here, or at least be compiled? Starts no compiler and no kernel."""
    nvcc = cuda_build.find_cuda_tool("nvcc")
    name, capability = gpu()
    if capability is not None and capability >= _OLDEST:
        if nvcc:
            return Availability(State.RUNS, f"{name}; compiled by {nvcc} on first use")
        return Availability(State.UNAVAILABLE, f"{name} could run it, but there is no nvcc: set CUDA_HOME")
    here = f"{name} is older than SM80" if capability else name
    if nvcc:
        return Availability(State.COMPILES, f"for SM80 and later by {nvcc}; {here}")
    return Availability(State.UNAVAILABLE, f"{here} and no nvcc")
