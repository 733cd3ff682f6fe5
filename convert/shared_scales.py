"""One global scale for NVFP4 weights that runtimes load as one and whose producer gave each its own.

A runtime that fuses q, k and v keeps one global scale for the three and would read the other two wrong. Where the
global scales differ by powers of two, the block scales can say it instead: E4M3 shifts exactly inside its range, no
number changes, and codes stay. Other ratios have no exact form; then the output would be right in no such runtime, and
the run says so rather than write it.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from requant.convert.plan import GroupUnit, Member
from requant.convert.rows import Opened, read_scalar, row_tiles
from requant.kernels.formats import E4M3_VALUES
from requant.manifests.errors import SourceError

__all__ = ["Shared", "shared_scale"]

_BYTES: Final = 256


class Shared(NamedTuple):
    """stored: the common global scale, in the source's dialect. tables [members][256]: block scale byte -> its new one.

    moved: members whose block scales change.
    """

    stored: np.float32
    tables: tuple[NDArray[np.uint8], ...]
    moved: int


def shared_scale(unit: GroupUnit, files: Opened) -> Shared | None:
    """What puts the members of a re-layout under one global scale; None where they have it already. SourceError."""
    scalars = [member.weight.scalar for member in unit.members]
    stored = [read_scalar(t, files, m.start // m.weight.rows) for m, t in zip(unit.members, scalars, strict=True) if t]
    if len(set(stored)) <= 1:
        return None
    parts = [np.frexp(value) for value in stored]
    if len({float(mantissa) for mantissa, _ in parts}) > 1:
        _refuse(unit, stored, "their ratio is no power of two, so that no exact common one exists")
    sign = -1 if unit.members[0].weight.more.reciprocal else 1
    powers = [sign * int(exponent) for _, exponent in parts]
    used = [_bytes_used(member, files) for member in unit.members]
    for common in sorted(set(powers), reverse=True):
        tables = [_shifted(power - common) for power in powers]
        if all((table[1] | ~seen).all() for table, seen in zip(tables, used, strict=True)):
            moved = sum(power != common for power in powers)
            return Shared(stored[powers.index(common)], tuple(table[0] for table in tables), moved)
    _refuse(unit, stored, "block scales brought under a common one would leave the range of E4M3")
    return None


def _bytes_used(member: Member, files: Opened) -> NDArray[np.bool_]:
    """[256]: which bytes the member's block scales hold."""
    seen = np.zeros(_BYTES, dtype=np.bool_)
    if member.scales is not None:
        for _, tile in row_tiles(member.scales, files):
            seen[np.unique(tile)] = True
    return seen


def _shifted(power: int) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """byte -> the byte of its value times 2^power, and whether there is one."""
    table = np.arange(_BYTES, dtype=np.uint8)
    if power == 0:
        return table, np.ones(_BYTES, dtype=np.bool_)
    at: dict[float, int] = {float(v): b for b, v in enumerate(E4M3_VALUES[:0x7F])}
    values: NDArray[Any] = E4M3_VALUES.astype(np.float64) * 2.0**power
    exact = np.array([b < 0x7F and float(v) in at for b, v in enumerate(values)])
    return np.array([at.get(float(v), 0) for v in values], dtype=np.uint8), exact


def _refuse(unit: GroupUnit, stored: list[np.float32], why: str) -> None:
    each = ", ".join(
        f"{m.module.rpartition('.')[2]} {value:.9g}" for m, value in zip(unit.members, stored, strict=True)
    )
    raise SourceError(
        f"the source's global scales differ ({each}), and {why}",
        where=f"fused group {unit.group}",
        hint="vLLM, SGLang and TensorRT-LLM keep one of them: convert to bf16 first and from there to nvfp4; "
        "for transformers alone, say target.runtimes: [transformers], and each weight keeps its own",
    )
