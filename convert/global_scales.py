"""The global scale of a fused group that is rounded to NVFP4: from its amax, or swept over a sample of its rows.

A sixteenth of the group, but at least 65,536 weights and at most 262,144, in a few stretches of rows spread evenly over
each member. Which rows depends on shapes alone, so every worker, engine and run comes to the same number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import numpy as np
from requant.convert.decode import float_tiles
from requant.convert.plan import GroupUnit, Member
from requant.convert.rows import Opened

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from requant.kernels.quantize import ScaleChoice, Weight

__all__ = ["shared_global_scale", "stretches"]

_PART: Final = 16
_LEAST: Final = 1 << 16
_MOST: Final = 1 << 18
"""Weights. The sweep encodes a quarter of the sample 12 times and all of it twice: a third of the time that encoding
the group takes, unless the group is tiny."""
_STRETCHES: Final = 8
_STRETCHES_TURNED: Final = 2
"""Where the matrix lies [K, N], every stretch reads all K lines."""


def shared_global_scale(unit: GroupUnit, group_amax: float, choice: ScaleChoice, files: Opened) -> np.float32:
    """weight_scale_2 of the group: amax / (6 * 448), or what `sweep_global_scale` finds better under `mse`."""
    from requant.kernels.quantize import nvfp4_global_scale, sweep_global_scale

    if choice != "mse":
        return nvfp4_global_scale(group_amax, choice)
    total = sum(member.form.rows * member.form.cols for member in unit.members)
    wanted = min(max(total // _PART, _LEAST), _MOST, total)
    sample: list[tuple[Weight, NDArray[np.float32] | None]] = []
    for member in unit.members:
        importance = _importance(unit, member)
        rows = -(-wanted * member.form.rows // total)
        for first, count in stretches(member, rows):
            start = member.start + first * member.step
            sample += [(tile, importance) for _, tile in float_tiles(member.weight, start, member.step, count, files)]
    return sweep_global_scale(group_amax, sample, choice)


def stretches(member: Member, wanted: int) -> Iterator[tuple[int, int]]:
    """(first row, rows) of about `wanted` rows of a member, spread evenly; each lies within one expert."""
    rows, per = member.form.rows, member.form.rows // max(member.form.transposed, 1)
    if wanted >= rows:
        yield from ((first, per) for first in range(0, rows, per))
        return
    weight = member.weight
    grain = math.lcm(8, weight.rows // weight.more.rotary if weight.more.rotary else 1)  # words of 8 rows; whole heads
    if per % grain:
        grain = 1
    count = min(-(-wanted // grain), _STRETCHES_TURNED if weight.more.turned else _STRETCHES)
    size = min(-(-wanted // (count * grain)) * grain, per)
    for number in range(count):
        first = (rows - size) * number // max(count - 1, 1) // grain * grain
        yield min(first, first // per * per + per - size), size


def _importance(unit: GroupUnit, member: Member) -> NDArray[np.float32] | None:
    if not unit.calibration:
        return None
    from requant.convert.compensate import importance_of

    return importance_of(unit, member)
