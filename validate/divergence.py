"""How far two models' next-token distributions lie apart, position by position, and what may be concluded from it.

All from the FP32 logits of both models on the same tokens, worked off in chunks of positions, in float64:

    KL(source || target) = sum_v p(v) (log p(v) - log q(v))     in nats; 0 exactly where the logits are equal
    agreement            = whether both put the same token first
    NLL                  = -log of the probability of the token that follows; perplexity = exp(mean NLL)

Neighbouring positions are not independent, so errors are those of means over blocks of 64 consecutive positions, and
intervals Student's for the number of those blocks.
The ratio of perplexities is judged on the paired differences of NLL, which cancel what is hard about the text: its
interval is far narrower than those of the two perplexities.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from requant.validate.student import t_quantile

__all__ = ["Mean", "Positions", "Ratio", "Verdict", "compare_logits", "mean_of", "ratio_of"]

BLOCK: Final = 64
"""Positions whose mean counts as one observation."""
_CHUNK: Final = 64
"""Positions in float64 at a time: 64 x 200,000 tokens are 100 MB."""
_ONE_SIDED: Final = 0.95
_TWO_SIDED: Final = 0.975


@dataclass(frozen=True, slots=True)
class Positions:
    """One float64 per position: KL in nats, agreement 0 or 1, NLL in nats under either model."""

    kl: NDArray[np.float64]
    agree: NDArray[np.float64]
    nll_source: NDArray[np.float64]
    nll_target: NDArray[np.float64]

    @classmethod
    def joined(cls, parts: list[Positions]) -> Positions:
        """All positions of several stretches, in order."""
        if not parts:
            empty = np.empty(0, dtype=np.float64)
            return cls(empty, empty, empty, empty)
        return cls(
            np.concatenate([p.kl for p in parts]),
            np.concatenate([p.agree for p in parts]),
            np.concatenate([p.nll_source for p in parts]),
            np.concatenate([p.nll_target for p in parts]),
        )

    def at(self, index: int) -> Positions:
        """One position."""
        one = slice(index, index + 1)
        return Positions(self.kl[one], self.agree[one], self.nll_source[one], self.nll_target[one])


def compare_logits(source: torch.Tensor, target: torch.Tensor, following: torch.Tensor) -> Positions:
    """Logits [T, V] of both models and the tokens [T] that follow -> one entry per position.

    ValueError where shapes differ. A NaN in either's logits makes NaN of that position.
    """
    if source.shape != target.shape or source.shape[0] != following.shape[0]:
        raise ValueError(f"logits {list(source.shape)} and {list(target.shape)}, {following.shape[0]} tokens")
    parts: list[Positions] = []
    for first in range(0, source.shape[0], _CHUNK):
        rows = slice(first, first + _CHUNK)
        index = following[rows, None]
        s, t = source[rows], target[rows]
        log_p = torch.log_softmax(s.double(), dim=-1)
        nll = -log_p.gather(-1, index)[:, 0]
        if torch.equal(s, t):  # and no NaN: nothing equals that
            zero = torch.where(nll.isnan(), nll, 0.0)
            parts.append(Positions(_numpy(zero), _numpy(zero + 1), _numpy(nll), _numpy(nll)))
            continue
        log_q = torch.log_softmax(t.double(), dim=-1)
        parts.append(
            Positions(
                # each term may be negative, the sum not: what is below 0 is rounding. NaN passes through clamp.
                _numpy((log_p.exp() * (log_p - log_q)).nan_to_num(nan=math.nan, posinf=math.inf).sum(-1).clamp(min=0)),
                _numpy((s.argmax(-1) == t.argmax(-1)).double()),
                _numpy(nll),
                _numpy(-log_q.gather(-1, index)[:, 0]),
            )
        )
    return Positions.joined(parts)


def _numpy(values: torch.Tensor) -> NDArray[np.float64]:
    return cast("NDArray[np.float64]", values.cpu().numpy())


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean and its standard error; None where there are fewer than two blocks. blocks: what it was estimated from."""

    value: float
    error: float | None
    blocks: int = 0

    def reach(self, probability: float) -> float:
        """Half the width of an interval that ends at this probability on either side; infinite without an error."""
        return math.inf if self.error is None else t_quantile(probability, self.blocks - 1) * self.error


def mean_of(values: NDArray[np.float64]) -> Mean:
    """Mean over all positions, its error from the means of blocks of 64."""
    blocks = len(values) // BLOCK
    if blocks < 2:
        return Mean(float(values.mean()) if len(values) else math.nan, None)
    means = values[: blocks * BLOCK].reshape(blocks, BLOCK).mean(axis=1)
    return Mean(float(values.mean()), float(means.std(ddof=1) / math.sqrt(blocks)), blocks)


class Verdict(StrEnum):
    """Of a comparison with a margin. inconclusive: the interval holds the margin, more tokens are needed."""

    NOT_INFERIOR = "not inferior"
    INFERIOR = "inferior"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class Ratio:
    """Perplexity of the target over the source's, with its two-sided 95% interval; None: too few positions for one."""

    value: float
    low: float | None
    high: float | None
    difference: Mean

    def verdict(self, margin: float) -> Verdict:
        """Whether the ratio is below `margin`, at 95% one-sided confidence."""
        limit, reach = math.log(margin), self.difference.reach(_ONE_SIDED)
        if self.difference.value + reach <= limit:
            return Verdict.NOT_INFERIOR
        if self.difference.value - reach > limit:
            return Verdict.INFERIOR
        return Verdict.INCONCLUSIVE


def ratio_of(positions: Positions) -> Ratio:
    """The ratio of perplexities, from the paired differences of NLL."""
    mean = mean_of(positions.nll_target - positions.nll_source)
    if mean.error is None:
        return Ratio(math.exp(mean.value), None, None, mean)
    spread = mean.reach(_TWO_SIDED)
    return Ratio(math.exp(mean.value), math.exp(mean.value - spread), math.exp(mean.value + spread), mean)
