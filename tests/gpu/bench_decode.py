"""Steps of the decode engine (validate/decode_*.py) with random weights at a family's real shapes, on this GPU:

python tests/gpu/bench_decode.py [--config gpt-oss-20b] [--kinds nvfp4 bf16 ...] [--streams 1 8 16] [--json FILE]
python tests/gpu/bench_decode.py --show FILE

Every row is measured by validate/decode_speed.py, as stage `speed` does it for a checkpoint: waves of random prompts,
the graph's tokens against the eager step's, the roofline from the card's read bandwidth in the same run. Prints the
rows of docs/decode.md's tables; FILE is written after each point, so that a run that is cut short keeps what it has.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from random_decoder import KINDS, RandomDecoders
from requant.convert.synthetic import config_of
from requant.manifests.gates import SpeedGate
from requant.validate import decode_profile, decode_speed
from requant.validate.decode_engine import Engine
from requant.validate.decode_model import Decoder
from requant.validate.decode_products import Products
from requant.validate.gpu_clock import measure_bandwidth

TITLES = {
    "nvfp4": "experts NVFP4, as `requant run gpt-oss-20b` makes them",
    "nvfp4-head": "experts and head NVFP4",
    "nvfp4-out": "experts, output projection and head NVFP4",
    "nvfp4-all": "attention and head NVFP4 too",
    "mxfp4": "experts MXFP4, as published",
    "bf16": "BF16",
}
KEPT = (0, 128)
"""Launches of a step that --trace keeps, counted from its first."""


def main() -> None:
    begin = time.time()
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--config", default="gpt-oss-20b", help="a built-in name or a config.json")
    kinds = ["nvfp4", "nvfp4-out", "nvfp4-all", "mxfp4", "bf16"]
    parser.add_argument("--kinds", nargs="+", default=kinds, choices=list(KINDS))
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8, 16])
    parser.add_argument("--requests", nargs="+", type=int, default=[8, 16, 16])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--trace", action="store_true", help="keep what each launch of a step cost")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", type=Path, help="print the tables of such a FILE, and measure nothing")
    given = parser.parse_args()
    if given.show:
        show(json.loads(given.show.read_text(encoding="utf-8"))["points"], given.kinds)
        return
    gate = SpeedGate(
        concurrency=tuple(given.streams), requests=tuple(given.requests[: len(given.streams)]),
        prompt_tokens=given.prompt, output_tokens=given.tokens,
    )  # fmt: skip
    read, copy = measure_bandwidth()
    measured = decode_speed.Measured()
    bench = decode_speed.Bench(gate, read, "cuda", lambda _done, _all: None, measured)
    torch.manual_seed(0)
    makers = RandomDecoders(config_of(given.config, given.layers, None)[0], bench.capacity)
    data = {
        "read_gbps": read, "copy_gbps": copy, "card": torch.cuda.get_device_name(), "torch": torch.__version__,
        "config": given.config, "points": {}, "products": {}, "failed": {},
    }  # fmt: skip
    made: dict[str, tuple[Decoder, Products]] = {}
    for streams, requests in zip(gate.concurrency, gate.requests, strict=True):
        for kind in given.kinds:
            if kind not in made:
                decoder = makers.make(kind)
                made[kind] = decoder, Products(decoder)
            decoder, products = made[kind]
            label = f"{kind} {streams}"
            try:
                point = bench.point(kind, decoder, streams, requests, products)
                if given.trace:
                    data.setdefault("traces", {})[label] = trace(bench.capacity, decoder, streams, products)
            except (RuntimeError, ValueError) as error:
                data["failed"][label] = f"{type(error).__name__}: {error}"[:500]
                print(f"[{time.time() - begin:.1f} s] {label}: {data['failed'][label]}", flush=True)
                continue
            data["points"][label] = point
            data["products"][kind] = products.chosen
            data["findings"] = [finding.message for finding in measured.findings]
            if given.json:
                given.json.write_text(json.dumps(data, indent=1))
            said = ", ".join(f"{part['kind']} {part['us']:.0f}" for part in point["breakdown"])
            spent = ", ".join(f"{name} {seconds:.1f}" for name, seconds in bench.seconds.items())
            print(f"[{time.time() - begin:.1f} s] {label}: {said}; seconds so far: {spent}", flush=True)
            print(rows(data["points"], [kind])[-1], flush=True)
    show(data["points"], given.kinds)


def trace(capacity: int, decoder: Decoder, streams: int, products: Products) -> list[tuple[str, float]]:
    """What each launch of one step costs, in order."""
    engine = Engine(decoder, streams, capacity, products)
    engine.capture()
    for stream in range(streams):
        engine.start(stream, torch.randint(0, 1000, (capacity - 64,), device="cuda"))
    spans = decode_profile.record_steps(engine.step, 3)
    count = len(spans) // 3
    spent = decode_profile.costs(spans[count - 1 : 2 * count])
    return [(name[:60], round(us, 2)) for name, us in spent[slice(*KEPT)]]


def show(points: dict, kinds: list[str]) -> None:
    """Both tables."""
    print("\n".join([*rows(points, kinds), "", *parts(points)]))


def rows(points: dict, kinds: list[str]) -> list[str]:
    """The table of steps."""
    lines = []
    for kind in kinds:
        title = TITLES[kind]
        for label, p in points.items():
            if label.rsplit(" ", 1)[0] != kind:
                continue
            streams = p["concurrency"]
            base = points.get(f"bf16 {streams}")
            ratio = f"{base['step_us_median'] / p['step_us_median']:.2f}" if base and kind != "bf16" else "-"
            lines.append(
                f"| {title} | {streams} | {p['bytes'] / 1e9:.2f} | {p['step_us_median']:,.0f} / "
                f"{p['step_us_p95']:,.0f} | {100 * p['of_roofline']:.0f}% | {p['stream_tokens_per_s']:,.0f} | "
                f"{p['decode_tokens_per_s']:,.0f} | {p['output_tokens_per_s']:,.0f} | {ratio} | "
                f"{p['ttft_ms_median']:,.1f} / {p['ttft_ms_p95']:,.1f} |"
            )
            title = ""
    return lines


def parts(points: dict) -> list[str]:
    """The table of kinds of kernels."""
    lines = []
    for label, p in points.items():
        found = {part["kind"]: part for part in p["breakdown"]}
        whole = sum(part["us"] for part in found.values())
        cells = [
            f"{found[kind]['us']:,.0f}, {100 * found[kind]['us'] / whole:.0f}%" if kind in found else "-"
            for kind in ("moe", "dense", "norm", "attention", "other")
        ]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
