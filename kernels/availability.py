"""What a machine can do with a kernel path, in one sentence that `requant doctor` prints."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

__all__ = ["Availability", "KernelUnavailableError", "State", "dot_scaled", "gpu"]

_DOT_SCALED_TRITON: Final = (3, 8)
"""Older ones crash on E4M3 scales."""
_TENSOR_MEMORY: Final = ((10, 0), (10, 3))
"""Compute capabilities whose FP4 tensor cores are reached by tcgen05."""


class State(StrEnum):
    """runs: here and now. compiles: the binary can be made and inspected here, not run. unavailable: neither."""

    RUNS = "runs"
    COMPILES = "compiles"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class Availability:
    """State of one path and the reason, which names the chip, tool or version that decides it."""

    state: State
    reason: str

    def __str__(self) -> str:
        joint = " because " if self.state is State.UNAVAILABLE else ": "
        return f"{self.state}{joint}{self.reason}"


class KernelUnavailableError(RuntimeError):
    """This kernel path cannot run on this machine; the message says why and what would."""


def gpu() -> tuple[str, tuple[int, int] | None]:
    """The first GPU's name and compute capability, or "there is no GPU" and None."""
    import torch

    if not torch.cuda.is_available():
        return "there is no GPU", None
    capability = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} (SM{capability[0]}{capability[1]})", capability


def dot_scaled() -> Availability:
    """Triton's dot_scaled with NVFP4 operands (kernels/triton/dot_scaled.py); does not import Triton."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return Availability(State.UNAVAILABLE, "there is no Triton")
    if tuple(int(part) for part in version.split(".")[:2]) < _DOT_SCALED_TRITON:
        return Availability(State.UNAVAILABLE, f"Triton {version} crashes on E4M3 scales: 3.8 or later is needed")
    name, capability = gpu()
    if capability in _TENSOR_MEMORY:
        return Availability(State.RUNS, f"{name}, tcgen05 by Triton {version}; never tried on such a chip")
    here = f"{name} has no tcgen05" if capability else name
    return Availability(State.COMPILES, f"for SM100 by Triton {version}; {here}")
