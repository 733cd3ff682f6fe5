"""Where each output tensor will lie: shard and byte offset, known before the first byte is written."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, repeat
from typing import Final, NamedTuple

from requant.convert.layouts.writing import Leaf
from requant.convert.shards import DTYPE_BITS, render_header

__all__ = ["OutShard", "OutTensor", "header_of", "place"]

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


def place(
    modules: Sequence[str], leaves: Sequence[Leaf], shard_size: int
) -> tuple[tuple[OutShard, ...], tuple[OutTensor, ...]]:
    """Cut the outputs, in order, into shards; inside one, wider dtypes come first: then every tensor is aligned."""
    runs = _runs(modules, leaves, shard_size)
    placed: list[OutTensor] = []
    shards: list[OutShard] = []
    for number, run in enumerate(runs):
        name = "model.safetensors" if len(runs) == 1 else f"model-{number + 1:05d}-of-{len(runs):05d}.safetensors"
        members, kinds = modules[run.start : run.stop], leaves[run.start : run.stop]
        begins, data, raw = _lay_out(members, kinds)
        placed += map(OutTensor, members, kinds, repeat(number), (len(raw) + begin for begin in begins))
        shards.append(OutShard(name, len(raw) + data, hashlib.sha256(raw).hexdigest(), run))
    return tuple(shards), tuple(placed)


def header_of(shard: OutShard, tensors: Sequence[OutTensor]) -> bytes:
    """The header of a shard of a plan with these tensors, as `place` measured it."""
    members = tensors[shard.tensors.start : shard.tensors.stop]
    return _lay_out([tensor.module for tensor in members], [tensor.leaf for tensor in members])[2]


def _runs(modules: Sequence[str], leaves: Sequence[Leaf], shard_size: int) -> list[range]:
    """Which tensors go together: as many as fit the size and the header's bound, one at least."""
    starts = [0]
    data = header = 0
    for index, (module, leaf) in enumerate(zip(modules, leaves, strict=True)):
        entry = len(module) + len(leaf.suffix) + 120
        if index > starts[-1] and (data + leaf.nbytes > shard_size or header + entry > HEADER_BUDGET):
            starts.append(index)
            data = header = 0
        data += leaf.nbytes
        header += entry
    return [range(start, end) for start, end in pairwise([*starts, len(modules)])]


def _file_order(leaves: Sequence[Leaf]) -> list[int]:
    """Indices in the order of the file: by width, the widest first, else as they come."""
    width_of = {dtype: max(DTYPE_BITS[dtype] // 8, 1) for dtype in {leaf.dtype for leaf in leaves}}
    by_width: dict[int, list[int]] = {width: [] for width in sorted(set(width_of.values()), reverse=True)}
    for index, leaf in enumerate(leaves):
        by_width[width_of[leaf.dtype]].append(index)
    return list(chain.from_iterable(by_width.values()))


def _lay_out(modules: Sequence[str], leaves: Sequence[Leaf]) -> tuple[list[int], int, bytes]:
    """Offsets from the data's start (in the order given), the size of the data, and the header."""
    begins = [0] * len(leaves)
    entries: list[tuple[str, str, tuple[int, ...], int, int]] = []
    position = 0
    for index in _file_order(leaves):
        suffix, dtype, shape, nbytes = leaves[index]
        begins[index] = position
        entries.append((modules[index] + suffix, dtype, shape, position, position + nbytes))
        position += nbytes
    return begins, position, render_header(entries, {"format": "pt"})
