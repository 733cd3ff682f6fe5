"""x @ weight^T for FP4 weights, by whichever kernel this machine has: one call, and the answer says which it was.

    y, choice = matmul(x, PackedTensor(...))                    # numpy: FP32 [M, K] -> FP32 [M, N] on the CPU
    y, choice = matmul(x, Fp4Tensor.weight(...))                # torch: BF16 [M, K] -> BF16 [M, N] on the GPU
    y, choice = grouped_matmul(x, experts, expert_ids)          # y [tokens, top_k, N], on either

dispatch.py has the paths and how `auto` chooses; a path asked for by name runs or raises KernelUnavailableError.
activations="bf16" keeps `auto` from paths that round x to FP4 (a checkpoint made for W4A16 says so by having no
input_scale). Bad operands raise ValueError, always before anything runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar, overload

import numpy as np
from numpy.typing import NDArray
from requant.kernels import reference
from requant.kernels.cpu import cpu_matmul
from requant.kernels.dispatch import Activations, Choice, Path, choose
from requant.kernels.formats import NumberFormat, PackedTensor
from requant.kernels.reference_w4a4 import decode

if TYPE_CHECKING:
    import torch
    from requant.kernels.w4a4_operands import Fp4Tensor

__all__ = ["Product", "decode", "grouped_matmul", "matmul", "stack"]

Y = TypeVar("Y")
Array = NDArray[np.float32] | NDArray[np.float64]


class Product(NamedTuple, Generic[Y]):
    """The result, and which path made it."""

    y: Y
    choice: Choice


@overload
def matmul(
    x: NDArray[np.float32],
    weight: PackedTensor,
    path: Path | str = "auto",
    *,
    activations: Activations = "fp4",
    input_scale: float | None = None,
) -> Product[Array]: ...
@overload
def matmul(
    x: torch.Tensor,
    weight: Fp4Tensor,
    path: Path | str = "auto",
    *,
    activations: Activations = "fp4",
    input_scale: float | None = None,
    fp32: bool = False,
) -> Product[torch.Tensor]: ...
def matmul(
    x: NDArray[np.float32] | torch.Tensor,
    weight: PackedTensor | Fp4Tensor,
    path: Path | str = "auto",
    *,
    activations: Activations = "fp4",
    input_scale: float | None = None,
    fp32: bool = False,
) -> Product[Array] | Product[torch.Tensor]:
    """x [M, K] times weight [N, K] transposed, and the choice that was made; M may be 0.

    input_scale: the static global scale of activations, for paths that round them (default: one per token). fp32: on a
    GPU y is FP32 and not BF16; paths that round activations round it to BF16 first. Raises
    ValueError for operands that do not fit, KernelUnavailableError where the path cannot run.
    """
    if isinstance(weight, PackedTensor):
        if not isinstance(x, np.ndarray):
            raise ValueError("a PackedTensor of numpy arrays is multiplied on the CPU: x must be a numpy array too")
        return _on_cpu(x, weight, path, activations)
    if isinstance(x, np.ndarray):
        raise ValueError("a weight on a GPU needs x as a torch tensor on that GPU")
    if weight.codes.dim() != 2:
        raise ValueError(f"{weight.codes.shape[0]} stacked weights need grouped_matmul and expert ids")
    on_gpu = _same_device(x, weight)
    n = weight.codes.shape[0]
    choice = choose(path, weight.format, n, weight.k, on_gpu=on_gpu, activations=activations)
    _check_bf16(x, weight.k)
    y = _on_gpu(x, weight, choice.path, input_scale, fp32=fp32)
    return Product(y.float() if fp32 else y, choice)


@overload
def grouped_matmul(
    x: NDArray[np.float32],
    weight: Sequence[PackedTensor],
    expert_ids: NDArray[np.integer],
    path: Path | str = "auto",
    *,
    activations: Activations = "fp4",
    input_scale: float | None = None,
) -> Product[Array]: ...
@overload
def grouped_matmul(
    x: torch.Tensor,
    weight: Fp4Tensor,
    expert_ids: torch.Tensor,
    path: Path | str = "auto",
    *,
    activations: Activations = "fp4",
    input_scale: float | None = None,
) -> Product[torch.Tensor]: ...
def grouped_matmul(
    x: NDArray[np.float32] | torch.Tensor,
    weight: Sequence[PackedTensor] | Fp4Tensor,
    expert_ids: NDArray[np.integer] | torch.Tensor,
    path: Path | str = "auto",
    *,
    activations: Activations = "fp4",
    input_scale: float | None = None,
) -> Product[Array] | Product[torch.Tensor]:
    """Each token times its own experts: x [T, K], weight [E, N, K], ids int [T, top_k] -> y [T, top_k, N].

    On a GPU BF16 tensors and a stack, on a CPU FP32 arrays and one PackedTensor for each expert. Errors as matmul's,
    and ValueError for an expert id out of range.
    """
    if isinstance(x, np.ndarray) or isinstance(expert_ids, np.ndarray) or isinstance(weight, Sequence):
        if not (isinstance(x, np.ndarray) and isinstance(expert_ids, np.ndarray) and isinstance(weight, Sequence)):
            raise ValueError("experts on the CPU: x and ids are numpy arrays, and the weight a PackedTensor for each")
        return _grouped_on_cpu(x, weight, expert_ids, path, activations)
    if weight.codes.dim() != 3:
        raise ValueError(f"codes {list(weight.codes.shape)} are not a stack of experts [E, N, K/2]")
    on_gpu = _same_device(x, weight)
    experts, n = weight.codes.shape[:2]
    choice = choose(path, weight.format, n, weight.k, on_gpu=on_gpu, activations=activations, grouped=True)
    _check_bf16(x, weight.k)
    if expert_ids.dim() != 2 or expert_ids.shape[0] != x.shape[0]:
        raise ValueError(f"expert_ids must be [{x.shape[0]}, top_k], not {list(expert_ids.shape)}")
    from requant.kernels import w4a16
    from requant.kernels.w4a4 import grouped_matmul as w4a4_grouped
    from requant.kernels.w4a4 import route

    routing = route(expert_ids, experts)  # checks the ids
    if choice.path in (Path.W4A4, Path.W4A4_EMULATED):
        emulate = choice.path is Path.W4A4_EMULATED
        rows = w4a4_grouped(x, weight, routing, input_scale=input_scale, emulate=emulate)
        y = rows.new_empty(rows.shape)
        y[routing.order] = rows
    else:
        ids = expert_ids.int().contiguous()
        way = "cuda" if choice.path is Path.W4A16 else "triton"
        y = w4a16.w4a16_moe(x, weight.codes, weight.scales, weight.global_scale, ids, fmt=weight.format, path=way)
    return Product(y.view(*expert_ids.shape, n), choice)


def _on_cpu(x: NDArray[np.float32], weight: PackedTensor, path: Path | str, activations: Activations) -> Product[Array]:
    n, k = weight.codes.shape[0], weight.codes.shape[1] * 2
    choice = choose(path, weight.format, n, k, on_gpu=False, activations=activations)
    _check_arrays(x, weight)
    if choice.path is Path.CPU:
        return Product(cpu_matmul(x, weight), choice)
    return Product(reference.matmul(x, decode(weight)), choice)


def _check_arrays(x: NDArray[np.float32], weight: PackedTensor) -> None:
    n, k = weight.codes.shape[0], weight.codes.shape[1] * 2
    if x.ndim != 2 or not np.issubdtype(x.dtype, np.floating):
        raise ValueError(f"x is {x.dtype} {x.shape}: expected float32 [M, {k}]")
    if x.shape[1] != k:
        raise ValueError(f"x {x.shape} and weight [{n}, {k}] do not share K")
    if k % weight.format.group:
        raise ValueError(f"K = {k} is not a multiple of {weight.format}'s group of {weight.format.group}")
    if weight.codes.dtype != np.uint8 or weight.block_scales.dtype != np.uint8:
        raise ValueError(
            f"codes are {weight.codes.dtype}, block scales {weight.block_scales.dtype}: expected uint8 bytes"
        )
    scale = weight.global_scale
    if scale is not None and not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"global scale {scale} is not a positive finite number")


def _grouped_on_cpu(
    x: NDArray[np.float32],
    experts: Sequence[PackedTensor],
    ids: NDArray[np.integer],
    path: Path | str,
    activations: Activations,
) -> Product[Array]:
    """Expert by expert, each decoded once: all of its tokens in one product."""
    if not experts or any(
        w.format is not experts[0].format or w.codes.shape != experts[0].codes.shape for w in experts
    ):
        raise ValueError("experts have one format and shape, and there is at least one")
    if ids.ndim != 2 or ids.shape[0] != x.shape[0] or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"expert_ids must be integers [{x.shape[0]}, top_k], not {ids.dtype} {list(ids.shape)}")
    outside = ids[(ids < 0) | (ids >= len(experts))]
    if outside.size:
        raise ValueError(f"expert id {outside[0]} is out of range: there are {len(experts)} experts")
    for w in experts:  # also those that no token asks for
        _check_arrays(x, w)
    choice = _on_cpu(x[:0], experts[0], path, activations).choice
    shape = (*ids.shape, experts[0].codes.shape[0])
    y: Array = np.empty(shape, np.float64) if choice.path is Path.REFERENCE else np.empty(shape, np.float32)
    for expert, w in enumerate(experts):
        token, slot = np.nonzero(ids == expert)
        if token.size:
            y[token, slot] = _on_cpu(x[token], w, path, activations).y
    return Product(y, choice)


def _same_device(x: torch.Tensor, weight: Fp4Tensor) -> bool:
    if x.device != weight.codes.device:
        raise ValueError(f"x is on {x.device}, the weight on {weight.codes.device}")
    if x.device.type != "cuda":
        raise ValueError(f"torch tensors are multiplied on a GPU, these are on {x.device}: give numpy arrays instead")
    return True


def _check_bf16(x: torch.Tensor, k: int) -> None:
    import torch

    if x.dtype != torch.bfloat16 or x.dim() != 2 or x.shape[1] != k:
        raise ValueError(f"x must be bfloat16 [M, {k}], not {x.dtype} {list(x.shape)}")


def _on_gpu(x: torch.Tensor, weight: Fp4Tensor, path: Path, input_scale: float | None, *, fp32: bool) -> torch.Tensor:
    import torch
    from requant.kernels import w4a4, w4a16

    if path in (Path.W4A4, Path.W4A4_EMULATED):
        return w4a4.matmul(x, weight, input_scale=input_scale, emulate=path is Path.W4A4_EMULATED)
    if path in (Path.W4A16, Path.W4A16_TRITON):
        scale = 1.0 if weight.global_scale is None else weight.global_scale
        way = "cuda" if path is Path.W4A16 else "triton"
        y = x.new_empty((x.shape[0], weight.codes.shape[0]), dtype=torch.float32 if fp32 else torch.bfloat16)
        return w4a16.w4a16_matmul(x, weight.codes, weight.scales, scale, fmt=weight.format, out=y, path=way)
    # The quantizer holds no FP4 mma, so the emulated build's is the same; those two chips have no other.
    static = None if weight.format is NumberFormat.MXFP4 else input_scale
    quantized = w4a4.quantize(x, weight.format, input_scale=static, granularity=path.granularity, emulate=True)
    if path is Path.SCALED_MM:
        from requant.kernels import scaled_mm

        return scaled_mm.matmul(quantized, weight)
    from requant.kernels.triton import dot_scaled

    return dot_scaled.matmul(quantized, weight)


def stack(weights: Sequence[PackedTensor], device: str = "cuda") -> Fp4Tensor:
    """Weights of one format and shape as the experts [E, N, K] of an Fp4Tensor on a device. ValueError otherwise."""
    import torch
    from requant.kernels.w4a4_operands import Fp4Tensor

    if not weights or any(w.format is not weights[0].format for w in weights):
        raise ValueError("only weights of one format can be stacked, and at least one")
    codes, scales = np.stack([w.codes for w in weights]), np.stack([w.block_scales for w in weights])
    found = [w.global_scale for w in weights if w.global_scale is not None]
    scale = torch.tensor([float(g) for g in found], dtype=torch.float32, device=device) if found else None
    return Fp4Tensor.weight(torch.as_tensor(codes, device=device), torch.as_tensor(scales, device=device), scale)
