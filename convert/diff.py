"""`requant diff A B`: two checkpoints tensor by tensor, and config key by key, across layouts and formats.

Tensors of one name, dtype and shape are compared by their bytes. What is left over on either side is compared weight by
weight, as numbers: A in NVFP4 and B in BF16, modelopt's names and compressed-tensors', stacked experts and single ones.
The same FP4 codes under the same scales are the same numbers, whichever dialect says them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from requant.convert.checkpoint import Catalogue
from requant.convert.layouts.base import SourceWeight
from requant.convert.layouts.reading import recognise
from requant.convert.shards import TensorInfo
from requant.convert.weights import Compared, Selected, compare_weight, experts_of, whole
from requant.manifests.errors import SourceError

__all__ = ["Diff", "compare", "diff_text"]

CHUNK: Final = 4 * 2**20


@dataclass(slots=True)
class Diff:
    """What differs. changed: name -> (bytes that differ, bytes compared, offset of the first).

    weights: modules that are stored in two ways, with what became of their numbers. unread: why weights could not be
    compared as numbers, if they could not.
    """

    equal: int = 0
    missing: list[str] = field(default_factory=list[str])
    extra: list[str] = field(default_factory=list[str])
    reshaped: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    changed: dict[str, tuple[int, int, int]] = field(default_factory=dict[str, tuple[int, int, int]])
    weights: list[Compared] = field(default_factory=list[Compared])
    unread: str = ""
    config: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])

    @property
    def same(self) -> bool:
        """No difference in any tensor or config key."""
        return not (self.missing or self.extra or self.reshaped or self.changed or self.weights or self.config)

    def to_json(self) -> dict[str, Any]:
        """As json.dumps takes it."""
        return {
            "same": self.same,
            "equal_tensors": self.equal,
            "missing_in_b": self.missing,
            "extra_in_b": self.extra,
            "other_dtype_or_shape": [list(entry) for entry in self.reshaped],
            "changed": [
                {"tensor": name, "bytes_different": n, "bytes": total, "first_at": first}
                for name, (n, total, first) in self.changed.items()
            ],
            "weights": [w._asdict() for w in self.weights],
            "weights_not_compared": self.unread,
            "config": [{"key": key, "a": a, "b": b} for key, a, b in self.config],
        }


def compare(a: Catalogue, b: Catalogue, progress: Callable[[int], None] = lambda _: None) -> Diff:
    """Compare all tensors of two catalogues, in bounded memory."""
    result = Diff(
        missing=[name for name in a.tensors if name not in b.tensors],
        extra=[name for name in b.tensors if name not in a.tensors],
    )
    for name, left in a.tensors.items():
        right = b.tensors.get(name)
        if right is None or (left.dtype, left.shape) != (right.dtype, right.shape):
            if right is not None:
                result.reshaped.append((name, _kind(left), _kind(right)))
        else:
            different, first = _bytes(a.root, left, b.root, right, progress)
            if different:
                result.changed[name] = (different, left.nbytes, first)
            else:
                result.equal += 1
    _compare_weights(a, b, result, progress)
    left_config, right_config = dict(_flat(a.config, "")), dict(_flat(b.config, ""))
    for key in dict.fromkeys([*left_config, *right_config]):
        one, other = left_config.get(key, "-"), right_config.get(key, "-")
        if one != other:
            result.config.append((key, one, other))
    return result


def _compare_weights(a: Catalogue, b: Catalogue, result: Diff, progress: Callable[[int], None]) -> None:
    """Weights of which some tensor differs, as numbers; those tensors are no longer missing, extra or reshaped."""
    open_names = {*result.missing, *result.extra, *result.changed, *(name for name, _, _ in result.reshaped)}
    try:
        left, right = ({w.module: w for w in recognise(c, "auto")[0].weights(c)} for c in (a, b))
    except SourceError as error:
        result.unread = str(error)
        return
    settled: set[str] = set()
    for one, other in _pairs(left, right):
        tensors = {t.name for t in (*one.weight.tensors, *other.weight.tensors)}
        if not tensors & open_names:
            continue
        try:
            result.weights.append(compare_weight(a.root, one, b.root, other))
        except SourceError as error:
            result.unread = str(error)
            continue
        settled |= {t.name for weight in (one.weight, other.weight) for t in weight.tensors if t is not weight.bias}
        progress(one.weight.codes.nbytes * one.rows // (one.weight.rows * max(one.weight.experts, 1)))
    result.missing = [name for name in result.missing if name not in settled]
    result.extra = [name for name in result.extra if name not in settled]
    result.reshaped = [entry for entry in result.reshaped if entry[0] not in settled]


def _pairs(left: Mapping[str, SourceWeight], right: Mapping[str, SourceWeight]) -> Iterator[tuple[Selected, Selected]]:
    """Weights of one module name and shape on both sides; stacks against single experts where only one side stacks."""
    singles = {s.name: s for w in left.values() if w.experts and w.module not in right for s in experts_of(w)}
    others = {s.name: s for w in right.values() if w.experts and w.module not in left for s in experts_of(w)}
    for module, weight in left.items():
        twin = right.get(module)
        if twin is not None and (weight.rows, weight.cols, weight.experts) == (twin.rows, twin.cols, twin.experts):
            yield whole(weight), whole(twin)
        elif module in others and (weight.rows, weight.cols) == (others[module].rows, weight.cols):
            yield whole(weight), others[module]
    for name, single in singles.items():
        if name in right and (right[name].rows, right[name].cols) == (single.rows, single.weight.cols):
            yield single, whole(right[name])
        elif name in others and others[name].rows == single.rows:
            yield single, others[name]


def _kind(tensor: TensorInfo) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _bytes(
    root_a: Path, a: TensorInfo, root_b: Path, b: TensorInfo, progress: Callable[[int], None]
) -> tuple[int, int]:
    """(bytes that differ, offset of the first) of two tensors of one size."""
    import numpy as np

    different, first = 0, -1
    with (root_a / a.file).open("rb") as left, (root_b / b.file).open("rb") as right:
        left.seek(a.begin)
        right.seek(b.begin)
        for begin in range(0, a.nbytes, CHUNK):
            count = min(CHUNK, a.nbytes - begin)
            one, other = left.read(count), right.read(count)
            if one != other:
                unequal = np.flatnonzero(np.frombuffer(one, np.uint8) != np.frombuffer(other, np.uint8))
                different += len(unequal)
                first = begin + int(unequal[0]) if first < 0 else first
            progress(count)
    return different, first


def _flat(value: object, prefix: str) -> Iterator[tuple[str, str]]:
    """Dotted key -> text, for every leaf of a JSON object."""
    if isinstance(value, Mapping):
        for key, item in cast("Mapping[str, object]", value).items():
            yield from _flat(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, repr(value)


def diff_text(result: Diff, verbose: bool) -> str:
    """The differences as lines, the first twenty of each kind unless verbose."""
    if result.same:
        return f"same: {result.equal:,} tensors equal byte for byte, config equal"
    lines = [f"different: {result.equal:,} tensors equal byte for byte"]
    equal = [w for w in result.weights if w.equal]
    worst = sorted((w for w in result.weights if not w.equal), key=lambda w: w.sqnr_db or 0.0)
    if result.weights:
        lines.append(f"{len(equal):,} of {len(result.weights):,} weights stored in two ways are the same numbers")
    if result.unread:
        lines.append(f"not compared as numbers: {result.unread}")
    groups: list[tuple[str, list[str]]] = [
        ("same numbers, stored in two ways", [f"{w.module}: {w.a} | {w.b}" for w in equal]),
        ("other numbers", [
            f"{w.module}: {w.a} | {w.b}, "
            + ("no signal" if w.sqnr_db is None else f"SQNR {w.sqnr_db:.2f} dB")
            + f", max error {w.max_error:.3g}"
            for w in worst
        ]),
        ("bytes differ", [
            f"{name}: {n:,} of {total:,} bytes, first at {at:,}" for name, (n, total, at) in result.changed.items()
        ]),
        ("other dtype or shape", [f"{name}: {one} | {other}" for name, one, other in result.reshaped]),
        ("only in A", result.missing),
        ("only in B", result.extra),
        ("config", [f"{key}: {one} | {other}" for key, one, other in result.config]),
    ]  # fmt: skip
    for title, entries in groups:
        if entries:
            lines.append(f"{title} ({len(entries):,}):")
            shown = entries if verbose else entries[:20]
            lines += [f"  {entry}" for entry in shown]
            if len(entries) > len(shown):
                lines.append(f"  ... and {len(entries) - len(shown):,} more (-v shows all)")
    return "\n".join(lines)
