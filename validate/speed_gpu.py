"""Times of the FP4 matmuls on a GPU, and of BF16's beside them; outputs are poisoned before and checked after.

One measurement is a graph of many launches (gpu_clock.py) over several copies of the weight (MoE: several routings over
one stack of experts), so that no launch finds its bytes in the L2 cache. Before the timed replays every output is
filled with NaN; after them one is compared with float64, element by element, with the bound of kernels/bounds.py. A
time whose output is wrong is reported as wrong. BF16's output must have been written too; how near it comes is not
judged, since cuBLAS may add partial sums in BF16.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves some of its operations untyped.

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from requant.kernels import reference_torch, w4a4, w4a16
from requant.kernels.dispatch import Path
from requant.kernels.formats import E4M3_VALUES, E8M0_BIAS, MXFP4_GROUP, NumberFormat
from requant.kernels.matmul import matmul
from requant.kernels.reference_torch import excess, products
from requant.kernels.w4a4_operands import Fp4Tensor
from requant.validate.gpu_clock import copies_past_l2, past_l2, timed

__all__ = ["Bf16", "Measured", "as_mxfp4", "decode", "random_routing", "time_fp4"]

_DEVICE: Final = "cuda"


@dataclass(frozen=True, slots=True)
class Measured:
    """One time. us: median of a launch; spread_us: largest less least; touched: experts whose weights were read, on
    average (dense: 1); of_bound: the largest error as a multiple of its bound (BF16: 0, infinite if unwritten)."""

    us: float
    spread_us: float
    of_bound: float
    touched: float = 1.0


def decode(weight: Fp4Tensor, expert: int | None = None) -> torch.Tensor:
    """The weight's numbers (of one expert), exact, float64 [N, K] on its device."""
    if expert is None:
        return reference_torch.dequantize(weight.format, weight.codes, weight.scales, weight.global_scale)
    scale = None if weight.global_scale is None else weight.global_scale[expert]
    return reference_torch.dequantize(weight.format, weight.codes[expert], weight.scales[expert], scale)


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
        return lambda: y.copy_(matmul(x, w, path).y)

    us, spread = timed([call(w, y) for w, y in zip(weights, outputs, strict=True)], poison=outputs)
    exact = products(_operand(path, x, weight.format), decode(weight))
    return Measured(us, spread, excess(outputs[-1], *exact))


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

    us, spread = timed([call(stacks[s % len(stacks)], ids[s], outputs[s]) for s in range(sets)], poison=outputs)
    touched = statistics.mean(int(i.unique().numel()) for i in ids)
    return Measured(us, spread, _check_grouped(path, weight, x, ids[-1], outputs[-1]), touched)


def _check_grouped(path: Path, weight: Fp4Tensor, x: torch.Tensor, ids: torch.Tensor, y: torch.Tensor) -> float:
    operand, worst = _operand(path, x, weight.format), 0.0
    for expert in ids.unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        worst = max(worst, excess(y[token, slot], *products(operand[token], decode(weight, expert))))
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
            us, spread = timed([lambda w=w: torch.matmul(x, w, out=y) for w in weights], poison=[y])
            return Measured(us, spread, _unwritten([y]))
        ids = [random_routing(tokens, experts, top_k, seed) for seed in range(sets)]
        made = [self._call(x, i, index % copies) for index, i in enumerate(ids)]
        outputs = [y for _, mine in made for y in mine]
        us, spread = timed([call for call, _ in made], len(ids), poison=outputs)
        return Measured(us, spread, _unwritten(outputs), statistics.mean(int(i.unique().numel()) for i in ids))

    def _call(self, x: torch.Tensor, ids: torch.Tensor, copy: int) -> tuple[Callable[[], object], list[torch.Tensor]]:
        """One product, expert by expert, and the outputs that it writes."""
        parts = [(x[(ids == e).any(dim=1)], self._of(int(e), copy).T) for e in ids.unique().tolist()]
        outputs = [torch.empty((rows.shape[0], w.shape[1]), dtype=torch.bfloat16, device=_DEVICE) for rows, w in parts]

        def run() -> None:
            for (rows, w), y in zip(parts, outputs, strict=True):
                torch.matmul(rows, w, out=y)

        return run, outputs

    def _of(self, expert: int | None, copy: int) -> torch.Tensor:
        """A copy of one expert's weight, made when it is first asked for."""
        while len(self._plain) <= copy:
            self._plain.append({})
        kept = self._plain[copy]
        if (expert or 0) not in kept:
            kept[expert or 0] = decode(self._weight, expert).bfloat16()
        return kept[expert or 0]


def _unwritten(outputs: list[torch.Tensor]) -> float:
    """0, or infinity if the poison is still in one of them."""
    return 0.0 if all(bool(y.isfinite().all()) for y in outputs) else float("inf")


def _copy(weight: Fp4Tensor) -> Fp4Tensor:
    return Fp4Tensor(weight.format, weight.codes.clone(), weight.scales.clone(), weight.global_scale)


def _operand(path: Path, x: torch.Tensor, fmt: NumberFormat) -> torch.Tensor:
    """What the path really multiplies, float64: x, or x as the kernel's own quantizer rounds it (tested elsewhere)."""
    if not path.rounds_activations:
        return x.double()
    native = path is Path.W4A4  # the quantizer holds no FP4 mma: elsewhere the emulated build's is the same
    rounded = w4a4.quantize(x, fmt, granularity=path.granularity, emulate=not native)
    return decode(rounded)
