"""Times of the FP4 matmuls on a GPU: CUDA graphs, weights rotated past the L2 cache, outputs poisoned and checked.

One measurement is a graph of many launches over several copies of the weight (MoE: several routings over one stack of
experts), so that no launch finds its bytes in the L2 cache and the host is out of the picture. The graph is replayed
`_REPLAYS` times; the time of a launch is the median over replays, the spread their largest less their least. Before the
timed replays every output is filled with NaN; after them the first is compared with float64, element by element, with
the bound of kernels/bounds.py. A time whose output is wrong is reported as wrong.

The ceilings are this card's, from the same run: reading (the amax kernel of csrc/quantize.cu over 4 GB), copying, and
BF16 torch.matmul of 8192 x 8192 x 8192.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves CUDA graphs, events and device properties untyped.

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from requant.kernels import bounds, gpu_quantize, w4a4, w4a16
from requant.kernels.cuda_build import architecture
from requant.kernels.dispatch import Path
from requant.kernels.formats import E2M1_VALUES, E4M3_VALUES, E8M0_BIAS, E8M0_VALUES, MXFP4_GROUP, NumberFormat
from requant.kernels.w4a4_operands import Fp4Tensor
from requant.validate.roofline import Ceilings

__all__ = ["Bf16", "Measured", "as_mxfp4", "decode", "measure_ceilings", "random_routing", "time_fp4"]

_DEVICE: Final = "cuda"
_REPLAYS: Final = 9
_LAUNCHES: Final = 48
"""Launches in a graph, about."""
_PAST_L2: Final = 4
"""Bytes between two uses of the same weight, in L2 caches."""
_MOST_COPIES: Final = 256
"""Weights under 1 MB or so cannot be rotated past the cache in a graph of this size; no large model has such."""
_BUFFER: Final = 4 << 30
_PEAK_SIZE: Final = 8192


@dataclass(frozen=True, slots=True)
class Measured:
    """One time. us: median of a launch; spread_us: largest less least; touched: experts whose weights were read, on
    average (dense: 1); of_bound: the largest error as a multiple of its bound, NaN where it was not judged."""

    us: float
    spread_us: float
    of_bound: float
    touched: float = 1.0


def copies_past_l2(nbytes: int) -> int:
    """How many copies of `nbytes` are larger than the L2 cache, several times; at most `_MOST_COPIES`."""
    cache = int(torch.cuda.get_device_properties(0).L2_cache_size)
    return min(max(1, -(-_PAST_L2 * cache // max(nbytes, 1))), _MOST_COPIES)


def past_l2(nbytes: int) -> int:
    """The same, and at least 2: the sets of bytes to take in turn."""
    return max(2, copies_past_l2(nbytes))


def timed(calls: Sequence[Callable[[], object]], launches: int = _LAUNCHES) -> tuple[float, float]:
    """(median, spread) microseconds of one call, all of them in turn in one graph."""
    rounds = max(1, round(launches / len(calls)))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # warm up where capture may not: module loading, workspaces, the allocator
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    times: list[float] = []
    for _ in range(_REPLAYS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / (rounds * len(calls)))
    return statistics.median(times), max(times) - min(times)


def measure_ceilings() -> Ceilings:
    """Read, copy and BF16 matmul rates of this card, now."""
    read, copy = _bandwidth()
    a = torch.randn((_PEAK_SIZE, _PEAK_SIZE), device=_DEVICE).bfloat16()
    b = torch.randn((_PEAK_SIZE, _PEAK_SIZE), device=_DEVICE).bfloat16()
    y = torch.empty_like(a)
    peak_us, _ = timed([lambda: torch.matmul(a, b, out=y)], 8)
    return Ceilings(read, copy, 2 * _PEAK_SIZE**3 / peak_us / 1e6)


def _bandwidth() -> tuple[float, float]:
    """GB/s read, and read plus written by a copy."""
    library = gpu_quantize.load_library(architecture(torch.cuda.get_device_capability()))
    source = torch.randint(0, 1 << 30, (_BUFFER // 4,), dtype=torch.int32, device=_DEVICE)
    target = torch.empty_like(source)
    sink = torch.full((1,), 0x7FFFFFFF, dtype=torch.int32, device=_DEVICE)

    def read() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        library.requant_bf16_amax(source.data_ptr(), _BUFFER // 32, sink.data_ptr(), stream)

    read_us, _ = timed([read], 4)
    target.copy_(source)
    times: list[float] = []
    for _ in range(_REPLAYS):  # not in a graph: as a node of one it reached 2.8 TB/s on an H200, and 4.3 so
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return _BUFFER / read_us / 1e3, 2 * _BUFFER / statistics.median(times) / 1e3


def decode(weight: Fp4Tensor, expert: int | None = None) -> torch.Tensor:
    """The weight's numbers (of one expert), exact, float64 [N, K] on its device."""
    codes = weight.codes if expert is None else weight.codes[expert]
    scales = weight.scales if expert is None else weight.scales[expert]
    table = torch.as_tensor(E2M1_VALUES, dtype=torch.float64, device=codes.device)
    steps = E4M3_VALUES if weight.format is NumberFormat.NVFP4 else E8M0_VALUES
    step = torch.as_tensor(steps, dtype=torch.float64, device=codes.device)[scales.int()]
    values = table[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).int()]
    values = values * step.repeat_interleave(weight.format.group, dim=-1)
    if weight.global_scale is not None:
        values = values * weight.global_scale[expert or 0].double()
    return values


def as_mxfp4(weight: Fp4Tensor) -> Fp4Tensor | None:
    """The same codes under E8M0 scales: the source's very bytes where the conversion was exact. None if K % 32."""
    if weight.format is NumberFormat.MXFP4:
        return weight
    if weight.k % MXFP4_GROUP or weight.global_scale is None:
        return None
    step = torch.as_tensor(E4M3_VALUES, device=weight.codes.device)[weight.scales[..., ::2].int()]
    scale = weight.global_scale.view((-1, 1, 1) if weight.codes.dim() == 3 else (-1, 1))
    exponent = torch.log2((step * scale).clamp(min=2.0**-126)).round() + E8M0_BIAS
    return Fp4Tensor(NumberFormat.MXFP4, weight.codes, exponent.clamp(0, 254).byte().contiguous(), None)


def random_routing(tokens: int, experts: int, top_k: int, seed: int) -> torch.Tensor:
    """int32 [tokens, top_k]: each token's experts, distinct, uniform."""
    made = torch.Generator().manual_seed(seed)
    return torch.rand((tokens, experts), generator=made).argsort(dim=1)[:, :top_k].int().contiguous().to(_DEVICE)


def activations(tokens: int, k: int, seed: int) -> torch.Tensor:
    """BF16 [tokens, k] of a dynamic range of 2^20 with outlier channels."""
    made = torch.Generator().manual_seed(seed)
    x = torch.randn((tokens, k), generator=made)
    x = x * torch.exp2(torch.randint(-20, 1, (tokens, k), generator=made).float())
    x[:, torch.randint(0, k, (max(1, k // 200),), generator=made)] *= 64
    return x.bfloat16().to(_DEVICE)


def time_fp4(path: Path, weight: Fp4Tensor, tokens: int, top_k: int) -> Measured:
    """One FP4 matmul of this many tokens: dense for a weight [N, K], grouped over experts for [E, N, K]."""
    x = activations(tokens, weight.k, tokens)
    if weight.codes.dim() == 2:
        return _time_dense(path, weight, x)
    return _time_grouped(path, weight, x, top_k)


def _time_dense(path: Path, weight: Fp4Tensor, x: torch.Tensor) -> Measured:
    copies = past_l2(weight.codes.numel() + weight.scales.numel())
    weights = [weight] + [_copy(weight) for _ in range(copies - 1)]
    n = weight.codes.shape[0]
    outputs = [torch.full((x.shape[0], n), torch.nan, dtype=torch.bfloat16, device=_DEVICE) for _ in weights]

    def call(w: Fp4Tensor, y: torch.Tensor) -> Callable[[], object]:
        scale = 1.0 if w.global_scale is None else w.global_scale
        if path in (Path.W4A16, Path.W4A16_TRITON):
            way = "cuda" if path is Path.W4A16 else "triton"
            return lambda: w4a16.w4a16_matmul(
                x, w.codes, w.scales, scale, fmt=w.format, out=y, constant_weights=True, path=way
            )
        return lambda: y.copy_(w4a4.matmul(x, w))

    us, spread = timed([call(w, y) for w, y in zip(weights, outputs, strict=True)])
    operand = _operand(path, x, weight.format)
    numbers = decode(weight)
    return Measured(us, spread, _of_bound(outputs[-1], operand @ numbers.T, operand.abs() @ numbers.abs().T))


def _time_grouped(path: Path, weight: Fp4Tensor, x: torch.Tensor, top_k: int) -> Measured:
    experts, n, _ = weight.codes.shape
    stack_bytes = weight.codes.numel() + weight.scales.numel()
    stacks = [weight] + [_copy(weight) for _ in range(copies_past_l2(stack_bytes) - 1)]
    sets = max(past_l2(stack_bytes // experts * min(experts, x.shape[0] * top_k)), len(stacks))
    ids = [random_routing(x.shape[0], experts, top_k, seed) for seed in range(sets)]
    outputs = [torch.full((*i.shape, n), torch.nan, dtype=torch.bfloat16, device=_DEVICE) for i in ids]

    def call(w: Fp4Tensor, i: torch.Tensor, y: torch.Tensor) -> Callable[[], object]:
        if path in (Path.W4A16, Path.W4A16_TRITON):
            way = "cuda" if path is Path.W4A16 else "triton"
            r = w4a16.route_experts(i, experts, path=way)
            return lambda: w4a16.w4a16_moe(
                x, w.codes, w.scales, w.global_scale, fmt=w.format, routing=r, out=y, path=way
            )
        rows = w4a4.route(i, experts)
        return lambda: y.view(-1, n).index_copy_(0, rows.order, w4a4.grouped_matmul(x, w, rows))

    us, spread = timed([call(stacks[s % len(stacks)], ids[s], outputs[s]) for s in range(sets)])
    touched = statistics.mean(int(i.unique().numel()) for i in ids)
    return Measured(us, spread, _check_grouped(path, weight, x, ids[-1], outputs[-1]), touched)


def _check_grouped(path: Path, weight: Fp4Tensor, x: torch.Tensor, ids: torch.Tensor, y: torch.Tensor) -> float:
    operand, worst = _operand(path, x, weight.format), 0.0
    for expert in ids.unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        numbers = decode(weight, expert)
        exact, terms = operand[token] @ numbers.T, operand[token].abs() @ numbers.abs().T
        worst = max(worst, _of_bound(y[token, slot], exact, terms))
    return worst


class Bf16:
    """The same weight in BF16, for torch.matmul: dense, or one call per expert that is touched."""

    def __init__(self, weight: Fp4Tensor) -> None:
        self._weight = weight
        self._plain: list[dict[int, torch.Tensor]] = []

    def time(self, tokens: int, top_k: int) -> Measured:
        """One product of this many tokens."""
        x = activations(tokens, self._weight.k, tokens)
        experts = self._weight.codes.shape[0] if self._weight.codes.dim() == 3 else 1
        nbytes = 4 * self._weight.codes.numel()
        copies = copies_past_l2(nbytes)
        sets = max(past_l2(nbytes // experts * min(experts, tokens * top_k)), copies)
        if self._weight.codes.dim() == 2:
            y = torch.empty((tokens, self._weight.codes.shape[0]), dtype=torch.bfloat16, device=_DEVICE)
            weights = [self._of(None, index).T for index in range(copies)]
            us, spread = timed([lambda w=w: torch.matmul(x, w, out=y) for w in weights])
            return Measured(us, spread, float("nan"))
        ids = [random_routing(tokens, experts, top_k, seed) for seed in range(sets)]
        us, spread = timed([self._call(x, i, index % copies) for index, i in enumerate(ids)], len(ids))
        return Measured(us, spread, float("nan"), statistics.mean(int(i.unique().numel()) for i in ids))

    def _call(self, x: torch.Tensor, ids: torch.Tensor, copy: int) -> Callable[[], object]:
        parts = [(x[(ids == e).any(dim=1)], self._of(int(e), copy).T) for e in ids.unique().tolist()]
        outputs = [torch.empty((rows.shape[0], w.shape[1]), dtype=torch.bfloat16, device=_DEVICE) for rows, w in parts]

        def run() -> None:
            for (rows, w), y in zip(parts, outputs, strict=True):
                torch.matmul(rows, w, out=y)

        return run

    def _of(self, expert: int | None, copy: int) -> torch.Tensor:
        """A copy of one expert's weight, made when it is first asked for."""
        while len(self._plain) <= copy:
            self._plain.append({})
        kept = self._plain[copy]
        if (expert or 0) not in kept:
            kept[expert or 0] = decode(self._weight, expert).bfloat16()
        return kept[expert or 0]


def _copy(weight: Fp4Tensor) -> Fp4Tensor:
    return Fp4Tensor(weight.format, weight.codes.clone(), weight.scales.clone(), weight.global_scale)


def _operand(path: Path, x: torch.Tensor, fmt: NumberFormat) -> torch.Tensor:
    """What the path really multiplies, float64: x, or x as the kernel's own quantizer rounds it (tested elsewhere)."""
    if not path.rounds_activations:
        return x.double()
    rounded = w4a4.quantize(x, fmt, emulate=path is Path.W4A4_EMULATED)
    one = Fp4Tensor(
        fmt, rounded.codes, rounded.scales, None if fmt is NumberFormat.MXFP4 else torch.ones(1, device=_DEVICE)
    )
    values = decode(one)
    return values if rounded.global_scale is None else values * rounded.global_scale.double()[:, None]


def _of_bound(y: torch.Tensor, exact: torch.Tensor, terms: torch.Tensor) -> float:
    return bounds.excess(y.double().cpu().numpy(), exact.cpu().numpy(), terms.cpu().numpy())
