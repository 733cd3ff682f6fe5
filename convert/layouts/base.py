"""What a reading layout hands to the plan: weights, where their bytes lie, and nothing about numbers.

Layout (names, suffixes, axes, interleave) and format (the numbers) are separate: any reading layout goes with any
writing layout. A layout recognises its producer from config and headers, says why, and lists the weights; tensors that
belong to no weight are left to the plan, which copies them byte for byte.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from requant.convert.shards import TensorInfo

__all__ = ["NOTHING_MORE", "More", "Rows", "SourceWeight"]


class Rows(NamedTuple):
    """Every `step`-th row, from row `start`, `n_rows` of them, of a tensor seen as rows of `row_bytes` bytes."""

    tensor: TensorInfo
    row_bytes: int
    start: int
    step: int
    n_rows: int

    @property
    def contiguous(self) -> bool:
        """One byte range of the file."""
        return self.step == 1 or self.n_rows <= 1

    @property
    def begin(self) -> int:
        """Absolute file offset of the first row."""
        return self.tensor.begin + self.start * self.row_bytes

    @property
    def nbytes(self) -> int:
        """Bytes that are wanted (not those skipped between them)."""
        return self.n_rows * self.row_bytes


class More(NamedTuple):
    """What only some formats need beside codes and scales; most weights share one empty instance.

    split: a stack that is written as one module per expert in every layout; of its gate_up_proj the first half of the
    rows is gate, the second up. turned: the matrix is stored [K, N]. block: (h, w) of an FP8 scale. reciprocal: the
    global scale is stored as 1/s2. offset: added to the zero points. rotary: heads whose rows llama.cpp keeps in
    another order, or 0. zeros, order: tensors of integer formats. extra: further tensors that a conversion uses up.
    blocked: FP4 codes and their scales lie block by block in one tensor, ggml's.
    fp8_input: the activation scale beside FP4 codes is that of FP8 activations.
    """

    split: bool = False
    turned: bool = False
    block: tuple[int, int] = (0, 0)
    reciprocal: bool = False
    offset: int = 0
    rotary: int = 0
    zeros: TensorInfo | None = None
    order: TensorInfo | None = None
    extra: tuple[TensorInfo, ...] = ()
    blocked: bool = False
    fp8_input: bool = False


NOTHING_MORE: Final = More()


class SourceWeight(NamedTuple):
    """One quantizable weight of the source, [experts,] rows N (out), cols K (in).

    module: its name as the manifest's rules match it. format: which numbers, one of

        plain      codes BF16, F16 or F32 [N, K]; turned: [K, N]
        mxfp4      codes [N, K/2], scales E8M0 [N, K/32]
        nvfp4      codes [N, K/2], scales E4M3 [N, K/16], scalar F32 (one, or one per expert)
        fp8        codes E4M3 [N, K], scales per block (h, w): F32, BF16, F16 or E8M0 (also as U8)
        int4       codes I32 [N, K/8], scales [N, K/g], zeros I32 [N/8, K/g] or none      (compressed-tensors)
        gptq       codes I32 [K/8, N], scales F16 [K/g, N], zeros I32 [K/g, N/8], order I32 [K]
        awq        codes I32 [K, N/8], scales F16 [K/g, N], zeros I32 [K/g, N/8], columns interleaved
        gguf       codes U8 [N, bytes of K weights], as ggml packs them; dtype of the codes names the type. Its
                   MXFP4 and NVFP4 are `mxfp4` and `nvfp4`, blocked, without tensors of scales

    interleaved: rows alternate gate, up (gpt-oss). input: the source's own activation scale. tensors: all that it is
    made of, its stacked bias included.
    """

    module: str
    format: str
    rows: int
    cols: int
    codes: TensorInfo
    scales: TensorInfo | None
    experts: int = 0
    interleaved: bool = False
    bias: TensorInfo | None = None
    scalar: TensorInfo | None = None
    input: TensorInfo | None = None
    more: More = NOTHING_MORE

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """The source tensors that this weight owns."""
        codes, scales, bias, scalar, own_input, more = self[4], self[5], *self[8:]
        if scales is not None and bias is scalar is own_input is None and more is NOTHING_MORE:
            return (codes, scales)  # all that most of half a million have
        parts = (codes, scales, bias, scalar, own_input, more.zeros, more.order, *more.extra)
        return tuple(t for t in parts if t is not None)
