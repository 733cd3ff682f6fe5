"""W4A4 through torch: `torch.nn.functional.scaled_mm` with NVFP4 operands, which is cuBLASLt's kernel. SM100 and later.

cuBLASLt wants the block scales swizzled and padded (`SWIZZLE_32_4_4`): tiles of 128 rows x 4 scales lie one after the
other, row r and scale c of a tile at byte 16 (r % 32) + 4 (r / 32) + c. So this is the one path that rewrites the
checkpoint's scales; the codes are passed as they lie. It serves as a peer: a second opinion and a speed to beat, where
the chip and torch have it. Nothing here has run on such a chip.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from requant.kernels.availability import Availability, KernelUnavailableError, State, gpu
from requant.kernels.formats import NumberFormat
from requant.kernels.w4a4_operands import Fp4Tensor

if TYPE_CHECKING:
    import torch

__all__ = ["availability", "matmul", "swizzle_32_4_4"]

_TILE_ROWS: Final = 128
_TILE_SCALES: Final = 4
_OLDEST: Final = (10, 0)
"""Compute capability of the first chips with FP4 tensor cores."""
_MULTIPLE: Final = {"K": 32, "N": 16}
"""What torch 2.13 asks of a float4 operand: K/2 bytes and N in multiples of 16."""


def swizzle_32_4_4(scales: torch.Tensor) -> torch.Tensor:
    """Linear block scales [rows, K/16] to cuBLASLt's order: flat, rows padded to 128 and scales to 4 with zero."""
    import torch

    rows, columns = scales.shape
    tiles_m, tiles_k = -(-rows // _TILE_ROWS), -(-columns // _TILE_SCALES)
    padded = torch.zeros((tiles_m * _TILE_ROWS, tiles_k * _TILE_SCALES), dtype=torch.uint8, device=scales.device)
    padded[:rows, :columns] = scales.view(torch.uint8)
    tiles = padded.view(tiles_m, 4, 32, tiles_k, _TILE_SCALES)  # row = 32 * (4) + (32)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def matmul(x: Fp4Tensor, w: Fp4Tensor) -> torch.Tensor:
    """y [M, N] BF16 from NVFP4 x [M, K] with one global scale (`granularity="tensor"`) and an NVFP4 weight [N, K].

    Raises ValueError for operands that cuBLASLt does not take, KernelUnavailableError where it is not there.
    """
    import torch

    if x.format is not NumberFormat.NVFP4 or w.format is not NumberFormat.NVFP4:
        raise ValueError(f"scaled_mm is for NVFP4 x NVFP4, not {x.format} x {w.format}")
    if w.codes.dim() != 2 or x.k != w.k:
        raise ValueError(f"codes {list(x.codes.shape)} and {list(w.codes.shape)} do not go together")
    n = w.codes.shape[0]
    for name, size in (("K", w.k), ("N", n)):
        if size % _MULTIPLE[name]:
            raise ValueError(f"{name} = {size} is not a multiple of {_MULTIPLE[name]}, which cuBLASLt needs")
    scales_x, scales_w = x.global_scale, w.global_scale
    if scales_x is None or scales_w is None or scales_x.numel() != 1:
        raise ValueError("cuBLASLt takes one global scale for all of x: quantize with granularity='tensor'")
    state = availability()
    if state.state is not State.RUNS:
        raise KernelUnavailableError(f"scaled_mm is {state}")
    if x.codes.shape[0] == 0:
        return torch.empty((0, n), dtype=torch.bfloat16, device=x.codes.device)

    functional: Any = torch.nn.functional  # scaled_mm is newer than the oldest torch that this package takes
    scaling, swizzle = functional.ScalingType, functional.SwizzleType
    recipe, order = [scaling.BlockWise1x16, scaling.TensorWise], [swizzle.SWIZZLE_32_4_4, swizzle.NO_SWIZZLE]
    blocks_x, blocks_w = (swizzle_32_4_4(t.scales).view(torch.float8_e4m3fn) for t in (x, w))
    y: torch.Tensor = functional.scaled_mm(
        x.codes.view(torch.float4_e2m1fn_x2),
        w.codes.view(torch.float4_e2m1fn_x2).t(),
        [blocks_x, scales_x],
        recipe,
        [blocks_w, scales_w],
        recipe,
        swizzle_a=order,
        swizzle_b=order,
        output_dtype=torch.bfloat16,
    )
    return y


def availability() -> Availability:
    """Does this torch, on this chip, have an NVFP4 scaled_mm?"""
    import torch

    if not hasattr(torch.nn.functional, "scaled_mm") or not hasattr(torch, "float4_e2m1fn_x2"):
        return Availability(State.UNAVAILABLE, f"torch {torch.__version__} has no nn.functional.scaled_mm for float4")
    name, capability = gpu()
    if capability is None:
        return Availability(State.UNAVAILABLE, name)
    if capability < _OLDEST:
        return Availability(State.UNAVAILABLE, f"{name} has no FP4 tensor cores")
    return Availability(State.RUNS, f"{name}, cuBLASLt by torch {torch.__version__}; never tried on such a chip")
