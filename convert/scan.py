"""`plan --scan`: read the scale planes (1/17 of MXFP4) and forecast what will be lossless, per tensor and window."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from requant.convert.compute import scale_tiles
from requant.convert.files import Files
from requant.convert.plan import CopyUnit, GroupUnit, Plan
from requant.kernels.formats import E8M0_BIAS, MARLIN_WINDOW, NATIVE_WINDOW

__all__ = ["GroupForecast", "scan"]


@dataclass(frozen=True, slots=True)
class GroupForecast:
    """What the scales alone say of a fused group, in 32-blocks; k_min, k_max over all blocks.

    certain: the span fits the Marlin window, all is exact without looking at a code. Otherwise outside_native and
    outside_marlin are upper bounds: dead blocks do not count, and some halves shift exactly.
    """

    group: str
    modules: tuple[str, ...]
    k_min: int
    k_max: int
    blocks: int
    outside_native: int
    outside_marlin: int

    @property
    def certain(self) -> bool:
        """Exact under both windows."""
        return self.k_max - self.k_min <= MARLIN_WINDOW


class _Sources:
    """Source files only: a scan writes nothing."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def source(self, file: str) -> int:
        return self._files(file)

    def output(self, shard: int) -> int:
        raise LookupError(f"a scan does not write (shard {shard})")


def scan(plan: Plan, progress: Callable[[int], None] = lambda _: None) -> list[GroupForecast]:
    """A forecast for every fused group that is repacked. SourceError names the first NaN scale."""
    files = Files(plan.catalogue.root, os.O_RDONLY)
    forecasts: list[GroupForecast] = []
    try:
        for unit in plan.units:
            if isinstance(unit, CopyUnit) or unit.kind != "repack":
                continue
            forecasts.append(_forecast(unit, _histogram(unit, _Sources(files))))
            progress(sum(m.scales.nbytes for m in unit.members if m.scales))
    finally:
        files.close()
    return forecasts


def _histogram(unit: GroupUnit, files: _Sources) -> NDArray[np.int64]:
    """[256]: blocks of the group by E8M0 byte."""
    histogram = np.zeros(256, dtype=np.int64)
    for member in unit.members:
        for _, tile in scale_tiles(member, files):
            histogram += np.bincount(np.ascontiguousarray(tile).reshape(-1), minlength=256)
    return histogram


def _forecast(unit: GroupUnit, histogram: NDArray[np.int64]) -> GroupForecast:
    present = np.flatnonzero(histogram)
    low, high = int(present[0]), int(present[-1])
    return GroupForecast(
        group=unit.group,
        modules=tuple(m.module for m in unit.members),
        k_min=low - E8M0_BIAS,
        k_max=high - E8M0_BIAS,
        blocks=int(histogram.sum()),
        outside_native=int(histogram[: max(high - NATIVE_WINDOW, 0)].sum()),
        outside_marlin=int(histogram[: max(high - MARLIN_WINDOW, 0)].sum()),
    )
