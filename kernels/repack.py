"""MXFP4 -> NVFP4 without going through BF16: codes stay, exponents move.

An MXFP4 block (32 codes, scale 2^k) becomes two NVFP4 blocks (16 codes each) with scale 2^(k-m) under a global scale
2^m that every weight of a fused group shares. E4M3 holds 2^p exactly for p in [-9, 8], so all is exact as long as the
exponents of one group span at most 17; kernels that flush E4M3 subnormals (Marlin) need 14.

Two steps, and the first is nearly always enough:

1. *Span over all blocks <= 14* (`window_exponent`): m = k_max - 8. No code is looked at: one E8M0 byte becomes two
   E4M3 bytes by arithmetic on the byte (`window_scales`), the codes are copied as bytes.
2. *Otherwise* (`choose_exponent`): only live blocks count (a block is live if any magnitude is nonzero). A census of
   (exponent, how often the codes halve or double exactly) per 16-half decides m: fewest lossy halves, then fewest
   nonzero scales below 2^-6, then least squared error, then the largest m.

In step 2 a half may lose bits only at the small end. An m under k_max - 8 is admissible only if every half above the
E4M3 range doubles exactly into it: clamping the largest blocks of a tensor would save more halves and wreck the
weights that matter most (one outlier block 20 octaves up would be cut to a fiftieth of its value).

Everything is decided in integers, the same on every engine, device and worker count, so the bytes agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from requant.kernels.formats import (
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
    "Repacked",
    "choose_exponent",
    "find_nan_scale",
    "global_scale",
    "repack",
    "window_exponent",
    "window_scales",
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


SMALLEST_PLAIN_EXPONENT: Final = -126
"""A global scale under 2^-126 is an FP32 subnormal, which kernels may flush and whose reciprocal may overflow. Encoders
give it to weights of nothing but zeros (E8M0 byte 0), so the codes are looked at before it is taken."""


def window_exponent(byte_min: int, byte_max: int) -> int | None:
    """Step 1: m for a fused group whose E8M0 bytes lie in [byte_min, byte_max], or None if the codes must be read."""
    if byte_max == E8M0_NAN_BYTE or byte_max - byte_min > MARLIN_WINDOW:
        return None
    m = byte_max - E8M0_BIAS - E4M3_POW2_MAX
    return m if m >= SMALLEST_PLAIN_EXPONENT else None


def window_scales(scales: NDArray[np.uint8], m: int) -> NDArray[np.uint8]:
    """Step 1: E8M0 bytes [N, K/32] -> E4M3 bytes [N, K/16] of 2^(k-m), for exponents k - m in [-6, 8] only.

    There the E4M3 byte is (k - m + 7) << 3, so plain uint8 arithmetic does it at the speed of memory.
    """
    bytes_once = scales - np.uint8((m + E8M0_BIAS - 7) % 256)
    bytes_once <<= 3
    pairs = bytes_once.astype(np.uint16)
    pairs *= 0x0101  # both halves of a 32-block get the scale
    return pairs.view(np.uint8)


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


@dataclass(frozen=True, slots=True)
class Repacked:
    """A fused group in NVFP4: global scale 2^m, and per member codes uint8 [N, K/2] and E4M3 bytes uint8 [N, K/16]."""

    m: int
    members: tuple[tuple[NDArray[np.uint8], NDArray[np.uint8]], ...]
    counts: Counts


def repack(members: Sequence[tuple[NDArray[np.uint8], NDArray[np.uint8]]]) -> Repacked:
    """MXFP4 -> NVFP4 for a fused group in memory: members are (codes uint8 [N, K/2], E8M0 bytes uint8 [N, K/32]).

    The converter does the same in tiles from disk (convert/compute.py). ValueError for a NaN scale (255).
    """
    from requant.kernels import repack_jit

    for index, (_, scales) in enumerate(members):
        hit = find_nan_scale(scales)
        if hit is not None:
            raise ValueError(f"member {index}: E8M0 scale 255 (NaN) at row {hit[0]}, block {hit[1]}")
    low = min((int(scales.min()) for _, scales in members if scales.size), default=0)
    high = max((int(scales.max()) for _, scales in members if scales.size), default=0)
    m = window_exponent(low, high)
    if m is not None:
        planes = tuple((codes.copy(), window_scales(scales, m)) for codes, scales in members)
        return Repacked(m, planes, Counts(exact=sum(plane.size for _, plane in planes)))
    hist = np.zeros((256, 4, 4, 2), dtype=np.int64)
    for codes, scales in members:
        repack_jit.half_census(codes, scales, hist)

    def lossy_cost(m: int) -> tuple[int, NDArray[np.int64]]:
        error = np.zeros(256, dtype=np.int64)
        return sum(repack_jit.lossy_error(codes, scales, m, error) for codes, scales in members), error

    choice = choose_exponent(hist, lossy_cost)
    counts = np.zeros(4, dtype=np.int64)
    out: list[tuple[NDArray[np.uint8], NDArray[np.uint8]]] = []
    for codes, scales in members:
        planes_out = np.empty_like(codes), np.empty((scales.shape[0], scales.shape[1] * 2), dtype=np.uint8)
        repack_jit.repack_tile(codes, scales, choice.m, *planes_out, counts)
        out.append(planes_out)
    return Repacked(choice.m, tuple(out), Counts(*(int(n) for n in counts)))


def _exact_sum(per_byte: NDArray[np.int64]) -> int:
    """Sum of per-exponent squared errors on one integer scale: byte b counts 4^b (a common factor is left out)."""
    return sum(int(per_byte[byte]) << (2 * int(byte)) for byte in np.flatnonzero(per_byte))
