"""What all reading layouts share: after their own packed weights come the plain ones that none of them claimed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from requant.convert.checkpoint import Catalogue
from requant.convert.layouts.base import SourceWeight
from requant.convert.layouts.checks import FLOATS
from requant.convert.layouts.stacks import stacked_weights

__all__ = ["Layout"]


class Layout(Protocol):
    """How one producer stores quantized weights."""

    name: str

    def recognise(self, catalogue: Catalogue) -> str | None:
        """Why this checkpoint is of this layout, or None."""
        ...

    def packed(self, catalogue: Catalogue) -> Iterator[SourceWeight]:
        """The quantized weights. SourceError names the tensor that is not as it should be."""
        ...

    def weights(self, catalogue: Catalogue) -> Iterator[SourceWeight]:
        """All weights that a rule could convert: the quantized, the 2-D floats, the stacked experts."""
        taken: set[str] = set()  # of the floats: scales, mostly
        for weight in self.packed(catalogue):
            taken.update([tensor[0] for tensor in weight.tensors if tensor[1] in FLOATS])
            yield weight
        for tensor in catalogue.tensors.values():
            if tensor[1] not in FLOATS or len(tensor.shape) != 2 or tensor.name in taken:
                continue
            if tensor.name.endswith(".weight"):
                rows, cols = tensor.shape
                yield SourceWeight(tensor.name.removesuffix(".weight"), "plain", rows, cols, tensor, None)
        yield from stacked_weights(catalogue, taken)
