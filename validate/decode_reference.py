"""Whether a step computes what the model says: its logits against the same step in plain torch with float64 products.

A graph that decodes the tokens of its own eager step may be wrong twice in the same way. So a few layers (one of each
kind that the model has), the final norm and the head run once more, apart from every kernel that is timed: products in
float64 on the numbers that the codes stand for, norms, rotary embedding, attention, routing and gates in plain torch
(decode_glue.py, which equals transformers' classes: tests/model/test_decode_families.py). Keys and values of earlier
tokens are random and the same for both, and the reference takes the experts that the step chose, so that a near tie is
no difference; that they are distinct, and as likely as its own choice, is judged apart.

The prefill is judged by the keys and values that it leaves in one more layer after those, which need all that lies
before. A near tie of experts moves a token here or there, so that medians count, of every 16 tokens in a row: a tile of
them that is wrong is no tie.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch
from requant.kernels import w4a16
from requant.kernels.w4a4_operands import Fp4Tensor
from requant.validate.decode_engine import Engine
from requant.validate.decode_glue import Added, Chosen, PlainGlue
from requant.validate.decode_load import decoded
from requant.validate.decode_model import Decoder, Layer, Matrix, Moe, Router
from requant.validate.decode_products import Products
from requant.validate.decode_step import Cache, State, prefill, step

__all__ = ["BOUND", "Deviation", "check_prefill", "check_step", "few_layers"]

BOUND: Final = 0.02
"""Largest error of a stream's logits as a part of their size. BF16 keeps 2^-9 a rounding, and a few layers round some
dozens of times: up to 0.008 measured on an H200 (docs/decode.md). A bias, a window or a block of weights left out
shows as 0.04 and more in the tests' small model."""
_ROWS: Final = 8192
"""Rows of a weight that are held in float64 at a time."""
_TOKENS: Final = 16
"""Of a prompt, in a row, whose median error counts."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """error: of the logits (or of keys and values), relative, the worst stream's (of 16 tokens the median, the worst
    of these); routing: how far
    below the reference's own choice the least likely of the chosen experts lies, as a part of the router's largest
    logit; infinite where one was chosen twice. layers: how many ran."""

    error: float
    routing: float
    layers: int

    @property
    def wrong(self) -> bool:
        """Whether it is beyond what BF16 explains; NaN is."""
        return not (self.error <= BOUND and self.routing <= BOUND)


def few_layers(decoder: Decoder) -> Decoder:
    """The first layer of each kind (window or none, experts or none, formats of its weights), two at least."""
    kinds: set[tuple[object, ...]] = set()
    chosen: list[Layer] = []
    for layer in decoder.layers:
        a, mlp = layer.attention, layer.mlp
        weights = (a.qkv, a.out, mlp.gate_up, mlp.down)
        kind = (a.window > 0, isinstance(mlp, Moe), *(weight.stored for weight in weights))
        if kind not in kinds or len(decoder.layers) <= 2:
            kinds.add(kind)
            chosen.append(layer)
    if len(chosen) == 1 and len(decoder.layers) > 1:
        chosen.append(decoder.layers[1])
    return replace(decoder, layers=tuple(chosen))


def check_step(decoder: Decoder, streams: int, position: int, products: Products) -> Deviation:
    """One step of so many streams at `position`, as it is timed (on a GPU in a graph), against the reference."""
    few = few_layers(decoder)
    engine = Engine(few, streams, position + 2, products)
    engine.capture()
    made = torch.Generator(few.embedding.device).manual_seed(streams)
    for kept in engine.cache.layers:
        for part in kept:
            part.normal_(generator=made)
    tokens = torch.randint(0, len(few.embedding), (streams,), generator=made, device=few.embedding.device)
    # streams stand apart, so that one that reads another's keys is seen
    at = (position - torch.arange(streams, device=tokens.device) % max(1, position // 2)).int()
    cache = Cache(tuple((k.clone(), v.clone()) for k, v in engine.cache.layers))
    engine.state.tokens.copy_(tokens)
    engine.state.positions.copy_(at)
    engine.step()
    assert engine.logits is not None
    state = State(tokens.clone(), at.clone(), engine.state.routed)
    glue = _Forced()
    with torch.inference_mode():
        exact = step(few, cache, state, glue, _Exact(few))
    if not torch.equal(engine.state.tokens, engine.logits.argmax(-1)):
        return Deviation(float("inf"), glue.short, len(few.layers))
    return Deviation(_worst(engine.logits, exact), glue.short, len(few.layers))


def check_prefill(decoder: Decoder, prompt: torch.Tensor, products: Products) -> Deviation:
    """A prompt's keys and values in the layer after a few, against the reference's."""
    few = few_layers(decoder)
    few = replace(few, layers=(*few.layers, few.layers[0]))
    engine = Engine(few, 1, len(prompt), products)
    engine.capture(len(prompt))
    engine.start(0, prompt)
    cache = Cache.empty(few, 1, len(prompt))
    with torch.inference_mode():
        prefill(few, cache, torch.zeros(1, dtype=torch.int64, device=prompt.device), prompt, PlainGlue(), _Exact(few))
    errors = [
        _in_a_row(_by_row(ours.transpose(1, 2).flatten(2)[0], exact.transpose(1, 2).flatten(2)[0]))
        for ours, exact in zip(engine.cache.layers[-1], cache.layers[-1], strict=True)
    ]
    return Deviation(float(torch.stack(errors).max()), 0.0, len(few.layers))


def _by_row(ours: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    ours, exact = ours.double(), exact.double()
    return (ours - exact).norm(dim=-1) / exact.norm(dim=-1)


def _in_a_row(errors: torch.Tensor) -> torch.Tensor:
    """The largest median of any 16 tokens in a row, cut at every eighth and at the end; NaN stays."""
    if len(errors) <= _TOKENS:
        return errors.median()
    ends = [*range(_TOKENS, len(errors), _TOKENS // 2), len(errors)]
    return torch.stack([errors[end - _TOKENS : end].median() for end in ends]).max()


def _worst(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float(_by_row(ours, exact).max())


class _Forced(PlainGlue):
    """Takes the experts that were chosen elsewhere. short: see Deviation.routing."""

    def __init__(self) -> None:
        self.short = 0.0

    def choose(
        self,
        h: torch.Tensor,
        added: Added,
        norm: torch.Tensor,
        eps: float,
        router: Router,
        ids: torch.Tensor | None,
        *,
        route: bool,
    ) -> Chosen:
        """See Glue."""
        assert ids is not None
        h, x = self.add_norm(h, added, norm, eps)
        logits = torch.nn.functional.linear(x.double(), router.weight.double())
        logits = logits if router.bias is None else logits + router.bias.double()
        ordered = ids.long().sort(-1).values
        known = bool((ordered >= 0).all()) and bool((ordered < len(router.weight)).all())
        if not known or bool((ordered[:, 1:] == ordered[:, :-1]).any()):
            self.short = float("inf")
            ids = torch.topk(logits, router.top_k, dim=-1).indices.int()
        values = logits.gather(-1, ids.long())
        best = torch.topk(logits, router.top_k, dim=-1).values
        below = (best.amin(-1) - values.amin(-1)) / logits.abs().amax(-1)
        self.short = max(self.short, float(below.max()))
        whole = values if router.normalize else logits
        weights = torch.exp(values - torch.logsumexp(whole, -1, keepdim=True)).float()
        return Chosen(h, x, ids, weights, None)


class _Exact(Products):
    """Every product in float64, its result rounded once to the dtype of the activations."""

    def dense(self, x: torch.Tensor, weight: Matrix, dtype: torch.dtype | None = None) -> torch.Tensor:
        """See Products. dtype: of the result, where it is not the activations'."""
        return _product(x, weight, None, dtype)

    def grouped(
        self, x: torch.Tensor, weight: Matrix, ids: torch.Tensor, routing: w4a16.MoeRouting | None
    ) -> torch.Tensor:
        """See Products."""
        rows = (x if x.dim() == 3 else x[:, None].expand(*ids.shape, x.shape[-1])).reshape(ids.numel(), -1)
        flat = ids.flatten()
        out = x.new_empty((ids.numel(), weight.shape[1]))
        for expert in flat.unique().tolist():
            mine = (flat == expert).nonzero()[:, 0]
            out[mine] = _product(rows[mine], weight, expert)
        return out.view(*ids.shape, -1)


def _product(x: torch.Tensor, weight: Matrix, expert: int | None, dtype: torch.dtype | None = None) -> torch.Tensor:
    """x [M, K] times the weight (of one expert) -> [M, N], some rows of the weight in float64 at a time."""
    x64, rows = x.double(), weight.shape[-2]
    parts = [x64 @ _numbers(weight, expert, slice(first, first + _ROWS)).T for first in range(0, rows, _ROWS)]
    return torch.cat(parts, -1).to(dtype or x.dtype)


def _numbers(weight: Matrix, expert: int | None, rows: slice) -> torch.Tensor:
    if weight.packed is None:
        assert weight.plain is not None
        return (weight.plain if expert is None else weight.plain[expert])[rows].double()
    w = weight.packed
    codes, scales = (w.codes, w.scales) if expert is None else (w.codes[expert], w.scales[expert])
    one = None if w.global_scale is None else w.global_scale[expert or 0].reshape(1)
    return decoded(Fp4Tensor(w.format, codes[rows], scales[rows], one), None)
