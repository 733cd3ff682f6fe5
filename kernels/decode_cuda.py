"""Two of a decode step's kernels in CUDA, whose parts meet in shared memory and not through the L2: `choose`, `attend`.

triton/decode.py has both for every GPU, model and number of streams; these are for few tokens of a model whose sizes
fit (`chooses`, `attends`), from SM90 on; `attend` where a block has as much shared memory, on SM90 and SM100. They lie
in the library of the W4A16 kernels, whose routing `choose` writes: csrc/decode_choose.cuh, csrc/decode_attend.cuh.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final

from requant.kernels import w4a16_configs as configs
from requant.kernels import w4a16_library as lib
from requant.kernels.w4a16_operands import device_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["attend", "attends", "choose", "chooses"]

_MOST_K: Final = 3072
_STEP_K: Final = 32
_MOST_EXPERTS: Final = 32
"""kChooseK, kChooseStepK and kChooseExperts of csrc/decode_choose.cuh."""
_HEAD_DIM: Final = 64
_MOST_HEADS: Final = 8
_MOST_KEYS: Final = 736
"""kHeadDim, kAttendHeads and kMostKeys of csrc/decode_attend.cuh."""
_ATTEND_SHARED: Final = 221 * 1024
"""Bytes that a block of it may have: kMostKeys keys and values, and AttendShared."""
_ALIGNMENT: Final = 16


class _Choose(ctypes.Structure):
    """ChooseCall of csrc/decode_choose.cuh, field by field."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("h", "y", "bias", "norm", "router", "router_bias", "h_out", "x", "ids", "weights", "routing")
        ),
        *((name, ctypes.c_int) for name in ("k", "experts", "top_k", "max_tiles", "normalize")),
        ("eps", ctypes.c_float),
    )


class _Attend(ctypes.Structure):
    """AttendCall of csrc/decode_attend.cuh, field by field."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("qkv", "bias", "sinks", "cos", "sin", "positions", "keys", "values", "out")
        ),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("tokens", "heads", "kv_heads", "capacity", "window")),
    )


def chooses(tokens: int, width: int, experts: int, *tensors: Tensor | None) -> bool:
    """Whether `choose` takes a layer of this size on its GPU; of `tensors` all must be there, BF16, and aligned."""
    fits = tokens == 1 and width % _STEP_K == 0 and width <= _MOST_K and experts <= _MOST_EXPERTS
    return fits and _runs(tensors)


def attends(heads: int, kv_heads: int, head_dim: int, keys: int, *tensors: Tensor | None) -> bool:
    """Whether `attend` takes heads like these with so many keys at most on their GPU; of `tensors` all must be there,
    BF16, and aligned."""
    fits = head_dim == _HEAD_DIM and heads % kv_heads == 0 and heads <= _MOST_HEADS * kv_heads and keys <= _MOST_KEYS
    return fits and _runs(tensors, _ATTEND_SHARED)


def choose(
    h: Tensor,
    y: Tensor,
    bias: Tensor | None,
    norm: Tensor,
    router: Tensor,
    router_bias: Tensor | None,
    h_out: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    routing: Tensor | None,
    *,
    max_tiles: int,
    normalize: bool,
    eps: float,
    early_start: bool,
) -> None:
    """h_out = h + y + bias, x = RMSNorm(h_out) * norm, and of router x + router_bias the largest: ids and weights.

    h, h_out [1, K] FP32, others BF16; router [experts, K]; ids [1, top_k] int32, weights [1, top_k] FP32: softmax over
    those, or over all without `normalize`. routing: what w4a16_library.routing_ints says, of max_tiles tiles.
    early_start: this kernel may take its place while the one before runs; all but y is older than that one.
    """
    tensors = (h, y, bias, norm, router, router_bias, h_out, x, ids, weights, routing)
    call = _Choose(*map(_address, tensors), h.shape[-1], router.shape[0], ids.shape[-1], max_tiles, int(normalize), eps)
    _start("requant_decode_choose", call, h, early_start=early_start)


def attend(
    qkv: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    tables: tuple[Tensor, Tensor],
    positions: Tensor,
    cache: tuple[Tensor, Tensor],
    out: Tensor,
    *,
    scale: float,
    window: int,
    early_start: bool,
) -> None:
    """Attention of one new token of each of T streams, whose key and value it writes at its position of the cache.

    qkv [T, (heads + 2 kv_heads) * 64], bias of a row, sinks [heads], out [T, heads * 64], cache [T, kv_heads, capacity,
    64] each, BF16; tables (cos, sin) [positions, 32] FP32; positions [T] int32. window 0: none. early_start: as above,
    and all but qkv is older. The kernel that follows may start at once: it must wait before it reads any but constants.
    """
    tokens, kv_heads, capacity, _ = cache[0].shape
    tensors = (qkv, bias, sinks, *tables, positions, *cache, out)
    call = _Attend(*map(_address, tensors), scale, tokens, out.shape[1] // _HEAD_DIM, kv_heads, capacity, window)
    _start("requant_decode_attend", call, qkv, early_start=early_start)


def _runs(tensors: tuple[Tensor | None, ...], shared: int = 0) -> bool:
    """shared: bytes that a block needs."""
    import torch

    there = [t for t in tensors if t is not None]
    if not all(t.is_cuda and t.dtype == torch.bfloat16 and t.data_ptr() % _ALIGNMENT == 0 for t in there):
        return False
    capability = torch.cuda.get_device_capability(there[0].device)
    return capability >= (9, 0) and shared <= configs.shared_limit(capability)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _start(name: str, call: ctypes.Structure, tensor: Tensor, *, early_start: bool) -> None:
    """On the tensor's device and its current stream."""
    import torch

    library, _, _ = device_of(tensor)
    with torch.cuda.device(tensor.device):
        stream = torch.cuda.current_stream().cuda_stream
        lib.start(name, library, ctypes.addressof(call), stream, early=early_start)
