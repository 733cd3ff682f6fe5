"""Which kernel computes x @ w^T for an FP4 weight on this machine, and why that one.

| path          | operands              | chips                | kernel                                            |
|---------------|-----------------------|----------------------|---------------------------------------------------|
| w4a4          | FP4 x FP4             | SM120, SM121         | w4a4.py: warp-level FP4 mma                       |
| scaled_mm     | NVFP4 x NVFP4         | SM100 and later      | cuBLASLt through torch                            |
| dot_scaled    | FP4 x FP4             | SM100, SM103         | triton/dot_scaled.py: tcgen05                     |
| w4a16         | FP4 x BF16            | SM80 and later       | w4a16.py: decoded in registers, half-precision mma|
| w4a16-triton  | FP4 x BF16            | SM80 and later       | triton/w4a16.py: the same where there is no nvcc  |
| w4a4-emulated | FP4 x FP4             | SM80 and later       | w4a4.py with the instruction emulated: proof only |
| cpu           | FP4 x FP32            | any CPU              | cpu.py: decode and BLAS                           |
| reference     | FP4 x FP64            | any CPU              | reference.py: the oracle                          |

`auto` takes the first path for the chip (`_order`) that runs here and takes the operands; the choice says what was
passed over and why. A path that is asked for by name and cannot run raises KernelUnavailableError: there is no silent
fallback, and emulation and the oracle are never chosen by themselves.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

from requant.kernels import availability as known
from requant.kernels.availability import Availability, KernelUnavailableError, State
from requant.kernels.formats import NumberFormat

__all__ = ["Activations", "Choice", "Path", "PathState", "choose", "paths"]

Activations = Literal["fp4", "bf16"]
"""What may become of activations: rounded to FP4 where the chip multiplies those, or left as they are (W4A16)."""


class Path(StrEnum):
    """A way to compute the product; see the table above."""

    W4A4 = "w4a4"
    SCALED_MM = "scaled_mm"
    DOT_SCALED = "dot_scaled"
    W4A16 = "w4a16"
    W4A16_TRITON = "w4a16-triton"
    W4A4_EMULATED = "w4a4-emulated"
    CPU = "cpu"
    REFERENCE = "reference"

    @property
    def on_gpu(self) -> bool:
        """Whether it takes tensors on a GPU (the others take numpy arrays)."""
        return self not in (Path.CPU, Path.REFERENCE)

    @property
    def rounds_activations(self) -> bool:
        """Whether x is quantized to FP4 first."""
        return self in (Path.W4A4, Path.SCALED_MM, Path.DOT_SCALED, Path.W4A4_EMULATED)

    @property
    def granularity(self) -> Literal["token", "tensor"]:
        """What shares a global scale where x is quantized without a static one; cuBLASLt takes one for all of x."""
        return "tensor" if self in (Path.SCALED_MM, Path.DOT_SCALED) else "token"

    @property
    def kernel(self) -> str:
        """The code that runs, for reports."""
        return _KERNELS[self]


_KERNELS: Final = {
    Path.W4A4: "csrc/w4a4.cu",
    Path.SCALED_MM: "torch scaled_mm (cuBLASLt)",
    Path.DOT_SCALED: "triton/dot_scaled.py",
    Path.W4A16: "csrc/w4a16.cu",
    Path.W4A16_TRITON: "triton/w4a16.py",
    Path.W4A4_EMULATED: "csrc/w4a4.cu, FP4 mma emulated",
    Path.CPU: "cpu.py (numba, BLAS)",
    Path.REFERENCE: "reference.py (float64)",
}
_OLDEST: Final = (8, 0)
_WARP_FP4: Final = 12
_TENSOR_MEMORY: Final = 10
"""Major compute capabilities with FP4 tensor cores: warp-level mma, and tcgen05."""
_FALLBACKS: Final = (Path.W4A16, Path.W4A16_TRITON)


@dataclass(frozen=True, slots=True)
class PathState:
    """One path on this machine: runs, compiles, or unavailable because ..."""

    path: Path
    availability: Availability

    @property
    def runs(self) -> bool:
        """Here and now."""
        return self.availability.state is State.RUNS


@dataclass(frozen=True, slots=True)
class Choice:
    """The path that was taken. chip: its name as torch or the platform gives it; reason: why this path."""

    path: Path
    kernel: str
    chip: str
    reason: str


def paths() -> tuple[PathState, ...]:
    """Every path in the order of the table, with what this machine can do with it. Compiles and runs nothing."""
    return tuple(PathState(path, _AVAILABILITY[path]()) for path in Path)


def choose(
    path: Path | str,
    fmt: NumberFormat,
    n: int,
    k: int,
    *,
    on_gpu: bool,
    activations: Activations = "fp4",
    grouped: bool = False,
) -> Choice:
    """The path for a weight [n, k] of a format: the one named, or by chip for `auto`.

    on_gpu: where the operands lie. Raises ValueError for a name that is no path or does not go with the operands,
    KernelUnavailableError for a path that cannot run here, or where no path can.
    """
    chip = _chip(on_gpu)
    if path != "auto":
        return _named(path, fmt, n, k, on_gpu, chip, grouped)
    passed_over: list[str] = []
    for candidate in _order(on_gpu):
        if candidate.rounds_activations and activations == "bf16":
            passed_over.append(f"{candidate} rounds activations")
            continue
        refused = _refusal(candidate, fmt, n, k, grouped)
        state = _AVAILABILITY[candidate]()
        if refused or state.state is not State.RUNS:
            passed_over.append(f"{candidate}: {refused or state.reason}")
            continue
        why = f"the first path for {chip} that runs"
        return Choice(candidate, candidate.kernel, chip, why + (f" ({'; '.join(passed_over)})" if passed_over else ""))
    if on_gpu and known.gpu()[1] is None:
        raise KernelUnavailableError(f"no GPU path runs here: {chip}")
    raise KernelUnavailableError(f"no FP4 kernel runs on {chip}: {'; '.join(passed_over) or 'SM80 or later is needed'}")


def _named(path: Path | str, fmt: NumberFormat, n: int, k: int, on_gpu: bool, chip: str, grouped: bool) -> Choice:
    if path not in tuple(Path):
        raise ValueError(f"no path is called {path!r}: auto, {', '.join(Path)}")
    named = Path(path)
    if named.on_gpu != on_gpu:
        wants, has = ("tensors on a GPU", "arrays on the CPU") if named.on_gpu else ("numpy arrays", "tensors on a GPU")
        if named.on_gpu:
            _check_runs(named)
        raise ValueError(f"path {named} takes {wants}, not {has}")
    refused = _refusal(named, fmt, n, k, grouped)
    if refused:
        raise KernelUnavailableError(f"path {named} is unavailable because {refused}")
    _check_runs(named)
    return Choice(named, named.kernel, chip, "asked for by name")


def _check_runs(path: Path) -> None:
    state = _AVAILABILITY[path]()
    if state.state is State.COMPILES:
        raise KernelUnavailableError(f"path {path} compiles here, but does not run: {state.reason}")
    if state.state is not State.RUNS:
        raise KernelUnavailableError(f"path {path} is {state}")


def _order(on_gpu: bool) -> tuple[Path, ...]:
    if not on_gpu:
        return (Path.CPU,)
    capability = known.gpu()[1]
    if capability is None or capability < _OLDEST:
        return ()
    if capability[0] == _WARP_FP4:
        return (Path.W4A4, *_FALLBACKS)
    if capability[0] == _TENSOR_MEMORY:
        return (Path.SCALED_MM, Path.DOT_SCALED, *_FALLBACKS)
    return _FALLBACKS


def _refusal(path: Path, fmt: NumberFormat, n: int, k: int, grouped: bool) -> str:
    """Why this path does not take such a weight, or ""."""
    if path is Path.SCALED_MM:
        if fmt is not NumberFormat.NVFP4:
            return f"cuBLASLt's block scales are NVFP4's, not {fmt}'s"
        if k % 32 or n % 16:
            return f"cuBLASLt needs K % 32 = 0 and N % 16 = 0, not {n} x {k}"
    if grouped and path in (Path.SCALED_MM, Path.DOT_SCALED):
        return "it has no grouped form"
    return ""


def _chip(on_gpu: bool) -> str:
    if on_gpu:
        return known.gpu()[0]
    import platform

    return f"CPU ({platform.machine()})"


# --- availability -----------------------------------------------------------------------------------------------------


def _w4a4() -> Availability:
    from requant.kernels import w4a4

    return w4a4.availability()


def _w4a4_emulated() -> Availability:
    from requant.kernels.cuda_build import find_cuda_tool

    name, capability = known.gpu()
    nvcc = find_cuda_tool("nvcc")
    if capability is None or capability < _OLDEST:
        reason = name if capability is None else f"{name} is older than SM80"
        if nvcc is None:
            return Availability(State.UNAVAILABLE, f"{reason} and no nvcc")
        return Availability(State.COMPILES, f"for SM80 and later by {nvcc}; {reason}")
    if nvcc is None:
        return Availability(State.UNAVAILABLE, f"{name} could run it, but there is no nvcc: set CUDA_HOME")
    return Availability(State.RUNS, f"{name}, a proof of the W4A4 kernels; its speed means nothing")


def _scaled_mm() -> Availability:
    from requant.kernels import scaled_mm

    return scaled_mm.availability()


def _w4a16() -> Availability:
    from requant.kernels import w4a16

    state, reason = w4a16.availability()
    return Availability(State(state), reason)


def _w4a16_triton() -> Availability:
    name, capability = known.gpu()
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return Availability(State.UNAVAILABLE, "there is no Triton")
    if capability is None:
        return Availability(State.COMPILES, f"by Triton {version}; {name}")
    if capability < _OLDEST:
        return Availability(State.UNAVAILABLE, f"{name} is older than SM80")
    return Availability(State.RUNS, f"{name}, Triton {version}")


def _cpu() -> Availability:
    return Availability(State.RUNS, "decode with numba, multiply with BLAS; right numbers, no claim of speed")


def _reference() -> Availability:
    return Availability(State.RUNS, "float64 with numpy, the oracle")


_AVAILABILITY: Final[dict[Path, Callable[[], Availability]]] = {
    Path.W4A4: _w4a4,
    Path.SCALED_MM: _scaled_mm,
    Path.DOT_SCALED: known.dot_scaled,
    Path.W4A16: _w4a16,
    Path.W4A16_TRITON: _w4a16_triton,
    Path.W4A4_EMULATED: _w4a4_emulated,
    Path.CPU: _cpu,
    Path.REFERENCE: _reference,
}
