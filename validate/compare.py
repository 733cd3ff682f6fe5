"""Two labelled runs of a server, as ratios with confidence intervals; runs that are not comparable are refused.

Comparable: the same server and version, flags, prompts and lengths, card, and load generator; both complete. What is
not known is not the same. A difference that the user means to have (`--allow flags`) is said in the result.

Intervals are bootstrapped over requests, 95%: medians for latencies; for the rate, streams times tokens per second of
latency, the throughput of a closed loop. Few requests spread too little, and their quantiles are taken further out
(student.py). Where the interval holds 1 the verdict is "no difference", however large the ratio looks: 8 requests do
not tell 3% apart. They say nothing of what the machine did between the runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, cast

import numpy as np
from numpy.typing import NDArray
from requant.manifests.errors import SourceError, UsageError
from requant.validate.results import JSON
from requant.validate.serving_run import RUN_KIND
from requant.validate.student import expanded

__all__ = ["FIELDS", "Comparison", "Ratio", "compare_runs", "comparison_text", "load_run"]

FIELDS: Final = ("server", "flags", "prompts", "card")
"""What two runs must share."""
_RESAMPLES: Final = 4000
_FEWEST: Final = 4
"""Requests below which a resample says nothing."""
_SEED: Final = 20_250_101
_ENDS: Final = (0.025, 0.975)
_NAMES: Final = {"server": "version", "flags": "flags", "prompts": "prompts or lengths", "card": "card"}
Samples = Mapping[str, NDArray[np.float64]]
Verdict = Literal["faster", "slower", "no difference", "too few requests"]


@dataclass(frozen=True, slots=True)
class Ratio:
    """B over A of one measure at one concurrency. low, high: its 95% interval, None with too few requests."""

    concurrency: int
    measure: str
    a: float
    b: float
    ratio: float
    low: float | None
    high: float | None
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Comparison:
    """Every measure at every concurrency that both runs have. allowed: what differs by the user's leave."""

    a: str
    b: str
    ratios: tuple[Ratio, ...]
    allowed: tuple[str, ...]
    kernels: tuple[str, str]

    def to_json(self) -> dict[str, JSON]:
        """As json.dumps takes it."""
        rows: list[JSON] = [{name: getattr(ratio, name) for name in Ratio.__slots__} for ratio in self.ratios]
        return {
            "a": self.a,
            "b": self.b,
            "kernels_a": self.kernels[0],
            "kernels_b": self.kernels[1],
            "differs_by_leave": list(self.allowed),
            "ratios": rows,
        }


def _median(key: str) -> Callable[[Samples, int], float]:
    return lambda samples, _: float(np.median(samples[key]))


def _rate(samples: Samples, streams: int) -> float:
    """Output tokens per second of a closed loop of `streams`."""
    return streams * float(samples["output_tokens"].sum()) / float(samples["latency_s"].sum())


_MEASURES: Final[tuple[tuple[str, Callable[[Samples, int], float], bool], ...]] = (
    ("output tokens/s", _rate, True),
    ("time to first token, ms", _median("ttft_ms"), False),
    ("time between tokens, ms", _median("itl_ms"), False),
)
"""(name, statistic of (samples, streams), whether more is better)."""


def load_run(path: Path) -> Mapping[str, JSON]:
    """A run file, or the first serving run of a sign-off (file or folder). SourceError if it is neither."""
    file = path / "requant.signoff.json" if path.is_dir() else path
    try:
        raw = cast("Mapping[str, JSON]", json.loads(file.read_text(encoding="utf-8")))
        if raw.get("kind") == RUN_KIND:
            return raw
        stages = cast("Sequence[Mapping[str, JSON]]", raw["stages"])
        data = next(cast("Mapping[str, JSON]", s["data"]) for s in stages if s["stage"] == "serving" and s["data"])
        return cast("Sequence[Mapping[str, JSON]]", data["runs"])[0]
    except StopIteration as error:
        hint = "run `requant bench FOLDER --launch ... --out DIR` on both"
        raise SourceError("the sign-off holds no run of a server", where=str(file), hint=hint) from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no run file and no sign-off"
        raise SourceError(f"cannot be read: {why}", where=str(file), hint="give what `bench --out` wrote") from error


def compare_runs(a: Mapping[str, JSON], b: Mapping[str, JSON], *, allow: Sequence[str] = ()) -> Comparison:
    """B against A. UsageError if they are not comparable; it names every reason at once."""
    for name in allow:
        if name not in FIELDS:
            raise UsageError(f"nothing is called {name!r}", where="--allow", hint=f"one of {', '.join(FIELDS)}")
    labels = (str(a.get("label")), str(b.get("label")))
    reasons = [f"{label!r} is not complete" for label, run in zip(labels, (a, b), strict=True) if not run["complete"]]
    differing = [name for name in FIELDS if not a.get(name) or a.get(name) != b.get(name)]
    reasons += [_difference(name, a.get(name), b.get(name)) for name in differing if name not in allow]
    left, right = _points(a), _points(b)
    shared = [streams for streams in left if streams in right]
    if not shared:
        reasons.append("they have no concurrency in common")
    if reasons:
        hint = "measure both in the same way; `--allow NAME` lets one difference stand"
        raise UsageError(f"the runs are not comparable: {'; '.join(reasons)}", where=" and ".join(labels), hint=hint)
    rng = np.random.default_rng(_SEED)
    ratios = [
        _ratio(streams, measure, left[streams], right[streams], rng) for streams in shared for measure in _MEASURES
    ]
    allowed = tuple(_difference(name, a.get(name), b.get(name)) for name in differing)
    return Comparison(*labels, tuple(ratios), allowed, (_kernels(a), _kernels(b)))


def comparison_text(result: Comparison) -> str:
    """A table for the terminal."""
    lines = [f"B = {result.b} against A = {result.a}; ratios are B / A with 95% intervals", ""]
    lines += [f"  kernels of A: {result.kernels[0]}", f"  kernels of B: {result.kernels[1]}"]
    lines += [f"  differs by leave: {difference}" for difference in result.allowed]
    lines += ["", f"  {'streams':>7}  {'measure':<24}  {'A':>10}  {'B':>10}  {'B / A':>7}  {'interval':<17}  verdict"]
    for one in result.ratios:
        interval = "-" if one.low is None or one.high is None else f"{one.low:.3f} to {one.high:.3f}"
        lines.append(
            f"  {one.concurrency:>7}  {one.measure:<24}  {one.a:>10,.4g}  {one.b:>10,.4g}  {one.ratio:>7.3f}  "
            f"{interval:<17}  {one.verdict}"
        )
    return "\n".join(lines)


def _difference(name: str, a: JSON, b: JSON) -> str:
    shown = _NAMES[name]
    if not a or not b:
        return f"{shown} of {'both are' if not a and not b else 'one is'} not known ({name})"
    return f"{shown} differ: {_said(a)} and {_said(b)} ({name})"


def _said(value: JSON) -> str:
    return repr(value) if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _kernels(run: Mapping[str, JSON]) -> str:
    kernels = cast("Sequence[str]", run.get("kernels") or ())
    native = {True: "native FP4", False: "FP4 decoded first", None: "not known whether native"}
    return f"{', '.join(kernels) or 'none named'} ({native[cast('bool | None', run.get('fp4_native'))]})"


def _points(run: Mapping[str, JSON]) -> dict[int, dict[str, NDArray[np.float64]]]:
    """Samples by concurrency, of the concurrencies where anything was measured."""
    found: dict[int, dict[str, NDArray[np.float64]]] = {}
    for point in cast("Sequence[Mapping[str, JSON]]", run.get("points") or ()):
        samples = cast("Mapping[str, Sequence[float]]", point["samples"])
        arrays = {key: np.asarray(values, dtype=np.float64) for key, values in samples.items()}
        if len(arrays["latency_s"]):
            found[int(cast("int", point["concurrency"]))] = arrays
    return found


def _ratio(
    streams: int,
    measure: tuple[str, Callable[[Samples, int], float], bool],
    a: Samples,
    b: Samples,
    rng: np.random.Generator,
) -> Ratio:
    name, statistic, more_is_better = measure
    left, right = statistic(a, streams), statistic(b, streams)
    ratio = right / left if left else float("nan")
    if min(len(a["latency_s"]), len(b["latency_s"])) < _FEWEST or not left:
        return Ratio(streams, name, left, right, ratio, None, None, "too few requests")
    below = _resampled(a, streams, statistic, rng)
    tries = _resampled(b, streams, statistic, rng)[below > 0] / below[below > 0]
    fewest = min(len(a["latency_s"]), len(b["latency_s"]))
    low, high = (float(value) for value in np.quantile(tries, [expanded(end, fewest) for end in _ENDS]))
    verdict: Verdict = "no difference"
    if low > 1 or high < 1:
        verdict = "faster" if (ratio > 1) == more_is_better else "slower"
    return Ratio(streams, name, left, right, ratio, low, high, verdict)


def _resampled(
    samples: Samples, streams: int, statistic: Callable[[Samples, int], float], rng: np.random.Generator
) -> NDArray[np.float64]:
    """The statistic of resamples of the requests, each with all of its measures together."""
    count = len(samples["latency_s"])
    picks = rng.integers(0, count, (_RESAMPLES, count))
    return np.array([statistic({key: values[pick] for key, values in samples.items()}, streams) for pick in picks])
