"""Tensors of a mapped checkpoint on their way to a GPU: through page-locked memory, which all processors fill at once.

`tensor.to("cuda")` from a mapped file is one thread that meets every page for the first time, copies it to memory that
the GPU may read, and waits. Here torch's threads copy a piece of the mapping into one of two such buffers while the GPU
fetches the other.
"""

# pyright: reportUnknownMemberType=false
# torch leaves CUDA events untyped.

from __future__ import annotations

from typing import Final

import torch

__all__ = ["Transfer"]

_PIECE: Final = 64 << 20
"""Bytes that are fetched at a time."""
_SMALL: Final = 1 << 20
"""Bytes of a tensor up to which two buffers gain nothing."""


class Transfer:
    """Copies onto one device. piece: bytes at a time; pieces: whether to copy so (None: if it is a GPU)."""

    def __init__(self, device: str, piece: int = _PIECE, *, pieces: bool | None = None) -> None:
        self._device = torch.device(device)
        self._gpu = self._device.type == "cuda"
        self._piece = piece
        self._pieces = self._gpu if pieces is None else pieces
        self._buffers: list[torch.Tensor] = []
        self._fetched: list[torch.cuda.Event] = []
        self._turn = 0

    def copy(self, mapped: torch.Tensor) -> torch.Tensor:
        """The same values on the device, in memory of their own; work queued after this sees them."""
        nbytes = mapped.numel() * mapped.element_size()
        if not self._pieces or nbytes <= min(_SMALL, self._piece) or not mapped.is_contiguous():
            return mapped.to(self._device, copy=True)
        here = mapped.reshape(-1).view(torch.uint8)
        there = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        for first in range(0, nbytes, self._piece):
            piece = here[first : first + self._piece]
            buffer = self._free_buffer()[: piece.numel()]
            buffer.copy_(piece)
            there[first : first + piece.numel()].copy_(buffer, non_blocking=True)
            if self._gpu:
                self._fetched[self._turn].record(torch.cuda.current_stream(self._device))
        return there.view(mapped.dtype).reshape(mapped.shape)

    def _free_buffer(self) -> torch.Tensor:
        """The buffer whose turn it is, once the GPU has fetched what it held."""
        if not self._buffers:
            self._buffers = [torch.empty(self._piece, dtype=torch.uint8, pin_memory=self._gpu) for _ in range(2)]
            self._fetched = [torch.cuda.Event() for _ in range(2 * self._gpu)]
        self._turn ^= 1
        if self._gpu:
            self._fetched[self._turn].synchronize()
        return self._buffers[self._turn]
