"""GPU quantizers against a copy on the same card, in the same run: GB/s read and written, and the fraction of copy.

python tests/gpu/bench_gpu_quantize.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from requant.kernels import gpu_quantize
from requant.kernels.cuda_build import architecture
from requant.validate.gpu_clock import measure_ceilings, timed

SHAPES = {
    "one expert of DeepSeek-V4-Flash, w1 or w3": (2048, 4096),
    "8192 x 8192": (8192, 8192),
    "2 GB": (262144, 8192),
}
"""The first two fit the L2 cache of the card, whole or in part; the last does not."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    library = gpu_quantize.load_library(architecture(torch.cuda.get_device_capability()))
    ceilings = measure_ceilings()
    print(f"{torch.cuda.get_device_name()}: read {ceilings.read_gbps:.0f}, copy {ceilings.copy_gbps:.0f} GB/s")
    print(f"{'kernel':34} {'weights':>22} {'us':>9} {'GB/s':>7} {'of copy':>8}")
    rows = []
    for name, (n, k) in SHAPES.items():
        sets = max(2, -(-(1 << 28) // (n * k // 2))) if n * k < 1 << 30 else 2
        for kernel, make in KERNELS.items():
            if kernel.startswith("BF16") and n * k > 1 << 30:
                sets = 1
            calls, nbytes = [], 0
            for seed in range(min(sets, 32)):
                call, nbytes = make(library, n, k, seed)
                calls.append(call)
            us, spread = timed(calls, max(4, len(calls)))
            gbps = nbytes / us / 1e3
            rows.append(
                {"kernel": kernel, "weights": name, "n": n, "k": k, "us": us, "spread_us": spread, "gbps": gbps}
            )
            rows[-1]["of_copy"] = gbps / ceilings.copy_gbps
            print(f"{kernel:34} {name[:22]:>22} {us:9.1f} {gbps:7.0f} {100 * gbps / ceilings.copy_gbps:7.0f}%")
            del calls
            torch.cuda.empty_cache()
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def random_mxfp4(n: int, k: int, span: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    return codes, torch.randint(121 - span, 122, (n, k // 32), dtype=torch.uint8, device="cuda")


def window(library, n: int, k: int, seed: int):
    codes, scales = random_mxfp4(n, k, 10, seed)
    out = torch.empty_like(codes), torch.empty((n, k // 16), dtype=torch.uint8, device="cuda")
    arguments = (codes.data_ptr(), scales.data_ptr(), scales.numel(), -14, out[0].data_ptr(), out[1].data_ptr())
    keep = (codes, scales, out)
    return lambda: (library.requant_repack_window(*arguments, stream()), keep), n * k // 2 * 2 + n * k // 32 * 3


def halves(span: int):
    def make(library, n: int, k: int, seed: int):
        codes, scales = random_mxfp4(n, k, span, seed)
        out = torch.empty_like(codes), torch.empty((n, k // 16), dtype=torch.uint8, device="cuda")
        counts = torch.zeros(4, dtype=torch.int64, device="cuda")
        pointers = (out[0].data_ptr(), out[1].data_ptr(), counts.data_ptr())
        arguments = (codes.data_ptr(), scales.data_ptr(), scales.numel(), -14, *pointers)
        keep = (codes, scales, out, counts)
        return lambda: (library.requant_repack_halves(*arguments, stream()), keep), n * k // 2 * 2 + n * k // 32 * 3

    return make


def census(library, n: int, k: int, seed: int):
    codes, scales = random_mxfp4(n, k, 20, seed)
    hist = torch.zeros((256, 32), dtype=torch.int64, device="cuda")
    arguments = (codes.data_ptr(), scales.data_ptr(), scales.numel(), hist.data_ptr())
    keep = (codes, scales, hist)
    return lambda: (library.requant_half_census(*arguments, stream()), keep), n * k // 2 + n * k // 32


def bf16(library, n: int, k: int, seed: int):
    """amax, global scale and encoding; the weight is counted twice, since it is read twice."""
    torch.manual_seed(seed)
    w = torch.randn((n, k), dtype=torch.bfloat16, device="cuda")
    amax = torch.zeros(1, dtype=torch.int32, device="cuda")
    scale = torch.empty(1, dtype=torch.float32, device="cuda")
    codes = torch.empty((n, k // 2), dtype=torch.uint8, device="cuda")
    scales = torch.empty((n, k // 16), dtype=torch.uint8, device="cuda")
    keep = (w, amax, scale, codes, scales)

    def call() -> object:
        library.requant_bf16_amax(w.data_ptr(), scales.numel(), amax.data_ptr(), stream())
        library.requant_global_scale(amax.data_ptr(), scale.data_ptr(), stream())
        library.requant_bf16_nvfp4(
            w.data_ptr(), scales.numel(), scale.data_ptr(), codes.data_ptr(), scales.data_ptr(), stream()
        )
        return keep

    return call, n * k * 4 + n * k // 2 + n * k // 16


KERNELS = {
    "MXFP4 -> NVFP4, step 1": window,
    "MXFP4 -> NVFP4, step 2, all in range": halves(10),
    "MXFP4 -> NVFP4, step 2, 1 in 4 out": halves(19),
    "census of step 2": census,
    "BF16 -> NVFP4, amax and encode": bf16,
}

if __name__ == "__main__":
    main()
