"""The matrix products of a step: W4A16 for FP4 weights, and for plain ones whichever of cuBLAS and ours is faster here.

For a plain weight of one shape and number of tokens the candidates are timed once, on all the weights of that shape in
turn (so that none lies in the L2 cache), and the fastest is kept: BF16, as the baseline, gets the best that there is.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportCallIssue=false
# A Triton launch takes options that its kernel does not declare.

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
from requant.kernels import w4a16
from requant.validate.decode_model import Decoder, Matrix

__all__ = ["Products"]

FEW: Final = 64
"""Tokens up to which the kernels for few tokens are tried."""
_EARLY_IS_WORTH: Final = 0.9
"""A kernel that has all its weights on the way before it waits for the one before it also gains the time of that one,
which timing it alone does not show."""
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
        self.chosen: dict[str, str] = {}

    def dense(self, x: torch.Tensor, weight: Matrix) -> torch.Tensor:
        """x [T, K] times the weight transposed -> [T, N]."""
        if weight.packed is not None:
            w = weight.packed
            scale = 1.0 if w.global_scale is None else w.global_scale
            return w4a16.w4a16_matmul(x, w.codes, w.scales, scale, fmt=w.format, constant_weights=self._pdl)
        assert weight.plain is not None
        if not x.is_cuda or x.shape[0] > FEW:
            return torch.nn.functional.linear(x, weight.plain)
        key = (x.shape[0], *weight.shape)
        y = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
        if key not in self._best:
            tries = list(_dense_candidates(*key, pdl=self._pdl))
            self._best[key] = self._tune(key, x, tries, y, x)
        self._best[key](x, weight.plain, y, x)
        return y

    def grouped(
        self, x: torch.Tensor, weight: Matrix, ids: torch.Tensor, routing: w4a16.MoeRouting | None
    ) -> torch.Tensor:
        """Each slot's expert times its row: x [T, K], or [T, J, K], with ids [T, J] -> [T, J, N]."""
        per_slot = x.dim() == 3
        if weight.packed is not None:
            w = weight.packed
            return w4a16.w4a16_moe(
                x, w.codes, w.scales, w.global_scale, fmt=w.format, routing=routing, x_per_slot=per_slot
            )
        assert weight.plain is not None
        if not x.is_cuda or ids.numel() > 4 * FEW:
            return _sorted_product(x, weight.plain, ids)
        key = (ids.numel(), *weight.shape)
        y = torch.empty((*ids.shape, weight.shape[1]), dtype=x.dtype, device=x.device)
        if key not in self._best:
            tries = list(
                _grouped_candidates(ids.shape[1], *weight.shape, slots=ids.numel(), per_slot=per_slot, pdl=self._pdl)
            )
            self._best[key] = self._tune(key, x, tries, y, ids)
        self._best[key](x, weight.plain, y, ids)
        return y

    def _tune(
        self,
        key: tuple[int, ...],
        x: torch.Tensor,
        tries: Sequence[tuple[str, Product]],
        y: torch.Tensor,
        ids: torch.Tensor,
    ) -> Product:
        """The fastest of the candidates."""
        from requant.validate.gpu_clock import timed

        weights = self._same[key[1:]][:12]
        found: list[tuple[float, str, Product]] = []
        for name, product in tries:
            us, _ = timed([lambda w=w, p=product: p(x, w, y, ids) for w in weights], len(weights) * 2)
            found.append((us, name, product))
        us, name, best = min(found, key=lambda entry: entry[0] * (_EARLY_IS_WORTH if "early" in entry[1] else 1))
        told = ", ".join(f"{n} {u:.1f}" for u, n, _ in sorted(found, key=lambda entry: entry[0]))
        self.chosen[" x ".join(map(str, key))] = f"{name} ({us:.1f} us; {told})"
        return best


def _dense_candidates(m: int, n: int, k: int, *, pdl: bool) -> Iterator[tuple[str, Product]]:
    from requant.kernels.triton import bf16

    def blas(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, _ids: torch.Tensor) -> None:
        torch.mm(x, w.T, out=y)

    def vector(rows: int, columns: int, warps: int) -> Product:
        def run(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, _ids: torch.Tensor) -> None:
            bf16.vector[(-(-n // rows),)](
                x, w, y, n, K=k, BLOCK_N=rows, BLOCK_K=columns, PDL=pdl, launch_pdl=pdl, num_warps=warps
            )

        return run

    def skinny(rows: int, columns: int, stages: int) -> Product:
        def run(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, _ids: torch.Tensor) -> None:
            bf16.skinny[(-(-n // rows), -(-m // 16))](
                x, w, y, m, n, k, BLOCK_N=rows, BLOCK_K=columns, BLOCK_M=16, EVEN=k % columns == 0 and n % rows == 0,
                STAGES=stages, PDL=pdl, launch_pdl=pdl, num_warps=4,
            )  # fmt: skip

        return run

    yield "cuBLAS", blas
    if m == 1:
        for rows, columns, warps in ((4, 1024, 4), (4, 512, 2), (2, 4096, 4), (4, 4096, 8), (1, 4096, 2)):
            early = ", early" if columns >= k else ""
            yield f"vector {rows}x{columns}{early}", vector(rows, columns, warps)
    else:
        for rows, columns, stages in ((32, 128, 4), (16, 256, 4), (64, 64, 5)):
            yield f"skinny {rows}x{columns}", skinny(rows, columns, stages)


def _grouped_candidates(
    top_k: int, experts: int, n: int, k: int, *, slots: int, per_slot: bool, pdl: bool
) -> Iterator[tuple[str, Product]]:
    from requant.kernels.triton import bf16

    room = max(16, 1 << (slots - 1).bit_length())

    def ours(rows: int, columns: int, stages: int) -> Product:
        def run(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, ids: torch.Tensor) -> None:
            bf16.grouped[(-(-n // rows), experts)](
                x, w, ids, y, slots, n, k, TOP_K=top_k, PER_SLOT=per_slot, SLOTS=room, BLOCK_N=rows, BLOCK_K=columns,
                STAGES=stages, PDL=pdl, launch_pdl=pdl, num_warps=4,
            )  # fmt: skip

        return run

    for rows, columns, stages in ((32, 128, 4), (64, 128, 4), (64, 64, 6)):
        yield f"grouped {rows}x{columns}", ours(rows, columns, stages)


def _sorted_product(x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Many slots: by expert in turn (on a GPU in one grouped call, and nothing goes to the host)."""
    experts, n, _ = weight.shape
    flat = ids.flatten().long()
    rows = x.flatten(0, 1) if x.dim() == 3 else x.repeat_interleave(ids.shape[1], 0)
    order = torch.argsort(flat, stable=True)
    counts = torch.zeros(experts, dtype=torch.int64, device=x.device).scatter_add_(0, flat, torch.ones_like(flat))
    out = torch.empty((len(flat), n), dtype=x.dtype, device=x.device)
    if x.is_cuda:
        ends = counts.cumsum(0).int()
        out[order] = torch.nn.functional.grouped_mm(rows[order], weight.transpose(1, 2), offs=ends)
        return out.view(*ids.shape, n)
    begin = 0
    for expert, count in enumerate(counts.tolist()):
        mine = order[begin : begin + count]
        if count:
            out[mine] = rows[mine] @ weight[expert].T
        begin += count
    return out.view(*ids.shape, n)
