"""What a cluster's worker does where nothing is shared: one output shard, from fetching to uploading, by itself.

    TMPDIR/requant-shard-RUN@HOST-SPACE-PID/     of this process alone, wherever TMPDIR is seen from
        source/     the source with holes: true headers and configs (once for a process)
        view/       the output likewise
        task/window the source tensors of one window, in their places
        task/out    the shard, and holes for those that a unit also writes into

Each window is converted and compared with its source while both are there, then freed. What the contract stage needs
of the shard (header, scales, small tensors) goes to the driver with the counts; the shard goes where the sink says. A
task that is done twice, because its node was lost, sends the same bytes twice. Nothing here imports Ray.
"""

from __future__ import annotations

import atexit
import errno
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from requant.convert.compute import run_unit
from requant.convert.engine import ShardFiles, Task
from requant.convert.files import copy_range
from requant.convert.placement import OutTensor
from requant.convert.plan import Unit
from requant.convert.ray_task import Fault
from requant.convert.remote import Remote
from requant.convert.sinks import Sink, Uploaded
from requant.convert.stream import MakeJudge, fetch_window
from requant.convert.uploads import kept_spans
from requant.convert.windows import Window
from requant.manifests.errors import EnvironmentFault, RequantError, SourceError

__all__ = ["Kit", "ShardReport", "ShardTask", "SharedFolder", "Skeleton"]

PREFIX: Final = "requant-shard-"


class Skeleton(NamedTuple):
    """A file with holes. head: its first bytes; the rest up to size is a hole."""

    name: str
    size: int
    head: bytes


@dataclass(frozen=True)
class Kit:
    """What all tasks of a run need. source, view: of both checkpoints. run: a name that no other run has."""

    run: str
    source: tuple[Skeleton, ...]
    view: tuple[Skeleton, ...]
    make_judge: MakeJudge
    version: str


class Taker(Protocol):
    """Takes a shard; a Sink, or the folder that all share."""

    def put(self, path: Path, name: str) -> Uploaded: ...


@dataclass(frozen=True, slots=True)
class SharedFolder:
    """The unfinished output's folder, where all nodes see it: the shard is put beside the driver's empty one."""

    partial: str
    token: str

    def put(self, path: Path, name: str) -> Uploaded:
        """Copy it, sync it, put it in place. OSError 2 if the run is over or the folder is not shared after all."""
        os.close(os.open(self.token, os.O_RDONLY))
        final = Path(self.partial) / f"{name}.part"
        temporary = final.with_name(f"{final.name}.{_process()}")
        size = path.stat().st_size
        source, target = os.open(path, os.O_RDONLY), os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            copy_range(source, target, size, begin_in=0, begin_out=0, file=name)
            os.fsync(target)
            os.close(os.open(self.token, os.O_RDONLY))
            temporary.replace(final)
        finally:
            os.close(source)
            os.close(target)
            temporary.unlink(missing_ok=True)
        return Uploaded(size, "")


class ShardTask(NamedTuple):
    """A shard with all that makes it. tensors: places of outputs, by index. shards: (file, size) of those written into.

    remote: the source, with the files that are read.
    """

    number: int
    windows: tuple[Window, ...]
    units: Mapping[int, Unit]
    tensors: Mapping[int, OutTensor]
    shards: Mapping[int, tuple[str, int]]
    remote: Remote
    sink: Sink | SharedFolder
    partial: str

    @property
    def key(self) -> int:
        """The shard's number."""
        return self.number

    @property
    def disk(self) -> int:
        """Bytes that it needs on the node's disk."""
        largest = max((window.nbytes for window in self.windows), default=0)
        return largest + self.shards[self.number][1]

    def run(self, node: str, *shared: Any) -> ShardReport:
        """Do it, with the run's kit. Faults come back as values; anything else is a bug, and raised."""
        kit: Kit = shared[0]
        name = f"{socket.gethostname()}{f'-{node[:6]}' if node else ''}"
        start = time.monotonic()

        def task(nbytes: int) -> Task:
            return Task(name, str(os.getpid()), nbytes, start, time.monotonic())

        place = _home(kit.run) / "task"
        try:
            _check(kit, self, name)
            made = _make(self, kit, place)
        except RequantError as error:
            _judges.clear()  # it takes for judged what nobody will be told of
            again = not isinstance(error, SourceError)
            fault = Fault(type(error).__name__, error.message, error.where, error.hint, again=again)
            return ShardReport((), task(0), fault)
        except OSError as error:
            _judges.clear()
            where = f"{name}: {error.filename or 'no file named'}"
            fault = Fault("OSError", error.strerror or str(error), where, "", error.errno or errno.EIO)
            return ShardReport((), task(0), fault)
        finally:
            shutil.rmtree(place, ignore_errors=True)
        return made._replace(task=task(made.fetched))


class ShardReport(NamedTuple):
    """What became of a shard. units: (unit, counts) each. kept: (offset, bytes) of what the contract needs of it.

    judged: lines of the comparison's record. fetched: bytes of source.
    """

    units: Sequence[tuple[int, dict[str, Any]]]
    task: Task
    fault: Fault | None = None
    taken: Uploaded | None = None
    kept: Sequence[tuple[int, bytes]] = ()
    judged: str = ""
    fetched: int = 0


_NOTHING: Final = Task("", "", 0, 0.0, 0.0)
_judges: dict[str, Any] = {}
"""The judge of the run that this process works for: it has read the headers of two whole checkpoints."""


def _space() -> str:
    """Host and process namespace: containers that share a TMPDIR count their processes each for itself."""
    try:
        return f"{socket.gethostname()}-{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return f"{socket.gethostname()}-0"


def _process() -> str:
    """A name that no other process has, whichever machine it is on."""
    return f"{_space()}-{os.getpid()}"


def _home(run: str) -> Path:
    """This process's folder; those of processes of this machine that were killed are removed."""
    base = Path(tempfile.gettempdir())
    home = base / f"{PREFIX}{run}@{_process()}"
    if not home.exists():
        for old in base.glob(f"{PREFIX}*@{_space()}-*"):
            pid = old.name.rpartition("-")[2]
            if pid.isdigit() and old.stat().st_uid == os.getuid() and not Path(f"/proc/{pid}").exists():
                shutil.rmtree(old, ignore_errors=True)
        home.mkdir(mode=0o700)
        atexit.register(shutil.rmtree, home, ignore_errors=True)
    return home


def _check(kit: Kit, task: ShardTask, node: str) -> None:
    """EnvironmentFault unless this node runs the driver's program and has the disk."""
    here = version("requant")
    if here != kit.version:
        raise EnvironmentFault(
            f"has requant {here}, the driver {kit.version}",
            where=f"node {node}",
            hint="install the same version on every node: another one might write other bytes",
        )
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if task.disk > free:
        raise EnvironmentFault(
            f"needs {task.disk:,} bytes for a shard in {tempfile.gettempdir()}, {free:,} are free",
            where=f"node {node}",
            hint="set TMPDIR to a larger disk on the nodes, or make target.shard_size or execute.max_disk smaller",
        )


def _lay_out(folder: Path, skeletons: Sequence[Skeleton]) -> None:
    for file in skeletons:
        target = folder / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.head)
        os.truncate(target, file.size)


def _judge(kit: Kit, home: Path) -> Any:
    """The run's judge in this process, over the two checkpoints with holes."""
    if kit.run not in _judges:
        _judges.clear()
        _lay_out(home / "source", kit.source)
        _lay_out(home / "view", kit.view)
        _judges[kit.run] = kit.make_judge(home / "source", home / "view", home / "judged.jsonl")
    return _judges[kit.run]


def _make(task: ShardTask, kit: Kit, place: Path) -> ShardReport:
    home = place.parent
    shutil.rmtree(place, ignore_errors=True)
    record = home / "judged.jsonl"
    record.unlink(missing_ok=True)
    judge = _judge(kit, home)
    out = place / "out"
    names = {file for file, _ in task.shards.values()}
    _lay_out(out, [skeleton for skeleton in kit.view if skeleton.name in names])
    check: Callable[[str], None] = lambda _: None  # noqa: E731
    counts: list[tuple[int, dict[str, Any]]] = []
    for window in task.windows:
        source = fetch_window(task.remote, window, home / "source", place / "window", check)
        files = ShardFiles(source, out, {number: file for number, (file, _) in task.shards.items()})
        try:
            counts += [(index, run_unit(task, task.units[index], files)) for index in window.units]
        finally:
            files.close()
        judge.piece(source, out, {tensor.name for tensor in window.tensors})
        shutil.rmtree(source)
    file, _ = task.shards[task.number]
    taken = task.sink.put(out / file, file)
    kept: list[tuple[int, bytes]] = []
    if not isinstance(task.sink, SharedFolder):
        mine = [tensor for tensor in task.tensors.values() if tensor.shard == task.number]
        with (out / file).open("rb") as shard:
            for begin, end in kept_spans(mine):
                shard.seek(begin)
                kept.append((begin, shard.read(end - begin)))
    judged = record.read_text() if record.exists() else ""
    return ShardReport(counts, _NOTHING, None, taken, kept, judged, sum(window.nbytes for window in task.windows))
