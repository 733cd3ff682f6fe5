"""Where the time of a decode step goes: kernels by kind, and whether each computes on tensor cores.

torch.profiler records the kernels of a few steps. Their kind and the unit they compute on follow from their names by
the table below, which knows our kernels and cuBLAS's; that is a list, not a measurement, and a name that it does not
know is `other`. Kernels may overlap (programmatic dependent launch: one takes its place while the one before it still
runs, and its time counts from there), so their sum may exceed the step.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from requant.validate.results import JSON

__all__ = ["KINDS", "Kernel", "breakdown", "kind_of", "profile_step"]

KINDS: Final = ("moe", "attention", "dense", "norm", "other")
_STEPS: Final = 3
_TENSOR, _CUDA = "tensor cores", "CUDA cores"
_KNOWN: Final[tuple[tuple[str, str, str], ...]] = (
    (r"w4a16_(stream|grouped)_kernel|w4a16_kernel<[^,]*, *0,", "moe", _TENSOR),
    (r"w4a16", "dense", _TENSOR),
    (r"^grouped$|grouped_mm|GroupedGemm|grouped_gemm", "moe", _TENSOR),
    (r"route_kernel|^gate$", "moe", _CUDA),
    (r"^attend$", "attention", _TENSOR),
    (r"sgemm|simt|gemmSN", "dense", _CUDA),
    (r"^skinny$|nvjet|cutlass|xmma|gemm(?!v)", "dense", _TENSOR),
    (r"^vector$|gemv|splitK", "dense", _CUDA),
    (r"^add_norm$|^choose$", "norm", _CUDA),
)
"""(pattern, kind, unit), the first that matches: kernels/triton/, csrc/w4a16*.cuh, cuBLAS, CUTLASS."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel of a step. us: all its launches in a step; launches: how many. unit: what it computes on."""

    name: str
    kind: str
    unit: str
    us: float
    launches: float


def kind_of(name: str) -> tuple[str, str]:
    """(kind, unit) of a kernel by its name."""
    for pattern, kind, unit in _KNOWN:
        if re.search(pattern, name):
            return kind, unit
    return "other", _CUDA


def profile_step(step: Any) -> list[Kernel]:
    """The kernels of one call of `step` on the GPU, largest first: means over a few calls."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(_STEPS):
            step()
        torch.cuda.synchronize()
    found = [
        Kernel(event.key, *kind_of(event.key), event.self_device_time_total / _STEPS, event.count / _STEPS)
        for event in recorded.key_averages()
        if event.self_device_time_total > 0
    ]
    return sorted(found, key=lambda kernel: -kernel.us)


def breakdown(kernels: Sequence[Kernel]) -> list[dict[str, JSON]]:
    """Microseconds by kind, in KINDS' order, with the part on tensor cores; kinds that take none are left out."""
    rows: list[dict[str, JSON]] = []
    for kind in KINDS:
        mine = [kernel for kernel in kernels if kernel.kind == kind]
        total = sum(kernel.us for kernel in mine)
        if total:
            on_tensor = sum(kernel.us for kernel in mine if kernel.unit == _TENSOR)
            rows.append(
                {
                    "kind": kind,
                    "us": round(total, 1),
                    "launches": round(sum(kernel.launches for kernel in mine)),
                    "tensor_cores": round(on_tensor / total, 3),
                    "kernels": [f"{k.name[:80]} ({k.unit}): {k.us:.1f} us, {k.launches:.0f}x" for k in mine[:4]],
                }
            )
    return rows
