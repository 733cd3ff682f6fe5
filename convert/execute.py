"""Run a plan: preallocated shards, an engine that does the units, a journal, final names only for finished things.

    <output>.partial/               everything until the end
        model-00001-of-...          a finished shard: synced, then renamed
        model-00002-of-....part     preallocated, being written at planned offsets
        .requant/journal.jsonl      finished units
        .requant/lock.json          what the run is bound to
        .requant/owner.json         who is writing (held by flock)
    <output>/                       one rename, when all is there

Units are started in the order of the source, so both disks are read and written forward. Any engine (engine.py), any
number of workers and any interruption give the same bytes.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from requant.convert.engine import PART_SUFFIX, Done, Engine, LocalEngine, ShardFiles, Task
from requant.convert.files import preallocate, write_all
from requant.convert.journal import Journal
from requant.convert.placement import header_of
from requant.convert.plan import GroupUnit, Plan, refuse_overlap
from requant.convert.runrecord import run_record
from requant.convert.windows import shards_of
from requant.manifests.errors import EnvironmentFault, IncompleteError, LockError, RequantError, SourceError

__all__ = [
    "PARTIAL_SUFFIX",
    "RECORDS",
    "Progress",
    "RunResult",
    "default_workers",
    "execute",
    "partial_of",
    "refuse_finished",
]

PARTIAL_SUFFIX: Final = ".partial"
RECORDS: Final = ".requant"
MAX_AUTO_WORKERS: Final = 16
"""More threads than this only queue at the disk."""

Progress = Callable[[int], None]
"""Called with the bytes of source that were just dealt with, from any thread, one call at a time."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run did. counts: journal records of all units by index. resumed: units that an earlier run had done.

    record: how fast it was, and where (runrecord.py).
    """

    output: Path
    counts: dict[int, dict[str, Any]]
    resumed: int
    record: dict[str, Any] = field(default_factory=dict[str, Any])


def default_workers() -> int:
    """One thread per usable processor, up to a bound."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(usable, MAX_AUTO_WORKERS))


def partial_of(output: Path) -> Path:
    """Where an unfinished output lies."""
    return output.with_name(output.name + PARTIAL_SUFFIX)


def execute(
    plan: Plan,
    finish: Callable[[Path, RunResult], None],
    *,
    workers: int | None = None,
    engine: Engine | None = None,
    force: bool = False,
    progress: Progress = lambda _: None,
    lock: dict[str, Any] | None = None,
    reserve: bool = True,
    begin: Callable[[Path], None] = lambda _: None,
    order: str = "",
) -> RunResult:
    """Write the output by `engine`, or threads of this process. finish(folder, result) adds metadata before the rename.

    reserve: claim the disk for the whole output before the first byte (not where shards are freed on the way).
    begin(folder): called when the folder is ours, before anything in it counts. order: names the order of the plan's
    units, if it is not the plan's own: a journal holds their numbers.
    LockError: a finished output is in the way, another run holds it, or the plan changed. EnvironmentFault: the folder
    or the disk. IncompleteError: stopped half way, resumable. SourceError: the source's bytes are bad.
    """
    engine = engine or LocalEngine(workers or default_workers())
    output, partial = plan.output, partial_of(plan.output)
    for folder in (output, partial):
        refuse_overlap(plan.catalogue.root, folder)
    refuse_finished(output, force)
    _make_folder(partial)
    try:
        with _owned(partial):
            refuse_finished(output, force)  # another run may have finished it just now
            for token in (partial / RECORDS).glob("run-*"):  # workers of a driver that was killed stop at this
                token.unlink()
            if force:
                _discard(partial)
            journal_path = partial / RECORDS / "journal.jsonl"
            with Journal(journal_path, plan.sha256 + order) as journal:
                if journal.fresh:
                    _discard(partial, keep_records=True)  # shards of a plan that nobody remembers
                begin(partial)
                if lock is not None:
                    _write_text(partial / RECORDS / "lock.json", json.dumps(lock, indent=1))
                run = _Run(plan, partial, journal, progress, reserve=reserve)
                run.prepare(whole_shards=engine.whole_shards)
                resumed = len(journal.done)
                started = time.monotonic()
                run.work(engine)
                record = run_record(engine.name, run.tasks, time.monotonic() - started)
                result = RunResult(output, dict(journal.done), resumed, record)
            _refuse_changed_source(plan, journal_path)
            for half in partial.glob(f"*{PART_SUFFIX}.*"):  # copies of workers that were killed (shard_task.py)
                half.unlink(missing_ok=True)
            finish(partial, result)
            _publish(partial, output, force)
    except OSError as error:
        raise _disk_fault(error, partial, plan.catalogue.root) from error
    return result


def _refuse_changed_source(plan: Plan, journal_path: Path) -> None:
    """What was written mixes old and new bytes if a source file changed meanwhile; then nothing of it counts."""
    for shard in plan.catalogue.shards:
        try:
            stat = (plan.catalogue.root / shard.file).stat()
            same = (stat.st_size, stat.st_mtime_ns) == (shard.size, shard.mtime_ns)
        except OSError:
            same = False
        if not same:
            journal_path.unlink(missing_ok=True)
            raise SourceError(
                "changed while it was converted", where=shard.file, hint="let it settle, then run again with --force"
            )


def refuse_finished(output: Path, force: bool) -> None:
    """LockError if a finished output, or something of others, has the name."""
    if not output.exists():
        return
    if not output.is_dir():
        raise LockError("is in the way: not a folder", where=str(output), hint="name another target.output")
    if not any(output.iterdir()):
        return
    if not (output / "requant.lock.json").exists():
        raise LockError(
            "is not empty and was not written by requant",
            where=str(output),
            hint="name another target.output: files of others are never overwritten, not even with --force",
        )
    if not force:
        raise LockError(
            "is finished already",
            where=str(output),
            hint="use `requant validate` on it, name another target.output, or overwrite it with --force",
        )


def _make_folder(partial: Path) -> None:
    if partial.is_dir() and any(partial.iterdir()) and not (partial / RECORDS).is_dir():
        raise LockError(
            "is not empty and was not begun by requant",
            where=str(partial),
            hint="unfinished outputs go there: move it away, or name another target.output",
        )
    try:
        partial.mkdir(parents=True, exist_ok=True)
        probe = partial / RECORDS
        probe.mkdir(exist_ok=True)
        if not os.access(partial, os.W_OK):
            raise PermissionError(errno.EACCES, "not writable")
    except OSError as error:
        raise EnvironmentFault(
            f"cannot be written: {error.strerror}",
            where=str(partial),
            hint="choose a target.output on a disk that you may write to",
        ) from error


@contextmanager
def _owned(partial: Path) -> Generator[None]:
    """Hold the output folder; another live run is named by pid and host."""
    path = partial / RECORDS / "owner.json"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raw = os.read(fd, 4096)
            owner: dict[str, Any] = json.loads(raw) if raw.strip() else {}
            raise LockError(
                f"another run is writing it: process {owner.get('pid', '?')} on {owner.get('host', '?')}",
                where=str(partial),
                hint="wait for it, stop it, or name another target.output",
            ) from error
        if not path.exists() or os.fstat(fd).st_ino != path.stat().st_ino:
            raise LockError(
                "another run finished it this moment", where=str(partial), hint="look at the output, then run again"
            )
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        yield
    finally:
        os.close(fd)


def _discard(partial: Path, keep_records: bool = False) -> None:
    """Empty an unfinished output, the owner's file aside."""
    for path in partial.iterdir():
        if path.name != RECORDS:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in (partial / RECORDS).iterdir():
        if path.name != "owner.json" and not keep_records:
            path.unlink()


def _publish(partial: Path, output: Path, force: bool) -> None:
    """Give the finished folder its name. What --force replaces is removed only afterwards."""
    _sync_files(partial)
    replaced: Path | None = None
    if output.exists():
        if any(output.iterdir()):
            if not force:
                raise LockError(
                    "appeared while the conversion ran", where=str(output), hint="move it away, then run again"
                )
            replaced = output.with_name(f"{output.name}.replaced-{os.getpid()}")
            output.rename(replaced)
        else:
            output.rmdir()
    shutil.rmtree(partial / RECORDS)
    partial.rename(output)
    _sync_folder(output.parent)
    if replaced is not None:
        shutil.rmtree(replaced)


def _sync_files(partial: Path) -> None:
    """Metadata and sidecars reach the disk before the folder gets its name (shards were synced one by one)."""
    for path in partial.rglob("*"):
        if path.is_dir() or (path.suffix != ".safetensors" and RECORDS not in path.parts):
            _sync_folder(path)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_text(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text)
    temporary.replace(path)


def _disk_fault(error: OSError, partial: Path, source: Path) -> RequantError:
    """What a failed call means to the user."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return IncompleteError(
            f"the disk is full ({error.strerror})",
            where=str(partial),
            hint="free some space and run the same command again: it goes on where it stopped",
        )
    if error.filename and str(error.filename).startswith(str(source)):
        return SourceError(f"{error.strerror}", where=str(error.filename), hint="the source changed during the run")
    return IncompleteError(
        f"{error.strerror} ({error.filename or 'no file named'})",
        where=str(partial),
        hint="mend the disk and run the same command again: it goes on where it stopped",
    )


class _Run:
    """The state of one execution."""

    def __init__(self, plan: Plan, partial: Path, journal: Journal, progress: Progress, *, reserve: bool) -> None:
        self._reserve = reserve
        self.plan = plan
        self.partial = partial
        self.journal = journal
        self._progress = progress
        self.tasks: list[Task] = []
        self._files = ShardFiles(plan.catalogue.root, partial, dict(enumerate(s.file for s in plan.shards)))
        self._lock = threading.Lock()
        self._touched = [shards_of(plan, unit) for unit in plan.units]
        self._left = [0] * len(plan.shards)
        self._sealed: set[int] = set()

    def prepare(self, *, whole_shards: bool) -> None:
        """Preallocate what is missing; count what each shard still waits for. whole_shards: one that was begun and not
        ended is made from its beginning, by an engine that does not see what is there."""
        for number, shard in enumerate(self.plan.shards):
            final = self.partial / shard.file
            if final.exists() and final.stat().st_size == shard.size:
                self._sealed.add(number)
        for index, record in self.journal.unsure.items():
            if index not in self.journal.done and self._sealed.issuperset(self._touched[index]):
                self.journal.done[index] = record
        for index, shards in enumerate(self._touched):
            if index not in self.journal.done:
                for shard in shards:
                    self._left[shard] += 1
        for number, left in enumerate(self._left) if whole_shards else ():
            if left and number not in self._sealed:
                self._forget(number)
        needed = self._missing_bytes()
        free = shutil.disk_usage(self.partial).free
        if self._reserve and needed > free:
            raise EnvironmentFault(
                f"needs {needed:,} bytes more, the disk has {free:,} free",
                where=str(self.partial),
                hint="free some space or choose another target.output; what is done is kept, run again to go on",
            )
        for number, shard in enumerate(self.plan.shards):
            final, part = self.partial / shard.file, self.partial / (shard.file + PART_SUFFIX)
            if number in self._sealed:
                self._left[number] = 0
                continue
            final.unlink(missing_ok=True)  # someone cut it since it was sealed
            if not part.exists() or part.stat().st_size != shard.size:
                self._forget(number)
                fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
                try:
                    preallocate(fd, shard.size) if self._reserve else os.ftruncate(fd, shard.size)
                finally:
                    os.close(fd)
            write_all(self._files.output(number), header_of(shard, self.plan.tensors), 0)

    def _missing_bytes(self) -> int:
        catalogue = self.plan.catalogue
        missing = sum((catalogue.root / file).stat().st_size for file in catalogue.sidecars)
        for shard in self.plan.shards:
            part = self.partial / (shard.file + PART_SUFFIX)
            if not (self.partial / shard.file).exists():
                allocated = part.stat().st_blocks * 512 if part.exists() else 0
                missing += max(shard.size - allocated, 0)
        return missing

    def _forget(self, shard: int) -> None:
        """A shard that must be begun anew: units that wrote to it are not done after all, and the journal says so."""
        for index, shards in enumerate(self._touched):
            if shard in shards and index in self.journal.done:
                self.journal.forget(index)
                for other in shards:
                    self._left[other] += 1

    def work(self, engine: Engine) -> None:
        """All units that are not done, in order; then every shard has its final name."""
        todo = [i for i in range(len(self.plan.units)) if self._is_open(i)]
        self._progress(sum(self.plan.units[i].nbytes for i in range(len(self.plan.units)) if not self._is_open(i)))
        try:
            engine.drive(self.plan, self._files, todo, self._done)
            for number, left in enumerate(self._left):
                if left == 0:
                    self._seal(number)
        finally:
            self._files.close()

    def _is_open(self, unit: int) -> bool:
        """Not done. A copy into sealed shards needs no record; a group does: its counts are part of the result."""
        if unit in self.journal.done:
            return False
        return isinstance(self.plan.units[unit], GroupUnit) or any(self._left[n] for n in self._touched[unit])

    def _done(self, done: Done) -> None:
        """Enter what an engine has written; a shard that waits for nothing more is sealed."""
        for index, counts in done.units:
            self.journal.unit(index, counts, synced=done.synced)
        sealed: list[int] = []
        with self._lock:
            self.tasks.append(done.task)
            self._progress(done.task.nbytes)
            for index, _ in done.units:
                for shard in self._touched[index]:
                    self._left[shard] -= 1
                    if self._left[shard] == 0:
                        sealed.append(shard)
            for shard in done.shards:
                self._left[shard] = 0
                sealed.append(shard)
        for shard in sealed:
            self._seal(shard)

    def _seal(self, shard: int) -> None:
        """Sync a complete shard and give it its final name."""
        file = self.plan.shards[shard].file
        part = self.partial / (file + PART_SUFFIX)
        with self._lock:
            if shard in self._sealed or not part.exists():
                return
            fd = self._files.output(shard)
            self._sealed.add(shard)
        self.journal.sync()
        os.fsync(fd)
        self._files.close_output(shard)
        part.rename(self.partial / file)
