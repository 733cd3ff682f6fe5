"""Where the workers of a run on the GPU spend their time: which of disk, PCIe, GPU and processor it waits for.

Workers queue up at whatever is slowest. So the largest share of their time names it; and where they wait for the GPU,
the busier of its parts does: transfers and kernels report when they began and ended (CUDA events).
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

__all__ = ["Interval", "Meter"]

_MERGE_AT: Final = 4096


class Interval(NamedTuple):
    """Something the GPU did, in seconds of time.monotonic()."""

    part: str
    begin: float
    end: float


class _Busy:
    """How long at least one of many overlapping intervals ran."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []
        self._merge_at = _MERGE_AT

    def add(self, begin: float, end: float) -> None:
        self._spans.append((begin, end))
        if len(self._spans) >= self._merge_at:
            self._merge()
            self._merge_at = max(_MERGE_AT, 2 * len(self._spans))  # a run of hours may have gaps between all of them

    def _merge(self) -> None:
        merged: list[tuple[float, float]] = []
        for begin, end in sorted(self._spans):
            if merged and begin <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((begin, end))
        self._spans = merged

    @property
    def seconds(self) -> float:
        self._merge()
        return sum(end - begin for begin, end in self._spans)


class Meter:
    """Thread-safe sums. Workers' stages: read, write, copy (bytes inside the kernel of the system), gpu (waiting for
    it), processor. Parts of the GPU: to_gpu, kernels, from_gpu."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._bytes: Counter[str] = Counter()
        self._busy = {part: _Busy() for part in ("to_gpu", "kernels", "from_gpu")}
        self._mine = threading.local()

    @contextmanager
    def time(self, stage: str, nbytes: int = 0) -> Generator[None]:
        """What this thread does meanwhile is `stage`, apart from what is timed inside."""
        outer: float = getattr(self._mine, "inner", 0.0)
        self._mine.inner = 0.0
        begin = time.monotonic()
        try:
            yield
        finally:
            took = time.monotonic() - begin
            with self._lock:
                self._spent[stage] += took - self._mine.inner
                self._bytes[stage] += nbytes
            self._mine.inner = outer + took

    def ran(self, intervals: Sequence[Interval], sent: int, fetched: int) -> None:
        """What the GPU did for one tile, and how many bytes went there and back."""
        with self._lock:
            for part, begin, end in intervals:
                self._busy[part].add(begin, end)
            self._bytes["to_gpu"] += sent
            self._bytes["from_gpu"] += fetched

    def record(self) -> dict[str, Any]:
        """Seconds and bytes, and what the run was bound by, as JSON."""
        with self._lock:
            spent = {stage: round(seconds, 3) for stage, seconds in sorted(self._spent.items())}
            busy = {part: round(span.seconds, 3) for part, span in self._busy.items()}
            moved = {stage: nbytes for stage, nbytes in sorted(self._bytes.items()) if nbytes}
        return {"worker_seconds": spent, "gpu_seconds": busy, "bytes": moved, "bound": _bound(spent, busy)}


def _bound(spent: dict[str, float], busy: dict[str, float]) -> str:
    waits = {
        "disk": sum(spent.get(stage, 0.0) for stage in ("read", "write", "copy")),
        "gpu": spent.get("gpu", 0.0),
        "processor": spent.get("processor", 0.0),
    }
    most = max(waits, key=lambda name: waits[name])
    if most != "gpu":
        return most
    return "PCIe" if max(busy["to_gpu"], busy["from_gpu"]) >= busy["kernels"] else "GPU kernels"
