# ruff: noqa: B023, C408, E501  a script of measurements: closures are called at once, tables are wide
"""W4A16 as the public functions run it, against humming in the same process: the tables of docs/kernels-w4a16.md.

`python tests/bench/bench_w4a16.py --out DIR` on a machine with the GPU (and humming-kernels, if it is to be compared).
Weights rotate past the L2, CUDA graphs, median and spread of replays (validate/gpu_clock.py); outputs are filled with
NaN right before the timed replays, and every one of the last launch's is held to its bound after them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
from requant.kernels import w4a16
from requant.kernels import w4a16_library as lib
from requant.kernels.formats import NumberFormat
from requant.kernels.reference_torch import dequantize, excess, products
from requant.validate import gpu_clock

DENSE = [(4096, 4096), (7168, 2048), (5120, 2944), (12288, 4096), (8192, 8192)]
MOE = [("DeepSeek-V4-Flash gate_up", 256, 6, 4096, 4096), ("DeepSeek-V4-Flash down", 256, 6, 4096, 2048)]
MOE += [("gpt-oss-120b gate_up", 128, 4, 5760, 2880), ("gpt-oss-120b down", 128, 4, 2880, 2880)]
ROTATE_BYTES = 320e6
LAUNCHES = 96
NVFP4 = NumberFormat.NVFP4
DEVICE = "cuda"


def weight(n, k, experts=None):
    lead = () if experts is None else (experts,)
    codes = torch.randint(0, 256, (*lead, n, k // 2), dtype=torch.uint8, device=DEVICE)
    return codes, torch.randint(0x28, 0x50, (*lead, n, k // 16), dtype=torch.uint8, device=DEVICE)


def timed(calls, y=None):
    """Median and spread, microseconds per call; y: what they write."""
    return gpu_clock.timed(calls, LAUNCHES, poison=[] if y is None else [y])


def assert_right(y, x, w):
    exact, terms = products(x, w)
    if not (found := excess(y, exact, terms)) <= 1:
        raise RuntimeError(f"an output is off by {found:.3g} times its bound")


def read_ceiling(library):
    import ctypes

    buffer = torch.randint(0, 256, (2_000_000_000,), dtype=torch.uint8, device=DEVICE)
    sink = torch.zeros(4, device=DEVICE)
    library.requant_read.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    stream = torch.cuda.current_stream
    times = [
        timed(
            [
                lambda b=b: library.requant_read(
                    buffer.data_ptr(), buffer.numel(), sink.data_ptr(), b, stream().cuda_stream
                )
            ]
        )[0]
        for b in (264, 528, 1056)
    ]
    return buffer.numel() / min(times) / 1e3


def humming_layers(weights, n, k):
    from humming.layer import HummingLayer, HummingMethod

    layers = []
    for codes, scales in weights:
        layer = HummingLayer(n, k, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, torch_dtype=torch.bfloat16).to(
            DEVICE
        )
        scale = torch.full((1,), 0.01, device=DEVICE)
        layer.load_from_tensors(
            {"weight": codes, "weight_scale": scales.view(torch.float8_e4m3fn), "weight_scale_2": scale}
        )
        layer.transform()
        layers.append(layer)
    return layers, HummingMethod.get_default_tuning_configs(layers[0])


def compile_humming(n, k, ms):
    """Run everything of humming once, so that its cache on disk has the kernels."""
    (layer,), tuning = humming_layers([weight(n, k)], n, k)
    for m in ms:
        x = torch.randn(m, k, device=DEVICE).bfloat16()
        layer(x, outputs=torch.empty(m, n, device=DEVICE, dtype=torch.bfloat16), tuning_config=tuning)
    torch.cuda.synchronize()


def warm_humming(ms):
    """Its kernels are compiled on first use, most of a minute one after the other: all shapes at once instead.

    A process that fails leaves its shape to be compiled when it is timed.
    """
    command = [sys.executable, "-P", __file__, "--ms", ",".join(map(str, ms)), "--compile-humming"]
    for process in [subprocess.Popen([*command, str(n), str(k)]) for n, k in DENSE]:
        if process.wait() != 0:
            print("humming did not compile beforehand", flush=True)


def dense(ms, with_humming):
    rows = []
    if with_humming:
        warm_humming(ms)
    for n, k in DENSE:
        size = n * k * 9 / 16
        weights = [weight(n, k) for _ in range(max(2, -(-int(ROTATE_BYTES) // int(size))))]
        w = dequantize(NVFP4, *weights[-1]) * 0.01  # whose output is left: the last launch's
        layers, tuning = humming_layers(weights, n, k) if with_humming else ([], None)
        for m in ms:
            x = torch.randn(m, k, device=DEVICE).bfloat16()
            y = torch.empty(m, n, device=DEVICE, dtype=torch.bfloat16)
            row = dict(n=n, k=k, m=m, bytes=size)
            for name, constant in (("ours", False), ("ours_constant_weights", True)):
                calls = [
                    lambda c=c, s=s: w4a16.w4a16_matmul(x, c, s, 0.01, fmt=NVFP4, out=y, constant_weights=constant)
                    for c, s in weights
                ]
                row[name], row[name + "_spread"] = timed(calls, y)
                assert_right(y, x, w)
            if layers:
                row["humming"], row["humming_spread"] = timed(
                    [lambda layer=layer: layer(x, outputs=y, tuning_config=tuning) for layer in layers], y
                )
                row["humming_of_bound"] = excess(y, *products(x, w))
            rows.append(row)
            gain = (
                f"{row['humming'] / row['ours']:.2f}x {row['humming'] / row['ours_constant_weights']:.2f}x humming {row['humming']:.2f}"
                if layers
                else ""
            )
            print(
                f"{n}x{k} M={m} {row['ours']:.2f} +-{row['ours_spread']:.2f} {row['ours_constant_weights']:.2f} us {gain}",
                flush=True,
            )
        del weights, w, layers
    return rows


def moe(cs):
    rows = []
    for name, experts, topk, n, k in MOE:
        codes, scales = weight(n, k, experts)
        gs = torch.rand(experts, device=DEVICE) + 0.5
        for c in cs:
            x = torch.randn(c, k, device=DEVICE).bfloat16()
            y = torch.empty(c, topk, n, device=DEVICE, dtype=torch.bfloat16)
            ids = [
                torch.stack([torch.randperm(experts, device=DEVICE)[:topk] for _ in range(c)]).int() for _ in range(8)
            ]
            routings = [w4a16.route_experts(i, experts) for i in ids]
            touched = sum(i.unique().numel() for i in ids) / len(ids) * n * k * 9 / 16
            calls = [lambda r=r: w4a16.w4a16_moe(x, codes, scales, gs, routing=r, fmt=NVFP4, out=y) for r in routings]
            us, spread = timed(calls, y)
            for e in ids[-1].unique().tolist():
                token, slot = torch.where(ids[-1] == e)
                assert_right(y[token, slot], x[token], dequantize(NVFP4, codes[e], scales[e], gs[e]))
            route_us, _ = timed([lambda i=i: w4a16.route_experts(i, experts) for i in ids])
            rows.append(dict(name=name, c=c, us=us, spread=spread, bytes=touched, route_us=route_us))
            print(
                f"moe {name} C={c} {us:.1f} +-{spread:.1f} us {touched / us / 1e3:.0f} GB/s {touched / 1e6:.0f} MB route {route_us:.1f}",
                flush=True,
            )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=".")
    parser.add_argument("--no-humming", action="store_true")
    parser.add_argument("--only", choices=["dense", "moe"])
    parser.add_argument("--ms", default="1,2,4,8,16,32,64", help="M of the dense products")
    parser.add_argument("--compile-humming", nargs=2, type=int, metavar=("N", "K"), help="only compile its kernels")
    args = parser.parse_args()
    ms = [int(m) for m in args.ms.split(",")]
    torch.manual_seed(0)
    if args.compile_humming:
        compile_humming(*args.compile_humming, ms)
        return
    ceiling = read_ceiling(lib.load(lib.architecture(*torch.cuda.get_device_capability())))
    print(torch.cuda.get_device_name(), f"read ceiling {ceiling:.0f} GB/s", flush=True)
    result = dict(card=torch.cuda.get_device_name(), ceiling_gbps=ceiling)
    if args.only != "dense":
        result["moe"] = moe((1, 2, 4, 8, 16, 32))
    if args.only != "moe":
        result["dense"] = dense(ms, not args.no_humming)
    Path(args.out, "bench_w4a16.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
