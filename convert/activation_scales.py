"""A source's own static activation scales, carried into the output: as they are, or restated for another format.

    stored scale = amax / room         room: 6 * 448 under NVFP4 activations, 448 under FP8; compressed-tensors' NVFP4
                                       stores the reciprocal

Weights that become one fused group share the largest amax, which holds them all; a re-layout leaves each its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
from requant.convert.layouts.base import SourceWeight
from requant.convert.rows import Opened, read_scalar
from requant.convert.scalars import turned_over
from requant.manifests.errors import SourceError

if TYPE_CHECKING:
    from requant.convert.layouts.writing import Form

__all__ = ["Carrying", "carried_scales", "refuse_half"]

_ROOM: Final = {"nvfp4": 6.0 * 448.0, "fp8": 448.0}
"""amax in units of the scale, by the format of the layer that is written."""


class Carrying(Protocol):
    """Of a member of a unit, what is needed here."""

    @property
    def weight(self) -> SourceWeight: ...
    @property
    def form(self) -> Form: ...
    @property
    def start(self) -> int: ...
    @property
    def out_input(self) -> int | None: ...


def carried_scales(members: Sequence[Carrying], shared: bool, files: Opened) -> list[tuple[int, np.float32]]:
    """(output tensor, scale as it is to be stored) of the members that carry one. SourceError for one that is none.

    shared: the largest of them is everyone's.
    """
    found: list[tuple[int, Carrying, np.float32, float]] = []
    for member in members:
        weight = member.weight
        if weight.input is None or member.out_input is None:
            continue
        stored = read_scalar(weight.input, files, member.start // weight.rows)
        amax = _source_room(weight) * (1.0 / float(stored) if weight.more.reciprocal else float(stored))
        found.append((member.out_input, member, stored, amax))
    if not found:
        return []
    largest = max(found, key=lambda one: one[3])
    return [(out, _stated(member, *(largest[2:] if shared else (stored, amax)))) for out, member, stored, amax in found]


def _source_room(weight: SourceWeight) -> float:
    """What the producer divided the amax by."""
    return _ROOM["nvfp4" if weight.format == "nvfp4" and not weight.more.fp8_input else "fp8"]


def _stated(member: Carrying, stored: np.float32, amax: float) -> np.float32:
    """The same bits where the format is the same, turned over where the dialect asks; else from the amax."""
    room = _ROOM[member.form.number]
    if room == _source_room(member.weight):
        return turned_over(stored) if member.weight.more.reciprocal != member.form.reciprocal else stored
    scale = np.float32(amax / room)
    return turned_over(scale) if member.form.reciprocal else scale


def refuse_half(group: str, weights: Sequence[SourceWeight]) -> None:
    """SourceError if some weights of a fused group have an activation scale of their own and others have none."""
    without = [weight for weight in weights if weight.input is None]
    if without and len(without) < len(weights):
        raise SourceError(
            f"has no activation scale, and others of fused group {group} have one",
            where=f"{without[0].codes.file}: {without[0].codes.name}",
            hint="the source's calibration is incomplete: give activations.input_scale a constant, or calibrate",
        )
