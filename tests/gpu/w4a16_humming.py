"""Time humming-kernels on the same shapes with the same harness as w4a16_sweep.py: the peer of the dense tables.

`python tests/gpu/w4a16_humming.py --out DIR` on a machine with the GPU and the humming-kernels wheel.
"""

# ruff: noqa: B023, C408, E501  a script of measurements: closures are called at once
from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import w4a16_sweep as sweep
from humming.layer import HummingLayer, HummingMethod


def layers_for(n, k, count):
    made, first = [], None
    for _ in range(count):
        codes, scales = sweep.random_weight(0, n, k)
        layer = HummingLayer(
            n, k, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, torch_dtype=torch.bfloat16
        ).cuda()
        layer.load_from_tensors(
            {
                "weight": codes,
                "weight_scale": scales.view(torch.float8_e4m3fn),
                "weight_scale_2": torch.full((1,), 0.01, device="cuda"),
            }
        )
        layer.transform()
        made.append(layer)
        first = first or (codes, scales)
    return made, first


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--ms", default="1,2,4,8,16,32,64")
    parser.add_argument("--budget", type=float, default=150)
    args = parser.parse_args()
    rows, t0 = [], time.time()
    for n, k in sweep.DENSE:
        by = n * k * 9 / 16
        layers, (codes, scales) = layers_for(n, k, max(2, -(-int(sweep.ROTATE_BYTES) // int(by))))
        w = sweep.dequantize(0, codes, scales)
        tuning = HummingMethod.get_default_tuning_configs(layers[0])
        for m in (int(v) for v in args.ms.split(",")):
            if time.time() - t0 > args.budget:
                break
            x = torch.randn(m, k, device="cuda").bfloat16()
            y = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
            ref = x.double() @ w.T * 0.01
            for pdl in (None, True):
                y.fill_(float("nan"))
                run = [
                    (lambda layer=layer, pdl=pdl: layer(x, outputs=y, tuning_config=tuning, use_pdl=pdl))
                    for layer in layers
                ]
                run[0]()
                error = ((y.double() - ref).norm() / ref.norm()).item()
                us, spread = sweep.timed(run, 64, 5)
                rows.append(dict(n=n, k=k, m=m, us=us, spread=spread, error=error, pdl=str(pdl)))
            print(
                f"humming {n}x{k} M={m} {rows[-2]['us']:6.2f} pdl {rows[-1]['us']:6.2f} +-{spread:.2f} us err {error:.1e}",
                flush=True,
            )
        del layers, w
    Path(args.out, "humming.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
