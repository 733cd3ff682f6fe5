"""One decode step of C streams, and the prefill of one prompt, on a `Decoder` and a static KV cache.

A step is a fixed sequence of launches that reads tokens and positions from the GPU and leaves the next ones there: no
value goes to the host, so one CUDA graph holds all of it (decode_engine.py). For an MoE layer that is eight launches,
or seven: norm with the previous block's output, QKV, attention with cache and rotary embedding, output projection, norm
with the router's choice, gate_up, SwiGLU (where gate_up's kernel does not do it), down. The first norm reads the
embedding, and one launch after the head picks the tokens.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import dataclass

import torch
from requant.validate.decode_glue import Added, Glue
from requant.validate.decode_model import Decoder, Layer, Moe
from requant.validate.decode_products import Products

__all__ = ["Cache", "State", "prefill", "step"]


@dataclass(frozen=True, slots=True, eq=False)
class Cache:
    """Keys and values of C streams: of each layer (k, v), [C, KV heads, capacity, D]."""

    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    @classmethod
    def empty(cls, decoder: Decoder, streams: int, capacity: int) -> Cache:
        """Zeros in the dtype of the embedding."""
        made: list[tuple[torch.Tensor, torch.Tensor]] = []
        for layer in decoder.layers:
            shape = (streams, layer.attention.kv_heads, capacity, layer.attention.head_dim)
            made.append((decoder.embedding.new_zeros(shape), decoder.embedding.new_zeros(shape)))
        return cls(tuple(made))


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """What a step reads and writes in place. tokens [C] int64: the last of each stream; positions [C] int32: where it
    stands. routed: of each MoE layer the expert ids of the last step, [C, top_k] int32."""

    tokens: torch.Tensor
    positions: torch.Tensor
    routed: tuple[torch.Tensor, ...]

    @classmethod
    def new(cls, decoder: Decoder, streams: int) -> State:
        """All zero."""
        device = decoder.embedding.device
        layers = [layer.mlp for layer in decoder.layers if isinstance(layer.mlp, Moe)]
        routed = [torch.zeros((streams, mlp.router.top_k), dtype=torch.int32, device=device) for mlp in layers]
        return cls(
            torch.zeros(streams, dtype=torch.int64, device=device),
            torch.zeros(streams, dtype=torch.int32, device=device),
            tuple(routed),
        )


def step(decoder: Decoder, cache: Cache, state: State, glue: Glue, products: Products) -> torch.Tensor:
    """One token more for each stream; returns the logits [C, V] from which state.tokens was chosen (the largest)."""
    h, x = glue.embed(decoder.embedding, state.tokens, decoder.layers[0].attention_norm, decoder.eps)
    routed = iter(state.routed)
    norms = [*(layer.attention_norm for layer in decoder.layers[1:]), decoder.norm]
    for layer, kept, norm in zip(decoder.layers, cache.layers, norms, strict=True):
        a = layer.attention
        qkv = products.dense(x, a.qkv)
        heads = glue.attend(qkv, a, kept, state.positions, (decoder.cos, decoder.sin), decoder.eps)
        added = Added(products.dense(heads, a.out)[:, None], bias=a.out_bias)
        ids = next(routed) if isinstance(layer.mlp, Moe) else None
        h, added = _mlp(layer, h, added, ids, decoder.eps, glue, products)
        h, x = glue.add_norm(h, added, norm, decoder.eps)
    logits = products.dense(x, decoder.head, dtype=torch.float32)
    glue.pick(logits, state.tokens, state.positions)
    return logits


def prefill(
    decoder: Decoder, cache: Cache, stream: torch.Tensor, prompt: torch.Tensor, glue: Glue, products: Products
) -> torch.Tensor:
    """Run a prompt [T] into the cache of one stream; the logits [V] after its last token.

    stream [1] int64: on the device, so that one CUDA graph serves them all.
    """
    h, x = glue.embed(decoder.embedding, prompt, decoder.layers[0].attention_norm, decoder.eps)
    norms = [*(layer.attention_norm for layer in decoder.layers[1:]), None]
    for layer, kept, norm in zip(decoder.layers, cache.layers, norms, strict=True):
        a = layer.attention
        qkv = products.dense(x, a.qkv)
        heads = glue.attend_prompt(qkv, a, kept, stream, (decoder.cos, decoder.sin), decoder.eps)
        added = Added(products.dense(heads, a.out)[:, None], bias=a.out_bias)
        h, added = _mlp(layer, h, added, None, decoder.eps, glue, products)
        if norm is not None:
            h, x = glue.add_norm(h, added, norm, decoder.eps)
        else:  # only the last token goes on
            _, x = glue.add_norm(h[-1:], _last(added), decoder.norm, decoder.eps)
    return products.dense(x, decoder.head, dtype=torch.float32)[0]


def _mlp(
    layer: Layer,
    h: torch.Tensor,
    added: Added,
    ids: torch.Tensor | None,
    eps: float,
    glue: Glue,
    products: Products,
) -> tuple[torch.Tensor, Added]:
    """The MLP or the experts: the residual stream, and what is to be added to it."""
    mlp = layer.mlp
    if not isinstance(mlp, Moe):
        h, x = glue.add_norm(h, added, layer.mlp_norm, eps)
        both = products.dense(x, mlp.gate_up)[:, None]
        inner = glue.gate(both, mlp.gate, None, mlp.gate_up_bias)[:, 0]
        return h, Added(products.dense(inner, mlp.down)[:, None], bias=mlp.down_bias)
    slots = len(h) * mlp.router.top_k
    route = products.routes(mlp.gate_up, slots) or products.routes(mlp.down, slots)
    chosen = glue.choose(h, added, layer.mlp_norm, eps, mlp.router, ids, route=route)
    inner = products.gated(chosen.x, mlp.gate_up, chosen.ids, chosen.routing, mlp.gate, mlp.gate_up_bias)
    if inner is None:
        both = products.grouped(chosen.x, mlp.gate_up, chosen.ids, chosen.routing)
        inner = glue.gate(both, mlp.gate, chosen.ids, mlp.gate_up_bias)
    y = products.grouped(inner, mlp.down, chosen.ids, chosen.routing)
    return chosen.h, Added(y, chosen.weights, chosen.ids, mlp.down_bias)


def _last(added: Added) -> Added:
    """Of the last token alone."""
    weights, ids = (None if t is None else t[-1:] for t in (added.weights, added.ids))
    return Added(added.y[-1:], weights, ids, added.bias)
