"""Where the time of a decode step goes: kernels by kind, and whether each computes on tensor cores.

torch.profiler records the kernels of a few steps. Kernels overlap (programmatic dependent launch: one takes its place
while the one before it still runs), so a kernel's time here is not how long it was there but what it cost: from the end
of the last of those before it to its own end. These times add up to the step. The kind of a kernel and the unit it
computes on follow from its name by the table below, which knows our kernels and cuBLAS's; that is a list, not a
measurement, and a name that it does not know is `other`.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from requant.validate.results import JSON

__all__ = ["KINDS", "Kernel", "Span", "breakdown", "costs", "kind_of", "profile_step", "record_steps"]

KINDS: Final = ("moe", "attention", "dense", "norm", "other")
_STEPS: Final = 3
_TENSOR, _CUDA = "tensor cores", "CUDA cores"
_KNOWN: Final[tuple[tuple[str, str, str], ...]] = (
    (r"w4a16_(stream|split|split_turns|grouped)_kernel|w4a16_kernel<[^,]*, *0,", "moe", _TENSOR),
    (r"w4a16", "dense", _TENSOR),
    (r"^grouped$|grouped_mm|GroupedGemm|grouped_gemm", "moe", _TENSOR),
    (r"route_kernel|^gate$", "moe", _CUDA),
    (r"^(attend|prompt)$|decode_attend", "attention", _TENSOR),
    (r"^keys$", "attention", _CUDA),
    (r"sgemm|simt|gemmSN", "dense", _CUDA),
    (r"^skinny$|nvjet|cutlass|xmma|gemm(?!v)", "dense", _TENSOR),
    (r"^(vector|dequantize)$|gemv|splitK", "dense", _CUDA),
    (r"^add_norm$|^choose$", "norm", _CUDA),
    (r"decode_choose", "norm", _TENSOR),
)
"""(pattern, kind, unit), the first that matches: kernels/triton/, csrc/w4a16*.cuh, cuBLAS, CUTLASS."""


Span = tuple[str, float, float]
"""One launch: name, start, end in microseconds."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel of a step. us: what all its launches in a step cost; launches: how many. unit: what it computes on."""

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


def record_steps(step: Any, steps: int) -> list[Span]:
    """All launches of so many calls of `step` on the GPU, by their ends."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    found = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in recorded.events() or ()
        if event.device_type.name == "CUDA"
    ]
    return sorted(found, key=lambda span: span[2])


def costs(spans: Sequence[Span]) -> list[tuple[str, float]]:
    """What each launch but the first cost: (name, microseconds from the end of the one before it to its own)."""
    return [(name, end - before) for (name, _, end), (_, _, before) in zip(spans[1:], spans, strict=False)]


def profile_step(step: Any) -> list[Kernel]:
    """The kernels of one call of `step` on the GPU, costliest first: means over a few calls."""
    spans = record_steps(step, _STEPS + 1)
    launches = len(spans) // (_STEPS + 1)
    totals: dict[str, list[float]] = {}
    for name, us in costs(spans[launches - 1 :]):  # the first call's last launch stands before the second's first
        totals.setdefault(name, []).append(us)
    found = [Kernel(name, *kind_of(name), sum(each) / _STEPS, len(each) / _STEPS) for name, each in totals.items()]
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
