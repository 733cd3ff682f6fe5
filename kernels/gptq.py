"""Error-compensating rounding to FP4 (GPTQ): what one column's rounding loses, the columns after it make up for.

    W [N, K], H = mean of x x^T [K, K] of the layer's input, block scales as they will be stored

Columns are rounded one after the other, those with the largest H[k, k] first (`act order`). The error of column k,
divided by U[k, k], is taken off the columns not yet rounded, along U[k, :], where U^T U = (H + damp)^-1, U upper
triangular: this minimises the squared error of the output, E |x (W - W')^T|^2, greedily (Frantar et al. 2023). As in
llm-compressor's `GPTQModifier` (its anchor here) with `actorder: static`: 1% of the mean diagonal as damping, columns
in blocks of 128, scales chosen beforehand from the original weights, so that the order of columns is free. Two things
differ: a channel that no token reached is rounded to nearest where that library sets it to 0, and where the damped H is
not positive definite in FP64 the damping grows tenfold until it is.

Rows do not depend on one another, so any range of rows may be done at a time, and threads split rows; memory is U and
the rows. U is computed in FP64 and applied in FP32.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from requant.kernels.formats import E4M3_VALUES, E8M0_VALUES, NumberFormat
from requant.kernels.jit import kernel

__all__ = ["Compensation", "compensation", "round_compensated"]

_BLOCK: Final = 128
"""Columns whose errors go to the later columns in one matrix product; GPTQ's own block size."""
_DAMP: Final = 0.01
"""In units of the mean diagonal; GPTQ's own."""
_GROWTHS: Final = 8


class Compensation:
    """What is needed of H. order [K]: columns as they are rounded; upper [K, K] float32: U in that order."""

    def __init__(self, order: NDArray[np.int64], upper: NDArray[np.float32]) -> None:
        self.order = order
        self.upper = upper


def compensation(hessian: NDArray[np.float32], damp: float = _DAMP) -> Compensation:
    """U and the order of columns from H [K, K]. ValueError if H is not square, symmetric and finite."""
    h = hessian.astype(np.float64)
    if h.ndim != 2 or h.shape[0] != h.shape[1] or not np.isfinite(h).all():
        raise ValueError(f"a Hessian must be a square of finite numbers, not {hessian.shape}")
    diagonal = np.diagonal(h).copy()
    if (diagonal < 0).any():
        raise ValueError("a Hessian has no negative diagonal")
    dead = diagonal == 0
    order = np.argsort(-diagonal, kind="stable")
    mean = float(diagonal.mean()) or 1.0
    h[dead, dead] = mean
    h = h[np.ix_(order, order)]
    for _ in range(_GROWTHS):
        try:
            inverse = np.linalg.inv(h + damp * mean * np.eye(len(h)))
            upper = np.linalg.cholesky((inverse + inverse.T) / 2).T
            return Compensation(order, np.ascontiguousarray(upper, dtype=np.float32))
        except np.linalg.LinAlgError:
            damp *= 10
    raise ValueError("the Hessian stays singular however it is damped")


def round_compensated(
    w: NDArray[np.float32],
    number: NumberFormat,
    scales: NDArray[np.uint8],
    global_scale: np.float32 | None,
    how: Compensation,
    out_codes: NDArray[np.uint8],
) -> None:
    """w [N, K] -> codes [N, K/2] under the block scales [N, K/group] given (bytes of the format), errors compensated.

    ValueError for shapes. w itself is left as it is.
    """
    rows, k = w.shape
    group = number.group
    if k % group or scales.shape != (rows, k // group) or out_codes.shape != (rows, k // 2) or how.upper.shape[0] != k:
        raise ValueError(f"w {w.shape}, scales {scales.shape}, codes {out_codes.shape}, U {how.upper.shape} do not fit")
    factor = np.float32(1.0) if global_scale is None else np.float32(global_scale)
    table = E8M0_VALUES if number is NumberFormat.MXFP4 else E4M3_VALUES
    steps = table[scales] * factor
    rest = np.ascontiguousarray(w[:, how.order], dtype=np.float32)
    codes = np.empty((rows, k), dtype=np.uint8)
    zero = np.uint8(8 if number is NumberFormat.MXFP4 else 0)
    for first in range(0, k, _BLOCK):
        stop = min(first + _BLOCK, k)
        columns = how.order[first:stop]
        block = np.ascontiguousarray(rest[:, first:stop])
        error = np.empty_like(block)
        chosen = np.empty(block.shape, dtype=np.uint8)
        step = np.ascontiguousarray(steps[:, columns // group])
        upper = np.ascontiguousarray(how.upper[first:stop, first:stop])
        _round_block(block, upper, step, error, chosen, zero)
        codes[:, columns] = chosen
        if stop < k:
            rest[:, stop:] -= error @ how.upper[first:stop, stop:]
    out_codes[:] = codes[:, 0::2] | (codes[:, 1::2] << 4)


@kernel("f32[:,:]", "const f32[:,:]", "const f32[:,:]", "f32[:,:]", "u8[:,:]", "u8")
def _round_block(
    block: NDArray[np.float32],
    upper: NDArray[np.float32],
    step: NDArray[np.float32],
    error: NDArray[np.float32],
    codes: NDArray[np.uint8],
    zero: Any,
) -> None:
    """Round a block's columns one by one, each row for itself; error [N, B] is what later blocks have to make up."""
    width = block.shape[1]
    for n in range(block.shape[0]):
        row = block[n]
        for j in range(width):
            w, s = row[j], step[n, j]
            x = w / s if s > np.float32(0.0) else np.float32(0.0)
            a = abs(x)
            order = (  # E2M1, ties to the even code
                np.uint32(a > np.float32(0.25))
                + np.uint32(a >= np.float32(0.75))
                + np.uint32(a > np.float32(1.25))
                + np.uint32(a >= np.float32(1.75))
                + np.uint32(a > np.float32(2.5))
                + np.uint32(a >= np.float32(3.5))
                + np.uint32(a > np.float32(5.0))
            )
            # 0 .5 1 1.5 2 3 4 6
            q = np.float32(order) * np.float32(0.5)
            q = q if order < 5 else np.float32(order) - np.float32(2.0)
            q = q if order < 7 else np.float32(6.0)
            negative = x < np.float32(0.0)
            code = order | (np.uint32(negative) << np.uint32(3))
            codes[n, j] = zero if code == 0 else code
            value = -q * s if negative else q * s
            e = (w - value) / upper[j, j]
            error[n, j] = e
            for c in range(j + 1, width):
                row[c] -= e * upper[j, c]
