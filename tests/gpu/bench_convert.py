"""Conversions on the processor and on the GPU: the same bytes, what bounds each, how fast.

    python tests/gpu/bench_convert.py WORK [--gb 8] [--sources BF16 FP8 MXFP4] [--devices cpu cuda] [--json FILE]

Checkpoints are written to WORK: a plain BF16 one, FP8 in blocks of 128 x 128, and DeepSeek-V4 experts whose exponents
span 24, so that codes must be looked at. Each is converted by `execute.device: cpu`, `cuda` and `auto`, sources in the
page cache, and sha256 over every output shard is compared. Times are of the run alone, without planning.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import numpy as np
from requant.convert.pipeline import prepare, run_job
from requant.convert.runrecord import run_text

N, K = 14336, 4096
"""The MLP of a Llama-3 8B, one matrix."""
PATTERN = np.random.default_rng(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--gb", type=float, default=8.0)
    parser.add_argument("--sources", nargs="+", default=["BF16", "FP8", "MXFP4"])
    parser.add_argument("--devices", nargs="+", default=["cpu", "cuda", "cpu", "cuda", "auto"])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    rows, unequal = [], 0
    for name in given.sources:
        make = {"BF16": bf16, "FP8": fp8, "MXFP4": deepseek}[name]
        source = given.work / "source"
        layers = make(source, int(given.gb * 1e9))
        hashes = {}
        for device in given.devices:
            output = given.work / "output"
            manifest = given.work / "manifest.json"
            manifest.write_text(json.dumps({
                "version": 1, "name": "bench", "source": {"path": str(source)}, "layers": layers,
                "target": {"format": "nvfp4", "layout": "modelopt", "output": str(output), "shard_size": "2GB"},
                "execute": {"device": device},
            }))  # fmt: skip
            result = run_job(prepare(str(manifest)))
            hashes[device] = hash_shards(output)
            equal = hashes[device] == next(iter(hashes.values()))
            unequal += not equal
            verdict = f"{'same' if equal else 'OTHER'} bytes as {given.devices[0]}"
            print(f"{name}, device {device}: {verdict}, {len(hashes[device])} shards")
            print(run_text(result.record), flush=True)
            print(f"  peak memory of this process so far: {getrusage(RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB", flush=True)
            rows.append({"source": name, "device": device, "equal": equal, **result.record})
            shutil.rmtree(output)
        shutil.rmtree(source)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))
    return unequal


def hash_shards(folder: Path) -> dict[str, str]:
    """sha256 of every shard."""

    def one(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    paths = sorted(folder.glob("*.safetensors"))
    with ThreadPoolExecutor() as pool:
        return dict(zip((path.name for path in paths), pool.map(one, paths), strict=True))


def bf16(folder: Path, total: int) -> list[dict[str, str]]:
    """As many MLPs as fit, one weight repeated under different scales."""
    w = (PATTERN.standard_normal((N, K), dtype=np.float32) * 0.02).view(np.uint32) >> np.uint32(16)
    data = w.astype("<u2").tobytes()
    names = [
        f"model.layers.{i // 3}.mlp.{('gate', 'up', 'down')[i % 3]}_proj.weight" for i in range(total // len(data))
    ]
    write(folder, [(name, "BF16", (N, K), lambda: data) for name in names], {"model_type": "llama"})
    return [{"match": "*_proj", "to": "nvfp4", "scale": "nearest"}, {"match": "*", "to": "keep"}]


def fp8(folder: Path, total: int) -> list[dict[str, str]]:
    """DeepSeek-V3's form, F32 scales."""
    codes = PATTERN.integers(0, 0x7F, (N, K), dtype=np.uint8) | PATTERN.choice(np.uint8([0, 0x80]), (N, K))
    data, shape = codes.tobytes(), (N // 128, K // 128)
    grid = np.exp2(PATTERN.uniform(-14, -10, shape)).astype("<f4").tobytes()
    entries: list[tuple[str, str, tuple[int, ...], Callable[[], bytes]]] = []
    for i in range(total // len(data)):
        name = f"model.layers.{i // 3}.mlp.{('gate', 'up', 'down')[i % 3]}_proj"
        entries += [(f"{name}.weight", "F8_E4M3", (N, K), lambda: data)]
        entries += [(f"{name}.weight_scale_inv", "F32", shape, lambda: grid)]
    quant = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    write(folder, entries, {"model_type": "llama", "quantization_config": quant})
    return [{"match": "*_proj", "to": "nvfp4", "scale": "nearest"}, {"match": "*", "to": "keep"}]


def deepseek(folder: Path, total: int) -> list[dict[str, str]]:
    """tests/bench/make_checkpoint.py's checkpoint of DeepSeek-V4-Flash shapes, a wider span of exponents."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
    from make_checkpoint import make

    make(folder, total, 2 * 10**9, span=24)
    return [{"match": "layers.*.ffn.experts.*", "to": "nvfp4"}, {"match": "*", "to": "keep"}]


def write(
    folder: Path, entries: list[tuple[str, str, tuple[int, ...], Callable[[], bytes]]], config: dict[str, object]
) -> None:
    """One safetensors file, a norm last (every rule must match something)."""
    norm = ("model.norm.weight", "BF16", (K,), lambda: bytes(2 * K))
    header, position = {}, 0
    for name, dtype, shape, data in [*entries, norm]:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(data())]}
        position += len(data())
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for *_, data in [*entries, norm]:
            file.write(data())
    (folder / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    sys.exit(main())
