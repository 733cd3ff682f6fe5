"""What a decoder is made of, as the decode engine computes with it: weights joined as a server joins them, no modules.

One `Decoder` describes gpt-oss, Qwen3, Qwen3-MoE and Llama alike: pre-norm layers of attention (biases, QK-norm, sinks
and a sliding window where the family has them) and an MLP or a mixture of experts. decode_load.py fills it from a
checkpoint through the family's transformers class; decode_step.py runs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from requant.kernels.formats import NumberFormat

if TYPE_CHECKING:
    import torch
    from requant.kernels.w4a4_operands import Fp4Tensor

__all__ = ["Attention", "Decoder", "Gate", "Layer", "Matrix", "Mlp", "Moe", "Router"]


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """One weight [N, K], or one for each expert [E, N, K].

    plain: values to compute with (BF16 on a GPU, FP32 on a CPU); packed: FP4 for the W4A16 kernels. Exactly one is set.
    stored: the format in the checkpoint; nbytes: bytes that one read of the weight (of all experts) takes in it.
    """

    stored: NumberFormat
    nbytes: int
    plain: torch.Tensor | None = None
    packed: Fp4Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, K] or [E, N, K]."""
        if self.plain is not None:
            return tuple(self.plain.shape)
        assert self.packed is not None
        return (*self.packed.codes.shape[:-1], self.packed.k)

    @property
    def experts(self) -> int:
        """How many experts; 0: a dense weight."""
        return self.shape[0] if len(self.shape) == 3 else 0


@dataclass(frozen=True, slots=True, eq=False)
class Gate:
    """SwiGLU of [2 I] -> [I]. interleaved: rows of gate and up take turns. limit: gpt-oss's clamped form, else None."""

    interleaved: bool = False
    limit: float | None = None
    alpha: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """qkv [(H + 2 KV) D, hidden], out [hidden, H D]. window: tokens that are seen, 0 for all."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    qkv: Matrix
    out: Matrix
    qkv_bias: torch.Tensor | None = None
    out_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    window: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """weight [E, hidden]. normalize: the weights of the chosen are their softmax (gpt-oss; Qwen3 divides a softmax over
    all by the sum of the chosen: the same); without it they are the softmax over all experts."""

    weight: torch.Tensor
    top_k: int
    bias: torch.Tensor | None = None
    normalize: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Moe:
    """Experts: gate_up [E, 2 I, hidden], down [E, hidden, I], biases [E, rows]."""

    router: Router
    gate_up: Matrix
    down: Matrix
    gate: Gate
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Mlp:
    """A dense MLP: gate_up [2 I, hidden], down [hidden, I], biases [rows]."""

    gate_up: Matrix
    down: Matrix
    gate: Gate
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One layer; norms are RMSNorm weights [hidden]."""

    attention_norm: torch.Tensor
    attention: Attention
    mlp_norm: torch.Tensor
    mlp: Moe | Mlp


@dataclass(frozen=True, slots=True, eq=False)
class Decoder:
    """A causal language model. embedding [V, hidden]; cos, sin [positions, D / 2] FP32. kind: transformers' class."""

    kind: str
    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    eps: float
    head: Matrix
    cos: torch.Tensor
    sin: torch.Tensor

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return int(self.embedding.shape[1])

    @property
    def positions(self) -> int:
        """Longest sequence that the tables of the rotary embedding cover."""
        return int(self.cos.shape[0])

    def matrices(self) -> Iterator[Matrix]:
        """Every matrix that a step multiplies by."""
        for layer in self.layers:
            yield from (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down)
        yield self.head

    def kv_bytes(self, position: int) -> int:
        """Bytes of keys and values that a stream reads at this position."""
        total = 0
        for layer in self.layers:
            a = layer.attention
            seen = position if a.window == 0 else min(position, a.window)
            total += 2 * seen * a.kv_heads * a.head_dim * self.embedding.element_size()
        return total

    def small_bytes(self) -> int:
        """Bytes of what every step reads besides the matrices: norms, routers, biases."""
        total = self.norm.nbytes
        for layer in self.layers:
            a, mlp = layer.attention, layer.mlp
            small = [layer.attention_norm, layer.mlp_norm, a.qkv_bias, a.out_bias, a.q_norm, a.k_norm, a.sinks]
            if isinstance(mlp, Moe):
                small += [mlp.router.weight, mlp.router.bias]
            else:
                small += [mlp.gate_up_bias, mlp.down_bias]
            total += sum(t.nbytes for t in small if t is not None)
        return total
