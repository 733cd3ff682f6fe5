"""What a unit takes from a calibration: the importance of input channels, and the Hessian behind `rounding: gptq`.

A weight that no token reached in the calibration has neither: its scales are those of `mse`, its codes the nearest.
U, the factor that GPTQ works with, is computed once for weights that share an input and follow one another (q, k, v).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from requant.convert.plan import GroupUnit, Member
from requant.kernels.formats import NumberFormat

if TYPE_CHECKING:
    from requant.kernels.gptq import Compensation

__all__ = ["compensator", "importance_of"]

Compensate = Callable[[NDArray[Any], NDArray[np.uint8], "np.float32 | None", NDArray[np.uint8]], None]
"""(values [n, K], block scales, global scale, codes to replace)."""


def importance_of(unit: GroupUnit, member: Member) -> NDArray[np.float32] | None:
    """Mean square of each input channel [K], for `scale: weighted`; None for other choices and unreached weights."""
    if unit.scale != "weighted":
        return None
    from requant.convert.calibrate import moment_of

    moment = moment_of(Path(unit.calibration), member.weight.module)
    return None if moment is None or not moment.any() else moment


def compensator(unit: GroupUnit, member: Member) -> Compensate | None:
    """What replaces the nearest codes by compensating ones; None where none is asked for or possible."""
    if unit.rounding != "gptq":
        return None
    how = _compensation(unit.calibration, member.weight.module)
    if how is None:
        return None
    number = NumberFormat(member.form.number)

    def compensate(
        tile: NDArray[Any], scales: NDArray[np.uint8], s2: np.float32 | None, codes: NDArray[np.uint8]
    ) -> None:
        from requant.kernels.gptq import round_compensated

        wide = (tile.astype(np.uint32) << np.uint32(16)).view(np.float32) if tile.dtype == np.uint16 else tile
        round_compensated(wide.astype(np.float32, copy=False), number, scales, s2, how, codes)

    return compensate


def _compensation(calibration: str, module: str) -> Compensation | None:
    from requant.convert.calibrate import hessian_owner

    owner = hessian_owner(Path(calibration), module)
    return None if owner is None else _factor(calibration, owner)


@lru_cache(maxsize=4)  # a K of 11008 is 0.5 GB
def _factor(calibration: str, owner: str) -> Compensation:
    from requant.convert.calibrate import hessian_of
    from requant.kernels.gptq import compensation

    hessian = hessian_of(Path(calibration), owner)
    if hessian is None:
        raise ValueError(f"{owner} has no Hessian in {calibration}")
    return compensation(hessian)
