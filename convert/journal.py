"""The journal: which units of a plan are done, so that a killed run goes on where it stopped.

One JSON line per finished unit, appended with a single write. The first line binds the journal to a plan: another plan
(other manifest, other source, other version) is refused. A line cut off by the kill is ignored.

A process that dies leaves what it wrote in the page cache, so its journal can be believed. A machine that dies does
not: the first line therefore also names the boot, and after a reboot (or on another machine) only shards that bear
their final name count (they, and the journal up to then, were synced before they got it), and units whose worker synced
them before it said that they were done, as those of a cluster do.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any, Self, cast

from requant.manifests.errors import LockError

__all__ = ["Journal", "boot_id"]


def boot_id() -> str:
    """An identifier that changes when the machine restarts; empty where the system offers none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class Journal:
    """Append-only record of finished units with their counts. Thread-safe.

    done: what can be believed. unsure: units of an earlier boot, done only if all their shards bear their final names.
    fresh: there was no journal to go on from.
    """

    def __init__(self, path: Path, plan_sha256: str) -> None:
        self.done: dict[int, dict[str, Any]] = {}
        self.unsure: dict[int, dict[str, Any]] = {}
        self.same_boot = True
        self._lock = threading.Lock()
        self.fresh = not path.exists() or not self._read(path, plan_sha256)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if self.fresh else 0), 0o644)
        if self.fresh:
            self._append({"plan": plan_sha256, "boot": boot_id()})
            os.fsync(self._fd)  # after a crash the shards that were sealed still know their plan
        elif not self.same_boot:
            self._append({"boot": boot_id()})

    def _read(self, path: Path, plan_sha256: str) -> bool:
        """Take over what an earlier run recorded; False if not even the first line can be read."""
        lines = path.read_bytes().split(b"\n")
        complete = lines[:-1]  # the last piece is empty, or a line that the kill cut off
        records: list[dict[str, Any]] = []
        for line in complete:
            try:
                record: object = json.loads(line)
            except ValueError:
                break
            if not isinstance(record, dict):
                break
            records.append(cast("dict[str, Any]", record))
        if not records:
            return False
        if records[0].get("plan") != plan_sha256:
            raise LockError(
                "the unfinished output was begun with another plan (manifest, source or version changed)",
                where=str(path.parent.parent),
                hint="restore what changed, or start over with --force, which discards the unfinished output",
            )
        boot = records[0].get("boot", "")
        for record in records:
            if record.get("boot", boot) != boot:  # what the boot before wrote may not have reached the disk
                boot = record["boot"]
                self._doubt()
            if "unit" in record:
                self.done[record["unit"]] = record
            if "forget" in record:
                self.done.pop(record["forget"], None)
                self.unsure.pop(record["forget"], None)
        self.same_boot = boot == boot_id()
        if not self.same_boot:
            self._doubt()
        valid = b"".join(json.dumps(r, separators=(",", ":")).encode() + b"\n" for r in records)
        if len(valid) != path.stat().st_size:
            path.write_bytes(valid)
        return True

    def _doubt(self) -> None:
        self.unsure |= {index: record for index, record in self.done.items() if not record.get("synced")}
        self.done = {index: record for index, record in self.done.items() if record.get("synced")}

    def _append(self, record: dict[str, Any]) -> None:
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            os.write(self._fd, line)

    def unit(self, index: int, counts: dict[str, Any], *, synced: bool = False) -> None:
        """Record that unit `index` is written, with what it counted. synced: its bytes outlive the machine."""
        record = {"unit": index, **counts, **({"synced": True} if synced else {})}
        self.done[index] = record
        self._append(record)

    def forget(self, index: int) -> None:
        """Take a unit back: what it wrote is gone."""
        self.done.pop(index, None)
        self.unsure.pop(index, None)
        self._append({"forget": index})

    def sync(self) -> None:
        """All records so far reach the disk."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
