"""The same glue as decode_glue.py, by the fused kernels of kernels/triton/decode.py and kernels/decode_cuda.py."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportCallIssue=false
# A Triton launch takes options that its kernel does not declare.
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

from typing import Final

import torch
from requant.kernels import decode_cuda, w4a16
from requant.kernels.triton import decode, prompt
from requant.kernels.w4a16_library import routing_ints, tile_tokens
from requant.validate.decode_glue import Added, Chosen, PlainGlue
from requant.validate.decode_model import Attention, Gate, Router

__all__ = ["FusedGlue"]

_DOT: Final = 16
"""tl.dot's smallest side."""
_KEYS: Final = 128
"""Keys of the cache that one pass of the attention loop takes."""
_KEYS_OF_A_PART: Final = 128
_QUERIES: Final = 64
"""Queries of a prompt, and keys, that a program takes at a time."""
_GATE_BLOCK: Final = 256
_ROUTED_HERE: Final = 128
"""Slots that `choose` sorts by itself, each against each; beyond, route_experts does."""
_NORM_WARPS: Final = 32
_CHOOSE_WARPS: Final = 8
_ATTEND_WARPS: Final = 4
_COUNTERS: Final = 4096
_PARTS: Final = 64
"""Programs that look for the largest of one stream's logits."""
_RANKED: Final = 1 << 13
"""Comparisons up to which `choose` ranks all experts at once."""
_CHOOSERS: Final = 132
"""Programs of `choose` at most, where each has one expert: one for each multiprocessor of an H200."""
_ALONE: Final = 8
"""KV heads of all streams up to which one block does each (csrc/decode_attend.cuh), where it fits: gpt-oss's of one."""
_PROGRAMS: Final = 256
"""Programs of `attend` to aim at: about two for each multiprocessor of an H200."""


class FusedGlue:
    """For a GPU. pdl: programmatic dependent launch (SM90 and later; not under Triton's interpreter). routes: whether
    `choose` may sort slots, which it does for the CUDA kernel and not for Triton's (w4a16.uses_triton); with both, what
    kernels/decode_cuda.py takes is CUDA's."""

    def __init__(self, *, pdl: bool, device: str = "cuda", routes: bool = True) -> None:
        self._routes, self._pdl = routes, pdl
        self._cuda = routes and pdl
        self._counters = torch.zeros(1 + _COUNTERS, dtype=torch.int32, device=device)
        self._launch = {"PDL": pdl, "launch_pdl": True} if pdl else {"PDL": False}

    def embed(
        self, embedding: torch.Tensor, tokens: torch.Tensor, norm: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Glue."""
        h = torch.empty((len(tokens), embedding.shape[1]), dtype=torch.float32, device=embedding.device)
        return h, self._normed(embedding, None, norm, eps, h, tokens)

    def pick(self, logits: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor) -> None:
        """See Glue."""
        streams, vocabulary = logits.shape
        if streams > _COUNTERS:
            raise ValueError(f"{streams} streams: at most {_COUNTERS} together")
        value = torch.empty((streams, _PARTS), dtype=torch.float32, device=logits.device)
        index = torch.empty((streams, _PARTS), dtype=torch.int32, device=logits.device)
        decode.largest[(streams, _PARTS)](
            logits, tokens, positions, value, index, self._counters[1:], vocabulary,
            PARTS=_PARTS, BLOCK=_up(-(-vocabulary // _PARTS)), num_warps=4, **self._launch,
        )  # fmt: skip

    def add_norm(
        self, h: torch.Tensor, added: Added | None, norm: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Glue."""
        out = torch.empty_like(h)
        return out, self._normed(h, added, norm, eps, out, None)

    def _normed(
        self,
        h: torch.Tensor,
        added: Added | None,
        norm: torch.Tensor,
        eps: float,
        out: torch.Tensor,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        tokens, width = out.shape
        x = torch.empty(out.shape, dtype=norm.dtype, device=h.device)
        made = Added(h) if added is None else added
        slots = made.y.shape[1] if added is not None else 1
        decode.add_norm[(tokens,)](
            h, made.y, _or(made.weights, h), _or(made.ids, h), _or(made.bias, h), norm, _or(rows, h), out, x, width,
            eps, SLOTS=slots, WEIGHTED=made.weights is not None, BIAS=made.bias is not None, ADD=added is not None,
            ROWS=rows is not None, BLOCK=_up(width), num_warps=_NORM_WARPS, **self._launch,
        )  # fmt: skip
        return x

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
        tokens, width = h.shape
        if tokens > _COUNTERS:
            return PlainGlue().choose(h, added, norm, eps, router, ids, route=route)
        experts, top_k = router.weight.shape[0], router.top_k
        out, x = torch.empty_like(h), torch.empty(h.shape, dtype=norm.dtype, device=h.device)
        logits = torch.empty((tokens, experts), dtype=torch.float32, device=h.device)
        weights = torch.empty((tokens, top_k), dtype=torch.float32, device=h.device)
        chosen = torch.empty((tokens, top_k), dtype=torch.int32, device=h.device) if ids is None else ids
        slots = tokens * top_k
        tile = tile_tokens(slots, experts)
        here = route and self._routes and slots <= _ROUTED_HERE
        routing = torch.empty(routing_ints(slots, experts), dtype=torch.int32, device=h.device) if here else chosen
        most = min(slots, experts + slots // tile)
        if self._cuda and decode_cuda.chooses(
            tokens, width, experts, added.y, added.bias, norm, router.weight, router.bias
        ):
            decode_cuda.choose(
                h, added.y, added.bias, norm, router.weight, router.bias, out, x, chosen, weights,
                routing if here else None, max_tiles=most, normalize=router.normalize, eps=eps, early_start=self._pdl,
            )  # fmt: skip
            return Chosen(out, x, chosen, weights, w4a16.MoeRouting(routing, 1, top_k, experts) if here else None)
        rows = min(4, _up(max(1, -(-tokens * experts // _CHOOSERS))))
        decode.choose[(tokens, -(-experts // rows))](
            h, added.y, _or(added.bias, h), norm, router.weight, _or(router.bias, h), out, x, logits, chosen, weights,
            routing, self._counters, width, eps, tokens, experts, most,
            BIAS=added.bias is not None, ROUTER_BIAS=router.bias is not None, NORMALIZE=router.normalize, ROUTE=here,
            TOP_K=top_k, PLACES=_up(top_k), TOKENS=_up(tokens), EXPERTS=_up(experts), TILE=tile, ROWS=rows,
            RANKED=(_up(tokens) if here else 1) * _up(experts) ** 2 <= _RANKED,
            BLOCK=_up(width), num_warps=_CHOOSE_WARPS, **self._launch,
        )  # fmt: skip
        made = w4a16.MoeRouting(routing, tokens, top_k, experts) if here else None
        return Chosen(out, x, chosen, weights, w4a16.route_experts(chosen, experts) if route and not here else made)

    def gate(
        self,
        both: torch.Tensor,
        gate: Gate,
        ids: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """See Glue."""
        width = both.shape[-1] // 2
        out = torch.empty((*both.shape[:-1], width), dtype=both.dtype, device=both.device)
        decode.gate[(out.numel() // width, -(-width // _GATE_BLOCK))](
            both, _or(ids, both), _or(bias, both), out, width, gate.limit or 0.0, gate.alpha,
            BIAS=bias is not None, EXPERTS=ids is not None, INTERLEAVED=gate.interleaved,
            CLAMPED=gate.limit is not None, BLOCK=_GATE_BLOCK, num_warps=4, **self._launch,
        )  # fmt: skip
        return out

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
        a, tokens = attention, qkv.shape[0]
        if not _halves_fit(a):
            return PlainGlue().attend(qkv, attention, cache, positions, tables, eps)
        capacity = cache[0].shape[2]
        longest = capacity if not a.window else min(capacity, a.window)
        alone = self._cuda and a.q_norm is None and a.k_norm is None and tokens * a.kv_heads <= _ALONE
        if alone and decode_cuda.attends(a.heads, a.kv_heads, a.head_dim, longest, qkv, a.qkv_bias, a.sinks, *cache):
            out = torch.empty((tokens, a.heads * a.head_dim), dtype=qkv.dtype, device=qkv.device)
            decode_cuda.attend(
                qkv, a.qkv_bias, a.sinks, tables, positions, cache, out, scale=a.scale, window=a.window,
                early_start=self._pdl,
            )  # fmt: skip
            return out
        splits = _up(max(1, min(_PROGRAMS // (tokens * a.kv_heads), -(-longest // _KEYS_OF_A_PART))))
        part = torch.empty((splits, tokens, a.heads, a.head_dim), dtype=torch.float32, device=qkv.device)
        state = torch.empty((splits, tokens, a.heads, 2), dtype=torch.float32, device=qkv.device)
        out = torch.empty((tokens, a.heads * a.head_dim), dtype=qkv.dtype, device=qkv.device)
        if tokens * a.kv_heads > _COUNTERS:
            raise ValueError(f"{tokens} streams of {a.kv_heads} KV heads: at most {_COUNTERS} together")
        decode.attend[(tokens * a.kv_heads, splits)](
            qkv, _or(a.qkv_bias, qkv), _or(a.q_norm, qkv), _or(a.k_norm, qkv), _or(a.sinks, qkv), *tables, positions,
            *cache, part, state, out, self._counters[1:], a.scale, eps, capacity, a.window,
            HEADS=a.heads, KV_HEADS=a.kv_heads, HALF=a.head_dim // 2, GROUP=max(_DOT, _up(a.heads // a.kv_heads)),
            SPLITS=splits, BIAS=a.qkv_bias is not None, QK_NORM=a.q_norm is not None, SINKS=a.sinks is not None,
            BLOCK=_KEYS, num_warps=_ATTEND_WARPS, **self._launch,
        )  # fmt: skip
        return out

    def attend_prompt(
        self,
        qkv: torch.Tensor,
        attention: Attention,
        cache: tuple[torch.Tensor, torch.Tensor],
        stream: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        eps: float,
    ) -> torch.Tensor:
        """See Glue."""
        a, count = attention, len(qkv)
        if not _halves_fit(a):
            return PlainGlue().attend_prompt(qkv, attention, cache, stream, tables, eps)
        out = torch.empty((count, a.heads * a.head_dim), dtype=qkv.dtype, device=qkv.device)
        sizes = {"HEADS": a.heads, "KV_HEADS": a.kv_heads, "HALF": a.head_dim // 2, "BIAS": a.qkv_bias is not None}
        bias, capacity, blocks = _or(a.qkv_bias, qkv), cache[0].shape[2], -(-count // _QUERIES)
        prompt.keys[(blocks, a.kv_heads)](
            qkv, bias, _or(a.k_norm, qkv), *tables, stream, *cache, count, capacity, eps, **sizes,
            NORM=a.k_norm is not None, BLOCK=_QUERIES, num_warps=4,
        )  # fmt: skip
        prompt.prompt[(blocks, a.heads)](
            qkv, bias, _or(a.q_norm, qkv), _or(a.sinks, qkv), *tables, stream, *cache, out, count, capacity, a.window,
            a.scale, eps, **sizes, NORM=a.q_norm is not None, SINKS=a.sinks is not None, BLOCK=_QUERIES,
            KEYS=_QUERIES, num_warps=4,
        )  # fmt: skip
        return out


def _halves_fit(attention: Attention) -> bool:
    """Whether halves of a head can be multiplied by tl.dot, and counted in powers of two."""
    return attention.head_dim >= 2 * _DOT and attention.head_dim & (attention.head_dim - 1) == 0


def _or(tensor: torch.Tensor | None, stand_in: torch.Tensor) -> torch.Tensor:
    """A pointer for an argument that the kernel does not read."""
    return stand_in if tensor is None else tensor


def _up(value: int) -> int:
    """The next power of two."""
    return 1 << (value - 1).bit_length()
