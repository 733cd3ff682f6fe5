"""Peak memory of a run whose one fused group is as large as is asked for: gpt-oss's experts, all in one tensor.

    python tests/bench/bench_memory.py FOLDER [--experts 128] [--case bf16-nearest ...]

gate_up_proj [E, 2880, 5760], in BF16 (4.2 GB with 128 experts) or MXFP4, in one file; one expert's random bytes, again
and again. Each case is run by a process of its own, which reads its peak off /proc at the end. The project's bound is
1 GB plus the largest fused group; the table says how far below that it stays. Takes 6 GB of disk at most.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

HIDDEN, INTER = 2880, 2880
"""openai/gpt-oss-120b config.json: hidden_size, intermediate_size; num_local_experts is 128."""
NAME = "model.layers.0.mlp.experts.gate_up_proj"


class Case(NamedTuple):
    """source: bf16 or mxfp4. scales: E8M0 bytes [low, high] of an MXFP4 source. model: how its experts are stacked."""

    source: str
    format: str
    layout: str
    scale: str
    scales: tuple[int, int] = (110, 118)
    model: str = "gpt_oss"


CASES = {
    "bf16-nearest": Case("bf16", "nvfp4-w4a16", "modelopt", "nearest"),
    "bf16-four-over-six": Case("bf16", "nvfp4-w4a16", "modelopt", "four-over-six"),
    "bf16-mse": Case("bf16", "nvfp4-w4a16", "modelopt", "mse"),
    "bf16-experts": Case("bf16", "nvfp4-w4a16", "modelopt-experts", "nearest"),
    "bf16-mxfp4": Case("bf16", "mxfp4", "compressed-tensors", "nearest", model="qwen3_moe"),
    "bf16-fp8": Case("bf16", "fp8", "compressed-tensors", "nearest", model="qwen3_moe"),
    "mxfp4-window": Case("mxfp4", "nvfp4-w4a16", "modelopt", "lossless"),
    "mxfp4-halves": Case("mxfp4", "nvfp4-w4a16", "modelopt", "lossless", (96, 130)),
    "mxfp4-experts": Case("mxfp4", "nvfp4-w4a16", "modelopt-experts", "lossless", (96, 130)),
    "mxfp4-bf16": Case("mxfp4", "bf16", "modelopt", "lossless"),
}

CHILD = """
import sys
from requant.convert.pipeline import prepare, run_job
run_job(prepare(sys.argv[1]))
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))  # getrusage counts the parent's
print(peak.split()[1])
"""


def write_source(folder: Path, case: Case, experts: int, inter: int = INTER, hidden: int = HIDDEN) -> int:
    """The checkpoint; bytes of its fused group."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    count = 2 * inter * hidden
    if case.source == "bf16":
        values = rng.standard_normal(count, dtype=np.float32) * np.float32(0.02)
        shape = (experts, hidden, 2 * inter) if case.model == "gpt_oss" else (experts, 2 * inter, hidden)
        planes = {NAME: ("BF16", shape, (values.view(np.uint32) >> 16).astype("<u2").tobytes())}
    else:
        codes = rng.integers(0, 256, count // 2, dtype=np.uint8).tobytes()
        scales = rng.integers(case.scales[0], case.scales[1] + 1, count // 32, dtype=np.uint8).tobytes()
        planes = {
            f"{NAME}_blocks": ("U8", (experts, 2 * inter, hidden // 32, 16), codes),
            f"{NAME}_scales": ("U8", (experts, 2 * inter, hidden // 32), scales),
        }
    header: dict[str, object] = {}
    position = 0
    for name, (dtype, shape, data) in planes.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(data) * experts]}
        position += len(data) * experts
    raw = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for _, _, data in planes.values():
            for _ in range(experts):
                file.write(data)
    config: dict[str, object] = {"model_type": case.model, "hidden_size": hidden, "moe_intermediate_size": inter}
    if case.source == "mxfp4":
        config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))
    return position


def peak(source: Path, output: Path, case: Case) -> tuple[float, float]:
    """Peak RSS (MB) and CPU-seconds of one conversion in a process of its own."""
    to = case.format.removesuffix("-w4a16")
    manifest = source.with_suffix(".yaml")
    manifest.write_text(
        json.dumps(
            {
                "version": 1,
                "name": "memory",
                "source": {"path": str(source)},
                "target": {"format": case.format, "layout": case.layout, "output": str(output), "shard_size": "500GB"},
                "layers": [{"match": "*", "to": to, "scale": case.scale}],
                "execute": {"workers": 2},
            }
        )
    )
    before = os.times()
    child = subprocess.run([sys.executable, "-P", "-c", CHILD, str(manifest)], stdout=subprocess.PIPE, check=True)
    after = os.times()
    shutil.rmtree(output)
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return int(child.stdout) / 1024, cpu


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--case", choices=list(CASES), nargs="+", default=list(CASES))
    given = parser.parse_args()
    print(f"{'case':20} {'group MB':>9} {'peak RSS MB':>12} {'CPU s':>7} {'wall s':>7}")
    made: tuple[str, tuple[int, int], str] | None = None
    size = 0
    for name in given.case:
        case = CASES[name]
        source = given.folder / "memory-source"
        if made != (case.source, case.scales, case.model):
            shutil.rmtree(source, ignore_errors=True)
            size = write_source(source, case, given.experts)
            made = (case.source, case.scales, case.model)
        begin = time.perf_counter()
        rss, cpu = peak(source, given.folder / "memory-out", case)
        print(f"{name:20} {size / 1e6:9.0f} {rss:12.0f} {cpu:7.1f} {time.perf_counter() - begin:7.1f}", flush=True)
    shutil.rmtree(given.folder / "memory-source")
    (given.folder / "memory-source.yaml").unlink()
