"""What a cluster's worker does: one batch of units, from an excerpt of the plan, straight onto the shared file system.

A batch carries what its units need and no more; a plan of half a million tensors never leaves the driver. A worker
first makes sure that it is looking at the run's own files with the run's own program, and syncs what it wrote before it
says so: then a node may die at any moment. Nothing here imports Ray.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from requant.convert.compute import run_unit
from requant.convert.engine import ShardFiles, Task
from requant.convert.placement import OutTensor
from requant.convert.plan import Plan, Unit
from requant.convert.shards import TensorInfo
from requant.manifests.errors import EnvironmentFault, IncompleteError, PublishError, RequantError, SourceError

__all__ = ["Batch", "Fault", "Report", "batches", "outs_of", "run_batch"]


class Batch(NamedTuple):
    """Some units with the places of their outputs. token: a file that exists as long as the run that sent this.

    sources: sizes of the source files they read. shards: names of the output shards they write, by number.
    """

    units: tuple[tuple[int, Unit], ...]
    tensors: Mapping[int, OutTensor]
    shards: Mapping[int, str]
    sources: Mapping[str, int]
    nbytes: int
    root: str
    partial: str
    token: str
    version: str

    @property
    def key(self) -> int:
        """Its first unit."""
        return self.units[0][0]

    def run(self, node: str, *_: object) -> Report:
        """Do it."""
        return run_batch(self, node)


class Fault(NamedTuple):
    """An error on its way to the driver: exceptions with keywords do not survive pickling. code: errno, or 0.

    again: it may well pass, as those of a network do.
    """

    kind: str
    message: str
    where: str
    hint: str
    code: int = 0
    again: bool = False

    def exception(self) -> Exception:
        """The error to raise."""
        if self.kind == "OSError":
            return OSError(self.code, self.message, self.where or None)
        kinds: dict[str, type[RequantError]] = {k.__name__: k for k in KINDS}
        return kinds.get(self.kind, IncompleteError)(self.message, where=self.where, hint=self.hint)

    @property
    def passing(self) -> bool:
        """Whether another node, or another time, may do better."""
        return self.again or (self.kind == "OSError" and self.code not in FULL)


FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
KINDS: Final = (SourceError, EnvironmentFault, IncompleteError, PublishError)


class Report(NamedTuple):
    """What became of a batch: (unit, counts) each, or the fault."""

    units: Sequence[tuple[int, dict[str, Any]]]
    task: Task
    fault: Fault | None = None


def batches(plan: Plan, todo: Iterable[int], limit: int, partial: Path, token: Path) -> Iterator[Batch]:
    """`todo` in order, cut where a batch has reached `limit` bytes of source. A larger unit goes alone."""
    sizes = {shard.file: shard.size for shard in plan.catalogue.shards}
    program = version("requant")

    def batch(indices: Sequence[int], nbytes: int) -> Batch:
        units = tuple((index, plan.units[index]) for index in indices)
        places = {out: plan.tensors[out] for _, unit in units for out in outs_of(unit)}
        return Batch(
            units=units,
            tensors=places,
            shards={number: plan.shards[number].file for number in {place.shard for place in places.values()}},
            sources={tensor.file: sizes[tensor.file] for tensor in _sources(units)},
            nbytes=nbytes,
            root=str(plan.catalogue.root.absolute()),
            partial=str(partial.absolute()),
            token=str(token.absolute()),
            version=program,
        )

    chosen: list[int] = []
    total = 0
    for index in todo:
        size = plan.units[index].nbytes
        if chosen and total + size > limit:
            yield batch(chosen, total)
            chosen, total = [], 0
        chosen.append(index)
        total += size
    if chosen:
        yield batch(chosen, total)


def _parts(value: object) -> tuple[object, ...]:
    """The fields of a named tuple, the elements of a tuple, or nothing."""
    return cast("tuple[object, ...]", value) if isinstance(value, tuple) else ()


def outs_of(value: object) -> Iterator[int]:
    """Indices of the output tensors named anywhere in a unit: its fields `out` and `out_*`."""
    parts = _parts(value)
    for field, part in zip(getattr(value, "_fields", ()), parts, strict=False):
        if (field == "out" or field.startswith("out_")) and isinstance(part, int):
            yield part
    for part in parts:
        yield from outs_of(part)


def _sources(value: object) -> Iterator[TensorInfo]:
    """Source tensors named anywhere in a unit."""
    if isinstance(value, TensorInfo):
        yield value
    else:
        for part in _parts(value):
            yield from _sources(part)


class _RunsFiles(ShardFiles):
    """Output shards of a run that is still on: a worker that outlived its driver must not write into the next one's."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(Path(batch.root), Path(batch.partial), batch.shards)
        self._token = batch.token
        self._checked: set[int] = set()

    def output(self, shard: int) -> int:
        """The descriptor; the token is looked for after the file is open, and a new run removes it first of all."""
        fd = super().output(shard)
        if shard not in self._checked:
            os.close(os.open(self._token, os.O_RDONLY))
            self._checked.add(shard)
        return fd


def run_batch(batch: Batch, node: str = "") -> Report:
    """Do a batch. Faults come back as values; anything else is a bug, and raised."""
    name = f"{socket.gethostname()}{f'-{node[:6]}' if node else ''}"
    start = time.monotonic()

    def task(nbytes: int) -> Task:
        return Task(name, str(os.getpid()), nbytes, start, time.monotonic())

    files = _RunsFiles(batch)
    try:
        _check_node(batch, name)
        done = [(index, run_unit(batch, unit, files)) for index, unit in batch.units]
        files.sync()
    except RequantError as error:
        return Report([], task(0), Fault(type(error).__name__, error.message, error.where, error.hint))
    except OSError as error:
        where = f"{name}: {error.filename or 'no file named'}"
        return Report([], task(0), Fault("OSError", error.strerror or str(error), where, "", error.errno or errno.EIO))
    finally:
        files.close()
    return Report(done, task(batch.nbytes))


def _check_node(batch: Batch, node: str) -> None:
    """EnvironmentFault unless this node runs the driver's program and sees the driver's files."""
    here = version("requant")
    if here != batch.version:
        raise EnvironmentFault(
            f"has requant {here}, the driver {batch.version}",
            where=f"node {node}",
            hint="install the same version on every node: another one might write other bytes",
        )
    try:
        os.close(os.open(batch.token, os.O_RDONLY))
        sizes = {file: (Path(batch.root) / file).stat().st_size for file in batch.sources}
    except OSError as error:
        raise EnvironmentFault(
            f"does not see {error.filename}",
            where=f"node {node}",
            hint="source and output must lie on a file system that every node mounts at the same path",
        ) from error
    for file, size in batch.sources.items():
        if sizes[file] != size:
            raise SourceError(
                f"has {sizes[file]:,} bytes on node {node}, the plan says {size:,}",
                where=file,
                hint="every node must see the same source; if it changed, let it settle and run again with --force",
            )
