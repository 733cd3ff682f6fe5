"""The oracle for tensors that lie on a GPU: FP4 decoded to float64 and the bound of bounds.py, without a copy of the
weight on the CPU. The tables are those of formats.py, so that reference.py and this agree bit by bit (a test says so).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from requant.kernels import bounds
from requant.kernels.formats import E2M1_VALUES, E4M3_VALUES, E8M0_VALUES, NumberFormat

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["dequantize", "excess", "products"]


def dequantize(fmt: NumberFormat, codes: Tensor, scales: Tensor, global_scale: Tensor | float | None = None) -> Tensor:
    """float64 [.., N, K], exact, where the codes lie: codes [.., N, K/2], scales [.., N, K/group] uint8.

    global_scale: a number, or one for each weight of a stack, or for each row of activations.
    """
    import torch

    values = torch.as_tensor(E2M1_VALUES, dtype=torch.float64, device=codes.device)
    table = E4M3_VALUES if fmt is NumberFormat.NVFP4 else E8M0_VALUES
    steps = torch.as_tensor(table, dtype=torch.float64, device=codes.device)[scales.int()]
    decoded = values[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2).int()]
    decoded *= steps.repeat_interleave(fmt.group, dim=-1)
    if global_scale is None:
        return decoded
    scale = torch.as_tensor(global_scale, dtype=torch.float64, device=codes.device)
    return decoded * (scale if scale.numel() == 1 else scale.reshape(-1, *[1] * (codes.dim() - 1)))


def products(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """(x w^T, sum |w x|) in float64, each [M, N]: what a kernel is judged by."""
    x = x.double()
    return x @ w.T, x.abs() @ w.abs().T


def excess(y: Tensor, exact: Tensor, terms: Tensor) -> float:
    """bounds.excess: the largest error as a multiple of its bound."""
    return bounds.excess(y.double().cpu().numpy(), exact.cpu().numpy(), terms.cpu().numpy())
