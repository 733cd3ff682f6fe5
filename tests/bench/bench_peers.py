r"""BF16 to NVFP4 by whole processes on one input: ours, llm-compressor's `model_free_ptq`, AMD Quark's file-to-file.

    python tests/bench/make_llama.py WORK/source --gb 1.35
    python -m venv WORK/llmc  && WORK/llmc/bin/pip  install torch==2.13.0 llmcompressor==0.14.0.1
    python -m venv WORK/quark && WORK/quark/bin/pip install torch==2.13.0 amd-quark==0.13 'transformers<5.17' accelerate
    python tests/bench/bench_peers.py WORK --llmc WORK/llmc/bin/python --quark WORK/quark/bin/python \
        [--repeat 3] [--write docs/peers.md]

The peers are no dependencies: each runs under the interpreter that is given, or not at all. Timed is the process from
its start to its end: imports, planning, reading, writing. CPU seconds are user and system time of it and its children,
peak memory the largest of them; the best of the repeats. Every tool may use all cores as it does by default. Ours
also forces its output to the disk, which the others leave to the kernel.

Afterwards the outputs are compared with ours in `scale: nearest`, tensor by tensor: global scales, block scales, codes,
and what each makes of the weights (SQNR against the source). Weight-only NVFP4 everywhere; embeddings are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from requant.kernels.cpu_dequant import dequantize_nvfp4

LLMC = """
import sys
from llmcompressor import model_free_ptq
model_free_ptq(sys.argv[1], sys.argv[2], scheme="NVFP4A16", ignore=["lm_head", "re:.*embed_tokens"], device="cpu")
"""
QUARK = """
import sys
from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import QConfig, QLayerConfig
from quark.torch.quantization.config.template import FP4Block16ScaleE4M3Scheme
weight = QLayerConfig(weight=FP4Block16ScaleE4M3Scheme().config.weight)
quantizer = ModelQuantizer(QConfig(global_quant_config=weight, exclude=["*lm_head*", "*embed_tokens*"]))
quantizer.direct_quantize_checkpoint(sys.argv[1], sys.argv[2], device="cpu")
"""
VERSIONS = """
from importlib.metadata import version
print(", ".join(f"{name} {version(name)}" for name in NAMES))
"""
OURS = """version: 1
name: peers
source: {{path: {source}}}
target: {{format: nvfp4-w4a16, layout: compressed-tensors, output: {output}, shard_size: 500MB}}
layers:
  - {{match: 'model.layers.*_proj', to: nvfp4, scale: {scale}}}
  - {{match: '*', to: keep}}
"""


def command_of(tool: str, work: Path, output: Path, given: argparse.Namespace) -> list[str]:
    source = work / "source"
    if tool == "llm-compressor":
        return [given.llmc, "-c", LLMC, str(source), str(output)]
    if tool == "Quark":
        return [given.quark, "-c", QUARK, str(source), str(output)]
    manifest = work / "ours.yaml"
    manifest.write_text(OURS.format(source=source, output=output, scale=tool.rpartition(" ")[2]), encoding="utf-8")
    return [sys.executable, "-m", "requant.convert.cli", "run", str(manifest), "--force"]


def timed(command: list[str], log: Path) -> dict[str, float]:
    """Wall and CPU seconds, peak bytes of the process and those that it waited for."""
    with log.open("wb") as out:
        begin = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=out)
        _, status, used = os.wait4(process.pid, 0)
        wall = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{command[0]} failed, see {log}:\n{log.read_text(errors='replace')[-3000:]}")
    return {"wall_s": wall, "cpu_s": used.ru_utime + used.ru_stime, "rss": used.ru_maxrss * 1024.0}


def start_up(command: list[str]) -> float:
    """CPU seconds that the imports of a tool take: its program without its last call."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    if "-c" in command:
        lines = command[2].strip().splitlines()[:-1]
        subprocess.run([command[0], "-c", "\n".join(lines)], check=True, capture_output=True)
    else:
        subprocess.run([*command[:4], "--help"], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


# --- the outputs ------------------------------------------------------------------------------------------------------


class Folder:
    """Tensors of a folder's safetensors files, as mapped bytes."""

    def __init__(self, folder: Path) -> None:
        self.tensors: dict[str, tuple[str, list[int], np.ndarray]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            raw = np.memmap(path, np.uint8, "r")
            size = int(raw[:8].view("<u8")[0])
            for name, entry in json.loads(raw[8 : 8 + size].tobytes()).items():
                if name != "__metadata__":
                    begin, end = entry["data_offsets"]
                    self.tensors[name] = (entry["dtype"], entry["shape"], raw[8 + size + begin : 8 + size + end])

    def packed(self, module: str) -> tuple[np.ndarray, np.ndarray, float, bool]:
        """Codes, block scales, global scale, whether that is a divisor."""
        divisor = f"{module}.weight_packed" in self.tensors
        codes = self.tensors[f"{module}.weight_packed" if divisor else f"{module}.weight"]
        scales = self.tensors[f"{module}.weight_scale"]
        scalar = self.tensors[f"{module}.weight_global_scale" if divisor else f"{module}.weight_scale_2"]
        return (
            codes[2].reshape(codes[1]),
            scales[2].reshape(scales[1]),
            float(scalar[2].copy().view("<f4")[0]),
            divisor,
        )


def compare(source: Folder, ours: Folder, theirs: Folder) -> dict[str, float]:
    """Shares of equal modules' globals, block scales and codes; SQNR of theirs against the source."""
    modules = [n.removesuffix(".weight_packed") for n in ours.tensors if n.endswith(".weight_packed")]
    count = dict.fromkeys(("globals", "scales", "codes", "all_scales", "all_codes"), 0)
    signal = noise = 0.0
    for module in modules:
        codes, scales, scalar, _ = ours.packed(module)
        their_codes, their_scales, their_scalar, divisor = theirs.packed(module)
        one = 1 / their_scalar if divisor else their_scalar
        count["globals"] += abs(one * scalar - 1) < 1e-6
        count["scales"] += int((scales == their_scales).sum())
        count["codes"] += int(((codes ^ their_codes) & 15 == 0).sum() + ((codes ^ their_codes) >> 4 == 0).sum())
        count["all_scales"] += scales.size
        count["all_codes"] += 2 * codes.size
        exact = source.tensors[f"{module}.weight"][2].view("<u2").reshape(len(codes), -1)
        for first in range(0, len(codes), 512):
            rows = slice(first, first + 512)
            values = (exact[rows].astype(np.uint32) << 16).view(np.float32)
            out = np.empty(values.shape, np.float32)
            dequantize_nvfp4(
                np.ascontiguousarray(their_codes[rows]),
                np.ascontiguousarray(their_scales[rows]),
                np.float32(their_scalar),
                out,
                reciprocal=divisor,
            )
            signal += float(np.square(values, dtype=np.float64).sum())
            noise += float(np.square(values - out, dtype=np.float64).sum())
    return {
        "globals": count["globals"] / len(modules),
        "scales": count["scales"] / count["all_scales"],
        "codes": count["codes"] / count["all_codes"],
        "sqnr_db": 10 * np.log10(signal / noise),
        "weights": count["all_codes"],
    }


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def versions(tool: str, given: argparse.Namespace) -> str:
    names = {"llm-compressor": ["llmcompressor", "compressed-tensors", "torch"], "Quark": ["amd-quark", "torch"]}
    if tool not in names:
        return f"numpy {np.__version__}"
    python = given.llmc if tool == "llm-compressor" else given.quark
    done = subprocess.run(
        [python, "-c", VERSIONS.replace("NAMES", repr(names[tool]))], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--llmc", help="Python that has llmcompressor")
    parser.add_argument("--quark", help="Python that has amd-quark")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--write", type=Path, help="put the table between the markers of this Markdown file")
    given = parser.parse_args()
    work: Path = given.work.resolve()
    tools = ["requant nearest", "requant mse"]
    tools += ["llm-compressor"] * bool(given.llmc) + ["Quark"] * bool(given.quark)
    source = Folder(work / "source")
    read = size_of(work / "source")
    outputs = {tool: work / f"out-{tool.replace(' ', '-')}" for tool in tools}
    rows = {}
    for tool in tools:
        command = command_of(tool, work, outputs[tool], given)
        idle = start_up(command)
        runs = []
        for _ in range(given.repeat):
            shutil.rmtree(outputs[tool], ignore_errors=True)
            runs.append(timed(command, work / "log.txt"))
        rows[tool] = {key: min(run[key] for run in runs) for key in runs[0]} | {"start_s": idle}
        rows[tool]["bytes"] = size_of(outputs[tool])
        print(tool, {key: round(value, 2) for key, value in rows[tool].items()}, file=sys.stderr, flush=True)
    ours = Folder(outputs["requant nearest"])
    lines = [
        "| tool | wall s | CPU s | of that imports | peak memory, GB | GB written | M weights / CPU-s "
        "| globals equal | block scales equal | codes equal | SQNR dB |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for tool in tools:
        row, same = rows[tool], compare(source, ours, Folder(outputs[tool]))
        lines.append(
            f"| {tool} ({versions(tool, given)}) | {row['wall_s']:.1f} | {row['cpu_s']:.1f} | {row['start_s']:.1f} | "
            f"{row['rss'] / 1e9:.2f} | {row['bytes'] / 1e9:.3f} | {same['weights'] / row['cpu_s'] / 1e6:.0f} | "
            f"{same['globals']:.1%} | {same['scales']:.2%} | {same['codes']:.2%} | {same['sqnr_db']:.2f} |"
        )
    made = "\n".join(lines)
    print(f"{read / 1e9:.2f} GB of BF16\n\n{made}")
    if given.write:
        text = given.write.read_text(encoding="utf-8")
        before, _, rest = text.partition("<!-- peers -->\n")
        given.write.write_text(
            f"{before}<!-- peers -->\n{made}\n<!-- end -->{rest.partition('<!-- end -->')[2]}", "utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
