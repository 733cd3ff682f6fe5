"""The speed stage's decode measurements as tables: columns, rows, and the sentence below them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, cast

from requant.validate.results import JSON

__all__ = ["DECODING", "STEP", "decoding_rows", "step_rows"]

Rows = tuple[tuple[str, ...], tuple[tuple[str, ...], ...], str]
DECODING: Final = "Decoding"
STEP: Final = "A decode step by kind of kernel"


def decoding_rows(data: Mapping[str, JSON]) -> Rows | None:
    """Every run at every concurrency; None where none was measured."""
    columns = (
        "run", "streams", "tokens/s of one", "tokens/s decoding", "tokens/s with prefill", "step us, median / p95",
        "prefill ms, median / p95", "TTFT ms, median / p95", "GB a step", "of roofline",
    )  # fmt: skip
    rows: list[tuple[str, ...]] = []
    for run in _objects(data.get("runs")):
        for point in _objects(run.get("points")):
            pairs = (f"{_shown(point, f'{key}_median')} / {_shown(point, f'{key}_p95')}" for key in _PAIRS)
            rows.append(
                (
                    str(run.get("label")),
                    _streams(point),
                    *(_shown(point, key) for key in _RATES),
                    *pairs,
                    f"{_number(point, 'bytes') / 1e9:.3f}",
                    f"{100 * _number(point, 'of_roofline'):.0f}%" if "of_roofline" in point else "-",
                )
            )
    if not rows:
        return None
    missing = data.get("not_measured")
    told = [f"{name}: not measured, {why}" for name, why in missing.items()] if isinstance(missing, Mapping) else []
    speedups = data.get("speedups")
    for name, ratios in speedups.items() if isinstance(speedups, Mapping) else ():
        if isinstance(ratios, Mapping) and ratios:
            each = ", ".join(
                f"{ratio:.2f} at {streams}" for streams, ratio in cast("Mapping[str, float]", ratios).items()
            )
            told.append(f"steps per second as a multiple of {name}'s: {each}")
    told += _reference(data)
    spent = data.get("seconds")
    if isinstance(spent, Mapping) and spent:
        told.append("measured in seconds: " + ", ".join(f"{part} {seconds}" for part, seconds in spent.items()))
    return columns, tuple(rows), "; ".join(told)


def _reference(data: Mapping[str, JSON]) -> list[str]:
    """How far the steps lie from the float64 reference (decode_reference.py)."""
    errors = [
        _number(found, "error")
        for run in _objects(data.get("runs"))
        for point in _objects(run.get("points"))
        if isinstance(found := point.get("of_reference"), Mapping)
    ]
    return [f"logits of a few layers are within {max(errors):.2g} of float64's, relatively"] if errors else []


_RATES: Final = ("stream_tokens_per_s", "decode_tokens_per_s", "output_tokens_per_s")
_PAIRS: Final = ("step_us", "prefill_ms", "ttft_ms")


def step_rows(data: Mapping[str, JSON]) -> Rows | None:
    """The converted model's step by kind, at every concurrency, with the unit that each kernel computes on."""
    rows: list[tuple[str, ...]] = []
    lines: list[str] = []
    for run in _objects(data.get("runs"))[:1]:
        for point in _objects(run.get("points")):
            parts = _objects(point.get("breakdown"))
            whole = sum(_number(part, "us") for part in parts)
            for part in parts:
                kernels = part.get("kernels")
                named = "; ".join(map(_kernel, kernels)) if isinstance(kernels, list | tuple) else ""
                share = f"{100 * _number(part, 'us') / whole:.0f}%" if whole else "-"
                row = (str(part.get("kind")), f"{_number(part, 'us'):.0f}", share, f"{_number(part, 'launches'):.0f}")
                rows.append((_streams(point), *row, f"{100 * _number(part, 'tensor_cores'):.0f}%", named))
            if parts and isinstance(point.get("bottleneck"), str):
                lines.append(str(point["bottleneck"]))
    if not rows:
        return None
    columns = ("streams", "kind", "us", "of kernel time", "launches", "on tensor cores", "kernels")
    return columns, tuple(rows), " ".join(lines)


def _kernel(told: JSON) -> str:
    """A kernel as the data have it, its C++ name as short as it can be told apart by."""
    short = _NOISE.sub("", str(told))
    name, shape, rest = short.partition("<")
    if not shape:
        return short
    unit = _UNIT.search(rest)
    arguments = rest[: unit.start()] if unit else rest
    cut = arguments if len(arguments) <= _ARGUMENTS else f"{arguments[:_ARGUMENTS]}..."
    return f"{name}<{cut}{unit.group() if unit else ''}"


_NOISE: Final = re.compile(r"^void |at::native::|requant::|c10::|at::cuda::|\(anonymous namespace\)::|\([\w:]+\)(?=\d)")
_UNIT: Final = re.compile(r" \((?:tensor|CUDA) cores\): .*$")
_ARGUMENTS: Final = 24


def _streams(point: Mapping[str, JSON]) -> str:
    streams, batch = point.get("concurrency"), point.get("batch")
    return str(streams) if streams == batch else f"{streams} (in batches of {batch})"


def _objects(value: JSON) -> list[Mapping[str, JSON]]:
    items: Sequence[JSON] = value if isinstance(value, list | tuple) else ()
    return [item for item in items if isinstance(item, Mapping)]


def _number(row: Mapping[str, JSON], key: str) -> float:
    value = row.get(key)
    return float(value) if isinstance(value, int | float) else 0.0


def _shown(row: Mapping[str, JSON], key: str) -> str:
    value = _number(row, key)
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
