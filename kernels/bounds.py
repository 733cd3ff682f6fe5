"""The tolerance of every kernel here, in one place.

    |y - y64| <= 2^-8 |y64| + 2^-14 sum |w x|          elementwise

y64 is the exact product of the operands that the kernel really multiplies (for W4A4, of the rounded activations). The
first term is a BF16 output's rounding (2^-9) with as much again; the second lets FP32 accumulation pass, whatever the
order, and fails half-precision partial sums (2^-11 a step). There is no looser bound for large K or for outliers.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["OF_RESULT", "OF_TERMS", "excess", "relative_error"]

OF_RESULT: Final = 2.0**-8
OF_TERMS: Final = 2.0**-14
Floats = NDArray[np.float64]


def excess(y: Floats, exact: Floats, terms: Floats) -> float:
    """The largest error as a multiple of its bound: at most 1 passes. terms: sum |w x|, of y's shape.

    An output that should be finite and is not counts as infinity; one that should not be finite is not judged.
    """
    judged = np.isfinite(exact) & np.isfinite(terms)
    if not judged.any():
        return 0.0
    if not np.isfinite(y[judged]).all():
        return float("inf")
    error = np.abs(y[judged] - exact[judged])
    bound = OF_RESULT * np.abs(exact[judged]) + OF_TERMS * terms[judged]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(error == 0, 0.0, error / bound)
    return float(ratio.max())


def relative_error(y: Floats, exact: Floats) -> float:
    """|y - exact| / |exact| in the Frobenius norm; 0 where both are zero, infinity for a NaN."""
    error, size = float(np.linalg.norm(y - exact)), float(np.linalg.norm(exact))
    if error == 0:
        return 0.0
    return error / size if np.isfinite(error) and size > 0 else float("inf")
