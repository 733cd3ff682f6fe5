"""Convert a source that is elsewhere through a small disk: fetch a window, convert it, judge it, free it.

    <output>.stream/source-PID/  the source with holes: true headers, configs and sidecars (remote.mirror_headers)
    <output>.stream/window-N/    its shards once more, with the bytes of window N in their places
    <output>.stream/view/        links to the output's shards, finished or not, under their final names
    <output>.stream/numerics.jsonl    what was judged, so that an interrupted run goes on

The next window is fetched while one is converted. Every window is compared with its source while both are there
(validate/numerics_pieces.py, handed in by the command line), so that a streamed checkpoint is signed off by the same
gates; those that need the whole model beside its source are `not run`, and the manifest must allow that.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Protocol

from requant.convert.checkpoint import open_checkpoint
from requant.convert.engine import PART_SUFFIX, Done, Engine, ShardFiles
from requant.convert.plan import Plan
from requant.convert.private import public_manifest
from requant.convert.remote import CONNECTIONS, Remote, mirror_headers, refuse_changed
from requant.convert.windows import Window, cut_windows, largest_block, shard_by_shard, tensors_of
from requant.manifests.errors import IncompleteError, UsageError

__all__ = [
    "Judge",
    "MakeJudge",
    "StreamEngine",
    "fetch_window",
    "link_shards",
    "source_with_holes",
    "stream_folder",
    "streamed_source",
    "window_budget",
]

STREAM_SUFFIX: Final = ".stream"
_SOURCE: Final = "source-"
WINDOW_BYTES: Final = 4 * 10**9
"""Of a window where max_disk sets no bound."""
WINDOWS: Final = 32
"""A run is cut into at least so many: what cannot overlap, the first fetch and the last conversion, is a small part."""
WINDOW_MIN: Final = 64 * 10**6
"""Smaller windows only add requests."""
REQUEST_BYTES: Final = 32 * 10**6
"""Of one ranged read: large enough for the rate, small enough to spread over the connections."""


def stream_folder(output: Path) -> Path:
    """Where the source passes through."""
    return output.with_name(output.name + STREAM_SUFFIX)


def source_with_holes(output: Path) -> Path:
    """What a streamed run left of its source: headers, configs and sidecars."""
    return next(iter(stream_folder(output).glob(f"{_SOURCE}*")), stream_folder(output))


def streamed_source(plan: Plan, remote: Remote) -> Plan:
    """The plan over a repository with holes, which it makes: headers, configs and sidecars are real."""
    root = stream_folder(plan.output) / f"{_SOURCE}{os.getpid()}"  # a run that holds the output may be using its own
    if root.exists():
        shutil.rmtree(root)
    root.mkdir(parents=True)
    small = [name for name in remote.files if name.endswith(".json") and "/" not in name]
    mirror_headers(remote, root, [*plan.catalogue.sidecars, *small])
    catalogue = open_checkpoint(root)
    refuse_changed(plan.catalogue, catalogue, remote.name)
    return shard_by_shard(replace(plan, catalogue=catalogue))


def window_budget(plan: Plan) -> int:
    """Bytes of one window, so that two of them and the output stay below max_disk. UsageError if nothing is left.

    plan: with its units shard by shard.
    """
    most = max(plan.bytes_in // WINDOWS, WINDOW_MIN)
    least = largest_block(plan, range(len(plan.units)))
    bound = plan.manifest.execute.max_disk
    if bound is None:
        return max(min(WINDOW_BYTES, most), least)
    left = (bound - plan.bytes_out) // 2
    if left <= 0:
        raise UsageError(
            f"the output alone is {plan.bytes_out:,} bytes, max_disk is {bound:,}",
            where="execute.max_disk",
            hint="allow more disk, or publish while converting (--push), which frees what is uploaded",
        )
    return min(left, max(most, least))


class Judge(Protocol):
    """Compares what was made with its source, while both are there (validate/numerics_pieces.py)."""

    def unjudged(self) -> Collection[str]:
        """Names of source tensors that some window must still hold."""
        ...

    def piece(self, source: Path, output: Path, tensors: Collection[str]) -> None:
        """Judge what these source tensors became."""
        ...

    def save(self, output: Path) -> None:
        """Leave the result in the output folder."""
        ...


MakeJudge = Callable[[Path, Path, Path], Judge]
"""(source with holes, view of the output, file to record in) -> the judge of a run."""


@dataclass
class StreamEngine:
    """Does the units window by window, each by `inner`. after(partial): called when a window is judged and freed."""

    remote: Remote
    inner: Engine
    budget: int
    make_judge: MakeJudge
    after: Callable[[Path], None] = lambda _: None
    _stop: threading.Event = field(default_factory=threading.Event)

    @property
    def name(self) -> str:
        """As in the manifest."""
        return self.inner.name

    @property
    def whole_shards(self) -> bool:
        """No: what stands in the folder is gone on with."""
        return False

    def drive(self, plan: Plan, files: ShardFiles, todo: Sequence[int], done: Callable[[Done], None]) -> None:
        """All of `todo`, and whatever an earlier run converted and did not live to judge."""
        folder = stream_folder(plan.output)
        for old in folder.glob(f"{_SOURCE}*"):
            if old != plan.catalogue.root:
                shutil.rmtree(old)
        record = folder / "numerics.jsonl"
        if len(todo) == len(plan.units):
            record.unlink(missing_ok=True)  # of a run that is not gone on with
        view = folder / "view"
        link_shards(plan, files.partial, view)
        judge = self.make_judge(plan.catalogue.root, view, record)
        missing = judge.unjudged()
        again = {i for i, unit in enumerate(plan.units) if any(t.name in missing for t in tensors_of(unit))}
        windows = cut_windows(plan, again | set(todo), self.budget)
        open_units = frozenset(todo)
        for window, place in self._fetched(plan, windows, folder):
            mine = ShardFiles(place, files.partial, dict(enumerate(shard.file for shard in plan.shards)))
            try:
                self.inner.drive(plan, mine, [i for i in window.units if i in open_units], done)
            finally:
                mine.close()
            link_shards(plan, files.partial, view)
            judge.piece(place, view, {tensor.name for tensor in window.tensors})
            shutil.rmtree(place)
            self.after(files.partial)
        judge.save(files.partial)

    def _fetched(self, plan: Plan, windows: Sequence[Window], folder: Path) -> Iterator[tuple[Window, Path]]:
        """Each window with the folder that holds its bytes; the next one is on its way meanwhile."""
        for old in folder.glob("window-*"):
            shutil.rmtree(old)
        with ThreadPoolExecutor(1, thread_name_prefix="requant-fetch") as ahead:
            coming: Future[Path] | None = None
            try:
                for number, window in enumerate(windows):
                    ready = coming or ahead.submit(self._fetch, plan, window, folder / f"window-{number}")
                    place = ready.result()
                    if number + 1 < len(windows):
                        coming = ahead.submit(self._fetch, plan, windows[number + 1], folder / f"window-{number + 1}")
                    yield window, place
            finally:
                self._stop.set()  # after an error or Ctrl-C nobody waits for a window that nobody wants

    def _fetch(self, plan: Plan, window: Window, place: Path) -> Path:
        def check(file: str) -> None:
            if self._stop.is_set():
                raise IncompleteError("stopped", where=file, hint="run the same command again")

        return fetch_window(self.remote, window, plan.catalogue.root, place, check)


def fetch_window(remote: Remote, window: Window, root: Path, place: Path, check: Callable[[str], None]) -> Path:
    """Write a window's bytes where they stand, in files of the right sizes and headers, in the new folder `place`.

    root: the source with holes. check(file): called before every write, to stop it by an error.
    """
    place.mkdir(parents=True)
    ranges = window.ranges()
    descriptors: dict[str, int] = {}

    def read(file: str, begin: int, end: int) -> None:
        def write(data: bytes, at: int) -> None:
            check(file)
            os.pwrite(descriptors[file], data, at)

        check(file)
        remote.read(file, begin, end, write)

    try:
        for file in ranges:
            target = place / file
            target.parent.mkdir(parents=True, exist_ok=True)
            descriptors[file] = os.open(target, os.O_RDWR | os.O_CREAT, 0o644)
            os.ftruncate(descriptors[file], (root / file).stat().st_size)
            with (root / file).open("rb") as source:
                start = source.read(8)
                os.pwrite(descriptors[file], start + source.read(int.from_bytes(start, "little")), 0)
        with ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="requant-range") as pool:
            jobs = [
                pool.submit(read, file, begin, end) for file, spans in ranges.items() for begin, end in _pieces(spans)
            ]
            for job in jobs:
                job.result()
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
    return place


def _pieces(spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The spans in pieces of one request each."""
    for begin, end in spans:
        for at in range(begin, end, REQUEST_BYTES):
            yield at, min(at + REQUEST_BYTES, end)


def link_shards(plan: Plan, partial: Path, view: Path) -> None:
    """Make `view` show the output's shards under their final names, and the manifest for its rules."""
    view.mkdir(exist_ok=True)
    for shard in plan.shards:
        final = partial / shard.file
        link = view / shard.file
        link.unlink(missing_ok=True)
        link.symlink_to((final if final.exists() else final.with_name(final.name + PART_SUFFIX)).resolve())
    (view / "requant.manifest.yaml").write_text(public_manifest(plan.manifest))
