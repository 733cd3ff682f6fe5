"""An output in an object store: what is there, what is not yet, and the order in which it comes.

A store has no folders to rename, so an output is told from an unfinished one by two objects:

    .requant/begun.json     written before anything else: the plan that the objects here belong to
    requant.lock.json       written after everything else: the output is complete
    .requant/begun.json     deleted

| begun.json | lock | what it is                                         | a run                              |
|------------|------|----------------------------------------------------|------------------------------------|
| -          | -    | nothing, or objects of others                      | begins, or refuses                 |
| this plan  | -    | unfinished                                         | goes on                            |
| other plan | -    | unfinished, of another manifest, source or version | refuses; `--force` begins anew     |
| -          | yes  | finished                                           | refuses; `--force` takes it apart  |
| this plan  | yes  | finished but for the last step                     | finishes                           |

Shards come as they are made, each by one upload that is visible when it is whole; then sidecars, index and configs:
no loader opens what has no config.json. The journal lies in the work folder; what is in the store stands in
`.requant-local/stored.json` there, with sizes, sha256s and versions, and is believed as long as the listing agrees.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, cast

from requant.convert.objects import Store
from requant.convert.plan import Plan
from requant.convert.private import STORED_FILE
from requant.convert.remote import RemoteFile
from requant.convert.sinks import BEGUN, StoreSink, plan_of, read_records, write_records
from requant.manifests.errors import IncompleteError, LockError

__all__ = ["Destination"]

LOCK: Final = "requant.lock.json"
SIGNOFF: Final = "requant.signoff."
LATE: Final = ("hf_quant_config.json", "model.safetensors.index.json", "config.json")
"""Written in this order after everything but the lock."""


class Destination:
    """The output of a plan at an address. plan_sha256: of the plan as anyone makes it."""

    def __init__(self, url: str, plan_sha256: str) -> None:
        self.url = url
        self._plan = plan_sha256
        self._store = Store(url, writing=True)
        self._before: list[str] = []

    def sink(self, partial: Path) -> StoreSink:
        """Where shards go; the folder is not needed."""
        del partial
        return StoreSink(self.url, self._plan)

    def check(self, force: bool) -> None:
        """LockError if a finished output, another plan's unfinished one, or objects of others are in the way."""
        there = self._store.listing()
        self._refuse(there, plan_of(self._store) if BEGUN in there else None, force)

    def begin(self, plan: Plan, partial: Path, force: bool) -> None:
        """Claim the address before the first byte, and forget shards that are not there any more as they were sent.

        LockError: a finished output, another plan's unfinished one, or objects of others are in the way.
        """
        there = self._store.listing()
        begun = plan_of(self._store) if BEGUN in there else None
        self._refuse(there, begun, force)
        if begun != self._plan:
            self._before = self._written_before()
            mine = [shard.file for shard in plan.shards]
            begin = {"plan": self._plan, "shards": mine, "before": self._before}
            self._store.put(BEGUN, json.dumps(begin).encode())
            write_records(partial / STORED_FILE, {})  # what is there is another plan's
        else:
            self._before = _names(self._store.text(BEGUN), "before")
        first = [LOCK, *reversed(LATE), *(name for name in there if name.startswith(SIGNOFF))]
        self._store.delete(name for name in first if name in there)
        self._store.abort_uploads(shard.file for shard in plan.shards)
        _forget_missing(self._store, partial)

    def _refuse(self, there: Mapping[str, RemoteFile], begun: str | None, force: bool) -> None:
        if begun == self._plan:
            return
        if begun is not None:
            if not force:
                raise LockError(
                    "the unfinished output there was begun with another plan (manifest, source or version changed)",
                    where=self.url,
                    hint="restore what changed, or start over with --force, which discards the unfinished output",
                )
        elif LOCK in there:
            if not force:
                raise LockError(
                    "is finished already",
                    where=self.url,
                    hint="name another target.output, or overwrite it with --force",
                )
        elif there:
            raise LockError(
                "holds objects that requant did not write",
                where=self.url,
                hint="name another target.output: objects of others are never overwritten, not even with --force",
            )

    def _written_before(self) -> list[str]:
        """The objects that an earlier output there wrote, finished or not."""
        lock, begun = self._store.text(LOCK), self._store.text(BEGUN)
        names = [*_names(lock, "outputs"), *_names(begun, "before"), *_names(begun, "shards")]
        return sorted({*names, *LATE} if names else names)

    def finish(self, partial: Path, outputs: Sequence[str]) -> None:
        """All shards are there: send the rest, the lock last. IncompleteError if a shard is not as it was sent."""
        there = self._store.listing()
        stored = read_records(partial / STORED_FILE)
        for name in outputs:
            if name.endswith(".safetensors"):
                file, shard = there.get(name), stored.get(name)
                if file is None or shard is None or (file.size, file.version) != (shard.size, shard.version):
                    raise IncompleteError(
                        f"{name} is not there as it was sent", where=self.url, hint="run the same command again"
                    )
        rest = [name for name in outputs if not name.endswith(".safetensors") and name not in (LOCK, *LATE)]
        for name in [*rest, *(name for name in LATE if name in outputs)]:
            self._store.put(name, partial / name)
        ours = {*outputs, BEGUN}
        self._store.delete(name for name in there if name in self._before and name not in ours)
        self._store.put(LOCK, partial / LOCK)
        self._store.delete([BEGUN])

    def add_signoff(self, output: Path) -> None:
        """Send the sign-off's files beside a finished output. LockError if another one than `output` lies there now."""
        if self._store.text(LOCK) != (output / LOCK).read_bytes():
            raise LockError(
                f"holds another output than {output}, whose sign-off is not sent there",
                where=self.url,
                hint=f"validate what is there: requant validate {self.url}",
            )
        for path in sorted(output.glob(f"{SIGNOFF}*")):
            self._store.put(path.name, path)


def _names(raw: bytes | None, key: str) -> list[str]:
    try:
        found: object = json.loads(raw or b"{}").get(key, [])
    except (ValueError, AttributeError):
        return []
    return [n for n in cast("list[object]", found) if isinstance(n, str)] if isinstance(found, list) else []


def _forget_missing(store: Store, partial: Path) -> None:
    """Shards that the record names and the store lacks are made again: without their record, and their hollow file."""
    records = read_records(partial / STORED_FILE)
    there = store.listing()
    gone = {
        name: shard
        for name, shard in records.items()
        if (file := there.get(name)) is None or (file.size, file.version) != (shard.size, shard.version)
    }
    if not gone:
        return
    for name, shard in gone.items():
        if shard.freed:
            for path in (partial / name, partial / f"{name}.part"):
                path.unlink(missing_ok=True)
    write_records(partial / STORED_FILE, {name: shard for name, shard in records.items() if name not in gone})
