"""The main job against `cp`: lossless repack of a synthetic DeepSeek-V4 checkpoint, in turn, on the same disk.

    python tests/bench/bench_repack.py FOLDER [--gb 8] [--runs 3] [--prime] [--json FILE]

A = `requant run` + `sync`, B = `cp -r --reflink=never` + `sync`, A B A B after one warm-up each; start-up included,
content hashing not (that is the sign-off's). Prints medians: wall, CPU-seconds per GB of source, peak RSS of A (the
kernel's own accounting of the finished child), and the ratio of walls, pair by pair.

--prime has both begin with memory that was in use a moment ago (a file of the source's size, written and deleted). In a
virtual machine that gives free memory back to its host, CPU-seconds are those of luck without it: bench_pagecache.py.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

MANIFEST = "deepseek-v4-flash"


def timed(command: list[str]) -> dict[str, float]:
    """Wall of a command followed by sync; CPU (user + system) seconds and peak RSS (MB) of the command."""
    begin = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    os.sync()
    wall = time.perf_counter() - begin
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    return {"wall": wall, "cpu": usage.ru_utime + usage.ru_stime, "rss": usage.ru_maxrss / 1024}


def one_pair(source: Path, work: Path, prime: int) -> tuple[dict[str, float], dict[str, float]]:
    """requant, then cp, into fresh folders; both removed and the disk quiet again before each. prime: bytes, or 0."""
    requant = Path(sys.executable).with_name("requant")
    sets = ["--set", f"source.path={source}", "--set", f"target.output={work / 'requant'}"]
    results: list[dict[str, float]] = []
    for command in (
        [str(requant), "run", MANIFEST, "--quiet", *sets],
        ["cp", "-r", "--reflink=never", str(source), str(work / "cp")],
    ):
        for folder in ("requant", "requant.partial", "cp"):
            shutil.rmtree(work / folder, ignore_errors=True)
        os.sync()
        if prime:
            from bench_pagecache import CHUNK, write

            write(work / "prime", prime // CHUNK * CHUNK)
        results.append(timed(command))
    return results[0], results[1]


def measure(folder: Path, gb: float, runs: int, prime: bool) -> dict[str, float]:
    """Medians for one size; the checkpoint is made first and removed last."""
    source = folder / f"source-{gb:g}"
    if not source.exists():  # in a process of its own: a child's peak RSS counts what its parent held at the fork
        maker = Path(__file__).resolve().parent / "make_checkpoint.py"
        shard = f"{min(gb / 3, 2.7)}"
        subprocess.run([sys.executable, maker, source, "--gb", f"{gb}", "--shard-gb", shard], check=True)
    size = sum(p.stat().st_size for p in source.iterdir())
    one_pair(source, folder, 0)  # warm-up
    pairs = [one_pair(source, folder, size if prime else 0) for _ in range(runs)]
    median = statistics.median
    ratios = sorted(a["wall"] / b["wall"] for a, b in pairs)
    row = {
        "source_gb": size / 1e9,
        "requant_wall": median(a["wall"] for a, _ in pairs),
        "cp_wall": median(b["wall"] for _, b in pairs),
        "ratio": median(ratios),
        "ratio_min": ratios[0],
        "ratio_max": ratios[-1],
        "cpu_s_per_gb": median(a["cpu"] for a, _ in pairs) / (size / 1e9),
        "cp_cpu_s_per_gb": median(b["cpu"] for _, b in pairs) / (size / 1e9),
        "rss_mb": max(a["rss"] for a, _ in pairs),
    }
    for name in ("requant", "cp", source.name):  # the next size must not start in a full page cache
        shutil.rmtree(folder / name, ignore_errors=True)
    return row


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gb", type=float, nargs="+", default=[1.1, 2, 4, 8])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--prime", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    print(f"{'GB':>6} {'requant s':>10} {'cp s':>8} {'ratio (min-max)':>20} {'CPU-s/GB':>9} {'cp':>6} {'RSS MB':>7}")
    rows = []
    for gb in given.gb:
        r = measure(given.folder, gb, given.runs, given.prime)
        rows.append(r)
        spread = f"{r['ratio']:.2f} ({r['ratio_min']:.2f}-{r['ratio_max']:.2f})"
        print(
            f"{r['source_gb']:6.2f} {r['requant_wall']:10.2f} {r['cp_wall']:8.2f} {spread:>20} "
            f"{r['cpu_s_per_gb']:9.2f} {r['cp_cpu_s_per_gb']:6.2f} {r['rss_mb']:7.0f}",
            flush=True,
        )
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))
