"""The record of a run: how fast it was, on which nodes, and who kept it waiting.

It belongs to the machines, not to the output, whose bytes are the same however it was made: it is printed, and kept in
`.requant-local/run.json` for `requant plan --rate-from`.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

from requant.convert.engine import Task
from requant.convert.private import LOCAL_FOLDER
from requant.manifests.errors import UsageError

__all__ = ["RECORD_FILE", "measured_rate", "run_record", "run_text"]

RECORD_FILE: Final = f"{LOCAL_FOLDER}/run.json"
STRAGGLER_FACTOR: Final = 3.0
"""A task is a straggler if it took this many times what the median task needs for its bytes, ..."""
STRAGGLER_SECONDS: Final = 1.0
"""... and this much longer: below that nobody waits for it."""
SLOW_NODE: Final = 0.5
"""A node is slow if its workers reach less than this share of the median node's rate."""


def run_record(engine: str, tasks: Sequence[Task], seconds: float) -> dict[str, Any]:
    """Totals, a row per node, and the stragglers among `tasks`, as JSON. seconds: of the whole run."""
    nbytes = sum(task.nbytes for task in tasks)
    busy = sum(task.end - task.start for task in tasks)
    by_node: dict[str, list[Task]] = defaultdict(list)
    for task in tasks:
        by_node[task.node].append(task)
    nodes = [_node(name, own, seconds) for name, own in sorted(by_node.items())]
    typical = statistics.median([node["worker_gb_per_s"] for node in nodes]) if nodes else 0.0
    return {
        "engine": engine,
        "seconds": round(seconds, 3),
        "bytes": nbytes,
        "gb_per_s": _rate(nbytes, seconds),
        "workers": sum(node["workers"] for node in nodes),
        "worker_gb_per_s": _rate(nbytes, busy),
        "nodes": [{**node, "slow": node["worker_gb_per_s"] < SLOW_NODE * typical} for node in nodes],
        "stragglers": _stragglers(tasks),
        "tail_seconds": round(_tail(tasks), 3),
    }


def _rate(nbytes: int, seconds: float) -> float:
    return round(nbytes / 1e9 / seconds, 4) if seconds > 0 else 0.0


def _node(name: str, tasks: Sequence[Task], seconds: float) -> dict[str, Any]:
    nbytes = sum(task.nbytes for task in tasks)
    busy = sum(task.end - task.start for task in tasks)
    return {
        "node": name,
        "workers": len({task.worker for task in tasks}),
        "tasks": len(tasks),
        "bytes": nbytes,
        "busy_seconds": round(busy, 3),
        "gb_per_s": _rate(nbytes, seconds),
        "worker_gb_per_s": _rate(nbytes, busy),
    }


def _stragglers(tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """The ten that took longest beyond what their bytes explain; `first`: the first task of its worker."""
    paces = [(task.end - task.start) / task.nbytes for task in tasks if task.nbytes]
    if not paces:
        return []
    pace = statistics.median(paces)
    late = [
        (took - expected, task, took, expected)
        for task in tasks
        if (took := task.end - task.start) > STRAGGLER_FACTOR * (expected := pace * task.nbytes)
        and took > expected + STRAGGLER_SECONDS
    ]
    late.sort(key=lambda entry: -entry[0])
    began = {(task.node, task.worker): task.start for task in sorted(tasks, key=lambda task: -task.start)}
    return [
        {
            "node": task.node,
            "bytes": task.nbytes,
            "seconds": round(took, 3),
            "expected_seconds": round(expected, 3),
            "first": task.start == began[task.node, task.worker],
        }
        for _, task, took, expected in late[:10]
    ]


def _tail(tasks: Sequence[Task]) -> float:
    """Seconds between the first worker's last task and the end: the run waited for the others. One clock a node."""
    last: dict[tuple[str, str], float] = {}
    for task in tasks:
        key = (task.node, task.worker)
        last[key] = max(last.get(key, task.end), task.end)
    by_node: dict[str, list[float]] = defaultdict(list)
    for (node, _), end in last.items():
        by_node[node].append(end)
    return max((max(ends) - min(ends) for ends in by_node.values()), default=0.0)


def run_text(record: dict[str, Any]) -> str:
    """The record in a few lines; nodes only where there are several, or a slow one."""
    lines = [
        f"  {record['seconds']:.1f} s, {record['gb_per_s']:.2f} GB/s of source; {record['workers']} workers "
        f"({record['engine']}), {record['worker_gb_per_s']:.2f} GB/s each while at work"
    ]
    if len(record["nodes"]) > 1:
        lines += [
            f"  node {node['node']}: {node['workers']} workers, {node['tasks']} tasks, {node['bytes'] / 1e9:.2f} GB, "
            f"{node['gb_per_s']:.2f} GB/s{' (slow)' if node['slow'] else ''}"
            for node in record["nodes"]
        ]
    lines += [
        f"  straggler: {entry['bytes'] / 1e9:.2f} GB on {entry['node']} took {entry['seconds']:.1f} s, "
        f"{entry['expected_seconds']:.1f} s expected"
        for entry in record["stragglers"]
        if not entry["first"]
    ]
    if first := [entry["seconds"] - entry["expected_seconds"] for entry in record["stragglers"] if entry["first"]]:
        # A worker compiles its loops, or loads them, in its first task: no sign of a slow disk or node.
        lines.append(
            f"  the first task of a worker took up to {max(first):.1f} s more: it compiles the loops or loads them"
        )
    if "device" in record:
        lines += _device_text(record["device"], record["seconds"])
    return "\n".join(lines)


def _device_text(device: dict[str, Any], seconds: float) -> list[str]:
    """Where it computed; of a GPU also what the workers waited for, and how busy its parts were."""
    if device["name"] == "cpu":
        return [f"  computed on the processor ({device['reason']})"]
    spent: dict[str, float] = device["worker_seconds"]
    total = sum(spent.values()) or 1.0
    shares = ", ".join(f"{_STAGES[stage]} {100 * took / total:.0f}%" for stage, took in spent.items())
    lines = [
        f"  computed on {device['chip']} ({device['reason']}): {device['groups_on_gpu']:,} groups; "
        f"bound by {device['bound']}",
        f"    the workers' time: {shares}",
    ]
    for stage, words in (("to_gpu", "to the GPU"), ("from_gpu", "from the GPU")):
        busy, moved = device["gpu_seconds"][stage], device["bytes"].get(stage, 0)
        if moved:
            share = 100 * busy / seconds if seconds else 0.0
            lines.append(
                f"    {words}: {moved / 1e9:.2f} GB, {_rate(moved, busy):.1f} GB/s while at it, {share:.0f}% of the run"
            )
    lines.append(f"    kernels: {100 * device['gpu_seconds']['kernels'] / seconds if seconds else 0.0:.0f}% of the run")
    lines += [f"    on the processor: {count:,} groups, {why}" for why, count in device["groups_on_processor"].items()]
    return lines


_STAGES: Final = {
    "read": "reading",
    "write": "writing",
    "copy": "copying files",
    "gpu": "waiting for the GPU",
    "processor": "computing themselves",
}


def measured_rate(output: Path) -> float:
    """GB of source per second of one worker, from the record of the run that made `output`; UsageError without one."""
    path = output / RECORD_FILE
    try:
        record = cast("dict[str, Any]", json.loads(path.read_text()))
        rate = float(record["worker_gb_per_s"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            "holds no record of a run", where=str(path), hint="name the output of a finished conversion, or give --rate"
        ) from error
    if rate <= 0:
        raise UsageError("the recorded run moved no bytes", where=str(path), hint="give --rate")
    return rate
