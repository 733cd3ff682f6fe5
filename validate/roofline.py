"""What a weight-only matmul must move and compute at least, and how far a measured time is from that floor.

    bytes = codes + block scales (+ global scales) of the experts touched + x once + y once
    flops = 2 M N K (M: tokens, or token-expert pairs)
    floor = max(bytes / read ceiling, flops / peak)

The ceilings are the card's own, measured in the same run, never a data sheet's. x and y count as BF16. Decode moves few
activations, so the floor is the weight's bytes over the ceiling; past M = 50 or so on an H200 the other term is larger.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from requant.kernels.formats import NumberFormat

__all__ = ["Ceilings", "Work", "weight_bytes", "work_of"]

_BF16_BYTES: Final = 2
_FP32_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the card does at best. read_gbps: reading alone; copy_gbps: read and written; peak_tflops: BF16 matmul."""

    read_gbps: float
    copy_gbps: float
    peak_tflops: float


@dataclass(frozen=True, slots=True)
class Work:
    """One matmul's least work. weight_bytes: of the experts touched; bytes: with x and y; flops: multiply and add."""

    weight_bytes: int
    bytes: int
    flops: int

    @property
    def intensity(self) -> float:
        """Flops per byte."""
        return self.flops / self.bytes

    def floor_us(self, ceilings: Ceilings) -> float:
        """The time that no kernel beats, in microseconds."""
        memory = self.bytes / (ceilings.read_gbps * 1e3)
        return max(memory, self.flops / (ceilings.peak_tflops * 1e6))

    def gbps(self, microseconds: float) -> float:
        """Bytes per time, in GB/s."""
        return self.bytes / microseconds / 1e3

    def tflops(self, microseconds: float) -> float:
        """Flops per time, in TFLOP/s."""
        return self.flops / microseconds / 1e6

    def of_ceiling(self, microseconds: float, ceilings: Ceilings) -> float:
        """Bandwidth as a fraction of the read ceiling."""
        return self.gbps(microseconds) / ceilings.read_gbps

    def of_floor(self, microseconds: float, ceilings: Ceilings) -> float:
        """The floor as a fraction of the time: 1 at best."""
        return self.floor_us(ceilings) / microseconds


def weight_bytes(fmt: NumberFormat, n: int, k: int) -> int:
    """Bytes of one weight [n, k] as it is stored: codes, block scales, and NVFP4's global scale."""
    if fmt is NumberFormat.BF16:
        return n * k * _BF16_BYTES
    if fmt is NumberFormat.FP8:
        return n * k
    return n * k // 2 + n * k // fmt.group + (_FP32_BYTES if fmt is NumberFormat.NVFP4 else 0)


def work_of(fmt: NumberFormat, n: int, k: int, m: int, *, touched: float = 1, slots: int | None = None) -> Work:
    """The work of m tokens. MoE: `touched` experts' weights (a mean may be fractional), `slots` rows of y."""
    rows = m if slots is None else slots
    weights = round(touched * weight_bytes(fmt, n, k))
    activations = (m * k + rows * n) * _BF16_BYTES
    return Work(weights, weights + activations, 2 * rows * n * k)
