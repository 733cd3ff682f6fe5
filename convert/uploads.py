"""Upload finished shards while the next ones are made, and free them: for an output larger than the disk.

What is uploaded to the Hub is not visible before the commit that `publish` makes after the sign-off; an object of a
store is, but the lock that says that the output is complete comes last (destination.py). Of a freed shard a hollow
file stays: its header and scales, which the contract stage reads, in their places, and holes where the codes were. What
is needed to know it again stands in the sink's record (sinks.py); hollow files go when all is published.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Self

from requant.convert.execute import partial_of
from requant.convert.files import read_exact, write_all
from requant.convert.placement import OutTensor
from requant.convert.plan import Plan
from requant.convert.private import STORED_FILE, UPLOADED_FILE
from requant.convert.sinks import Sink, Uploaded, read_records, write_records
from requant.convert.stream import stream_folder
from requant.manifests.errors import UsageError

__all__ = [
    "Uploaded",
    "Uploader",
    "frees",
    "kept_spans",
    "must_free",
    "read_freed",
    "read_uploaded",
    "uploaded_operation",
    "uploading_budget",
]

SMALL_BYTES: Final = 64 * 1024
"""Tensors up to this size stay in a hollow shard: norms, biases, scalars."""
SHARDS_OPEN: Final = 2
"""Shards that the units of a window may leave unfinished at its two ends."""


def read_uploaded(output: Path) -> dict[str, Uploaded]:
    """The shards of a folder that were uploaded to the Hub and freed, by name."""
    return read_records(output / UPLOADED_FILE)


def read_freed(output: Path) -> dict[str, Uploaded]:
    """The shards of a folder that are elsewhere and hollow here, by name."""
    records = {**read_records(output / STORED_FILE), **read_uploaded(output)}
    return {name: shard for name, shard in records.items() if shard.freed}


def uploaded_operation(name: str, shard: Uploaded) -> Any:
    """What huggingface_hub's commit takes for a file that is uploaded and not here any more.

    The library keeps such an operation in memory after `preupload_lfs_files`, and has no way to write it down; this
    makes it again from the three facts that the commit sends.
    """
    hub: Any = import_module("huggingface_hub")
    lfs: Any = import_module("huggingface_hub.lfs")
    operation = hub.CommitOperationAdd(name, b"")
    operation.upload_info = lfs.UploadInfo(size=shard.size, sample=shard.sample, sha256=bytes.fromhex(shard.sha256))
    operation._upload_mode, operation._should_ignore, operation._is_uploaded = "lfs", False, True
    return operation


class Uploader:
    """Uploads sealed shards one after the other, in a thread of its own. A context manager, which waits for the last.

    open_sink: partial folder -> where they go, made when the first shard is ready. free: they are hollow afterwards.
    """

    def __init__(self, plan: Plan, open_sink: Callable[[Path], Sink], *, free: bool) -> None:
        self._plan = plan
        self._open_sink = open_sink
        self._sink: Sink | None = None
        self.free = free
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="requant-upload")
        self._offered: dict[str, Future[None]] = {}
        self._previous: list[Future[None]] = []

    @property
    def budget(self) -> int:
        """Bytes of source on the way at a time."""
        return uploading_budget(self._plan)

    def sink(self, partial: Path) -> Sink:
        """Where shards go."""
        if self._sink is None:
            self._sink = self._open_sink(partial)
        return self._sink

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def offer(self, partial: Path) -> list[Future[None]]:
        """Take the shards that are sealed and not on their way yet."""
        now: list[Future[None]] = []
        if all(shard.file in self._offered for shard in self._plan.shards):
            return now
        done = read_records(partial / self.sink(partial).record)
        for number, shard in enumerate(self._plan.shards):
            if shard.file not in self._offered and shard.file not in done and (partial / shard.file).exists():
                self._offered[shard.file] = self._pool.submit(self._upload, partial, number)
                now.append(self._offered[shard.file])
        return now

    def after(self, partial: Path) -> None:
        """A window is done: offer the shards that it finished; wait until those of the window before are gone."""
        now = self.offer(partial)
        for upload in self._previous:
            upload.result()
        self._previous = now

    def finish(self, partial: Path) -> None:
        """Offer what is left and wait for all; the first error is raised."""
        self.offer(partial)
        for upload in self._offered.values():
            upload.result()

    def _upload(self, partial: Path, number: int) -> None:
        shard = self._plan.shards[number]
        path = partial / shard.file
        sink = self.sink(partial)
        record = partial / sink.record
        taken = sink.put(path, shard.file)._replace(freed=self.free)
        write_records(record, {**read_records(record), shard.file: taken})
        if self.free:
            members = self._plan.tensors[shard.tensors.start : shard.tensors.stop]
            hollow(path, members, stream_folder(self._plan.output) / "hollow")


def _stays(tensor: OutTensor) -> bool:
    return "scale" in tensor.name or tensor.nbytes <= SMALL_BYTES


def kept_spans(tensors: Sequence[OutTensor]) -> list[tuple[int, int]]:
    """Byte ranges [begin, end) that stay of a freed shard, which holds these tensors: header, scales, small tensors."""
    header = min((t.begin for t in tensors), default=0)
    return [(0, header), *((t.begin, t.begin + t.nbytes) for t in tensors if _stays(t))]


def hollow(path: Path, tensors: Sequence[OutTensor], temporary: Path) -> None:
    """Replace a shard, by way of `temporary`, by one with holes for all but what stays."""
    source = os.open(path, os.O_RDONLY)
    target = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        os.ftruncate(target, os.fstat(source).st_size)
        for begin, end in kept_spans(tensors):
            write_all(target, read_exact(source, end - begin, begin, path.name), begin)
        os.fsync(target)
    finally:
        os.close(source)
        os.close(target)
    temporary.replace(path)


def uploading_budget(plan: Plan) -> int:
    """Bytes of one window if shards are freed: two windows, what they become, and what hollow shards keep fit in
    max_disk. UsageError if nothing is left."""
    bound = plan.manifest.execute.max_disk or 0
    kept = sum(t.nbytes for t in plan.tensors if _stays(t)) + sum(len(s.file) + 4096 for s in plan.shards)
    largest = max(shard.size for shard in plan.shards)
    left = bound - kept - SHARDS_OPEN * largest
    grows = plan.bytes_out / max(plan.bytes_in, 1)
    budget = int(left / (2 + 2 * grows))
    if budget <= 0:
        raise UsageError(
            f"scales ({kept:,} bytes) and {SHARDS_OPEN} shards of {largest:,} leave nothing of max_disk ({bound:,})",
            where="execute.max_disk",
            hint="allow more disk, or smaller shards (target.shard_size)",
        )
    return budget


def frees(plan: Plan) -> bool:
    """Whether shards leave this disk as they are sent: for lack of room, or since they were never here."""
    settings = plan.manifest.execute
    return must_free(plan) or (settings.stream and (settings.engine == "ray" or _begun_elsewhere(plan)))


def _begun_elsewhere(plan: Plan) -> bool:
    """Whether an interrupted run has sent shards away: then the rest goes there too."""
    return bool(read_freed(partial_of(plan.output)))


def must_free(plan: Plan) -> bool:
    """Whether the output would take more than half of max_disk: then it is uploaded shard by shard and freed."""
    bound = plan.manifest.execute.max_disk
    return plan.manifest.execute.stream and bound is not None and plan.bytes_out > bound // 2
