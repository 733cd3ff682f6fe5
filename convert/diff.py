"""`requant diff A B`: two checkpoints tensor by tensor, by bytes, names, dtypes and shapes, and config key by key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from requant.convert.checkpoint import Catalogue
from requant.convert.shards import TensorInfo

__all__ = ["Diff", "compare", "diff_text"]

CHUNK: Final = 4 * 2**20


@dataclass(slots=True)
class Diff:
    """What differs. changed: name -> (bytes that differ, bytes compared, offset of the first)."""

    equal: int = 0
    missing: list[str] = field(default_factory=list[str])
    extra: list[str] = field(default_factory=list[str])
    reshaped: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    changed: dict[str, tuple[int, int, int]] = field(default_factory=dict[str, tuple[int, int, int]])
    config: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])

    @property
    def same(self) -> bool:
        """No difference in any tensor or config key."""
        return not (self.missing or self.extra or self.reshaped or self.changed or self.config)

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
        if right is None:
            progress(left.nbytes)
        elif (left.dtype, left.shape) != (right.dtype, right.shape):
            result.reshaped.append((name, _kind(left), _kind(right)))
            progress(left.nbytes)
        else:
            different, first = _bytes(a.root, left, b.root, right, progress)
            if different:
                result.changed[name] = (different, left.nbytes, first)
            else:
                result.equal += 1
    left_config, right_config = dict(_flat(a.config, "")), dict(_flat(b.config, ""))
    for key in dict.fromkeys([*left_config, *right_config]):
        one, other = left_config.get(key, "-"), right_config.get(key, "-")
        if one != other:
            result.config.append((key, one, other))
    return result


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
    groups: list[tuple[str, list[str]]] = [
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
