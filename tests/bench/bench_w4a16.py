# ruff: noqa: B023, C408, E501  a script of measurements: closures are called at once, tables are wide
"""W4A16 as the public functions run it, against humming in the same process: the tables of docs/kernels-w4a16.md.

`python tests/bench/bench_w4a16.py --out DIR` on a machine with the GPU (and humming-kernels, if it is to be compared).
Weights rotate past the L2, CUDA graphs, median and spread of replays; outputs are poisoned before and checked after.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
from requant.kernels import w4a16
from requant.kernels import w4a16_library as lib
from requant.kernels.formats import E2M1_VALUES, E4M3_VALUES, NumberFormat

DENSE = [(4096, 4096), (7168, 2048), (5120, 2944), (12288, 4096), (8192, 8192)]
MOE = [("DeepSeek-V4-Flash gate_up", 256, 6, 4096, 4096), ("DeepSeek-V4-Flash down", 256, 6, 4096, 2048)]
MOE += [("gpt-oss-120b gate_up", 128, 4, 5760, 2880), ("gpt-oss-120b down", 128, 4, 2880, 2880)]
ROTATE_BYTES = 320e6
NVFP4 = NumberFormat.NVFP4


def weight(n, k, experts=None):
    lead = () if experts is None else (experts,)
    codes = torch.randint(0, 256, (*lead, n, k // 2), dtype=torch.uint8, device="cuda")
    return codes, torch.randint(0x28, 0x50, (*lead, n, k // 16), dtype=torch.uint8, device="cuda")


def dequantize(codes, scales):
    table = torch.tensor(E2M1_VALUES, dtype=torch.float64, device="cuda")
    scale = torch.tensor(E4M3_VALUES, dtype=torch.float64, device="cuda")
    values = table[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()]
    return values * scale[scales.long()].repeat_interleave(16, -1)


def timed(calls, reps=9):
    """Median and spread, microseconds per call."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    rounds = max(1, round(96 / len(calls)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    times = []
    for _ in range(reps):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / (rounds * len(calls)))
    return statistics.median(times), max(times) - min(times)


def assert_right(y, exact, magnitude):
    excess = (y.double() - exact).abs() - (2.0**-8 * exact.abs() + 2.0**-14 * magnitude)
    if not excess.max().item() <= 0:
        raise RuntimeError(f"output out of bound by {excess.max().item()}")


def read_ceiling(library):
    import ctypes

    buffer = torch.randint(0, 256, (2_000_000_000,), dtype=torch.uint8, device="cuda")
    sink = torch.zeros(4, device="cuda")
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
        layer = HummingLayer(
            n, k, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, torch_dtype=torch.bfloat16
        ).cuda()
        scale = torch.full((1,), 0.01, device="cuda")
        layer.load_from_tensors(
            {"weight": codes, "weight_scale": scales.view(torch.float8_e4m3fn), "weight_scale_2": scale}
        )
        layer.transform()
        layers.append(layer)
    return layers, HummingMethod.get_default_tuning_configs(layers[0])


def dense(ms, with_humming):
    rows = []
    for n, k in DENSE:
        size = n * k * 9 / 16
        weights = [weight(n, k) for _ in range(max(2, -(-int(ROTATE_BYTES) // int(size))))]
        w = dequantize(*weights[0])
        layers, tuning = humming_layers(weights, n, k) if with_humming else ([], None)
        for m in ms:
            x = torch.randn(m, k, device="cuda").bfloat16()
            y = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
            row = dict(n=n, k=k, m=m, bytes=size)
            for name, constant in (("ours", False), ("ours_constant_weights", True)):
                y.fill_(float("nan"))
                calls = [
                    lambda c=c, s=s: w4a16.w4a16_matmul(x, c, s, 0.01, fmt=NVFP4, out=y, constant_weights=constant)
                    for c, s in weights
                ]
                row[name], row[name + "_spread"] = timed(calls)
                y.fill_(float("nan"))
                calls[0]()
                assert_right(y, x.double() @ w.T * 0.01, x.double().abs() @ w.abs().T * 0.01)
            if layers:
                row["humming"], row["humming_spread"] = timed(
                    [lambda layer=layer: layer(x, outputs=y, tuning_config=tuning) for layer in layers]
                )
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
        gs = torch.rand(experts, device="cuda") + 0.5
        for c in cs:
            x = torch.randn(c, k, device="cuda").bfloat16()
            y = torch.empty(c, topk, n, device="cuda", dtype=torch.bfloat16)
            ids = [
                torch.stack([torch.randperm(experts, device="cuda")[:topk] for _ in range(c)]).int() for _ in range(8)
            ]
            routings = [w4a16.route_experts(i, experts) for i in ids]
            touched = sum(i.unique().numel() for i in ids) / len(ids) * n * k * 9 / 16
            y.fill_(float("nan"))
            calls = [lambda r=r: w4a16.w4a16_moe(x, codes, scales, gs, routing=r, fmt=NVFP4, out=y) for r in routings]
            us, spread = timed(calls)
            route_us, _ = timed([lambda i=i: w4a16.route_experts(i, experts) for i in ids])
            y.fill_(float("nan"))
            calls[0]()
            e = int(ids[0][0, 0])
            w = dequantize(codes[e], scales[e]) * gs[e].double()
            assert_right(y[0, 0], x[0].double() @ w.T, x[0].double().abs() @ w.abs().T)
            if y.isnan().any():
                raise RuntimeError("an output was not written")
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
    args = parser.parse_args()
    torch.manual_seed(0)
    ceiling = read_ceiling(lib.load(lib.architecture(*torch.cuda.get_device_capability())))
    print(torch.cuda.get_device_name(), f"read ceiling {ceiling:.0f} GB/s", flush=True)
    result = dict(card=torch.cuda.get_device_name(), ceiling_gbps=ceiling)
    if args.only != "dense":
        result["moe"] = moe((1, 2, 4, 8, 16, 32))
    if args.only != "moe":
        result["dense"] = dense([int(m) for m in args.ms.split(",")], not args.no_humming)
    Path(args.out, "bench_w4a16.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
