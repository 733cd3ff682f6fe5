# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUntypedFunctionDecorator=false, reportUnknownParameterType=false
# pyright: reportMissingParameterType=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportFunctionMemberAccess=false, reportAssignmentType=false, reportArgumentType=false
# Triton is optional and ships no types; a kernel's parameters are its own language, not Python's.
"""W4A4 for SM100 (B200, GB200): Triton's `dot_scaled` on the checkpoint's own layout.

SM100 has no warp-level FP4 mma; its FP4 tensor cores are `tcgen05.mma` on tensor memory, which Triton generates:
`kind::mxf4nvf4` with a scale per 16 for NVFP4, `kind::mxf4` with one per 32 for MXFP4. `compile_ptx` compiles ahead of
time, on a machine without a GPU, so that a test can hold the PTX to that. Nothing here has run on an SM100.

Needs Triton 3.8 or later: older ones crash on E4M3 scales. `matmul` runs wherever Triton does, but only SM100 and later
have the instruction (elsewhere dot_scaled decodes to BF16). Triton's interpreter (3.9) is right for MXFP4 alone, and
cuts BF16 results toward zero: ask it for float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

import triton
import triton.language as tl
from requant.kernels.formats import NumberFormat
from requant.kernels.w4a4_operands import Fp4Tensor

if TYPE_CHECKING:
    import torch

__all__ = ["compile_ptx", "matmul"]

_TILE: Final = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 256}
"""tcgen05's M is 128; 256 codes along K are one 128-byte line of a row."""
_OPTIONS: Final = {"num_warps": 4, "enable_fp_fusion": False}
"""Fusion is said because Triton's default for it is about to change; nothing here could be fused."""


@triton.jit
def dot_scaled_kernel(
    x_codes, x_scales, x_global, w_codes, w_scales, w_global, y, M, N, K,
    x_global_stride,
    NVFP4: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y [M, N] BF16 or FP32 = x . w^T; codes [rows, K/2], scales [rows, K/group], one program per tile of y."""
    GROUP: tl.constexpr = 16 if NVFP4 else 32
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_codes = x_codes + rows[:, None].to(tl.int64) * (K // 2)
    row_scales = x_scales + rows[:, None].to(tl.int64) * (K // GROUP)
    column_codes = w_codes + columns[:, None].to(tl.int64) * (K // 2)
    column_scales = w_scales + columns[:, None].to(tl.int64) * (K // GROUP)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        code = k // 2 + tl.arange(0, BLOCK_K // 2)[None, :]
        scale = k // GROUP + tl.arange(0, BLOCK_K // GROUP)[None, :]
        x = tl.load(row_codes + code, mask=(rows[:, None] < M) & (code < K // 2), other=0)
        w = tl.load(column_codes + code, mask=(columns[:, None] < N) & (code < K // 2), other=0)
        sx = tl.load(row_scales + scale, mask=(rows[:, None] < M) & (scale < K // GROUP), other=0)
        sw = tl.load(column_scales + scale, mask=(columns[:, None] < N) & (scale < K // GROUP), other=0)
        if NVFP4:
            sx = sx.to(tl.float8e4nv, bitcast=True)
            sw = sw.to(tl.float8e4nv, bitcast=True)
        total = tl.dot_scaled(x, sx, "e2m1", w.trans(), sw, "e2m1", total)
    if NVFP4:
        scale_x = tl.load(x_global + rows * x_global_stride, mask=rows < M, other=0.0)
        total = total * scale_x[:, None] * tl.load(w_global)
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(y + rows[:, None].to(tl.int64) * N + columns[None, :], total.to(y.dtype.element_ty), mask=inside)


def matmul(x: Fp4Tensor, w: Fp4Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """y [M, N] (BF16 unless out_dtype is float32) from quantized x [M, K] and one weight [N, K] of the same format."""
    import torch

    if x.format is not w.format or x.k != w.k or w.codes.dim() != 2:
        raise ValueError(f"x is {x.format} of K = {x.k}, the weight {w.format} {list(w.codes.shape)} of K = {w.k}")
    m, n = x.codes.shape[0], w.codes.shape[0]
    y = torch.empty((m, n), dtype=torch.bfloat16 if out_dtype is None else out_dtype, device=x.codes.device)
    if m:
        one = torch.ones(1, dtype=torch.float32, device=y.device)
        globals_ = [one if t.global_scale is None else t.global_scale for t in (x, w)]
        grid = (triton.cdiv(m, _TILE["BLOCK_M"]), triton.cdiv(n, _TILE["BLOCK_N"]))
        dot_scaled_kernel[grid](
            x.codes, x.scales, globals_[0], w.codes, w.scales, globals_[1], y, m, n, x.k,
            int(globals_[0].numel() > 1), NVFP4=x.format is NumberFormat.NVFP4, **_OPTIONS, **_TILE,
        )  # fmt: skip
    return y


def compile_ptx(capability: int, fmt: NumberFormat) -> str:
    """PTX of the kernel for sm_<capability> (100, 120, ...), compiled without a GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {
        **dict.fromkeys(("x_codes", "x_scales", "w_codes", "w_scales"), "*u8"),
        **dict.fromkeys(("x_global", "w_global"), "*fp32"),
        "y": "*bf16",
        **dict.fromkeys(("M", "N", "K", "x_global_stride"), "i32"),
        **dict.fromkeys(("NVFP4", *_TILE), "constexpr"),
    }
    ordered = {name: signature[name] for name in dot_scaled_kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(ordered) if name not in ("M", "x_global_stride")
    }
    source = ASTSource(
        dot_scaled_kernel,
        ordered,
        constexprs={"NVFP4": fmt is NumberFormat.NVFP4, **_TILE},
        attrs={key: value for key, value in aligned.items() if list(ordered.values())[key[0]] != "constexpr"},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=_OPTIONS)
    return cast(str, compiled.asm["ptx"])
