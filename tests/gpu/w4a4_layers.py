"""The native W4A4 kernels (their instruction emulated, unless this is an SM120) on layers of a converted checkpoint.

    python tests/gpu/w4a4_layers.py CONVERTED [--activations FILE] [--match TEXT] [--most 24] [--json FILE]

Every NVFP4 or MXFP4 matrix of modelopt's or compressed-tensors' layout, up to --most: x is quantized on the fly into
the weight's format, for NVFP4 per token and under the static input_scale that calibrating on them gives (amax / (6 *
448)); y is held to |y - y64| <= 2^-8 |y64| + 2^-14 sum |w x| of the float64 product of what is multiplied, element by
element. Experts of one layer are stacked (up to 8) and go through the grouped kernel too. Without --activations x is
random, outlier channels 64 times the rest. Exit 1 if an element is out of bound.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from pathlib import Path

import torch
from requant.kernels.availability import gpu
from requant.kernels.formats import NumberFormat
from requant.kernels.reference_torch import dequantize, excess, products
from requant.kernels.w4a4 import Fp4Tensor, grouped_matmul, matmul, quantize, route
from safetensors import safe_open

NATIVE = (gpu()[1] or (0, 0))[0] == 12
EMULATE = not NATIVE
STACKED = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("converted", type=Path)
    parser.add_argument("--activations", type=Path)
    parser.add_argument("--match", default="")
    parser.add_argument("--most", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    weights = dict(matrices(given.converted, given.match, given.most))
    if not weights:
        parser.error(f"{given.converted} holds no FP4 matrix with {given.match!r} in its name")
    print(f"{gpu()[0]}: {'native' if NATIVE else 'emulated'} W4A4, {len(weights)} matrices of {given.converted.name}")
    print(f"{'module':58} {'N x K':>13} {'M':>3} {'x':>9} {'scale':>7} {'of bound':>8} {'x rounding':>10}")
    rows: list[dict[str, object]] = []
    for seed, (name, w) in enumerate(weights.items()):
        x, kind = activations(given.activations, name, w.k, given.tokens, seed)
        static = [float(x.abs().max()) / 2688] if w.format is NumberFormat.NVFP4 else []
        rows += [judge(name, w, x, kind, scale) for scale in (None, *static)]
    for layer, names in experts_of(weights).items():
        rows += [judge_grouped(layer, [weights[name] for name in names], given.tokens)]
    for row in rows:
        print(f"{row['module']!s:58} {row['shape']!s:>13} {row['m']:>3} {row['x']!s:>9} {row['scale']!s:>7} "
              f"{row['of_bound']:>8.3f} {row['rounding']:>10.4f}")  # fmt: skip
    worst = max(float(str(row["of_bound"])) for row in rows)
    print(f"largest error: {worst:.3f} of its bound, over {sum(int(str(row['elements'])) for row in rows):,} outputs")
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))
    return int(not worst <= 1.0)


def matrices(folder: Path, match: str, most: int):
    """(module, Fp4Tensor) of a modelopt or compressed-tensors checkpoint."""
    count = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt", device="cuda") as file:
            names = set(file.keys())
            for name in sorted(names):
                if count < most and name.endswith(".weight_scale") and match in name:
                    module = name.removesuffix(".weight_scale")
                    turned = f"{module}.weight_packed" in names  # compressed-tensors stores the reciprocal
                    codes = file.get_tensor(f"{module}.weight_packed" if turned else f"{module}.weight")
                    scales = file.get_tensor(name)
                    second = f"{module}.weight_global_scale" if turned else f"{module}.weight_scale_2"
                    stored = float(file.get_tensor(second)) if second in names else None
                    scale = 1 / stored if stored is not None and turned else stored
                    yield module, Fp4Tensor.weight(codes.view(torch.uint8), scales.view(torch.uint8), scale)
                    count += 1


def activations(path: Path | None, name: str, k: int, tokens: int, seed: int) -> tuple[torch.Tensor, str]:
    if path is not None:
        with safe_open(path, "pt", device="cuda") as file:
            return file.get_tensor(name).contiguous(), "captured"
    return random_x(tokens, k, seed), "random"


def random_x(tokens: int, k: int, seed: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    x = torch.randn((tokens, k), generator=made)
    x[:, torch.randint(0, k, (max(1, k // 200),), generator=made)] *= 64
    return x.bfloat16().cuda()


def decode(w: Fp4Tensor) -> torch.Tensor:
    """float64, exact."""
    return dequantize(w.format, w.codes, w.scales, w.global_scale)


def of_bound(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> float:
    return excess(y, *products(x, w))


def judge(name: str, w: Fp4Tensor, x: torch.Tensor, kind: str, scale: float | None) -> dict[str, object]:
    quantized = quantize(x, w.format, input_scale=scale, emulate=EMULATE)
    y = matmul(x, w, input_scale=scale, emulate=EMULATE)
    rounded = decode(quantized)
    return {
        "module": name, "shape": f"{w.codes.shape[0]} x {w.k}", "m": x.shape[0], "x": kind,
        "scale": "-" if w.global_scale is None else "token" if scale is None else "static", "elements": y.numel(),
        "of_bound": of_bound(y, rounded, decode(w)), "rounding": rounding(rounded, x),
    }  # fmt: skip


def rounding(rounded: torch.Tensor, x: torch.Tensor) -> float:
    """What quantizing x cost, relative, Frobenius."""
    return float((rounded - x.double()).norm() / x.double().norm())


def experts_of(weights: dict[str, Fp4Tensor]) -> dict[str, list[str]]:
    """Experts of one shape in one layer, by what they are."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in weights:
        found = re.fullmatch(r"(.*\.experts)\.\d+\.(.*)", name)
        if found and len(groups[f"{found[1]}.*.{found[2]}"]) < STACKED:
            groups[f"{found[1]}.*.{found[2]}"].append(name)
    return {key: names for key, names in groups.items() if len(names) > 1}


def judge_grouped(layer: str, members: list[Fp4Tensor], tokens: int) -> dict[str, object]:
    codes, scales = (torch.stack([getattr(m, part) for m in members]) for part in ("codes", "scales"))
    globals_ = [m.global_scale.reshape(1) for m in members if m.global_scale is not None]
    stacked = Fp4Tensor.weight(codes, scales, torch.cat(globals_) if globals_ else None)
    x = random_x(tokens, members[0].k, 99)
    ids = torch.stack([torch.randperm(len(members))[:2] for _ in range(tokens)]).cuda()
    routing = route(ids, len(members))
    y, quantized = (
        grouped_matmul(x, stacked, routing, emulate=EMULATE),
        decode(quantize(x, stacked.format, emulate=EMULATE)),
    )
    bounds, worst = routing.offsets.tolist(), 0.0
    for expert, member in enumerate(members):
        first, end = bounds[expert], bounds[expert + 1]
        if first < end:
            worst = max(worst, of_bound(y[first:end], quantized[routing.token[first:end].long()], decode(member)))
    return {
        "module": layer, "shape": f"{codes.shape[1]} x {members[0].k}", "m": tokens, "x": "random", "scale": "grouped",
        "elements": y.numel(), "of_bound": worst, "rounding": rounding(quantized, x),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
