"""Tokens per second of a model as it decodes: the converted checkpoint, its source and BF16, through one engine.

For each concurrency C and its number of requests: waves of C prompts of the same length, prefilled one after the other
and decoded together. Reported: prefill, time to first token (from the wave's start, so later prompts wait for earlier
ones), time between tokens, tokens per second of one stream and in total; medians and 95th percentiles; a first wave and
the capture of the graphs are not counted. Greedy tokens of the graphs must equal those of the same step launched
eagerly, and logits those of a reference (decode_reference.py): a speed is no speed where the numbers are wrong.

The roofline of a step is its bytes over the card's read bandwidth, measured in the same run: the dense weights, the
experts that the step's tokens were routed to, norms and biases, the embedding's rows, keys and values. Prompts are
random tokens: speed depends on values only through routing, which is random as well.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import torch
from requant.kernels.empty_model import ModelUnavailableError
from requant.kernels.formats import NumberFormat
from requant.manifests.gates import SpeedGate
from requant.validate.decode_engine import Engine, Wave
from requant.validate.decode_load import as_bf16, load_decoder
from requant.validate.decode_model import Decoder, Moe
from requant.validate.decode_products import Products
from requant.validate.decode_profile import breakdown, profile_step
from requant.validate.decode_reference import BOUND, Deviation, check_prefill, check_step
from requant.validate.results import JSON, Finding

__all__ = ["Bench", "Measured", "measure_model", "step_bytes"]

_CHECKED: Final = 16
"""Greedy tokens of graph and eager steps that are compared."""
_WARM_TOKENS: Final = 8
_RUN_PARTS: Final = 2
_POINT_PARTS: Final = 5
"""Parts of a run, and of each of its points beside the waves: steps of the progress bar, some seconds each."""
_KINDS: Final = {
    "moe": "the experts",
    "dense": "the dense products (attention projections and head)",
    "attention": "attention",
    "norm": "norms and the router",
    "other": "what is left (embedding, argmax, copies)",
}
_BREAKS: Final = (MemoryError, RuntimeError, ValueError)
"""What a kernel, a launch or an allocation may raise."""
Point = dict[str, JSON]


@dataclass(slots=True)
class Measured:
    """All runs. data: what the stage keeps; missing: runs that could not be, and why; findings: what is wrong."""

    data: dict[str, JSON] = field(default_factory=dict[str, JSON])
    runs: dict[str, list[Point]] = field(default_factory=dict[str, list[Point]])
    missing: dict[str, str] = field(default_factory=dict[str, str])
    findings: list[Finding] = field(default_factory=list[Finding])

    def speedups(self, baseline: str) -> dict[int, float]:
        """Steps per second of the converted model as a multiple of the baseline's, by concurrency; only of those at
        which both decoded as many streams at a time."""
        theirs, ours = (
            {(_int(p, "concurrency"), _int(p, "batch")): _float(p, "step_us_median") for p in self.runs.get(name, [])}
            for name in (baseline, "converted")
        )
        return {at[0]: theirs[at] / us for at, us in ours.items() if at in theirs}


def measure_model(
    output: Path,
    source: Path | None,
    gate: SpeedGate,
    *,
    read_gbps: float | None,
    device: str,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> Measured:
    """Measure all three. read_gbps: the card's read bandwidth; None on a CPU, which has no roofline here.

    ModelUnavailableError: the converted model cannot be loaded; why one of them broke off, or a baseline cannot be
    loaded, is kept in `missing`, beside what was measured before.
    """
    measured = Measured()
    bench = Bench(gate, read_gbps, device, progress, measured)
    bench.converted(output)
    if "converted" in measured.missing:
        pass
    elif source is None or not source.is_dir():
        measured.missing["source"] = "its folder is not here"
    else:
        bench.attempt("source", lambda: load_decoder(source, device=device, positions=bench.capacity))
    measured.data["runs"] = bench.shown
    measured.data["seconds"] = {part: round(seconds, 1) for part, seconds in bench.seconds.items()}
    measured.data["not_measured"] = dict(measured.missing)
    return measured


class Bench:
    """The runs of one gate. capacity: tokens that a stream's cache must hold."""

    def __init__(
        self,
        gate: SpeedGate,
        read_gbps: float | None,
        device: str,
        progress: Callable[[int, int], None],
        measured: Measured,
    ) -> None:
        self._gate = gate
        self._read = read_gbps
        self._device = device
        self._progress = progress
        self._measured = measured
        self._done = 0
        self.seconds: dict[str, float] = {}
        each = [_POINT_PARTS + _waves(r, c) for c, r in zip(gate.concurrency, gate.requests, strict=True)]
        self._total = (_RUN_PARTS + sum(each)) * 3
        self.capacity = gate.prompt_tokens + max(gate.output_tokens, _CHECKED)  # the profiled steps go that far
        self.shown: list[JSON] = []

    def converted(self, output: Path) -> None:
        """The checkpoint that is judged, and on a GPU the same numbers in BF16."""
        try:
            with self.timing("load"):
                target = load_decoder(output, device=self._device, positions=self.capacity)
            self.run("converted", target)
        except ModelUnavailableError:
            raise
        except _BREAKS as error:
            self._measured.missing["converted"] = _why(error)
            return
        if any(matrix.packed is not None for matrix in target.matrices()):
            self.attempt("bf16", lambda: _in_bf16(target))

    def attempt(self, name: str, make: Callable[[], Decoder]) -> None:
        """A run that the verdict can do without."""
        try:
            with self.timing("load"):
                decoder = make()
            self.run(name, decoder)
        except ModelUnavailableError as error:
            self._measured.missing[name] = str(error)
        except _BREAKS as error:
            self._measured.missing[name] = _why(error)

    @contextmanager
    def timing(self, part: str) -> Generator[None]:
        """Seconds of the host spent on one part of the stage, added up in `seconds`."""
        begin = time.perf_counter()
        try:
            yield
        finally:  # one that breaks off has taken them as well
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - begin
        if part != "waves":  # those are steps one by one
            self._advance()

    def _advance(self) -> None:
        self._done = min(self._done + 1, self._total)
        self._progress(self._done, self._total)

    def run(self, name: str, decoder: Decoder) -> None:
        """Measure one decoder at every concurrency."""
        products = Products(decoder)
        points = self._measured.runs.setdefault(name, [])
        label = f"{name} ({_formats(decoder)})"
        shown: dict[str, JSON] = {"label": label, "class": decoder.kind, "points": []}
        self.shown.append(shown)
        with self.timing("reference"):
            prompt = _prompts(decoder, 1, self._gate.prompt_tokens, 1)[0][0]
            shown["prefill_of_reference"] = self._judged(
                name, "the keys and values of a prefill", check_prefill(decoder, prompt, products)
            )
        for streams, requests in zip(self._gate.concurrency, self._gate.requests, strict=True):
            points.append(self.point(name, decoder, streams, requests, products))
            shown["points"] = list[JSON](points)
        shown["products"] = dict[str, JSON](products.chosen)

    def point(self, name: str, decoder: Decoder, streams: int, requests: int, products: Products) -> Point:
        """At this concurrency, or where memory does not suffice at the largest half of it that fits."""
        batch = streams
        while True:
            try:
                point = self._point(name, decoder, batch, requests, products)
                return {**point, "concurrency": streams, "batch": batch}
            except torch.OutOfMemoryError:
                if batch == 1:
                    raise
                batch //= 2
                message = f"{streams} streams do not fit into the GPU's memory: measured with {batch}"
                self._measured.findings.append(Finding("smaller-batch", "warning", message, where=name))

    def _point(self, name: str, decoder: Decoder, batch: int, requests: int, products: Products) -> Point:
        gate, middle = self._gate, self._gate.prompt_tokens + self._gate.output_tokens // 2
        engine = Engine(decoder, batch, self.capacity, products)
        with self.timing("choosing products"):
            engine.tune()
        with self.timing("reference"):  # with the products that will be timed
            found = check_step(decoder, batch, middle, products)
            checked_point: Point = {"of_reference": self._judged(name, f"the logits of {batch} streams' step", found)}
        with self.timing("capture"):
            engine.capture(gate.prompt_tokens)
        count = _waves(requests, batch)
        prompts = _prompts(decoder, batch, gate.prompt_tokens, count + 1)
        checked = min(_CHECKED, gate.output_tokens)
        with self.timing("graph against eager"):
            tokens = engine.tokens_both_ways(prompts[0], checked)
        if tokens[0] != tokens[1]:
            message = f"at {batch} streams the graph's greedy tokens differ from those of the same step without it"
            self._measured.findings.append(Finding("graph-differs", "error", message, where=name))
        waves: list[Wave] = []
        touched: list[float] = []
        with self.timing("waves"):
            engine.rewind(gate.prompt_tokens)
            engine.wave(prompts[0][:1], min(_WARM_TOKENS, gate.output_tokens))
            for wave in prompts[1:]:
                waves.append(engine.wave(wave, gate.output_tokens))
                touched.append(_touched(engine))
                self._advance()
        point = checked_point | _summary(waves, batch)
        moved = step_bytes(decoder, batch, statistics.mean(touched), middle)
        point |= {"bytes": moved, "experts_touched": round(statistics.mean(touched), 2), "first_tokens": tokens[1][0]}
        if self._read is not None:
            floor = moved / self._read / 1e3
            point |= {"roofline_us": round(floor, 1), "of_roofline": round(floor / _float(point, "step_us_median"), 4)}
        if engine.on_gpu:
            engine.rewind(middle)
            with self.timing("profile"):
                parts = breakdown(profile_step(engine.step))
            point["breakdown"] = list[JSON](parts)
            point["bottleneck"] = bottleneck(name, batch, point, parts)
        return point

    def _judged(self, name: str, what: str, found: Deviation) -> JSON:
        """The deviation as it is reported; an error where it is too large."""
        if found.wrong:
            apart = f"{what} are off by {found.error:.2g} of their size"
            if found.error <= BOUND:
                apart = f"experts were chosen {found.routing:.2g} of the largest logit below the likeliest ones"
            message = f"{apart}, against {BOUND:g} that rounding explains ({found.layers} layers, float64 products)"
            self._measured.findings.append(Finding("reference-differs", "error", message, where=name))
        numbers = {"error": found.error, "routing": found.routing}
        return {key: float(f"{value:.3g}") if math.isfinite(value) else str(value) for key, value in numbers.items()}


def step_bytes(decoder: Decoder, streams: int, touched: float, position: int) -> int:
    """Bytes that a step must read at least. touched: experts of a layer that its tokens went to, on average."""
    total = float(decoder.small_bytes() + decoder.head.nbytes)
    total += streams * (decoder.embedding[0].nbytes + decoder.kv_bytes(position))
    for layer in decoder.layers:
        total += layer.attention.qkv.nbytes + layer.attention.out.nbytes
        share = 1.0
        if isinstance(layer.mlp, Moe):
            share = touched / layer.mlp.gate_up.experts
        total += share * (layer.mlp.gate_up.nbytes + layer.mlp.down.nbytes)
    return round(total)


def bottleneck(name: str, streams: int, point: Point, parts: Sequence[dict[str, JSON]]) -> str:
    """One sentence: what holds the step up now."""
    whole = sum(_float(part, "us") for part in parts)
    if not whole:
        return ""
    first = max(parts, key=lambda part: _float(part, "us"))
    share, on_tensor = _float(first, "us") / whole, _float(first, "tensor_cores")
    unit = "tensor cores" if on_tensor > 0.5 else "CUDA cores"
    said = f"With {streams} stream{'s' if streams > 1 else ''} a step of the {name} model takes "
    said += f"{_float(point, 'step_us_median'):,.0f} us"
    if "of_roofline" in point:
        said += f", {100 * _float(point, 'of_roofline'):.0f}% of its bandwidth roofline"
    kind = _KINDS[str(first["kind"])]
    return f"{said}; {kind} now hold it up: {100 * share:.0f}% of the kernel time, by kernels on {unit}."


# --- small things -----------------------------------------------------------------------------------------------------


def _why(error: BaseException) -> str:
    """Why a run broke off, in one line."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return "memory does not suffice for its weights and one stream"
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"it broke off with {type(error).__name__}: {first}"


def _in_bf16(decoder: Decoder) -> Decoder:
    """The same numbers in BF16, layer by layer."""
    layers = [
        replace(
            layer,
            attention=replace(layer.attention, qkv=as_bf16(layer.attention.qkv), out=as_bf16(layer.attention.out)),
            mlp=replace(layer.mlp, gate_up=as_bf16(layer.mlp.gate_up), down=as_bf16(layer.mlp.down)),
        )
        for layer in decoder.layers
    ]
    return replace(decoder, layers=tuple(layers), head=as_bf16(decoder.head))


def _formats(decoder: Decoder) -> str:
    """Formats of the matrices, the one with most weights first."""
    sizes: dict[NumberFormat, int] = {}
    for matrix in decoder.matrices():
        count = 1
        for size in matrix.shape:
            count *= size
        sizes[matrix.stored] = sizes.get(matrix.stored, 0) + count
    return " and ".join(fmt.value.upper() for fmt, _ in sorted(sizes.items(), key=lambda item: -item[1]))


def _prompts(decoder: Decoder, streams: int, length: int, waves: int) -> list[list[torch.Tensor]]:
    """Random tokens, the same for every run of the same shape."""
    made = torch.Generator().manual_seed(0)
    vocabulary, device = decoder.embedding.shape[0], decoder.embedding.device
    return [
        [torch.randint(0, vocabulary, (length,), generator=made).to(device) for _ in range(streams)]
        for _ in range(waves)
    ]


def _touched(engine: Engine) -> float:
    """Experts that the last step's tokens went to, mean over the layers; 0 without experts."""
    counts = [int(ids.unique().numel()) for ids in engine.state.routed]
    return statistics.mean(counts) if counts else 0.0


def _waves(requests: int, streams: int) -> int:
    return -(-requests // streams)


def _summary(waves: Sequence[Wave], streams: int) -> Point:
    steps = [us for wave in waves for us in wave.step_us] or [float("nan")]
    prefills = [ms for wave in waves for ms in wave.prefill_ms]
    firsts = [ms for wave in waves for ms in wave.first_ms]
    step = statistics.median(steps)
    rates = [wave.tokens / wave.seconds for wave in waves]
    return {
        "completed": streams * len(waves),
        "errors": 0,
        "output_tokens_per_s": round(statistics.median(rates), 1),
        "decode_tokens_per_s": round(streams * 1e6 / step, 1),
        "stream_tokens_per_s": round(1e6 / step, 1),
        "step_us_median": round(step, 1),
        "step_us_p95": round(_p95(steps), 1),
        "itl_ms_median": round(step / 1e3, 4),
        "itl_ms_p95": round(_p95(steps) / 1e3, 4),
        "prefill_ms_median": round(statistics.median(prefills), 2),
        "prefill_ms_p95": round(_p95(prefills), 2),
        "ttft_ms_median": round(statistics.median(firsts), 2),
        "ttft_ms_p95": round(_p95(firsts), 2),
    }


def _p95(values: Sequence[float]) -> float:
    """The least value that 95% do not exceed, of those that occurred."""
    ordered = sorted(values)
    return ordered[-(-95 * len(ordered) // 100) - 1]


def _float(point: dict[str, JSON], key: str) -> float:
    value = point[key]
    return float(value) if isinstance(value, int | float) else float("nan")


def _int(point: dict[str, JSON], key: str) -> int:
    value = point[key]
    return value if isinstance(value, int) else 0
