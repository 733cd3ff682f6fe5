"""Global scales in modelopt's dialect (a multiplier, s2) and compressed-tensors' (its reciprocal), both FP32.

FP32 reciprocals do not come back: 1/(1/x) is another number for about one x in seven. But what stands in a checkpoint
is no arbitrary number: producers compute amax / 2688 and 2688 / amax from the same BF16 amax (2688 = 6 * 448; with
four-over-six 1536 = 6 * 256), and our `scale: mse` from that amax times a number of eighths below three, which has 13
significant bits. Where such a number explains the one, the other is computed from it, and turning over twice gives back
every bit. Powers of two, which the lossless repack chooses, come back anyway.
"""

from __future__ import annotations

from typing import Final

import numpy as np

__all__ = ["turned_over"]

_ROOMS: Final = (6.0 * 448.0, 6.0 * 256.0)
"""Largest weight in units of s2: E2M1's 6 times the largest block scale that the rule for scales allows."""


def turned_over(scale: np.float32) -> np.float32:
    """1/scale in FP32, so that turning it over again gives `scale` wherever FP32 has such a number.

    scale must be positive, and its reciprocal finite; the result is within one step of FP32 of the true reciprocal.
    """
    one, tiny = np.float32(1.0), np.finfo(np.float32).tiny
    plain = one / scale
    if one / plain == scale or plain < tiny:
        exact = np.frexp(scale)[0] == 0.5
        if exact:
            return plain
    for room in _ROOMS:
        top = np.float32(room)
        for guess in (scale * top, top / scale):  # amax from s2, amax from 1/s2
            amax = _short(np.float32(guess))
            if not (np.isfinite(amax) and amax > tiny):
                continue
            if amax / top == scale:
                return top / amax
            if top / amax == scale:
                return amax / top
    for near in (plain, np.nextafter(plain, np.float32(np.inf)), np.nextafter(plain, np.float32(0.0))):
        if near >= tiny and one / near == scale:
            return near
    return plain


def _short(value: np.float32) -> np.float32:
    """The nearest number of 13 significant bits."""
    word = int(value.view(np.uint32))
    return np.uint32(((word + 0x3FF + ((word >> 11) & 1)) & 0xFFFFF800) & 0xFFFFFFFF).view(np.float32)
