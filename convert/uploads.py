"""Upload finished shards while the next ones are made, and free them: for an output larger than the disk.

What is uploaded is not visible before the commit that `publish` makes after the sign-off. Of a freed shard a hollow
file stays: its header and scales, which the contract stage reads, in their places, and holes where the codes were. What
the commit needs to know of it stands in `.requant-local/uploaded.json`; hollow files go when it is made.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, cast

from requant.convert.files import read_exact, write_all
from requant.convert.hub import hub_api, hub_faults
from requant.convert.placement import OutTensor
from requant.convert.plan import Plan
from requant.convert.private import UPLOADED_FILE
from requant.convert.stream import stream_folder
from requant.manifests.errors import UsageError

__all__ = ["Uploaded", "Uploader", "must_free", "read_uploaded", "uploaded_operation", "uploading_budget"]

SMALL_BYTES: Final = 64 * 1024
"""Tensors up to this size stay in a hollow shard: norms, biases, scalars."""
SHARDS_OPEN: Final = 2
"""Shards that the units of a window may leave unfinished at its two ends."""


class Uploaded(NamedTuple):
    """A shard whose bytes are on the Hub, under no name yet. sample: its first 512 bytes."""

    size: int
    sha256: str
    sample: bytes


def read_uploaded(output: Path) -> dict[str, Uploaded]:
    """The freed shards of a folder, by name."""
    try:
        raw: object = json.loads((output / UPLOADED_FILE).read_text())
    except (OSError, ValueError):
        return {}
    found = cast("Mapping[str, Mapping[str, Any]]", raw)
    return {n: Uploaded(f["size"], f["sha256"], base64.b64decode(f["sample"])) for n, f in found.items()}


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

    open_target: partial folder -> (repository, revision), made when the first shard is ready.
    """

    def __init__(self, plan: Plan, open_target: Callable[[Path], tuple[str, str]]) -> None:
        self._plan = plan
        self._open_target = open_target
        self._target: tuple[str, str] | None = None
        self.budget = uploading_budget(plan)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="requant-upload")
        self._offered: dict[str, Future[None]] = {}
        self._previous: list[Future[None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def after(self, partial: Path) -> None:
        """A window is done: offer the shards that it finished; wait until those of the window before are gone."""
        done = read_uploaded(partial)
        now: list[Future[None]] = []
        for number, shard in enumerate(self._plan.shards):
            if shard.file not in self._offered and shard.file not in done and (partial / shard.file).exists():
                self._offered[shard.file] = self._pool.submit(self._upload, partial, number)
                now.append(self._offered[shard.file])
        for upload in self._previous:
            upload.result()
        self._previous = now

    def finish(self) -> None:
        """Wait for all; the first error is raised."""
        for upload in self._offered.values():
            upload.result()

    def _upload(self, partial: Path, number: int) -> None:
        hub: Any = import_module("huggingface_hub")
        shard = self._plan.shards[number]
        path = partial / shard.file
        repo, revision = self._target = self._target or self._open_target(partial)
        with hub_faults(repo, "the upload", publishing=True):
            operation = hub.CommitOperationAdd(shard.file, str(path))
            hub_api().preupload_lfs_files(repo, [operation], revision=revision, free_memory=False)
        info = operation.upload_info
        _record(partial, shard.file, Uploaded(int(info.size), info.sha256.hex(), bytes(info.sample)))
        hollow(path, [t for t in self._plan.tensors if t.shard == number], stream_folder(self._plan.output) / "hollow")


def _record(output: Path, name: str, shard: Uploaded) -> None:
    """Add a shard to the file, at once or not at all. One thread writes."""
    path = output / UPLOADED_FILE
    path.parent.mkdir(mode=0o700, exist_ok=True)
    known = {**read_uploaded(output), name: shard}
    raw = {n: {**s._asdict(), "sample": base64.b64encode(s.sample).decode()} for n, s in known.items()}
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(raw))
    temporary.replace(path)


def _stays(tensor: OutTensor) -> bool:
    return "scale" in tensor.name or tensor.nbytes <= SMALL_BYTES


def hollow(path: Path, tensors: Sequence[OutTensor], temporary: Path) -> None:
    """Replace a shard, by way of `temporary`, by one with holes for all but its header, scales and small tensors."""
    header = min((t.begin for t in tensors), default=0)
    spans = [(0, header), *((t.begin, t.begin + t.nbytes) for t in tensors if _stays(t))]
    source = os.open(path, os.O_RDONLY)
    target = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        os.ftruncate(target, os.fstat(source).st_size)
        for begin, end in spans:
            write_all(target, read_exact(source, end - begin, begin, path.name), begin)
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


def must_free(plan: Plan) -> bool:
    """Whether the output would take more than half of max_disk: then it is uploaded shard by shard and freed."""
    bound = plan.manifest.execute.max_disk
    return plan.manifest.execute.stream and bound is not None and plan.bytes_out > bound // 2
