"""GPTQ to FP4, ours and llm-compressor's, on the same weights, Hessians and block scales of SmolLM2.

    python -m requant.convert.smollm2 WORK/SmolLM2
    python -m venv WORK/llmc && WORK/llmc/bin/pip install torch==2.13.0 llmcompressor==0.14.0.1
    python tests/bench/bench_gptq.py WORK --text sentencepiece-0.2.3/test/botchan.txt --llmc WORK/llmc/bin/python

Needs the extra eval. The peer is no dependency: its `quantize_weight` (GPTQModifier's core, with that modifier's own
defaults: static order of columns, blocks of 128, 1% damping) runs under the interpreter that is given. The figure is
the squared error of the layer's output over the calibration tokens, E |x (W - W')^T|^2 = tr(D H D^T), in percent of
E |x W^T|^2, in FP64.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

LAYERS = (0, 10, 20, 29)
LEAVES = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
PEER = """
import sys, time
from pathlib import Path
import numpy as np, torch
from compressed_tensors.quantization import QuantizationArgs
from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight
spent = 0.0
for path in sorted(Path(sys.argv[1]).glob("*.in.npz")):
    given = np.load(path)
    nvfp4 = given["s2"] > 0
    arguments = QuantizationArgs(
        num_bits=4, type="float", symmetric=True, strategy="tensor_group" if nvfp4 else "group",
        group_size=16 if nvfp4 else 32, actorder="static",
    )
    w, h, scale = (torch.tensor(given[name])[None] for name in ("w", "h", "steps"))
    begin = time.process_time()
    done, _, fallback = quantize_weight(
        w, h, scale, torch.zeros_like(scale), 1 / torch.tensor(given["s2"])[None] if nvfp4 else None, arguments
    )
    spent += time.process_time() - begin
    assert not fallback.any(), path
    np.save(str(path).replace(".in.npz", ".out.npy"), done[0].numpy())
print(spent)
"""


def hessians(work: Path, text: Path) -> Path:
    """Measured once; the file of the calibration."""
    from requant.convert.calibrate import calibrate, calibration_path, load_calibration
    from requant.convert.checkpoint import open_checkpoint
    from requant.convert.layouts.reading import recognise
    from requant.manifests.schema import Calibrate

    os.environ["XDG_CACHE_HOME"] = str(work / "cache")
    catalogue = open_checkpoint(work / "SmolLM2")
    wanted = Calibrate(text=str(text), samples=32, sequence_length=512)
    path = calibration_path(catalogue, wanted)
    if load_calibration(path, hessians=True) is None:
        layers = tuple(f"model.layers.{layer}." for layer in LAYERS)
        layout = recognise(catalogue, "auto")[0]
        calibrate(work / "SmolLM2", catalogue, layout, wanted, hessian=lambda module: module.startswith(layers))
    return path


def weight_bits(work: Path, module: str) -> np.ndarray:
    import torch
    from safetensors import safe_open

    with safe_open(str(work / "SmolLM2" / "model.safetensors"), "pt") as file:
        return file.get_tensor(f"{module}.weight").view(torch.uint16).numpy()


def main() -> int:
    from requant.convert.calibrate import hessian_of
    from requant.kernels import reference
    from requant.kernels.formats import E2M1_VALUES, E4M3_VALUES, E8M0_VALUES, NumberFormat
    from requant.kernels.gptq import compensation, round_compensated
    from requant.kernels.quantize import amax, bf16_to_mxfp4, bf16_to_nvfp4, nvfp4_global_scale

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--llmc", required=True, help="Python that has llmcompressor")
    given = parser.parse_args()
    work: Path = given.work.resolve()
    calibration = hessians(work, given.text.resolve())
    folder = work / "gptq"
    folder.mkdir(exist_ok=True)
    kept, spent = {}, 0.0
    for number in (NumberFormat.NVFP4, NumberFormat.MXFP4):
        for layer in LAYERS:
            for group in LEAVES:
                bits = {leaf: weight_bits(work, f"model.layers.{layer}.{leaf}") for leaf in group}
                s2 = nvfp4_global_scale(max(amax(w) for w in bits.values()))
                for leaf, w in bits.items():
                    h = hessian_of(calibration, f"model.layers.{layer}.{leaf}")
                    codes = np.empty((w.shape[0], w.shape[1] // 2), np.uint8)
                    scales = np.empty((w.shape[0], w.shape[1] // number.group), np.uint8)
                    values = (w.astype(np.uint32) << 16).view(np.float32)
                    if number is NumberFormat.NVFP4:
                        bf16_to_nvfp4(w, s2, codes, scales)
                        steps = E4M3_VALUES[scales]
                    else:
                        bf16_to_mxfp4(w, codes, scales)
                        steps = E8M0_VALUES[scales]
                    own = s2 if number is NumberFormat.NVFP4 else None
                    ours = np.empty_like(codes)
                    begin = time.process_time()
                    round_compensated(values, number, scales, own, compensation(h), ours)
                    spent += time.process_time() - begin
                    name = f"{number.value}-{layer}-{leaf}"
                    unit = np.repeat(steps.astype(np.float64), number.group, axis=1) * float(own or 1)
                    kept[name] = (values, h, *(E2M1_VALUES[reference.unpack_nibbles(c)] * unit for c in (codes, ours)))
                    np.savez(folder / f"{name}.in.npz", w=values, h=h, steps=steps, s2=np.float32(own or 0))
    done = subprocess.run([given.llmc, "-c", PEER, str(folder)], check=True, capture_output=True, text=True)
    totals: dict[tuple[str, str], np.ndarray] = {}
    for name, (values, h, nearest, ours) in kept.items():
        theirs = np.load(folder / f"{name}.out.npy").astype(np.float64)
        exact, wide = values.astype(np.float64), h.astype(np.float64)
        errors = [float(np.einsum("nk,kj,nj->", d, wide, d, optimize=True)) for d in
                  (exact, nearest - exact, ours - exact, theirs - exact)]  # fmt: skip
        same = np.isclose(theirs, ours, rtol=1e-5, atol=1e-12).mean()
        number, _, leaf = name.split("-")
        totals.setdefault((number, leaf), np.zeros((0, 4)))
        row = [*(100 * e / errors[0] for e in errors[1:]), 100 * same]
        totals[number, leaf] = np.vstack([totals[number, leaf], row])
    print(f"CPU seconds: ours {spent:.1f}, llm-compressor {float(done.stdout.split()[-1]):.1f}\n")
    print("| format | layer | nearest | ours | llm-compressor | weights with the same value |")
    print("|---|---|--:|--:|--:|--:|")
    for (number, leaf), rows in totals.items():
        n, o, t, same = rows.mean(0)
        print(f"| {number} | {leaf} | {n:.4f} % | {o:.4f} % | {t:.4f} % | {same:.2f} % |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
