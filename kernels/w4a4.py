"""W4A4: FP4 x FP4 matmul on SM120's tensor cores, dense and grouped by expert, activations quantized on the fly.

    w = Fp4Tensor.weight(codes, scales, weight_scale_2)        # once; the checkpoint's own bytes, checked
    y = matmul(x, w)                                           # x BF16 [M, K] -> y BF16 [M, N]
    routing = route(expert_ids, experts)                       # [tokens, top_k]
    y = grouped_matmul(x, experts_weight, routing)             # [tokens * top_k, N], rows sorted by expert

Layout. codes uint8 [N, K/2] or [experts, N, K/2], low nibble = even k; block scales [.., N, K/16] E4M3 (NVFP4) or
[.., N, K/32] E8M0 (MXFP4), linear; nothing is repacked. K must be a multiple of the group, N and M are free.

Activations. NVFP4: under `input_scale` if given, as the checkpoint's; otherwise a global scale per token, or one per
tensor. MXFP4 needs none. A row of x with a NaN or an infinity yields a row of NaN, and no other row changes.

Where it runs. The instruction exists on SM120 and SM121. With `emulate=True` the same kernels run on any chip from SM80
on, with the instruction emulated bit for bit: that proves them, and its speed means nothing. It is never a fallback.

The same inputs give the same bits on the same chip: parts of K are added in a fixed order. (How many parts there are
depends on the chip's number of multiprocessors, unless `splits` says it.)
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from requant.kernels.availability import Availability, KernelUnavailableError, State, gpu
from requant.kernels.formats import NumberFormat
from requant.kernels.w4a4_build import NATIVE_ARCHITECTURES, find_cuda_tool, load_library
from requant.kernels.w4a4_operands import Fp4Tensor, Routing, check_storage, route

if TYPE_CHECKING:
    import torch

__all__ = ["Fp4Tensor", "Routing", "availability", "grouped_matmul", "matmul", "quantize", "route"]

Granularity = Literal["token", "tensor"]

_COLUMNS: Final = 128
_SLICE: Final = 256
"""Columns of y and length along K of a CTA's tile (Tile in csrc/w4a4_gemm.cuh)."""
_BLOCK_ROWS: Final = (16, 32, 64, 128)
_MAX_SPLITS: Final = 16
_OLDEST: Final = (8, 0)
"""cp.async and ldmatrix; needed by the emulated kernels too."""
_GIVEN, _PER_TOKEN, _PER_TENSOR = range(3)


class _GemmArgs(ctypes.Structure):
    """GemmArgs of csrc/w4a4_gemm.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x_codes", "x_scales", "x_global", "w_codes", "w_scales", "w_global")),
        *((name, ctypes.c_void_p) for name in ("token", "offsets", "y", "partial")),
        *((name, ctypes.c_int) for name in ("rows", "N", "K", "experts", "splits", "x_global_stride", "y_is_bf16")),
    )


class _QuantizeArgs(ctypes.Structure):
    """QuantizeArgs of csrc/w4a4_quantize.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "codes", "scales", "global", "row_amax")),
        ("rows", ctypes.c_int),
        ("K", ctypes.c_int),
    )


def _check_x(x: torch.Tensor, k: int | None) -> None:
    import torch

    if x.dtype != torch.bfloat16:
        raise ValueError(f"x must be bfloat16, not {x.dtype}")
    if x.dim() != 2 or (k is not None and x.shape[1] != k):
        raise ValueError(f"x must be [M, {'K' if k is None else k}], not {list(x.shape)}")
    check_storage(x, "rows of x")


def _library(device: torch.device, emulate: bool) -> ctypes.CDLL:
    """The kernels for this device, compiled on first use."""
    import torch

    if device.type != "cuda":
        raise KernelUnavailableError(f"W4A4 kernels run on an NVIDIA GPU; the tensors are on {device}")
    capability = torch.cuda.get_device_capability(device)
    if capability in NATIVE_ARCHITECTURES:
        return load_library(NATIVE_ARCHITECTURES[capability], emulate=emulate)
    name = f"{torch.cuda.get_device_name(device)} (SM{capability[0]}{capability[1]})"
    if capability < _OLDEST:
        raise KernelUnavailableError(f"{name} is older than SM80")
    if not emulate:
        raise KernelUnavailableError(
            f"{name} has no warp-level FP4 mma (SM120 and SM121 have). Use W4A16 here, or emulate=True to check results"
        )
    return load_library(f"{capability[0]}{capability[1]}{'a' if capability[0] >= 9 else ''}", emulate=True)


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _check_status(library: ctypes.CDLL, status: int, what: str) -> None:
    if status:
        text: bytes = library.requant_w4a4_error(status)
        raise RuntimeError(f"{what} failed: {text.decode()} (cudaError {status})")


def quantize(
    x: torch.Tensor,
    fmt: NumberFormat,
    *,
    input_scale: torch.Tensor | float | None = None,
    granularity: Granularity = "token",
    emulate: bool = False,
) -> Fp4Tensor:
    """x BF16 [M, K] on a GPU to FP4, bytes as `reference.encode_nvfp4` / `encode_mxfp4` give them.

    NVFP4's global scale is input_scale, or amax / (6 * 448) of each token or of the tensor (1 where all is zero),
    taken over finite values. A block with a NaN or an infinity gets a NaN scale and codes 0.
    """
    import torch

    _check_x(x, None)
    rows, k = x.shape
    if fmt not in (NumberFormat.NVFP4, NumberFormat.MXFP4):
        raise ValueError(f"{fmt} is no FP4 format")
    if k == 0 or k % fmt.group:
        raise ValueError(f"K = {k} is not a positive multiple of {fmt.group}, the group of {fmt}")
    given, mode, row_amax = None, _GIVEN, None
    if fmt is NumberFormat.MXFP4:
        if input_scale is not None:
            raise ValueError("MXFP4 has no global scale, so input_scale has no meaning")
    elif input_scale is not None:
        value = float(input_scale)
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"input_scale must be finite and positive, not {value}")
        given = torch.full((1,), value, dtype=torch.float32, device=x.device)
    elif granularity == "token":
        given, mode = torch.empty(rows, dtype=torch.float32, device=x.device), _PER_TOKEN
    else:
        given, mode = torch.ones(1, dtype=torch.float32, device=x.device), _PER_TENSOR
        row_amax = torch.empty(rows, dtype=torch.float32, device=x.device)
    library = _library(x.device, emulate)
    codes = torch.empty((rows, k // 2), dtype=torch.uint8, device=x.device)
    scales = torch.empty((rows, k // fmt.group), dtype=torch.uint8, device=x.device)
    if rows:
        args = _QuantizeArgs(*map(_pointer, (x, codes, scales, given, row_amax)), rows, k)
        with torch.cuda.device(x.device):
            stream = torch.cuda.current_stream(x.device).cuda_stream
            status = library.requant_w4a4_quantize(ctypes.byref(args), fmt is NumberFormat.MXFP4, mode, stream)
        _check_status(library, status, "activation quantizer")
    return Fp4Tensor(fmt, codes, scales, given)


def choose_block_rows(rows: float) -> int:
    """The smallest tile that holds this many rows (of one expert, on average), or the largest there is."""
    return next((size for size in _BLOCK_ROWS if rows <= size), _BLOCK_ROWS[-1])


def choose_splits(tiles: int, k: int, multiprocessors: int) -> int:
    """Parts of K such that the tiles' CTAs fill the chip once, of at least one slice each."""
    return max(1, min(multiprocessors // max(tiles, 1), -(-k // _SLICE), _MAX_SPLITS))


def _multiprocessors(device: torch.device) -> int:
    import torch

    properties = torch.cuda.get_device_properties(device)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]  torch leaves it untyped
    return int(properties.multi_processor_count)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]  the same


def _gemm(
    x: Fp4Tensor, w: Fp4Tensor, rows: int, routing: Routing | None, token: torch.Tensor | None, options: _Options
) -> torch.Tensor:
    import torch

    device = x.codes.device
    library = _library(device, options.emulate)
    n = w.codes.shape[-2]
    y = torch.empty((rows, n), dtype=options.out_dtype, device=device)
    if rows == 0:
        return y
    if routing is None:
        block_rows = options.block_rows or choose_block_rows(rows)
        row_tiles = -(-rows // block_rows)
    else:
        touched = min(rows, routing.experts)
        block_rows = options.block_rows or choose_block_rows(rows / touched)
        row_tiles = (rows + touched * (block_rows - 1)) // block_rows  # ceil each expert's rows: at most this many
    splits = options.splits or choose_splits(row_tiles * -(-n // _COLUMNS), w.k, _multiprocessors(device))
    if not 1 <= splits <= -(-w.k // _SLICE):
        raise ValueError(f"splits = {splits}: K = {w.k} has {-(-w.k // _SLICE)} slices of {_SLICE} to share out")
    partial = torch.empty((splits, rows, n), dtype=torch.float32, device=device) if splits > 1 else None
    stride = int(x.global_scale is not None and x.global_scale.numel() > 1)
    tensors = (x.codes, x.scales, x.global_scale, w.codes, w.scales, w.global_scale, token)
    args = _GemmArgs(
        *map(_pointer, (*tensors, routing.offsets if routing else None, y, partial)),
        rows, n, w.k, routing.experts if routing else 1, splits, stride, y.dtype == torch.bfloat16,
    )  # fmt: skip
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        status = library.requant_w4a4_gemm(
            ctypes.byref(args), w.format is NumberFormat.MXFP4, block_rows, row_tiles, stream
        )
    _check_status(library, status, "W4A4 matmul")
    return y


@dataclass(frozen=True, slots=True)
class _Options:
    out_dtype: torch.dtype
    splits: int | None
    block_rows: int | None
    emulate: bool


def _options(out_dtype: torch.dtype | None, splits: int | None, block_rows: int | None, emulate: bool) -> _Options:
    import torch

    out_dtype = torch.bfloat16 if out_dtype is None else out_dtype
    if out_dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"y can be bfloat16 or float32, not {out_dtype}")
    if block_rows not in (None, *_BLOCK_ROWS):
        raise ValueError(f"block_rows must be one of {_BLOCK_ROWS}, not {block_rows}")
    return _Options(out_dtype, splits, block_rows, emulate)


def _operand(
    x: torch.Tensor | Fp4Tensor,
    w: Fp4Tensor,
    input_scale: torch.Tensor | float | None,
    options: _Options,
    granularity: Granularity,
) -> Fp4Tensor:
    """x as FP4 in the weight's format, on the weight's device."""
    if isinstance(x, Fp4Tensor):
        if x.format is not w.format or x.codes.dim() != 2 or x.k != w.k:
            raise ValueError(f"x is {x.format} {list(x.codes.shape)}, which does not go with {w.format} of K = {w.k}")
        device = x.codes.device
    else:
        _check_x(x, w.k)
        device = x.device
    if device != w.codes.device:
        raise ValueError(f"x is on {device}, the weight on {w.codes.device}")
    if isinstance(x, Fp4Tensor):
        return x
    return quantize(x, w.format, input_scale=input_scale, granularity=granularity, emulate=options.emulate)


def matmul(
    x: torch.Tensor | Fp4Tensor,
    w: Fp4Tensor,
    *,
    input_scale: torch.Tensor | float | None = None,
    granularity: Granularity = "token",
    out_dtype: torch.dtype | None = None,
    splits: int | None = None,
    block_rows: int | None = None,
    emulate: bool = False,
) -> torch.Tensor:
    """y [M, N] = x [M, K] . w [N, K]^T, BF16 unless out_dtype is float32. M = 0 gives an empty y.

    x is BF16, or what `quantize` returned. splits and block_rows override the choice of tiles. Raises ValueError for
    operands that do not fit, KernelUnavailableError where the kernels cannot run.
    """
    options = _options(out_dtype, splits, block_rows, emulate)
    if w.codes.dim() != 2:
        raise ValueError(f"{w.codes.shape[0]} stacked weights need grouped_matmul and a routing")
    quantized = _operand(x, w, input_scale, options, granularity)
    return _gemm(quantized, w, quantized.codes.shape[0], None, None, options)


def grouped_matmul(
    x: torch.Tensor | Fp4Tensor,
    w: Fp4Tensor,
    routing: Routing,
    *,
    routed: bool = False,
    input_scale: torch.Tensor | float | None = None,
    granularity: Granularity = "token",
    out_dtype: torch.dtype | None = None,
    splits: int | None = None,
    block_rows: int | None = None,
    emulate: bool = False,
) -> torch.Tensor:
    """y [rows, N]: each routed row times its own expert's weight, rows in the order of the routing.

    w is [E, N, K] with a global scale per expert. x is [tokens, K], read by routing.token; with routed=True it already
    is [rows, K] in that order (the down projection). Errors as matmul's.
    """
    options = _options(out_dtype, splits, block_rows, emulate)
    if w.codes.dim() != 3 or w.codes.shape[0] != routing.experts:
        raise ValueError(f"codes {list(w.codes.shape)} are not a stack of the routing's {routing.experts} experts")
    quantized = _operand(x, w, input_scale, options, granularity)
    rows = routing.token.numel()
    if routing.offsets.device != quantized.codes.device:
        raise ValueError(f"the routing is on {routing.offsets.device}, x on {quantized.codes.device}")
    if routed and quantized.codes.shape[0] != rows:
        raise ValueError(f"x has {quantized.codes.shape[0]} rows, the routing {rows}")
    if not routed and routing.tokens != quantized.codes.shape[0]:
        raise ValueError(f"x has {quantized.codes.shape[0]} tokens, the routing {routing.tokens}")
    return _gemm(quantized, w, rows, routing, None if routed else routing.token, options)


def availability() -> Availability:
    """Can the native kernels run here, or at least be compiled? Starts no compiler and no kernel."""
    nvcc = find_cuda_tool("nvcc")
    name, capability = gpu()
    if capability in NATIVE_ARCHITECTURES:
        if nvcc:
            return Availability(State.RUNS, f"{name}, FP4 mma; compiled by {nvcc} on first use")
        return Availability(State.UNAVAILABLE, f"{name} could run it, but there is no nvcc: set CUDA_HOME")
    here = f"{name} has no warp-level FP4 mma" if capability else name
    if nvcc:
        return Availability(State.COMPILES, f"for SM120 by {nvcc}; {here}, so it runs under emulation at most")
    return Availability(State.UNAVAILABLE, f"{here} and no nvcc")
