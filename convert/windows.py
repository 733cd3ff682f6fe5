"""Cut a plan into windows: runs of units whose source fits on a small disk, one after the other.

A window holds whole tensors, and every tensor lies in one window: nothing is fetched twice, and what was made of a
tensor can be compared with all of it while it is there. Units keep their order, which is that of the source.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from requant.convert.layouts.base import SourceWeight
from requant.convert.plan import CopyUnit, Piece, Plan, Unit
from requant.convert.shards import TensorInfo
from requant.manifests.errors import UsageError

__all__ = ["Window", "cut_windows", "largest_block", "shard_by_shard", "shards_of", "tensors_of", "units_by_shard"]


class Window(NamedTuple):
    """Units (indices into the plan) with the source tensors that they read. nbytes: of these tensors."""

    units: tuple[int, ...]
    tensors: tuple[TensorInfo, ...]
    nbytes: int

    def ranges(self) -> dict[str, list[tuple[int, int]]]:
        """Byte ranges [begin, end) to fetch, by file, in order, neighbours joined."""
        found: dict[str, list[tuple[int, int]]] = {}
        for tensor in sorted(self.tensors, key=lambda t: (t.file, t.begin)):
            spans = found.setdefault(tensor.file, [])
            begin, end = tensor.begin, tensor.begin + tensor.nbytes
            if spans and spans[-1][1] == begin:
                spans[-1] = (spans[-1][0], end)
            elif begin < end:
                spans.append((begin, end))
        return found


def tensors_of(unit: object) -> Iterator[TensorInfo]:
    """Every source tensor that a unit reads, at any depth of its tuples: of a weight all but its bias, which is copied
    by other units."""
    if isinstance(unit, TensorInfo):
        yield unit
    elif isinstance(unit, SourceWeight):
        yield from (tensor for tensor in unit.tensors if tensor is not unit.bias)
    elif isinstance(unit, tuple):
        for part in unit:  # pyright: ignore[reportUnknownVariableType]
            yield from tensors_of(part)  # pyright: ignore[reportUnknownArgumentType]


def shard_by_shard(plan: Plan) -> Plan:
    """The plan with its units in the order of the output's shards, so that one is finished before the next is begun.

    A batch of copies, which may reach over many shards (norms of all layers), becomes one for each; and where the next
    batch goes on with a tensor (the biases of a stack, cut up by expert), all its pieces of a shard go with the last.
    Else every batch would need the one before it on the same disk, and all of them together.
    """
    tensors = plan.tensors
    keyed: list[tuple[int, Unit]] = []
    last: dict[tuple[int, str], int] = {}
    for index, unit in enumerate(plan.units):
        for piece in unit.pieces if isinstance(unit, CopyUnit) else ():
            last[tensors[piece.out].shard, _origin(piece)] = index
    waiting: dict[tuple[int, str], list[Piece]] = {}
    for index, unit in enumerate(plan.units):
        if isinstance(unit, CopyUnit):
            by_shard: dict[int, list[Piece]] = {}
            for piece in unit.pieces:
                key = tensors[piece.out].shard, _origin(piece)
                if key[1] and last[key] != index:
                    waiting.setdefault(key, []).append(piece)
                else:
                    by_shard.setdefault(key[0], []).extend((*waiting.pop(key, ()), piece))
            for shard, pieces in by_shard.items():
                nbytes = sum(tensors[piece.out].nbytes for piece in pieces)
                keyed.append((shard, CopyUnit(tuple(pieces), nbytes)))
        else:
            outputs = [out for member in unit.members for out in member.outputs]
            keyed.append((min(tensors[out].shard for out in outputs), unit))
    keyed.sort(key=lambda entry: entry[0])
    return replace(plan, units=tuple(unit for _, unit in keyed))


def _origin(piece: Piece) -> str:
    """Name of the source tensor, "" for a constant."""
    return next((tensor.name for tensor in tensors_of(piece.source)), "")


def cut_windows(plan: Plan, wanted: Iterable[int], budget: int) -> list[Window]:
    """Windows of at most `budget` bytes over the units `wanted`. UsageError if one cannot be made that small."""
    order = sorted(wanted)
    reads = _reads(plan, order)
    windows: list[Window] = []
    for block in _blocks(order, reads):
        window = _window(block, reads)
        if window.nbytes > budget:
            name = max(window.tensors, key=lambda t: t.nbytes).name
            raise UsageError(
                f"{window.nbytes:,} bytes must be on disk together (around {name}), execute.max_disk leaves {budget:,}",
                where="execute.max_disk",
                hint="allow more disk",
            )
        if windows and windows[-1].nbytes + window.nbytes <= budget:
            before = windows.pop()
            window = Window(before.units + window.units, before.tensors + window.tensors, before.nbytes + window.nbytes)
        windows.append(window)
    return windows


def largest_block(plan: Plan, units: Iterable[int]) -> int:
    """Source bytes that must be there together at least, for these units."""
    order = sorted(units)
    reads = _reads(plan, order)
    return max((_window(block, reads).nbytes for block in _blocks(order, reads)), default=0)


def units_by_shard(plan: Plan) -> dict[int, list[int]]:
    """Units that a worker needs to make an output shard by itself, by the shard's number, in order.

    They are those that write into it, and those that read a tensor that one of these reads: so that all that became of
    a tensor can be judged there. A unit that writes into two shards is done for both.
    """
    order = range(len(plan.units))
    found: dict[int, list[int]] = {number: [] for number in range(len(plan.shards))}
    for block in _blocks(order, _reads(plan, order)):
        for shard in sorted({shard for index in block for shard in shards_of(plan, plan.units[index])}):
            found[shard] += block
    return found


def shards_of(plan: Plan, unit: Unit) -> tuple[int, ...]:
    """Numbers of the output shards that a unit writes into."""
    tensors = plan.tensors
    if isinstance(unit, CopyUnit):
        return tuple({tensors[piece.out].shard for piece in unit.pieces})
    return tuple({tensors[out].shard for member in unit.members for out in member.outputs})


def _reads(plan: Plan, order: Iterable[int]) -> dict[int, list[TensorInfo]]:
    """The source tensors of each unit, once."""
    return {index: list({t.name: t for t in tensors_of(plan.units[index])}.values()) for index in order}


def _blocks(order: Sequence[int], reads: dict[int, list[TensorInfo]]) -> Iterator[list[int]]:
    """The smallest runs of units that share no tensor with the rest."""
    last = {tensor.name: index for index in order for tensor in reads[index]}
    block: list[int] = []
    until = -1
    for index in order:
        block.append(index)
        until = max([until, *(last[tensor.name] for tensor in reads[index])])
        if until <= index:
            yield block
            block = []


def _window(units: Sequence[int], reads: dict[int, list[TensorInfo]]) -> Window:
    tensors = {tensor.name: tensor for index in units for tensor in reads[index]}
    return Window(tuple(units), tuple(tensors.values()), sum(tensor.nbytes for tensor in tensors.values()))
