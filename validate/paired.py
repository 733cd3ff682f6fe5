"""Two models' scores on the same questions: is the second no worse, by more than a margin, and how sure is that.

Judged are the differences question by question, which cancel what is hard about the questions. For scores of 0 and 1
the error is that of Agresti and Min (2005), who add half a question to each of the four cells: ten questions on which
both models do alike are no proof that a thousand would be, and here they are none. The interval lies about the
difference itself, not about theirs, which is drawn towards 0. Other scores have the standard error of the mean
difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from requant.validate.divergence import Mean, Verdict

__all__ = ["PairedScores", "paired"]

_ONE_SIDED_95: Final = 1.645
_FEWEST: Final = 2


@dataclass(frozen=True, slots=True)
class PairedScores:
    """Means of both models, each with its standard error, and of the differences (target minus source), with theirs.

    equal: every question has the same score from both.
    """

    questions: int
    source: Mean
    target: Mean
    difference: Mean
    equal: bool

    def verdict(self, margin: float) -> Verdict:
        """Whether the target scores less by at most `margin`, at 95% one-sided confidence."""
        value, error = self.difference.value, self.difference.error
        if error is None:
            return Verdict.INCONCLUSIVE
        if value - _ONE_SIDED_95 * error >= -margin:
            return Verdict.NOT_INFERIOR
        return Verdict.INFERIOR if value + _ONE_SIDED_95 * error < -margin else Verdict.INCONCLUSIVE


def paired(source: Sequence[float], target: Sequence[float]) -> PairedScores:
    """Scores of both models, question by question, higher is better. ValueError if their numbers differ."""
    s, t = np.asarray(source, dtype=np.float64), np.asarray(target, dtype=np.float64)
    if s.shape != t.shape or s.ndim != 1:
        raise ValueError(f"{s.size} scores of the source and {t.size} of the target")
    return PairedScores(len(s), _mean(s), _mean(t), _difference(s, t), bool((s == t).all()))


def _mean(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Mean:
    n = len(values)
    error = float(values.std(ddof=1) / math.sqrt(n)) if n >= _FEWEST else None
    return Mean(float(values.mean()) if n else math.nan, error)


def _difference(
    source: np.ndarray[tuple[int], np.dtype[np.float64]], target: np.ndarray[tuple[int], np.dtype[np.float64]]
) -> Mean:
    plain = _mean(target - source)
    if not np.isin(np.concatenate([source, target]), (0.0, 1.0)).all() or plain.error is None:
        return plain
    n = len(source) + 2
    won, lost = float((target > source).sum()), float((target < source).sum())
    variance = (won + lost + 1 - (won - lost) ** 2 / n) / n**2
    return Mean(plain.value, math.sqrt(variance))
