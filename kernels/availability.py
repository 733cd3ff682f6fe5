"""What a machine can do with a kernel path, in one sentence that `requant doctor` prints."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Availability", "KernelUnavailableError", "State"]


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
