"""MXFP4 -> NVFP4 without going through BF16: codes stay, exponents move.

An MXFP4 block (32 codes, scale 2^k) becomes two NVFP4 blocks (16 codes each) with scale 2^(k-m) under a global scale
2^m that every weight of a fused group shares. E4M3 holds 2^p exactly for p in [-9, 8], so all is exact as long as the
exponents of one group span at most 17; kernels that flush E4M3 subnormals (Marlin) need 14.

Two steps, and the first is nearly always enough:

1. *Span over all blocks <= 14* (`window_exponent`): m = k_max - 8. No code is looked at: a 256-entry table turns one
   E8M0 byte into two E4M3 bytes, the codes are copied as bytes.
2. *Otherwise* (`choose_exponent`): only live blocks count (a block is live if any magnitude is nonzero). A census of
   (exponent, how often the codes halve or double exactly) per 16-half decides m: fewest lossy halves, then fewest
   nonzero scales below 2^-6, then least squared error, then the largest m.

In step 2 a half may lose bits only at the small end. An m under k_max - 8 is admissible only if every half above the
E4M3 range doubles exactly into it: clamping the largest blocks of a tensor would save more halves and wreck the
weights that matter most (one outlier block 20 octaves up would be cut to a fiftieth of its value).

Everything is decided in integers, the same on every engine, device and worker count, so the bytes agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from requant.kernels.formats import (
    E4M3_POW2_BYTES,
    E4M3_POW2_MAX,
    E4M3_POW2_MIN,
    E8M0_BIAS,
    E8M0_NAN_BYTE,
    MARLIN_POW2_MIN,
    MARLIN_WINDOW,
)

__all__ = [
    "MAX_DOUBLINGS",
    "Choice",
    "Counts",
    "choose_exponent",
    "find_nan_scale",
    "global_scale",
    "scale_pair_table",
    "window_exponent",
]

MAX_DOUBLINGS: Final = 3
"""The magnitude 0.5 doubles three times (1, 2, 4); no other goes further."""

ALL_DEAD_EXPONENT: Final = 0
"""m of a fused group without a single nonzero weight: a global scale of one."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What a repack did, in blocks of 16. `below_marlin` are nonzero scales under 2^-6 over live blocks."""

    exact: int = 0
    shifted: int = 0
    lossy: int = 0
    below_marlin: int = 0

    @property
    def blocks(self) -> int:
        """All 16-blocks."""
        return self.exact + self.shifted + self.lossy

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.exact + other.exact,
            self.shifted + other.shifted,
            self.lossy + other.lossy,
            self.below_marlin + other.below_marlin,
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """The global exponent of a fused group and what it will cost. Spans are over live blocks (None: all dead)."""

    m: int
    counts: Counts
    k_min: int | None
    k_max: int | None


def window_exponent(byte_min: int, byte_max: int) -> int | None:
    """Step 1: m for a fused group whose E8M0 bytes lie in [byte_min, byte_max], or None if the codes must be read."""
    if byte_max == E8M0_NAN_BYTE or byte_max - byte_min > MARLIN_WINDOW:
        return None
    return byte_max - E8M0_BIAS - E4M3_POW2_MAX


def scale_pair_table(m: int) -> NDArray[np.uint16]:
    """[256] uint16: two equal E4M3 bytes for each E8M0 byte; 0xFFFF (NaN twice) where 2^(k-m) is not an E4M3 value."""
    table = np.full(256, 0xFFFF, dtype=np.uint16)
    for byte in range(E8M0_NAN_BYTE):
        p = byte - E8M0_BIAS - m
        if E4M3_POW2_MIN <= p <= E4M3_POW2_MAX:
            table[byte] = int(E4M3_POW2_BYTES[p - E4M3_POW2_MIN]) * 0x0101
    return table


def global_scale(m: int) -> np.float32:
    """2^m as float32. Exact for m in [-149, 127]; an E8M0 source needs [-135, 119]."""
    return np.float32(np.ldexp(np.float64(1.0), m))


def find_nan_scale(scales: NDArray[np.uint8]) -> tuple[int, int] | None:
    """(row, block) of the first E8M0 NaN byte (255) in scales [N, K/32], or None."""
    hits = np.argwhere(scales == E8M0_NAN_BYTE)
    return (int(hits[0][0]), int(hits[0][1])) if len(hits) else None


def _predict(hist: NDArray[np.int64], m: int) -> Counts | None:
    """What m would cost, from the census; None if a half above the range does not double into it."""
    exact = shifted = lossy = below = 0
    live = hist[:, :, :, 1]
    exact += int(hist[:, :, :, 0].sum())  # a dead half is exact under any scale
    for byte in np.flatnonzero(live.sum(axis=(1, 2))):
        p = int(byte) - E8M0_BIAS - m
        by_halvings = live[byte].sum(axis=1)
        by_doublings = live[byte].sum(axis=0)
        total = int(by_halvings.sum())
        if p > E4M3_POW2_MAX:
            if p - E4M3_POW2_MAX > MAX_DOUBLINGS or int(by_doublings[: p - E4M3_POW2_MAX].sum()):
                return None
            shifted += total
        elif p >= MARLIN_POW2_MIN:
            exact += total
        else:
            to_marlin, to_native = MARLIN_POW2_MIN - p, max(E4M3_POW2_MIN - p, 0)
            lifted = int(by_halvings[to_marlin:].sum()) if to_marlin < len(by_halvings) else 0
            reach = int(by_halvings[to_native:].sum()) if to_native < len(by_halvings) else 0
            shifted += lifted
            if to_native == 0:
                exact += total - lifted
            else:
                shifted += reach - lifted
                lossy += total - reach
            below += reach - lifted
    return Counts(exact, shifted, lossy, below)


def choose_exponent(hist: NDArray[np.int64], lossy_cost: Callable[[int], tuple[int, NDArray[np.int64]]]) -> Choice:
    """Step 2: the global exponent of a fused group.

    hist: int64 [256, 4, 4, 2] from `repack_jit.half_census`, summed over the group: halves by E8M0 byte, times they
    halve exactly, times they double exactly, dead/live. lossy_cost(m) reads the codes again and is called only when
    exponents tie on lossy halves: how many of those keep a nonzero scale below 2^-6, and int64 [256], per E8M0 byte
    their squared error in units of 4^(k-1).
    """
    live_bytes = np.flatnonzero(hist[:, :, :, 1].sum(axis=(1, 2)))
    if not len(live_bytes):
        return Choice(ALL_DEAD_EXPONENT, Counts(exact=int(hist.sum())), None, None)
    k_min, k_max = int(live_bytes[0]) - E8M0_BIAS, int(live_bytes[-1]) - E8M0_BIAS
    admissible: list[tuple[int, Counts]] = []
    for doublings in range(MAX_DOUBLINGS + 1):
        m = k_max - E4M3_POW2_MAX - doublings
        counts = _predict(hist, m)
        if counts is not None:
            admissible.append((m, counts))
    fewest = min(counts.lossy for _, counts in admissible)
    tied = [(m, counts) for m, counts in admissible if counts.lossy == fewest]
    if len(tied) == 1 or fewest == 0:
        m, counts = min(tied, key=lambda mc: (mc[1].below_marlin, -mc[0]))
        return Choice(m, counts, k_min, k_max)
    ranked: list[tuple[tuple[int, int, int], int, Counts]] = []
    for m, counts in tied:
        kept_below, error = lossy_cost(m)
        below = counts.below_marlin + kept_below
        ranked.append(((below, _exact_sum(error), -m), m, counts))
    _, m, counts = min(ranked, key=lambda entry: entry[0])
    return Choice(m, counts, k_min, k_max)


def _exact_sum(per_byte: NDArray[np.int64]) -> int:
    """Sum of per-exponent squared errors on one integer scale: byte b counts 4^b (a common factor is left out)."""
    return sum(int(per_byte[byte]) << (2 * int(byte)) for byte in np.flatnonzero(per_byte))
