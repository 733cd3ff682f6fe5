"""Engine `ray`: the units of a run as tasks of a Ray cluster, or of a Ray that is started here for the run.

The driver keeps what a run is (journal, seals, publication). A task gets a batch of half a gigabyte at most, declares a
CPU and its memory, and writes to the shared file system. At most twice as many batches are
out as there are places for, whatever joins or leaves. Ray repeats the tasks of a lost node elsewhere; a unit done twice
writes the same bytes twice.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

from requant.convert.engine import Done, ShardFiles, batch_limit
from requant.convert.plan import Plan
from requant.convert.ray_task import Batch, Fault, Report, batches
from requant.manifests.errors import EnvironmentFault, IncompleteError

__all__ = ["PROCESS_BYTES", "RayEngine", "require_ray", "run_token"]

RETRIES: Final = 5
"""Times that a batch may be lost with its node, or fail on one, before the run stops (resumable)."""
PATIENCE_S: Final = 600.0
"""Seconds without a node that could run anything before the run stops (resumable): autoscalers need minutes."""
FAREWELL_S: Final = 60.0
"""Seconds that tasks under way are given to end after an error."""
POLL_S: Final = 2.0
STORE_BYTES: Final = 80 * 2**20
"""Object store of a Ray started here, the smallest that Ray takes: batches and reports are small."""

PROCESS_BYTES: Final = 300 * 2**20
"""A worker process before its first tile: Python, Ray, numpy, numba."""

Ray: TypeAlias = Any
"""The module: Ray ships no types that a strict checker could use."""


class Returned(Protocol):
    """What a task brings back."""

    @property
    def fault(self) -> Fault | None: ...


class Item(Protocol):
    """What a task is made from. key: of its own, to count failures by. partial: the unfinished output."""

    @property
    def key(self) -> int: ...

    @property
    def partial(self) -> str: ...

    def run(self, node: str, *shared: Any) -> Returned: ...


T = TypeVar("T", bound=Item)
R = TypeVar("R", bound=Returned)


def require_ray() -> Ray:
    """The module `ray`; EnvironmentFault where the extra is not installed."""
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise EnvironmentFault(
            "execute.engine: ray needs Ray, which is not installed",
            hint="pip install 'requant[ray]', on every node of the cluster; or set execute.engine: local",
        ) from error


@dataclass(frozen=True)
class RayEngine:
    """address: None (a Ray of our own), `auto`, `ray://host:port` or `host:port`. workers: tasks at once, or None for
    as many as the cluster has places. memory: bytes that a task declares."""

    address: str | None
    workers: int | None
    memory: int

    @property
    def name(self) -> str:
        """As in the manifest."""
        return "ray"

    @property
    def whole_shards(self) -> bool:
        """No: its tasks write into the folder that all share."""
        return False

    def drive(self, plan: Plan, files: ShardFiles, todo: Sequence[int], done: Callable[[Done], None]) -> None:
        """All of `todo`, as engine.Engine says. EnvironmentFault: no cluster. IncompleteError: it was lost for good."""
        if not todo:
            return

        def enter(_: Batch, report: Report) -> None:
            done(Done(report.units, report.task, synced=True))

        with self.connected() as ray, run_token(files.partial) as token:
            cluster = _Cluster(ray, self)
            limit = batch_limit(sum(plan.units[index].nbytes for index in todo), max(cluster.checked_places(), 1))
            _Tasks(ray, self, cluster, enter).run(batches(plan, todo, limit, files.partial, token))

    @contextmanager
    def connected(self) -> Generator[Ray]:
        """The module, while there is a connection."""
        ray = require_ray()
        with _connected(ray, self.address, self.workers):
            yield ray

    def run_tasks(self, ray: Ray, items: Iterator[T], enter: Callable[[T, R], None], shared: object) -> None:
        """Each of `items` by its own method `run`, with `shared`, on some node; enter() what came back, here."""
        cluster = _Cluster(ray, self)
        cluster.checked_places()
        _Tasks(ray, self, cluster, enter, (ray.put(shared),)).run(items)


class _Cluster:
    """What the cluster can run right now."""

    def __init__(self, ray: Ray, engine: RayEngine) -> None:
        self._ray = ray
        self._engine = engine
        self._asked = -POLL_S
        self._known = 0
        self.seen = time.monotonic()

    def places(self) -> int:
        """Tasks that its nodes can hold at once. seen: when there was last a place."""
        now = time.monotonic()
        if now - self._asked >= POLL_S:
            self._asked = now
            self._known = sum(self._holds(node["Resources"]) for node in self._ray.nodes() if node["Alive"])
        if self._known:
            self.seen = now
        return self._known

    def checked_places(self) -> int:
        """The same; EnvironmentFault if there can be none."""
        engine, places = self._engine, self.places()
        if not places and self.has_processors():  # a cluster without any may still be starting its nodes
            raise EnvironmentFault(
                f"no node of the Ray cluster offers a CPU and {engine.memory / 2**20:.0f} MiB of memory",
                where=engine.address or "local Ray",
                hint="add a node, or give the nodes more --num-cpus or --memory",
            )
        return places

    def has_processors(self) -> bool:
        """Whether any node runs tasks at all; a head of a cluster that grows on demand does not."""
        return any(node["Alive"] and node["Resources"].get("CPU", 0.0) >= 1 for node in self._ray.nodes())

    def _holds(self, resources: Mapping[str, float]) -> int:
        return int(min(resources.get("CPU", 0.0), resources.get("memory", 0.0) / max(self._engine.memory, 1)))


class _Tasks(Generic[T, R]):
    """Batches under way. shared: references to what every task gets beside its own."""

    def __init__(
        self,
        ray: Ray,
        engine: RayEngine,
        cluster: _Cluster,
        enter: Callable[[T, R], None],
        shared: tuple[object, ...] = (),
    ) -> None:
        self._ray = ray
        self._cluster = cluster
        self._enter = enter
        self._shared = shared
        self._workers = engine.workers
        self._pending: dict[Any, T] = {}
        self._failures: Counter[int] = Counter()
        self._remote = ray.remote(_on_a_node).options(
            name="requant",
            num_cpus=1,
            memory=engine.memory,
            max_retries=RETRIES,
            scheduling_strategy="SPREAD",
        )

    def run(self, queue: Iterator[T]) -> None:
        """Until the queue is empty and everything has come back."""
        try:
            while True:
                while len(self._pending) < self._room() and (batch := next(queue, None)) is not None:
                    self._submit(batch)
                if not self._pending:
                    return
                ready, _ = self._ray.wait(list(self._pending), num_returns=1, timeout=POLL_S)
                for reference in ready:
                    self._finish(self._pending.pop(reference), reference)
                if not ready:
                    self._refuse_to_wait_for_ever()
        finally:
            self._part()

    def _room(self) -> int:
        """Batches that may be out: one for each place, and as many waiting; or as many as the user said."""
        return self._workers or max(2 * self._cluster.places(), 1)

    def _submit(self, batch: T) -> None:
        self._pending[self._remote.remote(batch, *self._shared)] = batch

    def _finish(self, batch: T, reference: Any) -> None:
        """Enter what came back, or try again."""
        try:
            report: R = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError:
            raise  # a bug of ours, with the worker's traceback
        except self._ray.exceptions.RayError as error:  # Ray has tried RETRIES times by itself
            raise IncompleteError(
                f"the cluster lost a task for good ({type(error).__name__})",
                where=batch.partial,
                hint="look at the nodes (memory?), then run the same command again: it goes on where it stopped",
            ) from error
        if report.fault is None:
            self._enter(batch, report)
            return
        self._failures[batch.key] += 1
        if not report.fault.passing or self._failures[batch.key] > RETRIES:
            raise report.fault.exception()
        self._submit(batch)

    def _refuse_to_wait_for_ever(self) -> None:
        if not self._cluster.places() and time.monotonic() - self._cluster.seen > PATIENCE_S:
            raise IncompleteError(
                f"no node of the cluster could run a task for {PATIENCE_S:.0f} s",
                hint="start nodes, then run the same command again, on a cluster or here: it goes on where it stopped",
            )

    def _part(self) -> None:
        """After an error: tasks that have not begun are withdrawn, those that have are waited for."""
        left = list(self._pending)
        with suppress(Exception):  # the cluster may be what failed
            for reference in left:
                self._ray.cancel(reference, force=False)
            if left:
                self._ray.wait(left, num_returns=len(left), timeout=FAREWELL_S)


def _on_a_node(item: Item, *shared: object) -> Returned:
    """The task."""
    context: Any = require_ray().get_runtime_context()
    return item.run(str(context.get_node_id()), *shared)


@contextmanager
def run_token(partial: Path) -> Generator[Path]:
    """A file that says that this run is on (execute.py removes those of runs that were killed)."""
    path = partial / ".requant" / f"run-{uuid.uuid4().hex}"
    path.touch()
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def _connected(ray: Ray, address: str | None, workers: int | None) -> Generator[None]:
    """A connection to the cluster, or a Ray of our own; a connection that is there already is used and left."""
    if ray.is_initialized():
        yield
        return
    quiet: dict[str, Any] = {"logging_level": "error", "log_to_driver": False}
    try:
        if address is None:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            ray.init(
                address="local", num_cpus=workers, include_dashboard=False, object_store_memory=STORE_BYTES, **quiet
            )
        else:
            ray.init(address=address, **quiet)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        lines = str(error).split("\n")
        text = " ".join(dict.fromkeys(line.strip() for line in (lines[0], lines[-1] or lines[-2:][0])))
        raise EnvironmentFault(
            f"cannot reach or start Ray: {text.strip() or type(error).__name__}",
            where=address or "local Ray",
            hint="start one with `ray start --head`, correct execute.ray_address, or leave it out to start one here",
        ) from error
    try:
        with redirect_stdout(sys.stderr):  # where a ray:// driver prints what the cluster has to say
            yield
    finally:
        ray.shutdown()
