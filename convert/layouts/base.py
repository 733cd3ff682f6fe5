"""What a reading layout hands to the plan: weights, where their bytes lie, and nothing about numbers.

Layout (names, suffixes, axes, interleave) and format (the numbers) are separate: any reading layout goes with any
writing layout. A layout recognises its producer from config and headers, says why, and lists the weights; tensors that
belong to no weight are left to the plan, which copies them byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from requant.convert.checkpoint import Catalogue
from requant.convert.shards import TensorInfo
from requant.kernels.formats import MXFP4_GROUP
from requant.manifests.errors import SourceError

__all__ = ["ReadingLayout", "Rows", "SourceWeight", "check_mxfp4"]


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


class SourceWeight(NamedTuple):
    """One quantizable weight of the source, [experts,] rows N (out), cols K (in).

    module: its name as the manifest's rules match it. format: `mxfp4`, `fp8-block` or `plain`. interleaved: rows
    alternate gate, up (gpt-oss). tensors: all source tensors it is made of, its stacked bias included.
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

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """The source tensors that this weight owns."""
        return tuple(t for t in (self.codes, self.scales, self.bias) if t is not None)


class ReadingLayout(Protocol):
    """How one producer stores quantized weights."""

    name: str

    def recognise(self, catalogue: Catalogue) -> str | None:
        """Why this checkpoint is of this layout, or None."""
        ...

    def weights(self, catalogue: Catalogue) -> Iterator[SourceWeight]:
        """All weights that a rule could convert. SourceError names the tensor that is not as it should be."""
        ...


def check_mxfp4(
    codes: TensorInfo, scales: TensorInfo | None, scale_name: str, scale_dtypes: tuple[str, ...]
) -> tuple[int, int]:
    """(N, K) of a packed MXFP4 weight [N, K/2] with scales [N, K/32], or SourceError. F4 [N, K] counts elements."""
    if len(codes.shape) != 2 or 0 in codes.shape:
        raise SourceError(
            f"packed MXFP4 weight has shape {list(codes.shape)}, expected [N, K/2], not empty",
            where=f"{codes.file}: {codes.name}",
            hint="name the right source.layout in the manifest",
        )
    rows, cols = codes.shape
    if codes.dtype != "F4":  # of F4 the header counts elements, of the others bytes
        cols *= 2
    if scales is None:
        raise SourceError(
            f"has no scale tensor {scale_name}",
            where=f"{codes.file}: {codes.name}",
            hint="a packed weight without its scales cannot be read: is a shard missing, or the layout another?",
        )
    where = f"{scales.file}: {scales.name}"
    if cols % MXFP4_GROUP:
        raise SourceError(
            f"K = {cols} is not a multiple of {MXFP4_GROUP}",
            where=f"{codes.file}: {codes.name}",
            hint="not MXFP4: name the right source.layout in the manifest",
        )
    if scales.dtype not in scale_dtypes:
        raise SourceError(
            f"scale dtype is {scales.dtype}, expected {' or '.join(scale_dtypes)}",
            where=where,
            hint="an E4M3 scale plane would be NVFP4: name the right source.layout in the manifest",
        )
    if scales.shape != (rows, cols // MXFP4_GROUP):
        raise SourceError(
            f"scale plane is {list(scales.shape)}, expected {[rows, cols // MXFP4_GROUP]} for codes "
            f"{list(codes.shape)} (one scale per {MXFP4_GROUP} along K)",
            where=where,
            hint="a padded, swizzled or per-16 plane is not MXFP4: re-export the checkpoint in linear layout",
        )
    return rows, cols
