"""What the calls of W4A16 share: operands checked, the fields of a launch that follow from them, the device.

Every check says which operand is wrong, how, and what it must be.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final, Protocol, cast

from requant.kernels import w4a16_configs as configs
from requant.kernels import w4a16_library as lib
from requant.kernels.formats import NumberFormat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from requant.kernels.w4a16_wgmma_configs import WgmmaConfig
    from torch import Tensor

__all__ = [
    "MINIMUM_CAPABILITY",
    "call_for",
    "check_bias",
    "check_expert_scales",
    "check_format",
    "check_global_scale",
    "check_out",
    "check_same_device",
    "check_tensor",
    "check_weight",
    "check_x",
    "device_of",
    "early_start",
    "processors_of",
]


FORMATS: Final = {NumberFormat.NVFP4: 0, NumberFormat.MXFP4: 1}
"""enum Format of csrc/w4a16_types.cuh."""
K_MULTIPLE: Final = {NumberFormat.NVFP4: 16, NumberFormat.MXFP4: 32}
POINTER_ALIGNMENT: Final = 16
"""Bytes: the widest single copy of the kernel."""
MINIMUM_CAPABILITY: Final = (8, 0)


class _Properties(Protocol):
    multi_processor_count: int


def call_for(
    x: Tensor,
    codes: Tensor,
    block_scales: Tensor,
    out: Tensor,
    fmt: NumberFormat,
    n: int,
    k: int,
    chosen: configs.Config | WgmmaConfig,
) -> lib.Call:
    """A launch of that product, but for the fields that depend on its kind."""
    import torch

    call = lib.Call()
    call.codes, call.block_scales = codes.data_ptr(), block_scales.data_ptr()
    call.x, call.y = x.data_ptr(), out.data_ptr()
    call.format, call.alignment = FORMATS[fmt], configs.alignment(fmt, k)
    call.rows, call.k = n, k
    call.output_is_float = int(out.dtype == torch.float32)
    for name, value in chosen.launch_fields().items():
        setattr(call, name, value)
    return call


def early_start(capability: tuple[int, int], *, constant_weights: bool) -> int:
    """0: start after the kernel before. 1: blocks may take their places before it ends, and then wait. 2: and may read
    weights before they wait. Programmatic dependent launch, SM90 and later."""
    if capability < (9, 0):
        return 0
    return 2 if constant_weights else 1


def device_of(tensor: Tensor) -> tuple[lib.Library, tuple[int, int], int]:
    """The library for the tensor's GPU, its compute capability and its number of multiprocessors."""
    import torch

    capability = torch.cuda.get_device_capability(tensor.device)
    if capability < MINIMUM_CAPABILITY:
        raise lib.KernelBuildError(
            f"W4A16 kernels: {torch.cuda.get_device_name(tensor.device)} has compute capability "
            f"{capability[0]}.{capability[1]}; 8.0 or later is "
            "needed. Use the CPU path."
        )
    return lib.load(lib.architecture(*capability)), capability, processors_of(tensor.device.index)


@cache
def processors_of(device: int) -> int:
    """Multiprocessors of a GPU; torch leaves the type of its properties open."""
    import torch

    properties = cast("_Properties", torch.cuda.get_device_properties(device))  # pyright: ignore[reportUnknownMemberType]
    return properties.multi_processor_count


def check_format(fmt: NumberFormat) -> None:
    """A format that W4A16 has kernels for."""
    if fmt not in FORMATS:
        raise ValueError(f"fmt is {fmt!r}: W4A16 knows {', '.join(f.value for f in FORMATS)}")


def check_tensor(name: str, tensor: Tensor, dtypes: Sequence[object]) -> None:
    """Type, device, strides and alignment."""
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}: it must be {' or '.join(str(d) for d in dtypes)}")
    if not tensor.is_cuda:
        raise ValueError(f"{name} is on {tensor.device}: move it to a CUDA device, or use the CPU path")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}: call .contiguous() first")
    if tensor.numel() and tensor.data_ptr() % POINTER_ALIGNMENT:
        raise ValueError(
            f"{name} starts {tensor.data_ptr() % POINTER_ALIGNMENT} bytes past a multiple of {POINTER_ALIGNMENT}: "
            "call .clone() for aligned storage"
        )


def check_same_device(name: str, tensor: Tensor, codes: Tensor) -> None:
    """On the device of the codes."""
    if tensor.device != codes.device:
        raise ValueError(f"{name} is on {tensor.device} and codes on {codes.device}: they must share a device")


def check_weight(codes: Tensor, block_scales: Tensor, fmt: NumberFormat, lead: int) -> tuple[int, int]:
    """Codes and block scales that fit one another; returns N and K. lead: 1 where experts come first."""
    import torch

    names = ["experts"] * lead + ["N", "K/2"]
    if codes.dim() != 2 + lead:
        raise ValueError(f"codes has shape {tuple(codes.shape)}: it must be [{', '.join(names)}]")
    check_tensor("codes", codes, (torch.uint8,))
    scale_type = torch.float8_e4m3fn if fmt is NumberFormat.NVFP4 else torch.float8_e8m0fnu
    check_tensor("block_scales", block_scales, (torch.uint8, scale_type))
    check_same_device("block_scales", block_scales, codes)
    *experts, n, half_k = codes.shape
    k, multiple = 2 * half_k, K_MULTIPLE[fmt]
    if k == 0 or k % multiple:
        raise ValueError(f"K is {k} (codes {tuple(codes.shape)}): for {fmt.value} it must be a multiple of {multiple}")
    wanted = (*experts, n, k // fmt.group)
    if tuple(block_scales.shape) != wanted:
        raise ValueError(f"block_scales has shape {tuple(block_scales.shape)}: with these codes it must be {wanted}")
    return n, k


def check_x(x: Tensor, k: int, codes: Tensor) -> int:
    """x [M, K]; returns M."""
    import torch

    if x.dim() != 2 or x.shape[1] != k:
        raise ValueError(f"x has shape {tuple(x.shape)}: with these codes it must be [M, {k}]")
    check_tensor("x", x, (torch.bfloat16,))
    check_same_device("x", x, codes)
    return x.shape[0]


def check_global_scale(global_scale: float | Tensor, codes: Tensor) -> tuple[float, Tensor | None]:
    """Returns a number for the host to pass, and a tensor on the device or None."""
    import torch

    if isinstance(global_scale, torch.Tensor):
        if global_scale.numel() != 1 or global_scale.dtype != torch.float32:
            raise ValueError(
                f"global_scale is {global_scale.dtype} {tuple(global_scale.shape)}: it must be one float32 value"
            )
        if global_scale.is_cuda:
            check_same_device("global_scale", global_scale, codes)
            return 1.0, global_scale
        global_scale = float(global_scale)
    if not 0.0 < global_scale < float("inf"):
        raise ValueError(f"global_scale is {global_scale}: it must be positive and finite")
    return float(global_scale), None


def check_out(out: Tensor, shape: tuple[int, ...], codes: Tensor) -> None:
    """Where results go."""
    import torch

    if tuple(out.shape) != shape:
        raise ValueError(f"out has shape {tuple(out.shape)}: it must be {shape}")
    check_tensor("out", out, (torch.bfloat16, torch.float32))
    check_same_device("out", out, codes)


def check_expert_scales(global_scales: Tensor | None, experts: int, codes: Tensor) -> None:
    """One float32 for each expert, or none."""
    import torch

    if global_scales is None:
        return
    check_tensor("global_scales", global_scales, (torch.float32,))
    check_same_device("global_scales", global_scales, codes)
    if tuple(global_scales.shape) != (experts,):
        raise ValueError(f"global_scales has shape {tuple(global_scales.shape)}: it must be ({experts},)")


def check_bias(bias: Tensor, experts: int, n: int, codes: Tensor) -> None:
    """BF16 for each row of each expert."""
    import torch

    check_tensor("bias", bias, (torch.bfloat16,))
    check_same_device("bias", bias, codes)
    if tuple(bias.shape) != (experts, n):
        raise ValueError(f"bias has shape {tuple(bias.shape)}: it must be {(experts, n)}")
