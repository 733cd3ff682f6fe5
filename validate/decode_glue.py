"""What stands between the matrix products of a step, in plain torch: the reference, on any device and in any dtype.

decode_fused.py has the same functions as fused Triton kernels for a GPU. A stream's residual is FP32 in both.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import torch
from requant.kernels import w4a16
from requant.validate.decode_model import Attention, Gate, Router

__all__ = ["Added", "Chosen", "Glue", "PlainGlue"]

_QUERIES: Final = 256
"""Queries of a prompt whose attention plain torch computes at a time: bounds the logits' memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Added:
    """What a block adds to the residual stream: y [T, J, hidden], J slots a token, each weighted if there are weights.

    bias [hidden], or of the experts that ids [T, J] name: [E, hidden].
    """

    y: torch.Tensor
    weights: torch.Tensor | None = None
    ids: torch.Tensor | None = None
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """h, x [T, hidden]; ids [T, top_k] int32 and weights FP32 of each token's experts; the routing for FP4 products."""

    h: torch.Tensor
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    routing: w4a16.MoeRouting | None


class Glue(Protocol):
    """The steps between products, for T tokens (one of each stream). h must be older than the launch just before."""

    def embed(
        self, embedding: torch.Tensor, tokens: torch.Tensor, norm: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows of the embedding in FP32, their RMSNorm in the dtype of `norm`)."""
        ...

    def pick(self, logits: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor) -> None:
        """tokens [T] = the largest of logits [T, V] (the first of equal ones); positions [T] + 1. In place."""
        ...

    def add_norm(
        self, h: torch.Tensor, added: Added | None, norm: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(h + what is added, its RMSNorm in the dtype of `norm`)."""
        ...

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
        """The same, and each token's experts. ids: where they are wanted. route: FP4 experts follow."""
        ...

    def gate(
        self,
        both: torch.Tensor,
        gate: Gate,
        ids: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """both [T, J, 2 I] -> [T, J, I]."""
        ...

    def attend(
        self,
        qkv: torch.Tensor,
        attention: Attention,
        cache: tuple[torch.Tensor, torch.Tensor],
        positions: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        eps: float,
    ) -> torch.Tensor:
        """One new token of each stream: qkv [T, (H + 2 KV) D] -> [T, H D]. Keys and values of the token are written at
        its position in the cache ([T, KV, capacity, D] each); earlier positions are read."""
        ...

    def attend_prompt(
        self,
        qkv: torch.Tensor,
        attention: Attention,
        cache: tuple[torch.Tensor, torch.Tensor],
        stream: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        eps: float,
    ) -> torch.Tensor:
        """All tokens of one prompt, each of those before it: qkv [T, (H + 2 KV) D] -> [T, H D]. Keys and values are
        written to the cache of `stream` [1] int64, from position 0 on."""
        ...


class PlainGlue:
    """The reference."""

    def embed(
        self, embedding: torch.Tensor, tokens: torch.Tensor, norm: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Glue."""
        h = embedding.index_select(0, tokens).float()
        return h, _rms(h, norm, eps).to(norm.dtype)

    def pick(self, logits: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor) -> None:
        """See Glue."""
        tokens.copy_(logits.argmax(-1))
        positions.add_(1)

    def add_norm(
        self, h: torch.Tensor, added: Added | None, norm: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Glue."""
        if added is not None:
            y = added.y.float()
            if added.bias is not None:
                y = y + (added.bias if added.ids is None else added.bias[added.ids.long()]).float()
            if added.weights is not None:
                y = y * added.weights[..., None]
            h = h + y.sum(1)
        return h, _rms(h, norm, eps).to(norm.dtype)

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
        h, x = self.add_norm(h, added, norm, eps)
        logits = torch.nn.functional.linear(x.float(), router.weight.float())
        logits = logits if router.bias is None else logits + router.bias.float()
        values, found = torch.topk(logits, router.top_k, dim=-1)
        whole = values if router.normalize else logits
        weights = torch.exp(values - torch.logsumexp(whole, -1, keepdim=True))
        chosen = found.int() if ids is None else ids.copy_(found)
        routing = w4a16.route_experts(chosen, len(router.weight)) if route else None
        return Chosen(h, x, chosen, weights, routing)

    def gate(
        self,
        both: torch.Tensor,
        gate: Gate,
        ids: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """See Glue."""
        both32 = both.float()
        if bias is not None:
            both32 = both32 + (bias if ids is None else bias[ids.long()]).float()
        if gate.interleaved:
            first, up = both32[..., ::2], both32[..., 1::2]
        else:
            first, up = both32.chunk(2, dim=-1)
        if gate.limit is None:
            return (torch.nn.functional.silu(first) * up).to(both.dtype)
        first = first.clamp(max=gate.limit)
        up = up.clamp(-gate.limit, gate.limit)
        return ((up + 1) * first * torch.sigmoid(first * gate.alpha)).to(both.dtype)

    def attend(
        self,
        qkv: torch.Tensor,
        attention: Attention,
        cache: tuple[torch.Tensor, torch.Tensor],
        positions: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        eps: float,
    ) -> torch.Tensor:
        """See Glue."""
        at = positions.long()
        q, k, v = split_heads(qkv, attention, eps)
        cos, sin = tables[0][at][:, None], tables[1][at][:, None]
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        stream = torch.arange(qkv.shape[0], device=qkv.device)
        cache[0][stream, :, at] = k.to(cache[0].dtype)
        cache[1][stream, :, at] = v.to(cache[1].dtype)
        key = torch.arange(cache[0].shape[2], device=qkv.device)[None]
        seen = key <= at[:, None]
        if attention.window:
            seen &= key > at[:, None] - attention.window
        out = attention_of(q[:, :, None], cache[0].float(), cache[1].float(), seen[:, None, None], attention)
        return out[:, :, 0].flatten(1).to(qkv.dtype)

    def attend_prompt(
        self,
        qkv: torch.Tensor,
        attention: Attention,
        cache: tuple[torch.Tensor, torch.Tensor],
        stream: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        eps: float,
    ) -> torch.Tensor:
        """See Glue. A few hundred queries at a time."""
        count, a = len(qkv), attention
        q, k, v = split_heads(qkv, a, eps)
        cos, sin = (table[:count, None] for table in tables)
        q, k = (rotated(t, cos, sin).transpose(0, 1) for t in (q, k))
        keys, values = k.to(cache[0].dtype), v.transpose(0, 1).to(cache[1].dtype)
        for kept, new in zip(cache, (keys, values), strict=True):
            kept[:, :, :count].index_copy_(0, stream, new[None])
        at = torch.arange(count, device=qkv.device)
        out: list[torch.Tensor] = []
        for begin in range(0, count, _QUERIES):
            here = at[begin : begin + _QUERIES, None]
            first = 0 if not a.window else max(0, begin - a.window + 1)
            span = slice(first, begin + _QUERIES)
            seen = at[None, span] <= here
            if a.window:
                seen &= at[None, span] > here - a.window
            part = attention_of(q[:, begin : begin + _QUERIES], keys[:, span].float(), values[:, span].float(), seen, a)
            out.append(part.transpose(0, 1).flatten(1))
        return torch.cat(out).to(qkv.dtype)


def split_heads(qkv: torch.Tensor, attention: Attention, eps: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bias, heads, QK-norm: q [T, H, D], k and v [T, KV, D], FP32."""
    a = attention
    values = qkv.float() if a.qkv_bias is None else qkv.float() + a.qkv_bias.float()
    q, k, v = values.view(len(values), -1, a.head_dim).split([a.heads, a.kv_heads, a.kv_heads], dim=1)
    return (
        q if a.q_norm is None else _rms(q, a.q_norm, eps),
        k if a.k_norm is None else _rms(k, a.k_norm, eps),
        v,
    )


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [.., D], the halves of D as pairs."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attention_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, attention: Attention
) -> torch.Tensor:
    """q [.., H, Q, D], k and v [.., KV, S, D], seen (broadcast over) [.., H, Q, S] -> [.., H, Q, D], with sinks."""
    group = attention.heads // attention.kv_heads
    k, v = k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)
    logits = (q @ k.transpose(-1, -2) * attention.scale).masked_fill(~seen, float("-inf"))
    if attention.sinks is None:
        return torch.softmax(logits, -1) @ v
    sinks = attention.sinks.float()[:, None, None].expand(*logits.shape[:-1], 1)
    return torch.softmax(torch.cat([logits, sinks], -1), -1)[..., :-1] @ v


def _rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
