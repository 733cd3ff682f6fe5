"""Operands of the W4A4 kernels, checked once: FP4 tensors as the checkpoint stores them, and an MoE layer's routing.

Layout. codes uint8 [.., rows, K/2], low nibble = even k; block scales [.., rows, K/16] E4M3 (NVFP4) or [.., rows, K/32]
E8M0 (MXFP4), linear along K. The kernels read 16 bytes at a time, so every tensor starts at a multiple of 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from requant.kernels.formats import NumberFormat

if TYPE_CHECKING:
    import torch

__all__ = ["Fp4Tensor", "Routing", "check_storage", "route"]

_MINUS_ZERO: Final = 0x80
_MINUS_NAN: Final = 0xFF
"""E4M3 bytes; those between are the negative scales."""
_ALIGNMENT: Final = 16
"""Bytes; the widest copy of the kernels."""


@dataclass(frozen=True, slots=True, eq=False)
class Fp4Tensor:
    """FP4 rows on one device: a weight [N, K], a stack of expert weights [E, N, K], or activations [M, K].

    codes uint8 [.., rows, K/2]; scales uint8 [.., rows, K/group]; global_scale float32 [1], [E] (experts) or [M]
    (activations, per token), None for MXFP4.
    """

    format: NumberFormat
    codes: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor | None

    @property
    def k(self) -> int:
        """Length of the dimension that is summed."""
        return self.codes.shape[-1] * 2

    @classmethod
    def weight(
        cls, codes: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor | float | None = None
    ) -> Fp4Tensor:
        """Check a weight's tensors once, so that a matmul need not.

        The format follows from global_scale: NVFP4 has one (a number, a scalar tensor, or [E]), MXFP4 none. scales
        may be typed float8_e4m3fn, float8_e8m0fnu or uint8. Raises ValueError for a wrong dtype, shape, stride or
        alignment, for a global scale that is not finite and positive, and for a negative block scale: the FP4 tensor
        cores take E4M3 without its sign.
        """
        import torch

        fmt = NumberFormat.MXFP4 if global_scale is None else NumberFormat.NVFP4
        codes = _as_bytes(codes, "codes", ("float4_e2m1fn_x2",))
        scales = _as_bytes(scales, "block scales", ("float8_e4m3fn" if global_scale is not None else "float8_e8m0fnu",))
        if codes.dim() not in (2, 3):
            raise ValueError(f"codes must be [N, K/2] or [experts, N, K/2], not {list(codes.shape)}")
        if 0 in codes.shape:
            raise ValueError(f"an empty weight: codes {list(codes.shape)}")
        k = codes.shape[-1] * 2
        if k % fmt.group:
            raise ValueError(f"K = {k} is not a multiple of {fmt.group}, the group of {fmt}")
        expected = [*codes.shape[:-1], k // fmt.group]
        if list(scales.shape) != expected:
            raise ValueError(f"block scales {list(scales.shape)} do not fit K = {k} in {fmt}: expected {expected}")
        if global_scale is None:
            return cls(fmt, codes, scales, None)
        if bool(((scales > _MINUS_ZERO) & (scales != _MINUS_NAN)).any()):
            raise ValueError("a block scale is negative: FP4 tensor cores ignore the sign, and no exporter writes one")
        experts = codes.shape[0] if codes.dim() == 3 else 1
        globals_ = torch.as_tensor(global_scale, dtype=torch.float32, device=codes.device).reshape(-1).contiguous()
        if globals_.numel() == 1:
            globals_ = globals_.expand(experts).contiguous()
        if globals_.numel() != experts:
            raise ValueError(f"{globals_.numel()} global scales for {experts} weights")
        bad = ~(globals_.isfinite() & (globals_ > 0))
        if bad.any():
            first = int(bad.int().argmax())
            raise ValueError(f"global scale {globals_[first].item()} of weight {first}: must be finite and positive")
        return cls(fmt, codes, scales, globals_)


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Which token each row of a grouped matmul reads: row r, of the expert e with offsets[e] <= r < offsets[e + 1].

    token int32 [rows]; offsets int32 [experts + 1]; order int64 [rows], the place of each row in the flattened
    [tokens, top_k] ids, so that `out[routing.order] = y` puts results back; tokens, how many there are.
    """

    token: torch.Tensor
    offsets: torch.Tensor
    order: torch.Tensor
    tokens: int

    @property
    def experts(self) -> int:
        """Number of experts, touched or not."""
        return self.offsets.numel() - 1


def _as_bytes(tensor: torch.Tensor, what: str, views: tuple[str, ...]) -> torch.Tensor:
    """The tensor as uint8, if it is uint8 or one of the named one-byte dtypes, contiguous and aligned."""
    import torch

    if str(tensor.dtype).removeprefix("torch.") in views:
        tensor = tensor.view(torch.uint8)
    if tensor.dtype != torch.uint8:
        raise ValueError(f"{what} must be uint8 or {' or '.join(views)}, not {tensor.dtype}")
    check_storage(tensor, what)
    return tensor


def check_storage(tensor: torch.Tensor, what: str) -> None:
    """Raise ValueError unless the tensor is contiguous and aligned for the kernels."""
    if not tensor.is_contiguous():
        raise ValueError(f"{what} {list(tensor.shape)} are not contiguous (strides {tensor.stride()}): copy them first")
    if tensor.data_ptr() % _ALIGNMENT:
        raise ValueError(f"{what} start at an address that is not a multiple of {_ALIGNMENT} bytes: copy them first")


def route(expert_ids: torch.Tensor, experts: int) -> Routing:
    """Sort token-expert pairs by expert, stably. expert_ids integer [tokens, top_k].

    Reads the ids back to check them, so it cannot stand inside a CUDA graph; the matmuls can. Raises ValueError for
    ids outside [0, experts).
    """
    import torch

    if expert_ids.dim() != 2 or expert_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"expert_ids must be int32 or int64 [tokens, top_k], not {expert_ids.dtype} of {list(expert_ids.shape)}"
        )
    flat = expert_ids.reshape(-1).long()
    outside = flat[(flat < 0) | (flat >= experts)]
    if outside.numel():
        raise ValueError(f"expert id {outside[0].item()} is out of range: there are {experts} experts")
    ordered, order = torch.sort(flat, stable=True)
    bounds = torch.arange(experts + 1, device=flat.device)
    offsets = torch.searchsorted(ordered, bounds).int()
    return Routing((order // max(expert_ids.shape[1], 1)).int(), offsets, order, expert_ids.shape[0])
