"""Engine `ray` with `execute.stream`: output shards as tasks that need nothing in common but the network.

A task fetches what its shard is made of from the Hub or the object store, converts and compares it, and sends the
shard where it belongs (shard_task.py): an object of the output, a blob for the Hub's commit, or the output's folder if
that is on a file system that all see. The driver keeps what the run is: journal, record of what was sent, what was
judged, and of each shard its header and scales for the contract. So an interrupted run goes on here, on the cluster, or
elsewhere with the driver's folder.

Units at the border of two shards are done for both; the journal has them when both are there.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Final

from requant.convert.engine import PART_SUFFIX, Done, ShardFiles
from requant.convert.engine_ray import RayEngine, run_token
from requant.convert.files import write_all
from requant.convert.placement import header_of
from requant.convert.plan import Plan
from requant.convert.private import public_manifest
from requant.convert.ray_task import outs_of
from requant.convert.remote import Remote
from requant.convert.shard_task import Kit, ShardReport, ShardTask, SharedFolder, Skeleton
from requant.convert.sinks import Sink, read_records, write_records
from requant.convert.stream import WINDOW_BYTES, MakeJudge, link_shards, stream_folder
from requant.convert.windows import cut_windows, largest_block, shards_of, tensors_of, units_by_shard
from requant.manifests.errors import UsageError

__all__ = ["ShardEngine"]

TASK_BYTES: Final = 700 * 2**20
"""Memory of a task beside that of a worker: ranges and parts on the way, and the judge with what it imports."""
_SOURCE_FILES: Final = ("config.json", "hf_quant_config.json", ".index.json")


@dataclass(frozen=True)
class ShardEngine:
    """Makes whole shards by the tasks of `cluster`. open_sink: where they go; None: into the folder that all share."""

    remote: Remote
    cluster: RayEngine
    make_judge: MakeJudge
    open_sink: Callable[[Path], Sink] | None

    @property
    def name(self) -> str:
        """As in the manifest."""
        return "ray"

    @property
    def whole_shards(self) -> bool:
        """Yes: a task knows nothing of what others began."""
        return True

    def drive(self, plan: Plan, files: ShardFiles, todo: Sequence[int], done: Callable[[Done], None]) -> None:
        """All shards that a unit of `todo` writes into, and whatever was made and not judged."""
        folder = stream_folder(plan.output)
        for old in folder.glob("source-*"):
            if old != plan.catalogue.root:
                shutil.rmtree(old)
        record, view = folder / "numerics.jsonl", folder / "view"
        if len(todo) == len(plan.units):
            record.unlink(missing_ok=True)  # of a run that is not gone on with
        link_shards(plan, files.partial, view)
        missing = self.make_judge(plan.catalogue.root, view, record).unjudged()
        again = {i for i, unit in enumerate(plan.units) if any(t.name in missing for t in tensors_of(unit))}
        wanted = _shards_to_make(plan, files.partial, again | set(todo))
        if wanted:
            cluster = replace(self.cluster, memory=self.cluster.memory + TASK_BYTES)
            books = _Books(plan, files.partial, record, set(todo), wanted, done)
            with cluster.connected() as ray, run_token(files.partial) as token:
                sink = self.open_sink(files.partial) if self.open_sink else _shared(files.partial, token)
                tasks = _tasks(plan, wanted, self.remote, sink, files.partial)
                cluster.run_tasks(ray, tasks, books.enter, _kit(plan, token.name, self.make_judge))
        link_shards(plan, files.partial, view)
        self.make_judge(plan.catalogue.root, view, record).save(files.partial)


def _shared(partial: Path, token: Path) -> SharedFolder:
    return SharedFolder(str(partial.absolute()), str(token.absolute()))


def _shards_to_make(plan: Plan, partial: Path, units: set[int]) -> list[int]:
    """Shards that are not there; for a unit all of whose shards are, its first: counts or judgement were lost."""
    wanted: set[int] = set()
    sealed = {number for number, shard in enumerate(plan.shards) if (partial / shard.file).exists()}
    for index in units:
        touched = shards_of(plan, plan.units[index])
        wanted.update(set(touched) - sealed or {min(touched)})
    return sorted(wanted)


def _tasks(
    plan: Plan, wanted: Sequence[int], remote: Remote, sink: Sink | SharedFolder, partial: Path
) -> Iterator[ShardTask]:
    """A task for each shard, in order."""
    members = units_by_shard(plan)
    bound = plan.manifest.execute.max_disk
    for number in wanted:
        shard = plan.shards[number]
        if bound is not None and bound <= shard.size:
            raise UsageError(
                f"{shard.file} alone is {shard.size:,} bytes, max_disk is {bound:,}",
                where="execute.max_disk",
                hint="allow more disk, or smaller shards (target.shard_size)",
            )
        budget = max(WINDOW_BYTES, largest_block(plan, members[number])) if bound is None else bound - shard.size
        windows = tuple(cut_windows(plan, members[number], budget))
        units = {index: plan.units[index] for index in members[number]}
        tensors = {out: plan.tensors[out] for unit in units.values() for out in outs_of(unit)}
        touched = sorted({tensor.shard for tensor in tensors.values()})
        yield ShardTask(
            number=number,
            windows=windows,
            units=units,
            tensors=tensors,
            shards={n: (plan.shards[n].file, plan.shards[n].size) for n in touched},
            remote=remote.only(sorted({tensor.file for window in windows for tensor in window.tensors})),
            sink=sink,
            partial=str(partial),
        )


def _kit(plan: Plan, run: str, make_judge: MakeJudge) -> Kit:
    """The headers of both checkpoints, and what a judge asks of a folder beside them."""
    root = plan.catalogue.root
    shards = {shard.file for shard in plan.catalogue.shards}
    source: list[Skeleton] = []
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        name, head = path.relative_to(root).as_posix(), b""
        if name in shards:
            with path.open("rb") as stream:
                start = stream.read(8)
                head = start + stream.read(int.from_bytes(start, "little"))
        elif name.endswith(_SOURCE_FILES):
            head = path.read_bytes()
        source.append(Skeleton(name, path.stat().st_size, head))
    view = [Skeleton(shard.file, shard.size, header_of(shard, plan.tensors)) for shard in plan.shards]
    manifest = public_manifest(plan.manifest).encode()
    view.append(Skeleton("requant.manifest.yaml", len(manifest), manifest))
    return Kit(f"{run}-{uuid.uuid4().hex[:8]}", tuple(source), tuple(view), make_judge, version("requant"))


class _Books:
    """What the driver enters: judgements, records, hollow shards, units that are whole."""

    def __init__(
        self,
        plan: Plan,
        partial: Path,
        record: Path,
        todo: set[int],
        wanted: Sequence[int],
        done: Callable[[Done], None],
    ) -> None:
        self._plan = plan
        self._partial = partial
        self._record = record
        self._done = done
        making = set(wanted)
        self._waits = {index: making & set(shards_of(plan, plan.units[index])) for index in todo}

    def enter(self, task: ShardTask, report: ShardReport) -> None:
        """One shard is where it belongs."""
        number = task.number
        with self._record.open("a", encoding="utf-8") as stream:
            stream.write(report.judged)
            stream.flush()
            os.fsync(stream.fileno())
        if report.taken is not None and not isinstance(task.sink, SharedFolder):
            self._hollow(number, report.kept)
            path = self._partial / task.sink.record
            write_records(path, {**read_records(path), self._plan.shards[number].file: report.taken})
        whole: list[tuple[int, dict[str, object]]] = []
        for index, counts in report.units:
            waits = self._waits.get(index)
            if waits and number in waits:
                waits.discard(number)
                if not waits:
                    whole.append((index, counts))
        nbytes = sum(self._plan.units[index].nbytes for index, _ in whole)
        self._done(Done(whole, report.task._replace(nbytes=nbytes), synced=True, shards=(number,)))

    def _hollow(self, number: int, kept: Sequence[tuple[int, bytes]]) -> None:
        """The shard's file here, with holes for what is elsewhere. One that is sealed already has it."""
        shard = self._plan.shards[number]
        part = self._partial / (shard.file + PART_SUFFIX)
        if not part.exists():
            return
        fd = os.open(part, os.O_WRONLY)
        try:
            for begin, data in kept:
                write_all(fd, data, begin)
            os.fsync(fd)
        finally:
            os.close(fd)
