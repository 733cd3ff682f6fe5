"""Where each output tensor will lie: shard and byte offset, known before the first byte is written."""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from json.encoder import encode_basestring as quote
from typing import Final, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray
from requant.convert.layouts.writing import Leaf
from requant.convert.shards import DTYPE_BITS, described, frame_header

__all__ = ["OutShard", "OutTensor", "OutTensors", "header_of", "place"]

HEADER_BUDGET: Final = 50_000_000
"""Bytes of header per output shard, half of what readers accept (safetensors: 100,000,000)."""


class OutTensor(NamedTuple):
    """An output tensor and its place: `begin` is the absolute byte offset in shard number `shard`.

    Its name is the module's with the leaf's suffix: a million full names would cost more memory than all the rest.
    """

    module: str
    leaf: Leaf
    shard: int
    begin: int

    @property
    def name(self) -> str:
        """The tensor's name in the file."""
        return self.module + self.leaf.suffix

    @property
    def dtype(self) -> str:
        """As the header spells it."""
        return self.leaf.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """As the header states it."""
        return self.leaf.shape

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.leaf.nbytes


@dataclass(frozen=True, slots=True)
class OutShard:
    """An output shard: final name, total size in bytes, sha256 of its header, which of the plan's tensors it holds.

    The header itself is rendered when it is written (`header_of`): those of a large checkpoint take over 100 MB.
    """

    file: str
    size: int
    header_sha256: str
    tensors: range


class OutTensors(Sequence[OutTensor]):
    """All output tensors in the plan's order, kept as columns: a million rows would take 120 MB and be looked at once.

    begins: absolute, by tensor. starts: the first tensor of each shard.
    """

    __slots__ = ("_begins", "_leaves", "_modules", "_starts")

    def __init__(
        self, modules: Sequence[str], leaves: Sequence[Leaf], begins: array[int], starts: Sequence[int]
    ) -> None:
        self._modules, self._leaves, self._begins, self._starts = modules, leaves, begins, starts

    def __len__(self) -> int:
        return len(self._modules)

    @overload
    def __getitem__(self, index: int) -> OutTensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[OutTensor]: ...
    def __getitem__(self, index: int | slice) -> OutTensor | Sequence[OutTensor]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        shard = bisect_right(self._starts, index) - 1
        return OutTensor(self._modules[index], self._leaves[index], shard, self._begins[index])

    def __iter__(self) -> Iterator[OutTensor]:
        for shard, start in enumerate(self._starts):
            run = slice(start, self._starts[shard + 1] if shard + 1 < len(self._starts) else None)
            yield from map(OutTensor, self._modules[run], self._leaves[run], repeat(shard), self._begins[run])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OutTensors) and list(self) == list(other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def columns(self, run: range) -> tuple[Sequence[str], Sequence[Leaf]]:
        """Modules and leaves of a shard's tensors."""
        return self._modules[run.start : run.stop], self._leaves[run.start : run.stop]


class _Kinds:
    """Leaves by number. A checkpoint has many tensors and few kinds: numbers are what can be added up all at once."""

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        first = dict(zip(map(id, leaves), leaves, strict=True))
        number = {ident: index for index, ident in enumerate(first)}
        self.table = list(first.values())
        self.of = np.fromiter(map(number.__getitem__, map(id, leaves)), np.intp, len(leaves))
        self.sizes = np.array([leaf.nbytes for leaf in self.table], np.int64)[self.of]
        self.widths = np.array([max(DTYPE_BITS[leaf.dtype] // 8, 1) for leaf in self.table], np.int64)[self.of]


def place(modules: Sequence[str], leaves: Sequence[Leaf], shard_size: int) -> tuple[tuple[OutShard, ...], OutTensors]:
    """Cut the outputs, in order, into shards; inside one, wider dtypes come first: then every tensor is aligned."""
    kinds = _Kinds(leaves)
    runs = _runs(modules, kinds, shard_size)
    begins = array("q")
    shards: list[OutShard] = []
    for number, run in enumerate(runs):
        name = "model.safetensors" if len(runs) == 1 else f"model-{number + 1:05d}-of-{len(runs):05d}.safetensors"
        part = slice(run.start, run.stop)
        own, data, raw = _lay_out(modules[part], kinds.table, kinds.of[part], kinds.sizes[part], kinds.widths[part])
        begins.frombytes((own + len(raw)).tobytes())
        shards.append(OutShard(name, len(raw) + data, hashlib.sha256(raw).hexdigest(), run))
    return tuple(shards), OutTensors(modules, leaves, begins, [run.start for run in runs])


def header_of(shard: OutShard, tensors: OutTensors) -> bytes:
    """The header of a shard of a plan with these tensors, as `place` measured it."""
    modules, leaves = tensors.columns(shard.tensors)
    kinds = _Kinds(leaves)
    return _lay_out(modules, kinds.table, kinds.of, kinds.sizes, kinds.widths)[2]


def _runs(modules: Sequence[str], kinds: _Kinds, shard_size: int) -> list[range]:
    """Which tensors go together: as many as fit the size and the header's bound, one at least."""
    entry = np.array([len(leaf.suffix) + 120 for leaf in kinds.table], np.int64)[kinds.of]
    header = np.cumsum(entry + np.fromiter(map(len, modules), np.int64, len(modules)))
    data = np.cumsum(kinds.sizes)
    runs: list[range] = []
    start = 0
    while start < len(modules):
        before = (int(data[start - 1]), int(header[start - 1])) if start else (0, 0)
        fits = min(
            int(np.searchsorted(data, before[0] + shard_size, "right")),
            int(np.searchsorted(header, before[1] + HEADER_BUDGET, "right")),
        )
        runs.append(range(start, max(fits, start + 1)))
        start = runs[-1].stop
    return runs or [range(0)]


def _lay_out(
    modules: Sequence[str],
    table: Sequence[Leaf],
    kinds: NDArray[np.intp],
    sizes: NDArray[np.int64],
    widths: NDArray[np.int64],
) -> tuple[NDArray[np.int64], int, bytes]:
    """Offsets from the data's start (in the order given), the size of the data, and the header.

    In the file the widest stand first, else all as they come. kinds: numbers in the table, by tensor.
    """
    order: NDArray[np.intp] = np.argsort(-widths, kind="stable")
    ends: NDArray[np.int64] = np.cumsum(sizes[order])
    begins = np.empty_like(sizes)
    begins[order] = ends - sizes[order]
    return begins, int(ends[-1]) if len(ends) else 0, _render(modules, table, order.tolist(), kinds[order], ends)


_PIECES: Final = 6


def _render(
    modules: Sequence[str],
    table: Sequence[Leaf],
    order: Sequence[int],
    kinds: NDArray[np.intp],
    ends: NDArray[np.int64],
) -> bytes:
    """The header of tensors side by side. order: of the modules; kinds, ends: in that order.

    Its pieces are put into one list, column by column, and joined once: a large plan has a million entries.
    """
    if len(quote("".join(modules))) != len("".join(modules)) + 2:  # a name that JSON has to escape
        modules = [quote(module)[1:-1] for module in modules]
    texts = [quote(leaf.suffix)[1:] + described(leaf.dtype, leaf.shape) for leaf in table]
    bounds = ["0", *map(str, ends.tolist())]
    pieces = [']},"'] * (_PIECES * len(order))
    pieces[0::_PIECES] = map(modules.__getitem__, order)
    pieces[1::_PIECES] = map(texts.__getitem__, kinds.tolist())
    pieces[2::_PIECES] = bounds[:-1]
    pieces[3::_PIECES] = [","] * len(order)
    pieces[4::_PIECES] = bounds[1:]
    pieces[-1:] = ["]}"] * bool(order)
    return frame_header("".join(['"', *pieces]) if order else "", {"format": "pt"})
