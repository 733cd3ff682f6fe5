"""How a conversion scales: measured on 1 and 2 workers here, simulated on 1 to 64 nodes, and drawn.

    python tests/bench/bench_scaling.py measure FOLDER [--gb 4] [--workers 1 2] [--runs 3]    docs/cluster/scaling.json
    python tests/bench/bench_scaling.py draw                                                  docs/cluster/scaling.svg

`measure` makes a synthetic DeepSeek-V4 checkpoint and converts it by Ray and by threads. Strong scaling: one size, more
workers. Weak: it grows with them. A Ray with that many CPUs is started, and warmed up by small conversions, before
the clock starts; the disk is synced before and after. Runs take turns over the configurations, medians are kept. It
wants a quiet machine: the load average is recorded and a busy start is refused.

`draw` simulates Kimi-K3's load (its published sizes, half-gigabyte batches) by list scheduling: each batch goes to the
first free worker and takes its bytes over the narrowest of the worker's measured rate and its share of the node's
network and of the shared file system, times a factor drawn from the paces measured here. The line through the points
is `requant plan --nodes`, which knows no chance.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

HERE = Path(__file__).resolve().parents[2] / "docs" / "cluster"
QUIET_LOAD = 2.0
WARM_UP_GB = 0.3
KIMI_K3 = {"bytes_in": 1476e9, "bytes_out": 1559e9, "unit": 11.7e6}
"""`requant plan kimi-k3`: bytes in and out; its largest fused group (w1 with w3)."""
PER_NODE = 16
FLEETS = (
    ("no limit but the workers", None, None),
    ("25 Gbit/s a node", 25.0, None),
    ("25 Gbit/s a node, file system 20 GB/s", 25.0, 20.0),
)
"""(name, network of a node in Gbit/s, shared file system in GB/s)"""

CHILD = """
import json, os, sys, time
from requant.convert.pipeline import prepare, run_job
engine, workers, source, small, work = sys.argv[1], int(sys.argv[2]), *sys.argv[3:]
if engine == "ray":
    import ray
    ray.init(address="local", num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level="error",
             object_store_memory=80 * 2**20)
def convert(path, output):
    sets = [f"source.path={path}", f"target.output={output}", f"execute.engine={engine}", f"execute.workers={workers}"]
    begin = time.perf_counter()
    record = run_job(prepare("deepseek-v4-flash", sets)).record
    os.sync()
    return {"wall": time.perf_counter() - begin, **record}
for _ in range(2):
    convert(small, work + "/warm")
    __import__("shutil").rmtree(work + "/warm")
os.sync()
print(json.dumps(convert(source, work + "/out")))
"""


def one_run(engine: str, workers: int, source: Path, small: Path, work: Path) -> dict[str, Any]:
    """A conversion in a process of its own; its record and wall time, sync included."""
    for folder in ("out", "out.partial", "warm", "warm.partial"):
        shutil.rmtree(work / folder, ignore_errors=True)
    command = [sys.executable, "-c", CHILD, engine, str(workers), str(source), str(small), str(work)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    shutil.rmtree(work / "out")
    return json.loads(done.stdout.splitlines()[-1])


def measure(folder: Path, gb: float, counts: list[int], runs: int, force: bool) -> dict[str, Any]:
    """All configurations in turn, `runs` times; medians."""
    from make_checkpoint import make

    load = os.getloadavg()[0]
    if load > QUIET_LOAD and not force:
        raise SystemExit(f"the load average is {load:.1f}: wait for a quiet machine, or say --force")
    folder.mkdir(parents=True, exist_ok=True)
    sizes = sorted({gb, *(gb * n / max(counts) for n in counts)})
    sources = {size: folder / f"source-{size:g}" for size in [WARM_UP_GB, *sizes]}
    for size, path in sources.items():
        if not path.exists():
            make(path, int(size * 1e9), int(max(size / 4, 0.05) * 1e9))
    rows = [(kind, engine, n, gb if kind == "strong" else gb * n / max(counts))
            for kind in ("strong", "weak") for engine in ("local", "ray") for n in counts]  # fmt: skip
    seen: dict[tuple[str, str, int, float], list[dict[str, Any]]] = {row: [] for row in rows}
    for _ in range(runs):
        for row in rows:
            seen[row].append(one_run(row[1], row[2], sources[row[3]], sources[WARM_UP_GB], folder))
    table = []
    for (kind, engine, workers, size), results in seen.items():
        wall = statistics.median(r["wall"] for r in results)
        entry = {"kind": kind, "engine": engine, "workers": workers, "gb": results[0]["bytes"] / 1e9, "wall": wall}
        entry["walls"] = sorted(round(r["wall"], 3) for r in results)
        entry["gb_per_s"] = entry["gb"] / wall
        entry["worker_gb_per_s"] = statistics.median(r["worker_gb_per_s"] for r in results)
        table.append(entry)
        print(
            f"{kind:7} {engine:6} {workers} workers {size:5.2f} GB  {wall:6.2f} s  {entry['gb_per_s']:.2f} GB/s",
            flush=True,
        )
    for path in sources.values():
        shutil.rmtree(path)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "system": platform.system(), "load_before": load}
    return {"commit": commit.strip(), **machine, "runs": runs, "rows": table}


def simulate(nodes: int, rate: float, network: float | None, storage: float | None, paces: list[float]) -> float:
    """Seconds of Kimi-K3's load on `nodes` of PER_NODE workers. rate: GB/s of one. paces: factors on a batch's time."""
    from requant.convert.engine import batch_limit
    from requant.convert.predict import START_S

    rng = random.Random(nodes)
    workers = nodes * PER_NODE
    both = (KIMI_K3["bytes_in"] + KIMI_K3["bytes_out"]) / KIMI_K3["bytes_in"]
    larger = max(1.0, KIMI_K3["bytes_out"] / KIMI_K3["bytes_in"])
    limits = [rate]
    if network is not None:
        limits.append(network / 8 / larger / PER_NODE)
    if storage is not None:
        limits.append(storage / both / workers)
    batch = batch_limit(int(KIMI_K3["bytes_in"]), workers)
    left = KIMI_K3["bytes_in"]
    free = [0.0] * workers
    end = 0.0
    while left > 0:
        size = min(batch, left)
        left -= size
        moment = heapq.heappop(free) + size / 1e9 / min(limits) * rng.choice(paces)
        end = max(end, moment)
        heapq.heappush(free, moment)
    return START_S + end


def draw(data: dict[str, Any], target: Path) -> None:
    """Two panels: what was measured here, and the simulation, with the assumptions under them."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "requant"
    import matplotlib.pyplot as plt
    from requant.convert.predict import ASSUMPTIONS, Fleet, Load, predict

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5.4))
    for kind, marker in (("strong", "o"), ("weak", "s")):
        for engine, color in (("ray", "C0"), ("local", "C1")):
            rows = [r for r in data["rows"] if (r["kind"], r["engine"]) == (kind, engine)]
            base = rows[0]["gb_per_s"]
            label = f"{kind}, {engine} (1 worker: {base:.2f} GB/s)"
            left.plot([r["workers"] for r in rows], [r["gb_per_s"] / base for r in rows], marker=marker, color=color,
                      linestyle="-" if kind == "strong" else "--", label=label)  # fmt: skip
    most = max(r["workers"] for r in data["rows"])
    left.plot([1, most], [1, most], color="0.7", linewidth=1, label="ideal")
    left.set(xlabel="workers on one machine", ylabel="speed-up", title=f"measured: {data['cpus']} CPUs, one disk",
             xticks=range(1, most + 1))  # fmt: skip
    left.legend(fontsize=8)
    rate = worker_rate(data)
    paces = paces_of(data)
    nodes = [1, 2, 4, 8, 16, 32, 64]
    load = Load(int(KIMI_K3["bytes_in"]), int(KIMI_K3["bytes_out"]), int(KIMI_K3["unit"]))
    for index, (name, network, storage) in enumerate(FLEETS):
        line = [predict(load, Fleet(n, PER_NODE, rate, network, storage)).seconds for n in nodes]
        right.plot(nodes, line, color=f"C{index}", label=name)
        points = [simulate(n, rate, network, storage, paces) for n in nodes]
        right.plot(nodes, points, "o", color=f"C{index}", markerfacecolor="none")
    right.set(xscale="log", yscale="log", xlabel=f"nodes of {PER_NODE} workers", ylabel="seconds",
              title="Kimi-K3, 1.48 TB: simulated (o), requant plan (-)", xticks=nodes)  # fmt: skip
    right.set_xticklabels([str(n) for n in nodes])
    ticks = [seconds for seconds in (20, 50, 100, 200, 500, 1000, 2000) if seconds < right.get_ylim()[1]]
    right.set_yticks(ticks, [str(seconds) for seconds in ticks])
    right.minorticks_off()
    right.grid(visible=True, which="major", color="0.9")
    right.legend(fontsize=8)
    notes = [f"one worker {rate:.2f} GB/s of source, as measured on the left (Ray, 1 worker), commit {data['commit']}"]
    figure.text(0.01, 0.01, "Assumes: " + ";\n".join(notes + list(ASSUMPTIONS)), fontsize=7, va="bottom")
    figure.tight_layout(rect=(0, 0.15, 1, 1))
    figure.savefig(target, format="svg", metadata={"Date": None})


def worker_rate(data: dict[str, Any]) -> float:
    """GB/s of source of the one worker of a Ray."""
    return next(r["gb_per_s"] for r in data["rows"] if (r["kind"], r["engine"], r["workers"]) == ("strong", "ray", 1))


def paces_of(data: dict[str, Any]) -> list[float]:
    """How runs of one configuration differ from their median."""
    return [wall / statistics.median(row["walls"]) for row in data["rows"] for wall in row["walls"]]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("measure")
    one.add_argument("folder", type=Path)
    one.add_argument("--gb", type=float, default=4)
    one.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    one.add_argument("--runs", type=int, default=3)
    one.add_argument("--force", action="store_true")
    for verb in (one, verbs.add_parser("draw")):
        verb.add_argument("--json", type=Path, default=HERE / "scaling.json")
        verb.add_argument("--svg", type=Path, default=HERE / "scaling.svg")
    given = parser.parse_args()
    if given.verb == "measure":
        found = measure(given.folder, given.gb, given.workers, given.runs, given.force)
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    else:
        draw(json.loads(given.json.read_text()), given.svg)
