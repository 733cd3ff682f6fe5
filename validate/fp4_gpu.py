"""A checkpoint's FP4 weights on a GPU: one matrix at a time, or all experts of a layer in one grouped product.

Weights lie there as stored and are multiplied by kernels/matmul.py in BF16, by the path that it chooses for the chip.
Experts of one shape and format are stacked once, and each layer takes two or three launches instead of as many as it
has experts; experts that differ in shape, or a machine without a grouped kernel, leave them one by one.

W4A4 where the chip has no FP4 tensor cores is emulated, exactly: an activation rounded to E2M1 under an E4M3 scale has
six significant bits, so BF16 holds it, if the static global scale is left out and multiplied into the result.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from requant.kernels.dispatch import choose
from requant.kernels.formats import E2M1_MAGNITUDES, NVFP4_GROUP, PackedTensor
from requant.kernels.matmul import grouped_matmul, matmul, stack
from requant.kernels.w4a4_operands import Fp4Tensor
from torch import nn

__all__ = ["Fp32Head", "GpuExperts", "GpuWeight", "rounded_in_units"]

_MIDPOINTS: Final = tuple((float(a) + float(b)) / 2 for a, b in itertools.pairwise(E2M1_MAGNITUDES))
"""Between neighbouring magnitudes of E2M1; at every other one a tie goes up, to the even code."""
_E4M3_LEAST: Final = 2.0**-9
_E4M3_MAX: Final = 448.0


def rounded_in_units(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x [M, K] as NVFP4 activations under static global scales [M, 1] (FP32), divided by those: exact in BF16.

    The rule is kernels/reference.py's `encode_nvfp4`, in FP32 like there.
    """
    blocks = x.to(torch.float32).reshape(x.shape[0], -1, NVFP4_GROUP)
    scale = scale[..., None]
    block = blocks.abs().amax(-1, keepdim=True) / (6.0 * scale)
    block = torch.where(block == 0, torch.ones_like(block), block).clamp(_E4M3_LEAST, _E4M3_MAX)
    block = block.to(torch.float8_e4m3fn).to(torch.float32)
    quotient = blocks / (block * scale)
    bounds = torch.tensor(_MIDPOINTS, device=x.device)
    magnitude = quotient.abs().contiguous()
    order = torch.bucketize(magnitude, bounds) + torch.isin(magnitude, bounds[1::2])
    values = torch.tensor([float(m) for m in E2M1_MAGNITUDES], device=x.device)[order] * quotient.sign() * block
    return values.reshape(x.shape).to(torch.bfloat16)


class GpuWeight:
    """A weight [N, K], or a stack of experts [E, N, K]. kernels: the code that has multiplied with it so far."""

    def __init__(self, tensors: Sequence[PackedTensor], device: torch.device, *, stacked: bool) -> None:
        self.kernels: set[str] = set()
        if stacked:
            self._weight = stack(tensors, str(device))
            return
        one = tensors[0]
        number = None if one.global_scale is None else float(one.global_scale)
        codes, scales = (torch.tensor(plane, device=device) for plane in (one.codes, one.block_scales))
        self._weight = Fp4Tensor.weight(codes, scales, number)

    def multiply(self, x: torch.Tensor, scale: np.float32 | None, *, fp32: bool = False) -> torch.Tensor:
        """x [M, K] -> BF16 [M, N], or FP32. scale: the static activation scale, for W4A4."""
        x = x.to(torch.bfloat16).contiguous()
        if scale is None or self._native(grouped=False):
            number = None if scale is None else float(scale)
            product = matmul(
                x, self._weight, activations="bf16" if scale is None else "fp4", input_scale=number, fp32=fp32
            )
            self.kernels.add(product.choice.kernel)
            return product.y
        units = rounded_in_units(x, torch.full((x.shape[0], 1), float(scale), device=x.device))
        product = matmul(units, self._weight, activations="bf16", fp32=fp32)
        self.kernels.add(f"{product.choice.kernel}, activations rounded before")
        y = product.y.float() * float(scale)
        return y if fp32 else y.to(torch.bfloat16)

    def grouped(self, x: torch.Tensor, ids: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """x [T, K], ids [T, k] -> BF16 [T, k, N]. scales: static activation scales by expert [E], for W4A4."""
        x = x.to(torch.bfloat16).contiguous()
        if scales is None:
            product = grouped_matmul(x, self._weight, ids, activations="bf16")
            self.kernels.add(product.choice.kernel)
            return product.y
        if bool((scales == scales[0]).all()) and self._native(grouped=True):
            product = grouped_matmul(x, self._weight, ids, activations="fp4", input_scale=float(scales[0]))
            self.kernels.add(product.choice.kernel)
            return product.y
        tokens, slots = ids.shape
        rows = x[:, None].expand(tokens, slots, x.shape[1]).reshape(tokens * slots, -1)
        own = scales[ids.reshape(-1), None]  # each slot by its own expert's scale
        product = grouped_matmul(rounded_in_units(rows, own), self._weight, ids.reshape(-1, 1), activations="bf16")
        self.kernels.add(f"{product.choice.kernel}, activations rounded before")
        return (product.y[:, 0].float() * own).to(torch.bfloat16).reshape(tokens, slots, -1)

    def _native(self, *, grouped: bool) -> bool:
        """Whether this chip's path multiplies in FP4 itself."""
        w = self._weight
        n = w.codes.shape[-2]
        choice = choose("auto", w.format, n, w.k, on_gpu=True, activations="fp4", grouped=grouped)
        return choice.path.rounds_activations


class GpuExperts:
    """All experts of a layer on a GPU. up: their gate_up matrices, or their gates and their ups apart; biases alike.

    biases [E, N] per matrix or None; scales: static activation scales [E] of gate_up and of down, or None.
    """

    def __init__(
        self,
        up: Sequence[GpuWeight],
        down: GpuWeight,
        up_biases: Sequence[torch.Tensor | None],
        down_bias: torch.Tensor | None,
        scales: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        self._up = tuple(up)
        self._down = down
        self._up_biases = tuple(up_biases)
        self._down_bias = down_bias
        self._scales = scales or (None, None)

    @property
    def kernels(self) -> set[str]:
        """The code that has multiplied here so far."""
        return self._down.kernels.union(*(weight.kernels for weight in self._up))

    def forward(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        gate: Callable[[torch.Tensor], torch.Tensor],
        experts: int,
        interleaved: bool,
    ) -> torch.Tensor:
        """x [T, H], ids and weights [T, k] -> [T, H]; an id past the last expert marks a slot that counts nothing."""
        known = ids < experts
        ids = torch.where(known, ids, torch.zeros_like(ids))
        weights = torch.where(known, weights, torch.zeros_like(weights))
        parts = [
            _plus(weight.grouped(x, ids, self._scales[0]), bias, ids)
            for weight, bias in zip(self._up, self._up_biases, strict=True)
        ]
        both = parts[0] if len(parts) == 1 else _joined(parts, interleaved)
        inner = gate(both.reshape(ids.numel(), -1))
        flat = ids.reshape(-1, 1)
        y = _plus(self._down.grouped(inner, flat, self._scales[1]), self._down_bias, flat)
        y = y.reshape(*ids.shape, -1).float() * weights[..., None].float()
        return y.sum(1).to(x.dtype)


def _joined(parts: Sequence[torch.Tensor], interleaved: bool) -> torch.Tensor:
    return torch.stack(list(parts), dim=-1).flatten(-2) if interleaved else torch.cat(list(parts), dim=-1)


def _plus(y: torch.Tensor, bias: torch.Tensor | None, ids: torch.Tensor) -> torch.Tensor:
    """y [T, k, N] plus each slot's own row of bias [E, N]."""
    return y if bias is None else y + bias[ids].to(y.dtype)


class Fp32Head(nn.Module):
    """An output head whose logits are FP32: BF16 would round them by up to 0.06, and the divergence with them."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(head.weight.detach().to(torch.float32), requires_grad=False)
        bias = head._parameters.get("bias")
        self.register_buffer("bias", None if bias is None else bias.detach().to(torch.float32), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., H] -> FP32 [..., V]."""
        bias = self.bias
        return nn.functional.linear(x.to(torch.float32), self.weight, bias if isinstance(bias, torch.Tensor) else None)
