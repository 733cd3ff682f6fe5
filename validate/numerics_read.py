"""Tensor bytes of two large checkpoints through the safetensors library, in a bounded part of memory.

The library maps whole files, and a page once touched counts as resident until the file is unmapped: reading a 5 GB
shard to its end would hold 5 GB. So the reader keeps account of what it has touched and, past `budget` bytes, drops
all its file handles and opens anew (about a millisecond per 1500 tensors). What it hands out is a view of the mapping:
use it, then let go.

Bytes come as uint8, whatever the dtype: torch has no arithmetic for E4M3, E8M0 or packed FP4, and none is needed.
"""

from __future__ import annotations

from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray
from requant.validate.gguf_tensors import GgufTensor, gguf_rows, gguf_values
from requant.validate.opened import OpenedFolder, Tensor
from requant.validate.pairing import Copy, View

__all__ = ["MappedReader"]


class _Torch(Protocol):
    def __getitem__(self, at: object) -> _Torch: ...

    def view(self, dtype: object) -> _Torch: ...

    def reshape(self, *shape: int) -> _Torch: ...

    def contiguous(self) -> _Torch: ...

    def t(self) -> _Torch: ...

    def numpy(self) -> NDArray[np.uint8]: ...


class _Slices(Protocol):
    def __getitem__(self, at: object) -> _Torch: ...


class _Handle(Protocol):
    def get_tensor(self, name: str) -> _Torch: ...

    def get_slice(self, name: str) -> _Slices: ...


class MappedReader:
    """Reads views and rows of one checkpoint. budget: bytes that may be resident before the files are unmapped."""

    def __init__(self, folder: OpenedFolder, budget: int = 12 << 20) -> None:
        self._folder = folder
        self._budget = budget
        self._handles: dict[str, _Handle] = {}
        self._touched = 0

    def _handle(self, tensor: Tensor, nbytes: int) -> _Handle:
        if self._touched > self._budget:
            self._handles.clear()
            self._touched = 0
        self._touched += nbytes
        if tensor.file not in self._handles:
            from safetensors import safe_open

            self._handles[tensor.file] = cast(
                "_Handle", safe_open(str(self._folder.path / tensor.file), framework="pt")
            )
        return self._handles[tensor.file]

    def holds(self, tensor: Tensor) -> bool:
        """Whether the file that the tensor lies in is there; of a checkpoint in pieces some are not."""
        return (self._folder.path / tensor.file).exists()

    def _matrix(self, view: View, start: int, stop: int) -> _Torch:
        """Rows [start, stop) of the view, still in the tensor's dtype."""
        tensor = view.tensor
        total = tensor.shape[-1] if view.transposed else tensor.shape[1 if view.expert is not None else 0]
        span = slice(view.first + start * view.step, min(view.first + stop * view.step, total))
        rows_touched = total if view.transposed else span.stop - span.start  # a column lies on every page
        handle = self._handle(tensor, max(1, tensor.nbytes // max(1, tensor.elements)) * rows_touched * _width(view))
        if tensor.dtype == "F4":  # safetensors 0.8 cannot slice F4
            block = handle.get_tensor(tensor.name)[span]
        else:
            sliced = handle.get_slice(tensor.name)
            if view.expert is None:
                block = sliced[span]
            elif view.transposed:
                block = sliced[view.expert, :, span].t()
            else:
                block = sliced[view.expert, span]
        if view.step > 1:
            block = block[:: view.step]
        return block.reshape(stop - start, -1)

    def codes(self, view: View, start: int, stop: int) -> NDArray[np.uint8]:
        """Rows [start, stop) as contiguous uint8 [rows, width]; one byte per element of the stored tensor."""
        import torch

        # numpy copies, not torch: its thread pool costs more than it gives at this size, above all on a busy machine
        return np.ascontiguousarray(self._matrix(view, start, stop).view(torch.uint8).numpy())

    def values(self, view: View, start: int, stop: int) -> NDArray[np.float64]:
        """Rows [start, stop) of a BF16, F16, F32 or F64 weight as float64, exact."""
        import torch

        block = self._matrix(view, start, stop)
        if view.tensor.dtype != "BF16":
            return np.ascontiguousarray(block.numpy()).astype(np.float64)
        bits = np.ascontiguousarray(block.view(torch.int16).numpy()).view(np.uint16)
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)

    def rows(self, tensor: Tensor, start: int, stop: int) -> NDArray[np.uint8]:
        """Bytes of rows [start, stop) along the first axis, flat; a scalar has one row."""
        import torch

        if isinstance(tensor, GgufTensor):  # copied: norms and biases alone
            return np.asarray(gguf_rows(self._folder.path, tensor, 0, 1)).reshape(-1)
        count = max(1, tensor.shape[0]) if tensor.shape else 1
        handle = self._handle(tensor, tensor.nbytes * (stop - start) // count)
        if not tensor.shape or tensor.dtype == "F4":
            block = handle.get_tensor(tensor.name)
            block = block[start:stop] if tensor.shape else block
        else:
            block = handle.get_slice(tensor.name)[start:stop]
        return block.contiguous().reshape(-1).view(torch.uint8).numpy()

    def part(self, copy: Copy) -> NDArray[np.uint8]:
        """Bytes of the source row (or part of it) that `copy` speaks of, flat."""
        import torch

        block = self._handle(copy.source, copy.source.nbytes).get_tensor(copy.source.name)
        row = block[copy.expert][copy.first :: copy.step]
        return row.contiguous().reshape(-1).view(torch.uint8).numpy()

    def gguf(self, tensor: GgufTensor, start: int, stop: int, expert: int) -> NDArray[np.float64]:
        """Rows of a matrix in a GGUF file as float64, in the model's order."""
        return gguf_values(self._folder.path, tensor, start, stop, expert)

    def tensor(self, tensor: Tensor) -> object:
        """The whole tensor as torch has it, a view of the mapping: clone what shall outlive it."""
        return self._handle(tensor, tensor.nbytes).get_tensor(tensor.name)

    def scalar(self, tensor: Tensor) -> float:
        """An F32 tensor's first value, as float64 (little-endian whatever the machine)."""
        return float(self.rows(tensor, 0, 1)[:4].view("<f4")[0])


def _width(view: View) -> int:
    """Elements per row of the view."""
    shape = view.tensor.shape
    if view.transposed:
        return shape[-2]
    return int(np.prod(shape[2:] if view.expert is not None else shape[1:], dtype=np.int64))
