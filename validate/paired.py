"""Two models' scores on the same questions: is the second no worse, by more than a margin, and how sure is that.

Judged are the differences question by question, which cancel what is hard about the questions. For scores of 0 and 1
the error is that of Agresti and Min (2005), who add half a question to each of the four cells: ten questions on which
both models do alike are no proof that a thousand would be, and here they are none. The interval lies about the
difference itself, not about theirs, which is drawn towards 0. Other scores have the standard error of the mean
difference and Student's t for their number of questions; differences that are all the same, which show no spread, are
taken to have the error that Agresti and Min's formula gives such answers, in units of the scores' range.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from requant.validate.divergence import Mean, Verdict
from requant.validate.student import t_quantile

__all__ = ["PairedScores", "paired"]

_ONE_SIDED: Final = 0.95
_MANY: Final = 1 << 30
"""Degrees of freedom of an error that is not estimated from a spread: the normal distribution's."""
_FEWEST: Final = 2


@dataclass(frozen=True, slots=True)
class PairedScores:
    """Means of both models, each with its standard error, and of the differences (target minus source), with theirs.

    equal: every question has the same score from both. degrees: of freedom of the difference's error.
    """

    questions: int
    source: Mean
    target: Mean
    difference: Mean
    equal: bool
    degrees: int

    def verdict(self, margin: float) -> Verdict:
        """Whether the target scores less by at most `margin`, at 95% one-sided confidence."""
        value, error = self.difference.value, self.difference.error
        if error is None:
            return Verdict.INCONCLUSIVE
        reach = t_quantile(_ONE_SIDED, self.degrees) * error
        if value - reach >= -margin:
            return Verdict.NOT_INFERIOR
        return Verdict.INFERIOR if value + reach < -margin else Verdict.INCONCLUSIVE


def paired(source: Sequence[float], target: Sequence[float]) -> PairedScores:
    """Scores of both models, question by question, higher is better. ValueError if their numbers differ."""
    s, t = np.asarray(source, dtype=np.float64), np.asarray(target, dtype=np.float64)
    if s.shape != t.shape or s.ndim != 1:
        raise ValueError(f"{s.size} scores of the source and {t.size} of the target")
    difference, degrees = _difference(s, t)
    return PairedScores(len(s), _mean(s), _mean(t), difference, bool((s == t).all()), degrees)


def _mean(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Mean:
    n = len(values)
    error = float(values.std(ddof=1) / math.sqrt(n)) if n >= _FEWEST else None
    return Mean(float(values.mean()) if n else math.nan, error)


def _difference(
    source: np.ndarray[tuple[int], np.dtype[np.float64]], target: np.ndarray[tuple[int], np.dtype[np.float64]]
) -> tuple[Mean, int]:
    """The mean difference with its error, and that error's degrees of freedom."""
    plain, scores = _mean(target - source), np.concatenate([source, target])
    if plain.error is None:
        return plain, _MANY
    n = len(source) + 2
    if np.isin(scores, (0.0, 1.0)).all():
        won, lost = float((target > source).sum()), float((target < source).sum())
        variance = (won + lost + 1 - (won - lost) ** 2 / n) / n**2
        return Mean(plain.value, math.sqrt(variance)), _MANY
    if plain.error == 0:
        reach = max(float(np.ptp(scores)), float(np.abs(scores).max()))
        return Mean(plain.value, reach / n), _MANY  # the formula above with none won and none lost
    return plain, len(source) - 1
