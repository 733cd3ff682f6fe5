"""The matrix products of a step: W4A16 for FP4 weights, and for plain ones whichever of cuBLAS and ours is faster here.

For a plain weight of one shape and number of tokens the candidates are timed once, on the weights of that shape in turn
(so that none lies in the L2 cache), with random routing and each behind a norm, and those near the fastest once more in
a whole step: BF16, as the baseline, gets the best that there is.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportCallIssue=false
# A Triton launch takes options that its kernel does not declare.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
from requant.kernels import w4a16
from requant.validate.decode_model import Decoder, Gate, Matrix

__all__ = ["Products"]

FEW: Final = 64
"""Tokens up to which the kernels for few tokens are tried."""
_NEAR: Final = 1.25
_TRIED: Final = 4
"""A product that takes so many times the fastest one's time is still tried in a whole step, but at most so many."""
_TRIED_AGAIN: Final = 2
_BLOCKS: Final = 264
_MOST_SPLITS: Final = 8
"""Blocks of a product whose K is split: two for each multiprocessor of an H200."""
_ROOM: Final = 64
"""Slots that a grouped kernel looks through at least: one compiled kernel serves them all."""
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(x, weight, y to fill, expert ids of the slots)."""


class Products:
    """Multiplies activations by the matrices of one decoder. chosen: what was picked, by (tokens, N, K)."""

    def __init__(self, decoder: Decoder, *, pdl: bool = True) -> None:
        self._pdl = pdl
        self._same: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for matrix in decoder.matrices():
            if matrix.plain is not None and matrix.plain.is_cuda:
                self._same.setdefault(matrix.shape, []).append(matrix.plain)
        self._best: dict[tuple[int, ...], Product] = {}
        self._near: dict[tuple[int, ...], list[tuple[str, Product]]] = {}
        self._used: dict[tuple[int, ...], None] = {}
        self._joins: dict[tuple[int, ...], bool] = {}
        self._may_join: dict[tuple[int, ...], None] = {}
        self._sorted: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self.chosen: dict[str, str] = {}

    def dense(self, x: torch.Tensor, weight: Matrix, dtype: torch.dtype | None = None) -> torch.Tensor:
        """x [T, K] times the weight transposed -> [T, N], rounded to `dtype` (None: that of x) from FP32 sums."""
        shape = (x.shape[0], weight.shape[0])
        if weight.packed is not None and x.shape[0] <= FEW:
            w = weight.packed
            scale = 1.0 if w.global_scale is None else w.global_scale
            y = torch.empty(shape, dtype=dtype or x.dtype, device=x.device)
            return w4a16.w4a16_matmul(x, w.codes, w.scales, scale, fmt=w.format, out=y, constant_weights=self._pdl)
        if not x.is_cuda or x.shape[0] > FEW:
            return torch.nn.functional.linear(x, _plain(weight)).to(dtype or x.dtype)
        assert weight.plain is not None
        key = (x.shape[0], *weight.shape)
        y = torch.empty(shape, dtype=dtype or x.dtype, device=x.device)
        if key not in self._best:
            self._tune(key, x, list(_dense_candidates(*key, device=x.device, pdl=self._pdl)), y, x)
        self._used[key] = None
        self._best[key](x, weight.plain, y, x)
        return y

    def routes(self, weight: Matrix, slots: int) -> bool:
        """Whether so many slots go through the W4A16 kernels, which need a routing; more are worth decoding for."""
        return weight.packed is not None and slots <= 4 * FEW

    def grouped(
        self, x: torch.Tensor, weight: Matrix, ids: torch.Tensor, routing: w4a16.MoeRouting | None
    ) -> torch.Tensor:
        """Each slot's expert times its row: x [T, K], or [T, J, K], with ids [T, J] -> [T, J, N]."""
        per_slot = x.dim() == 3
        if self.routes(weight, ids.numel()):
            w = weight.packed
            assert w is not None
            # down's routing is older than gate_up or the gate before it, and those wait before they let it start
            return w4a16.w4a16_moe(
                x, w.codes, w.scales, w.global_scale, fmt=w.format, routing=routing, x_per_slot=per_slot,
                settled=per_slot and self._pdl,
            )  # fmt: skip
        if not x.is_cuda or ids.numel() > 4 * FEW:
            if not per_slot or self._sorted is None or self._sorted[0] is not ids:  # gate_up's sort serves down too
                self._sorted = (ids, *_sort(ids, weight.experts))
            return _sorted_product(x, _plain(weight), ids, *self._sorted[1:])
        assert weight.plain is not None
        key = (ids.numel(), *weight.shape)
        y = torch.empty((*ids.shape, weight.shape[1]), dtype=x.dtype, device=x.device)
        if key not in self._best:
            tries = list(
                _grouped_candidates(ids.shape[1], *weight.shape, slots=ids.numel(), per_slot=per_slot, pdl=self._pdl)
            )
            self._tune(key, x, tries, y, _spread(ids, weight.experts))
        self._used[key] = None
        self._best[key](x, weight.plain, y, ids)
        return y

    def gated(
        self,
        x: torch.Tensor,
        weight: Matrix,
        ids: torch.Tensor,
        routing: w4a16.MoeRouting | None,
        gate: Gate,
        bias: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """The product with gate_up and its gate in one launch: x [T, K] -> [T, J, I]; None where no kernel does both.

        bias [E, 2 I].
        """
        w = weight.packed
        if w is None or routing is None or routing.triton or not self.routes(weight, ids.numel()):
            return None
        experts, n, k = weight.shape
        key = (ids.numel(), experts, n, k)
        if key not in self._joins:
            self._joins[key] = w4a16.fuses(w.format, ids.numel(), n, k, experts=experts)
        self._may_join[key] = None
        if not self._joins[key]:
            return None
        activation = w4a16.GatedActivation(gate.interleaved, gate.limit, gate.alpha)
        return w4a16.w4a16_moe(
            x, w.codes, w.scales, w.global_scale, fmt=w.format, routing=routing, bias=bias, activation=activation
        )

    def _tune(
        self,
        key: tuple[int, ...],
        x: torch.Tensor,
        tries: Sequence[tuple[str, Product]],
        y: torch.Tensor,
        ids: torch.Tensor,
    ) -> None:
        """Choose the fastest of the candidates, each behind a norm: what starts before that has ended gains by it."""
        from requant.validate.gpu_clock import timed

        before = _norm_before(x, pdl=self._pdl)

        def pair(weight: torch.Tensor, product: Product) -> None:
            before()
            product(x, weight, y, ids)

        weights = self._same[key[1:]][:12]
        found: list[tuple[float, str, Product]] = []
        for name, product in tries:
            us, _ = timed([lambda w=w, p=product: pair(w, p) for w in weights], len(weights) * 2)
            found.append((us, name, product))
        found.sort(key=lambda entry: entry[0])
        us, name, self._best[key] = found[0]
        self._near[key] = [(n, p) for u, n, p in found if u < _NEAR * us][:_TRIED]
        told = ", ".join(f"{n} {u:.1f}" for u, n, _ in found)
        self.chosen[_label(key)] = f"{name} (us with a norm before it: {told})"

    def refine(self, step_us: Callable[[], float]) -> None:
        """Choose again among the products that came near the fastest: the one with which a step, as `step_us` measures
        it, takes least. What overlaps, and on which multiprocessors blocks find room, no other measurement shows."""
        self._used.clear()
        self._may_join.clear()
        step_us()
        for key in [key for key in self._may_join if self._joins[key]]:
            times: dict[bool, float] = {}
            for joined in (True, False):
                self._joins[key] = joined
                times[joined] = step_us()
            self._joins[key] = times[True] <= times[False]
            told = f"gate_up {times[True]:.1f}, gate_up and gate {times[False]:.1f}"
            self.chosen[f"gate of {_label(key)}"] = (
                f"{'one launch' if self._joins[key] else 'two'} (us of a step: {told})"
            )
        for key in [*self._used, *self._used]:  # twice: which product is best for one shape depends on the others'
            near = self._near[key]
            if len(near) < 2:
                continue
            found: list[tuple[float, str, Product]] = []
            for name, product in near:
                self._best[key] = product
                found.append((step_us(), name, product))
            found.sort(key=lambda entry: entry[0])
            _, name, self._best[key] = found[0]
            self._near[key] = [(n, p) for _, n, p in found[:_TRIED_AGAIN]]
            told = ", ".join(f"{n} {u:.1f}" for u, n, _ in found)
            self.chosen[_label(key)] = f"{name} (us of a step: {told})"


def _label(key: tuple[int, ...]) -> str:
    return " x ".join(map(str, key))


def _norm_before(x: torch.Tensor, *, pdl: bool) -> Callable[[], None]:
    """A launch of RMSNorm at the width of x, into a place of its own."""
    from requant.kernels.triton import decode

    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    h, out = (torch.zeros((rows, width), dtype=torch.float32, device=x.device) for _ in range(2))
    normed = torch.empty_like(x)
    block = 1 << (width - 1).bit_length()

    def run() -> None:
        decode.add_norm[(rows,)](
            h, h, h, h, h, x, h, out, normed, width, 1e-5, SLOTS=1, WEIGHTED=False, BIAS=False, ADD=False, ROWS=False,
            BLOCK=block, PDL=pdl, launch_pdl=pdl, num_warps=16,
        )  # fmt: skip

    return run


def _spread(ids: torch.Tensor, experts: int) -> torch.Tensor:
    """Ids as random tokens have them: of each, different experts, any as likely. Those of a warm-up's tokens may be all
    the same."""
    made = torch.Generator(device=ids.device).manual_seed(0)
    drawn = torch.rand((ids.shape[0], experts), generator=made, device=ids.device)
    return drawn.topk(ids.shape[1], dim=1).indices.to(ids.dtype)


def _dense_candidates(m: int, n: int, k: int, *, device: torch.device, pdl: bool) -> Iterator[tuple[str, Product]]:
    from requant.kernels.triton import bf16

    def blas(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, _ids: torch.Tensor) -> None:
        if y.dtype == x.dtype:
            torch.mm(x, w.T, out=y)
        else:
            torch.mm(x, w.T, out_dtype=y.dtype, out=y)

    def vector(rows: int, columns: int, tail: int, warps: int) -> Product:
        def run(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, _ids: torch.Tensor) -> None:
            bf16.vector[(-(-n // rows),)](
                x, w, y, n, K=k, BLOCK_N=rows, BLOCK_K=columns, TAIL=tail, PDL=pdl, launch_pdl=pdl, num_warps=warps
            )

        return run

    def skinny(rows: int, columns: int, stages: int, splits: int, *, early: bool) -> Product:
        blocks = (-(-n // rows), -(-m // 16))
        counters = torch.zeros(blocks[0] * blocks[1], dtype=torch.int32, device=device)

        def run(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, _ids: torch.Tensor) -> None:
            part = torch.empty((splits, m, n), dtype=torch.float32, device=device) if splits > 1 else y
            bf16.skinny[(*blocks, splits)](
                x, w, y, part, counters, m, n, k, BLOCK_N=rows, BLOCK_K=columns, BLOCK_M=16,
                EVEN=k % columns == 0 and n % rows == 0, SPLITS=splits, STAGES=stages, PDL=early, launch_pdl=early,
                num_warps=4,
            )  # fmt: skip

        return run

    yield "cuBLAS", blas
    if m == 1:
        yield "vector 4x512", vector(4, 512, 0, 2)
        yield "vector 4x1024", vector(4, 1024, 0, 4)
        most = 1 << (k.bit_length() - 1)
        tail = 0 if most == k else 1 << (k - most - 1).bit_length()
        for rows, warps in ((1, 4), (2, 4), (2, 8)):
            yield f"vector {rows} rows at once, {warps} warps", vector(rows, most, tail, warps)
    else:
        split = min(_MOST_SPLITS, _BLOCKS // (-(-n // 64) * -(-m // 16)))
        shapes = [(32, 128, 4, 1), (64, 64, 5, 1)] if split < 2 else [(32, 128, 4, 1), (64, 128, 4, split)]
        for rows, columns, stages, splits in shapes:
            name = f"skinny {rows}x{columns}" + (f", K in {splits}" if splits > 1 else "")
            yield name, skinny(rows, columns, stages, splits, early=pdl)
            if pdl:  # blocks that start early all go where there is room, and that may be a few multiprocessors
                yield f"{name}, in turn", skinny(rows, columns, stages, splits, early=False)


def _grouped_candidates(
    top_k: int, experts: int, n: int, k: int, *, slots: int, per_slot: bool, pdl: bool
) -> Iterator[tuple[str, Product]]:
    from requant.kernels.triton import bf16

    room = max(_ROOM, 1 << (slots - 1).bit_length())

    def ours(rows: int, columns: int, stages: int) -> Product:
        def run(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, ids: torch.Tensor) -> None:
            bf16.grouped[(-(-n // rows), experts)](
                x, w, ids, y, slots, n, k, TOP_K=top_k, PER_SLOT=per_slot, SLOTS=room, BLOCK_N=rows, BLOCK_K=columns,
                STAGES=stages, PDL=pdl, launch_pdl=pdl, num_warps=4,
            )  # fmt: skip

        return run

    for rows, columns, stages in ((64, 128, 4), (64, 64, 6)):
        yield f"grouped {rows}x{columns}", ours(rows, columns, stages)


def _plain(weight: Matrix) -> torch.Tensor:
    """The weight to multiply with: as it is, or decoded to BF16 for this one product of many tokens."""
    if weight.plain is not None:
        return weight.plain
    from requant.kernels.triton.dequantize import to_bf16

    assert weight.packed is not None
    return to_bf16(weight.packed)


def _sort(ids: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots by expert, and how many each has."""
    flat = ids.flatten().long()
    counts = torch.zeros(experts, dtype=torch.int64, device=ids.device).scatter_add_(0, flat, torch.ones_like(flat))
    return torch.argsort(flat, stable=True), counts


def _sorted_product(
    x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, order: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """Many slots: by expert in turn (on a GPU in one grouped call, and nothing goes to the host)."""
    n = weight.shape[1]
    rows = x.flatten(0, 1)[order] if x.dim() == 3 else x[order // ids.shape[1]]
    out = torch.empty((len(order), n), dtype=x.dtype, device=x.device)
    if x.is_cuda:
        ends = counts.cumsum(0).int()
        out[order] = torch.nn.functional.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
        return out.view(*ids.shape, n)
    begin = 0
    for expert, count in enumerate(counts.tolist()):
        if count:
            out[order[begin : begin + count]] = rows[begin : begin + count] @ weight[expert].T
        begin += count
    return out.view(*ids.shape, n)
