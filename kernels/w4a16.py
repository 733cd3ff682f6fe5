"""W4A16: BF16 activations times NVFP4 or MXFP4 weights, on the checkpoint's own layout, for few tokens.

`w4a16_matmul` is one linear layer, `w4a16_moe` one grouped GEMM of a mixture of experts. Both read codes [N, K/2]
uint8 (low nibble = even k) and block scales [N, K/group] bytes (E4M3 for NVFP4, E8M0 for MXFP4) exactly as a checkpoint
stores them: there is no repacked copy for a validator to trust. Sums are FP32 in a fixed order: a repeated call gives
the same bits; the global scale is applied in FP32 at the end. NaN and infinity in x, and NaN block scales, reach the
outputs that depend on them. The kernels for few tokens scale x to halves: it may span 2^28 within a token without any
loss, and loses 2^-39 of its largest element beyond that. MXFP4 block scales from 2^-100 to 2^100 are exact.

The kernel is csrc/w4a16*.cu*; w4a16_configs.py says which configuration runs; w4a16_library.py builds and loads it.
Where there is no nvcc, kernels/triton/w4a16.py computes both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from requant.kernels import w4a16_configs as configs
from requant.kernels import w4a16_library as lib
from requant.kernels.formats import NumberFormat
from requant.kernels.w4a16_operands import (
    MINIMUM_CAPABILITY,
    call_for,
    check_bias,
    check_expert_scales,
    check_format,
    check_global_scale,
    check_out,
    check_same_device,
    check_tensor,
    check_weight,
    check_x,
    device_of,
    early_start,
    processors_of,
)
from requant.kernels.w4a16_routing import sort_slots
from requant.kernels.w4a16_wgmma_configs import WgmmaConfig

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "GatedActivation",
    "MoeRouting",
    "availability",
    "fuses",
    "route_experts",
    "uses_triton",
    "w4a16_matmul",
    "w4a16_moe",
]


Path = Literal["auto", "cuda", "triton"]
HALVES: Final = 1
INTERLEAVED: Final = 2
"""enum Gating of csrc/w4a16_types.cuh."""


@dataclass(frozen=True, slots=True)
class MoeRouting:
    """Slots sorted by expert, for every GEMM of one layer: build it once with `route_experts`.

    data: int32 on the GPU, layout in csrc/w4a16_routing.cuh (triton: in triton/w4a16.py, which alone reads it).
    tokens x slots_per_token slots over `experts` experts.
    """

    data: Tensor
    tokens: int
    slots_per_token: int
    experts: int
    triton: bool = False

    @property
    def slots(self) -> int:
        """Number of (token, expert) pairs."""
        return self.tokens * self.slots_per_token


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """SwiGLU of an expert's gate and up rows: silu(gate) * up. interleaved: they take turns, else gate's come first.

    limit: gpt-oss's form, (up + 1) * gate * sigmoid(alpha * gate) with gate clamped from above and up from both sides.
    Raises ValueError for a limit that is not positive: the kernel takes 0 for none.
    """

    interleaved: bool = False
    limit: float | None = None
    alpha: float = 1.0

    def __post_init__(self) -> None:
        if self.limit is not None and not self.limit > 0:
            raise ValueError(f"limit is {self.limit}: it must be positive, or None for SwiGLU without a clamp")

    def put(self, call: lib.Call) -> None:
        """Set a launch's fields."""
        call.gating = INTERLEAVED if self.interleaved else HALVES
        call.limit, call.alpha = self.limit or 0.0, self.alpha


def availability() -> tuple[Literal["runs", "compiles", "unavailable"], str]:
    """Whether W4A16 CUDA runs here, and why or why not: ("runs" | "compiles" | "unavailable", reason)."""
    import torch

    nvcc = lib.find_nvcc()
    given = lib.given_library()
    if not torch.cuda.is_available():
        if nvcc is None:
            return "unavailable", "no NVIDIA GPU is visible to torch, and nvcc was not found"
        return "compiles", f"no NVIDIA GPU is visible to torch; {nvcc} can compile it"
    capability = torch.cuda.get_device_capability()
    name = torch.cuda.get_device_name()
    if capability < MINIMUM_CAPABILITY:
        return "unavailable", f"{name} has compute capability {capability[0]}.{capability[1]}; 8.0 or later is needed"
    if given is not None:
        return "runs", f"{name}, library {given}"
    if nvcc is None:
        return "unavailable", f"{name} is there, but nvcc was not found; the Triton path runs instead"
    return "runs", f"{name}, built by {nvcc}"


def w4a16_matmul(
    x: Tensor,
    codes: Tensor,
    block_scales: Tensor,
    global_scale: float | Tensor = 1.0,
    *,
    fmt: NumberFormat,
    out: Tensor | None = None,
    config: configs.Config | WgmmaConfig | None = None,
    constant_weights: bool = False,
    path: Path = "auto",
) -> Tensor:
    """y = global_scale * x @ dequantize(codes, block_scales)^T.

    x [M, K] bfloat16, codes [N, K/2] uint8, block_scales [N, K/group] uint8 (or a float8 view), all on one CUDA device,
    contiguous, 16-byte aligned. global_scale: a positive float, or a float32 tensor of one element on the device (then
    a value that is not positive makes every output NaN: checking it would stall the stream). out: [M, N] bfloat16 or
    float32, also contiguous. Any N; K a multiple of the group; any M (blocks of 64 tokens).
    constant_weights: promise that the kernel before this one on the stream wrote neither the weights nor a global scale
    on the device; the kernel may then start reading them before that one has finished (SM90 and later).
    Raises ValueError for wrong arguments, KernelBuildError where nothing can run.
    """
    import torch

    check_format(fmt)
    n, k = check_weight(codes, block_scales, fmt, lead=0)
    m = check_x(x, k, codes)
    host_scale, device_scale = check_global_scale(global_scale, codes)
    if out is None:
        out = torch.empty((m, n), dtype=torch.bfloat16, device=x.device)
    else:
        check_out(out, (m, n), codes)
    if m == 0 or n == 0:
        return out
    if uses_triton(path):
        from requant.kernels.triton.w4a16 import matmul

        with torch.cuda.device(codes.device):  # Triton launches on the current one
            return matmul(x, codes, block_scales, global_scale, fmt=fmt, out=out)
    library, capability, processors = device_of(codes)
    for start in range(0, m, configs.MAX_TOKENS):
        rows = min(configs.MAX_TOKENS, m - start)
        chosen = config or configs.choose(fmt, rows, n, k, capability=capability, processors=processors)
        call = call_for(x[start:], codes, block_scales, out[start:], fmt, n, k, chosen)
        call.tokens, call.experts = rows, 1
        call.global_scale = host_scale
        call.global_scales = None if device_scale is None else device_scale.data_ptr()
        call.early_start = early_start(capability, constant_weights=constant_weights)
        with torch.cuda.device(codes.device):
            lib.launch(library, call, torch.cuda.current_stream().cuda_stream)
    return out


def route_experts(expert_ids: Tensor, experts: int, *, check: bool = False, path: Path = "auto") -> MoeRouting:
    """Sort the slots of expert_ids [T, topk] int32 (CUDA, contiguous) by expert, stably; for the GEMMs of that path.

    check: read the ids back and raise ValueError for one outside 0 .. experts-1 (this waits for the GPU). Without it
    the outputs of such a slot are NaN.
    """
    import torch

    if expert_ids.dim() != 2:
        raise ValueError(f"expert_ids has shape {tuple(expert_ids.shape)}: it must be [tokens, experts per token]")
    check_tensor("expert_ids", expert_ids, (torch.int32,))
    if experts < 1:
        raise ValueError(f"experts is {experts}: it must be at least 1")
    tokens, per_token = expert_ids.shape
    if check and expert_ids.numel():
        bad = ((expert_ids < 0) | (expert_ids >= experts)).nonzero()
        if bad.numel():
            token, slot = (int(v) for v in bad[0])
            raise ValueError(
                f"expert_ids[{token}, {slot}] is {int(expert_ids[token, slot])}: experts run from 0 to {experts - 1}"
            )
    if uses_triton(path):
        from requant.kernels.triton.w4a16 import route

        return MoeRouting(route(expert_ids, experts), tokens, per_token, experts, triton=True)
    size = lib.routing_ints(expert_ids.numel(), experts)
    data = torch.empty(size, dtype=torch.int32, device=expert_ids.device)
    if expert_ids.numel():
        library, capability, _ = device_of(expert_ids)
        if lib.routing_shared_bytes(expert_ids.numel(), experts) > configs.shared_limit(capability):
            return MoeRouting(sort_slots(expert_ids, experts), tokens, per_token, experts)
        with torch.cuda.device(expert_ids.device):
            stream = torch.cuda.current_stream().cuda_stream
            lib.route(library, expert_ids.data_ptr(), expert_ids.numel(), per_token, experts, data.data_ptr(), stream)
    return MoeRouting(data, tokens, per_token, experts)


def w4a16_moe(
    x: Tensor,
    codes: Tensor,
    block_scales: Tensor,
    global_scales: Tensor | None,
    expert_ids: Tensor | None = None,
    *,
    fmt: NumberFormat,
    weights: Tensor | None = None,
    x_per_slot: bool = False,
    routing: MoeRouting | None = None,
    out: Tensor | None = None,
    config: configs.Config | None = None,
    check: bool = False,
    path: Path = "auto",
    bias: Tensor | None = None,
    activation: GatedActivation | None = None,
    settled: bool = False,
) -> Tensor:
    """One GEMM of a mixture of experts: y[t, j] = weights[t, j] * x_row @ W[expert_ids[t, j]]^T, in one launch.

    x [T, K] bfloat16 (or [T, topk, K] with x_per_slot: the down projection), codes [E, N, K/2], block_scales
    [E, N, K/group], global_scales [E] float32 or None (all 1), expert_ids [T, topk] int32, weights [T, topk] float32.
    Returns [T, topk, N] bfloat16. Pass `routing` from `route_experts` to share the sort between the GEMMs of a layer.
    A slot whose expert id is out of range gives NaN; check=True raises ValueError instead, and waits for the GPU.

    Where `fuses` says so: bias [E, N] bfloat16 is added before the weights, and with `activation` y is [T, topk, N/2],
    all in FP32 with one rounding at the end. settled: promise that routing and codes, scales and bias are older than
    the kernel before this one on the stream, and that the latter waits for its own predecessor before it lets this one
    start (griddepcontrol); they may then be read before it has finished.
    """
    import torch

    check_format(fmt)
    n, k = check_weight(codes, block_scales, fmt, lead=1)
    experts = codes.shape[0]
    width = n if activation is None else n // 2
    if routing is None:
        if expert_ids is None:
            raise ValueError("w4a16_moe needs expert_ids [T, topk], or a routing made from them by route_experts")
        check_same_device("expert_ids", expert_ids, codes)
        routing = route_experts(expert_ids, experts, check=check, path=path)
    if routing.experts != experts:
        raise ValueError(f"the routing is for {routing.experts} experts, the weight has {experts}")
    tokens, topk = routing.tokens, routing.slots_per_token
    check_tensor("x", x, (torch.bfloat16,))
    check_same_device("x", x, codes)
    wanted = (tokens, topk, k) if x_per_slot else (tokens, k)
    if tuple(x.shape) != wanted:
        raise ValueError(f"x has shape {tuple(x.shape)}: with x_per_slot={x_per_slot} it must be {wanted}")
    check_expert_scales(global_scales, experts, codes)
    if check and global_scales is not None and not bool((global_scales > 0).all()):
        raise ValueError("global_scales has a value that is not positive: every expert's must be > 0")
    if weights is not None:
        check_tensor("weights", weights, (torch.float32,))
        check_same_device("weights", weights, codes)
        if tuple(weights.shape) != (tokens, topk):
            raise ValueError(f"weights has shape {tuple(weights.shape)}: it must be {(tokens, topk)}")
    if out is None:
        out = torch.empty((tokens, topk, width), dtype=torch.bfloat16, device=x.device)
    else:
        check_out(out, (tokens, topk, width), codes)
    if bias is not None:
        check_bias(bias, experts, n, codes)
    if routing.slots == 0 or n == 0:
        return out
    if uses_triton(path) is not routing.triton:
        raise ValueError("the routing was made for another path: give route_experts the same `path`")
    if routing.triton:
        _check_fuses(None, n, bias, activation)
        from requant.kernels.triton.w4a16 import moe

        with torch.cuda.device(codes.device):
            return moe(
                x, codes, block_scales, global_scales, routing.data, routing.slots,
                fmt=fmt, weights=weights, x_per_slot=x_per_slot, out=out,
            )  # fmt: skip
    library, capability, processors = device_of(codes)
    chosen = config or configs.choose_grouped(
        fmt, routing.slots, n, k, experts=experts, capability=capability, processors=processors
    )
    _check_fuses(chosen, n, bias, activation)
    call = call_for(x, codes, block_scales, out, fmt, n, k, chosen)
    call.tokens, call.experts, call.slots = tokens, experts, routing.slots
    call.x_row_per_slot = int(x_per_slot)
    call.global_scale = 1.0
    call.global_scales = None if global_scales is None else global_scales.data_ptr()
    call.slot_weights = None if weights is None else weights.data_ptr()
    call.routing = routing.data.data_ptr()
    call.early_start = early_start(capability, constant_weights=False)
    call.settled = int(settled and n % configs.TILE_ROWS == 0)
    call.bias = None if bias is None else bias.data_ptr()
    if activation is not None:
        activation.put(call)
    with torch.cuda.device(codes.device):
        lib.launch(library, call, torch.cuda.current_stream().cuda_stream)
    return out


def fuses(fmt: NumberFormat, slots: int, n: int, k: int, *, experts: int) -> bool:
    """Whether w4a16_moe takes `bias` and `activation` on the current GPU: `slots` slots, weights [experts, n, k]."""
    import torch

    if not torch.cuda.is_available() or uses_triton():
        return False
    capability, processors = torch.cuda.get_device_capability(), processors_of(torch.cuda.current_device())
    if capability < MINIMUM_CAPABILITY:
        return False
    chosen = configs.choose_grouped(fmt, slots, n, k, experts=experts, capability=capability, processors=processors)
    return _takes_fused(chosen, n)


def _takes_fused(chosen: configs.Config | None, n: int) -> bool:
    return chosen is not None and chosen.stream == configs.SPLIT and n % configs.TILE_ROWS == 0


def _check_fuses(
    chosen: configs.Config | None, n: int, bias: Tensor | None, activation: GatedActivation | None
) -> None:
    if (bias is not None or activation is not None) and not _takes_fused(chosen, n):
        raise ValueError("this shape's kernel takes neither bias nor activation: ask `fuses` before")


def uses_triton(path: Path = "auto") -> bool:
    """Whether a call with this `path` is Triton's, here: routings of the two are not the same."""
    if path not in ("auto", "cuda", "triton"):
        raise ValueError(f"path is {path!r}: it must be 'auto', 'cuda' or 'triton'")
    return path == "triton" or (path == "auto" and lib.find_nvcc() is None and lib.given_library() is None)
