"""Engines: who does the units of a run. Threads here (`LocalEngine`), or the tasks of a cluster (engine_ray.py).

A run (execute.py) prepares the shards, keeps the journal, seals and publishes; an engine is handed the units that are
left and says of each when its bytes are written. Neither order nor place changes a byte, so what one engine began
another may finish.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from requant.convert.compute import run_unit
from requant.convert.files import Files
from requant.convert.plan import Plan, Unit

__all__ = ["PART_SUFFIX", "Done", "Engine", "LocalEngine", "ShardFiles", "Task", "batch_limit", "worker_bytes"]

PART_SUFFIX: Final = ".part"
TILES_BYTES: Final = 24 * 2**20
"""Tiles in flight of one worker: codes, scales, and their results."""


def worker_bytes(plan: Plan) -> int:
    """Memory that one worker needs beside the process it lives in: tiles, and whole experts where they are turned."""
    turned = (
        m.form.rows * m.form.cols // m.form.transposed * (1 if u.kind == "repack" else 8)
        for u in plan.groups
        for m in u.members
        if m.form.transposed
    )
    return TILES_BYTES + max(turned, default=0)


BATCH_BYTES: Final = 512 * 2**20
"""Source bytes of a cluster's task at most: a second or so of work, against milliseconds for the task itself."""
BATCHES_PER_PLACE: Final = 8
"""A smaller checkpoint is cut finer, so that every place gets several batches and the last one ends early."""
LEAST_BATCH: Final = 8 * 2**20


def batch_limit(total: int, places: int) -> int:
    """Source bytes of one task, for a run of `total` bytes on `places` workers."""
    return max(min(BATCH_BYTES, total // (places * BATCHES_PER_PLACE)), LEAST_BATCH)


class Task(NamedTuple):
    """Some units done by one worker in one go. start, end: seconds, of any one clock; nbytes: of source."""

    node: str
    worker: str
    nbytes: int
    start: float
    end: float


class Done(NamedTuple):
    """Units whose bytes are written: (index, counts) each. synced: they are on the disk, whatever becomes of a node.

    shards: numbers of shards that are whole, though a unit that also writes to another one may not be done.
    """

    units: Sequence[tuple[int, dict[str, Any]]]
    task: Task
    synced: bool = False
    shards: Sequence[int] = ()


class ShardFiles:
    """The source's files and the output's shards, opened once each and shared by all threads (compute.Opened).

    shards: file names by number. A shard has its final name once it is sealed, before that it ends in `.part`. A unit
    that spans a sealed and an open shard and has to be done again writes the sealed one's bytes once more: the same.
    """

    def __init__(self, root: Path, partial: Path, shards: Mapping[int, str]) -> None:
        self.root = root
        self.partial = partial
        self._names = shards
        self._sources = Files(root, os.O_RDONLY)
        self._outputs = Files(partial, os.O_RDWR)
        self._open: dict[int, tuple[int, str]] = {}

    def source(self, file: str) -> int:
        """Descriptor of a source shard, for reading."""
        return self._sources(file)

    def output(self, shard: int) -> int:
        """Descriptor of an output shard, for writing."""
        known = self._open.get(shard)
        if known is None:
            file = self._names[shard]
            try:
                known = self._outputs(file), file
            except FileNotFoundError:
                file += PART_SUFFIX
                known = self._outputs(file), file
            self._open[shard] = known
        return known[0]

    def close_output(self, shard: int) -> None:
        """Close one shard."""
        _, file = self._open.pop(shard, (0, ""))
        if file:
            self._outputs.close(file)

    def sync(self) -> None:
        """What was written through these descriptors reaches the disk."""
        for fd, _ in self._open.values():
            os.fsync(fd)

    def close(self) -> None:
        """Close all."""
        self._open.clear()
        self._sources.close()
        self._outputs.close()


class Engine(Protocol):
    """Does units."""

    @property
    def name(self) -> str:
        """As the manifest's execute.engine says it."""
        ...

    @property
    def whole_shards(self) -> bool:
        """Whether it makes shards from their beginning, and cannot go on with half of one."""
        ...

    def drive(self, plan: Plan, files: ShardFiles, todo: Sequence[int], done: Callable[[Done], None]) -> None:
        """Do the units of `todo`, starting them in that order; done() is called, from any thread, for what is written.

        Returns when all are done. The first error stops what has not begun, waits for what has, and is raised.
        """
        ...


@dataclass(frozen=True)
class LocalEngine:
    """A pool of threads: reads, writes, copies and kernels release the GIL. compute: what does a unit."""

    workers: int
    compute: Callable[[Plan, Unit, ShardFiles], dict[str, Any]] = run_unit

    @property
    def name(self) -> str:
        """As in the manifest."""
        return "local"

    @property
    def whole_shards(self) -> bool:
        """No: it writes where it is told."""
        return False

    def drive(self, plan: Plan, files: ShardFiles, todo: Sequence[int], done: Callable[[Done], None]) -> None:
        """All of `todo`; the pool is fed a little ahead, so that an error or Ctrl-C stops within a unit."""
        stop = threading.Event()

        def one(index: int) -> None:
            if stop.is_set():
                return
            unit = plan.units[index]
            start = time.monotonic()
            counts = self.compute(plan, unit, files)
            task = Task("local", threading.current_thread().name, unit.nbytes, start, time.monotonic())
            done(Done([(index, counts)], task))

        pool = ThreadPoolExecutor(max_workers=self.workers, thread_name_prefix="requant")
        pending: set[Future[None]] = set()
        queue = iter(todo)
        try:
            while True:
                while len(pending) < 2 * self.workers + 2 and (index := next(queue, None)) is not None:
                    pending.add(pool.submit(one, index))
                if not pending:
                    return
                finished, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in finished:
                    future.result()
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
