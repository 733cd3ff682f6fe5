"""Linear layers and experts that hold a checkpoint's FP4 weights as they are stored, and compute with them.

On the CPU they are the reference path: a weight is decoded to FP32, exactly but for the one rounding of the global
scale (kernels/cpu_dequant.py), and multiplied in FP32 by the BLAS that plain layers use too. Two checkpoints with the
same values, in whatever format and layout, give the same output bit by bit. A weight is decoded anew at each use, or
once, if there is memory for all of them (`keep`): the same bits either way.

On a GPU they compute in BF16 by the chip's kernels (fp4_gpu.py), all experts of a layer in one product where it has
one for that.

W4A16 is what they compute by default. With an `activation_scale` they are W4A4: the input is rounded to NVFP4 under
that static scale first, as the FP4 tensor cores would get it.

`Nvfp4Experts` takes the place of a transformers `...Experts` module: `forward(hidden_states, top_k_index,
top_k_weights)`, experts in ascending order, with the class's own gating (SwiGLU, gpt-oss's clamped form).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from requant.kernels.cpu_dequant import dequantize, dequantize_nvfp4
from requant.kernels.formats import NVFP4_GROUP, PackedTensor
from requant.kernels.quantize import bf16_to_nvfp4
from torch import nn

if TYPE_CHECKING:
    from requant.validate.fp4_gpu import GpuExperts, GpuWeight

__all__ = ["Expert", "Matrix", "Nvfp4Experts", "Nvfp4Linear", "Packed", "kernels_used", "round_activations"]


class Packed:
    """One FP4 weight [N, K]. keep: decode it once and for all."""

    def __init__(self, tensor: PackedTensor, *, keep: bool = False) -> None:
        self.tensor = tensor
        self._keep = keep
        self._decoded: torch.Tensor | None = None
        self._on_gpu: GpuWeight | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.tensor.codes.shape[0], 2 * self.tensor.codes.shape[1]

    def decoded(self) -> torch.Tensor:
        """The weight in FP32."""
        if self._decoded is not None:
            return self._decoded
        values = torch.empty(self.shape)  # by torch: BLAS gives other bits at other alignments, and numpy aligns to 16
        dequantize(self.tensor, values.numpy())
        if self._keep:
            self._decoded = values
        return values

    def multiply(self, x: torch.Tensor, scale: np.float32 | None, *, fp32: bool = False) -> torch.Tensor:
        """x [..., K] on a GPU times the weight transposed, in the dtype of x or FP32; the weight moves there once."""
        from requant.validate.fp4_gpu import GpuWeight

        if self._on_gpu is None:
            self._on_gpu = GpuWeight([self.tensor], x.device, stacked=False)
        y = self._on_gpu.multiply(x.reshape(-1, x.shape[-1]), scale, fp32=fp32)
        return y.reshape(*x.shape[:-1], self.shape[0]).to(torch.float32 if fp32 else x.dtype)

    @property
    def kernels(self) -> set[str]:
        """The GPU kernels that have multiplied with it so far."""
        return set() if self._on_gpu is None else self._on_gpu.kernels


Matrix = Packed | torch.Tensor
"""One weight [N, K]: packed FP4, or plain values in the dtype to compute in."""

_GATE_UP: Final = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")


def round_activations(x: NDArray[np.float32], scale: np.float32) -> NDArray[np.float32]:
    """x [M, K] as NVFP4 activations: E2M1 codes under E4M3 scales per 16 and one static global scale, in FP32 again."""
    rows, k = x.shape
    codes = np.empty((rows, k // 2), dtype=np.uint8)
    scales = np.empty((rows, k // NVFP4_GROUP), dtype=np.uint8)
    bf16_to_nvfp4(x, scale, codes, scales)
    out = np.empty_like(x)
    dequantize_nvfp4(codes, scales, scale, out)
    return out


def apply(
    x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None, scale: np.float32 | None, *, fp32: bool = False
) -> torch.Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N] -> [..., N]. fp32: that, also on a GPU."""
    if isinstance(weight, torch.Tensor):
        return nn.functional.linear(x, weight, bias)
    if x.is_cuda:
        y = weight.multiply(x, scale, fp32=fp32)
        return y if bias is None else y + bias
    if scale is not None:
        flat = x.detach().reshape(-1, x.shape[-1]).to(torch.float32).contiguous()
        x = torch.as_tensor(round_activations(flat.numpy(), scale)).reshape(x.shape)
    return nn.functional.linear(x, weight.decoded(), bias)


class Nvfp4Linear(nn.Module):
    """y = x W^T + b with W [N, K] in NVFP4 or MXFP4.

    activation_scale: NVFP4's static `input_scale`, to round the input as W4A4 kernels do; None for W4A16. fp32: whether
    y is FP32 also on a GPU, as an output head's logits are.
    """

    def __init__(
        self, weight: Packed, bias: torch.Tensor | None = None, activation_scale: np.float32 | None = None
    ) -> None:
        super().__init__()
        self.packed = weight
        self.out_features, self.in_features = weight.shape
        self.activation_scale = activation_scale
        self.fp32 = False
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., N], FP32; on a GPU in the dtype of x, unless `fp32`."""
        return apply(x, self.packed, cast("torch.Tensor | None", self.bias), self.activation_scale, fp32=self.fp32)


@dataclass(frozen=True, slots=True)
class Expert:
    """One expert. gate_up: one matrix with the rows of both, or (gate, up). Biases belong to the matrices, in order.

    scales: static activation scales of gate_up and of down, or None for W4A16.
    """

    gate_up: Matrix | tuple[Matrix, Matrix]
    down: Matrix
    gate_up_bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None
    down_bias: torch.Tensor | None = None
    scales: tuple[np.float32, np.float32] | None = None


class Nvfp4Experts(nn.Module):
    """All experts of a layer. original: the transformers module in whose place it stands, which knows the gating."""

    def __init__(self, original: Any, experts: Sequence[Expert]) -> None:
        super().__init__()
        for name in _GATE_UP:
            original._parameters.pop(name, None)
        self._original = (original,)  # in a tuple, so that its parameters are not ours
        self._interleaved = not getattr(original, "is_concatenated", True)
        self.experts = tuple(experts)
        self.num_experts = len(self.experts)
        self.one_by_one = ""
        self._grouped: GpuExperts | None = None

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states [..., H], top_k_index and top_k_weights [tokens, k] -> [..., H]."""
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        if flat.is_cuda and not self.one_by_one:
            together = self._together(flat, top_k_index, top_k_weights)
            if together is not None:
                return together.reshape(hidden_states.shape)
        out = torch.zeros_like(flat)
        chosen = cast("list[int]", top_k_index.flatten().tolist())  # pyright: ignore[reportUnknownMemberType]
        for index in sorted(set(chosen)):
            if not 0 <= index < self.num_experts:
                continue  # transformers marks masked slots with one past the last
            token, slot = torch.where(top_k_index == index)
            y = self._one(self.experts[index], flat[token])
            out.index_add_(0, token, (y * top_k_weights[token, slot, None]).to(out.dtype))
        return out.reshape(hidden_states.shape)

    def _together(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor | None:
        """All experts in grouped products on the GPU; None where that cannot be, and `one_by_one` says why."""
        from requant.kernels.availability import KernelUnavailableError

        try:
            if self._grouped is None:
                self._grouped = _stacked(self.experts, x.device)
            gate = self._original[0]._apply_gate
            return self._grouped.forward(x, ids, weights, gate, self.num_experts, self._interleaved)
        except (KernelUnavailableError, ValueError) as error:
            self.one_by_one = str(error)
            self._grouped = None
            return None

    @property
    def kernels(self) -> set[str]:
        """The GPU kernels that have multiplied here so far."""
        if self._grouped is not None:
            return {f"{kernel} (experts grouped)" for kernel in self._grouped.kernels}
        used: set[str] = set()
        for expert in self.experts:
            matrices = (*(expert.gate_up if isinstance(expert.gate_up, tuple) else (expert.gate_up,)), expert.down)
            used.update(*(matrix.kernels for matrix in matrices if isinstance(matrix, Packed)))
        return {f"{kernel} (experts one by one: {self.one_by_one})" for kernel in used}

    def _one(self, expert: Expert, x: torch.Tensor) -> torch.Tensor:
        scales = expert.scales or (None, None)
        if isinstance(expert.gate_up, tuple):
            bias = expert.gate_up_bias if isinstance(expert.gate_up_bias, tuple) else (None, None)
            parts = [apply(x, m, b, scales[0]) for m, b in zip(expert.gate_up, bias, strict=True)]
            both = torch.stack(parts, dim=-1).flatten(-2) if self._interleaved else torch.cat(parts, dim=-1)
        else:
            both = apply(x, expert.gate_up, cast("torch.Tensor | None", expert.gate_up_bias), scales[0])
        return apply(self._original[0]._apply_gate(both), expert.down, expert.down_bias, scales[1])


def kernels_used(model: nn.Module) -> tuple[str, ...]:
    """The GPU kernels that have multiplied FP4 weights of a model so far; none on a CPU."""
    used: set[str] = set()
    for module in model.modules():
        if isinstance(module, Nvfp4Linear):
            used |= module.packed.kernels
        elif isinstance(module, Nvfp4Experts):
            used |= module.kernels
    return tuple(sorted(used))


def _stacked(experts: Sequence[Expert], device: torch.device) -> GpuExperts:
    """The experts as stacks on a GPU; ValueError where they are not all packed, of one shape and alike in biases."""
    from requant.validate.fp4_gpu import GpuExperts, GpuWeight

    pairs = [e.gate_up if isinstance(e.gate_up, tuple) else (e.gate_up,) for e in experts]
    biases = [e.gate_up_bias if isinstance(e.gate_up_bias, tuple) else (e.gate_up_bias,) for e in experts]
    if len({len(pair) for pair in pairs}) != 1:
        raise ValueError("some experts hold gate and up as one matrix, some apart")

    def joined(matrices: Sequence[Matrix]) -> GpuWeight:
        packed = [matrix.tensor for matrix in matrices if isinstance(matrix, Packed)]
        if len(packed) != len(matrices):
            raise ValueError("some experts are not packed")
        return GpuWeight(packed, device, stacked=True)

    def bias_of(vectors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        given = [vector for vector in vectors if vector is not None]
        if given and len(given) != len(vectors):
            raise ValueError("some experts have a bias and some have none")
        return torch.stack(given).to(device) if given else None

    count = len(pairs[0])
    scales = [e.scales for e in experts if e.scales is not None]
    if scales and len(scales) != len(experts):
        raise ValueError("some experts have activation scales and some have none")
    up, down = (torch.tensor([float(s[i]) for s in scales], device=device) for i in (0, 1)) if scales else (None, None)
    return GpuExperts(
        [joined([pair[i] for pair in pairs]) for i in range(count)],
        joined([e.down for e in experts]),
        [bias_of([b[i] if len(b) == count else None for b in biases]) for i in range(count)],
        bias_of([e.down_bias for e in experts]),
        None if up is None or down is None else (up, down),
    )
