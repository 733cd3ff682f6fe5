"""What the kernels of a checkpoint are given in the stage `kernels`: activations of several kinds, and block scales at
the edge of every window.

`random` is normal, `wide` has exponents over 2^20 and outlier channels 64 times the rest, `captured` comes from a file
of real activations; `edges` is `random` again, on a weight of the matrix's own codes whose block scales stand where
kernels begin to flush, clamp and overflow. (`static` is `random` under the checkpoint's own input_scale, for paths that
round activations; `experts` goes through the grouped kernels.)
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from requant.kernels.formats import NumberFormat, PackedTensor
from requant.manifests.errors import SourceError
from requant.validate.results import JSON

if TYPE_CHECKING:
    import torch

__all__ = ["TOKENS", "Captured", "bf16", "edge_weight", "wide"]

TOKENS: Final = (1, 2, 4, 8, 16, 32, 64)
_EDGE_ROWS: Final = 64
_EDGE_BYTES: Final = {
    NumberFormat.NVFP4: (0x01, 0x02, 0x07, 0x08, 0x09, 0x38, 0x77, 0x78, 0x7E, 0x00),  # 2^-9 ... 2^-6 | 1 | 2^8 448 0
    NumberFormat.MXFP4: (108, 110, 111, 119, 127, 128),  # 17 and 14 octaves under the largest, and between
}


class _Handle(Protocol):
    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> torch.Tensor: ...


class Captured:
    """Real activations by module, if a file of them was given. SourceError if it cannot be read."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._used = 0
        self._handle: _Handle | None = None
        if file is not None:
            from safetensors import safe_open

            try:
                self._handle = cast("_Handle", safe_open(str(file), framework="pt"))
            except Exception as error:
                raise SourceError(f"cannot be read: {error}", where=str(file), hint="a safetensors file") from error

    def of(self, module: str, k: int) -> NDArray[np.float32] | None:
        """The first 64 tokens that entered this module, as BF16 values in float32; None where there are none."""
        name = module.partition("[")[0]
        if self._handle is None or name not in self._handle.keys():  # noqa: SIM118 - no mapping
            return None
        values = self._handle.get_tensor(name).float().numpy()
        if values.ndim != 2 or values.shape[1] != k:
            return None
        self._used += 1
        return bf16(values[: TOKENS[-1]])

    def note(self) -> JSON:
        """For the report: how many of the checked matrices had any."""
        return None if self._file is None else {"file": self._file.name, "matrices": self._used}


def bf16(values: NDArray[np.floating]) -> NDArray[np.float32]:
    """Rounded to BF16 (toward zero: which BF16 it is does not matter), as float32."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def wide(rng: np.random.Generator, tokens: int, k: int) -> NDArray[np.float32]:
    """Exponents over 2^20, and one channel in 200 (at least one) 64 times the rest."""
    x = rng.standard_normal((tokens, k)) * np.exp2(rng.integers(-20, 1, (tokens, k)))
    x[:, rng.integers(0, k, max(1, k // 200))] *= 64
    return bf16(x)


def edge_weight(weight: PackedTensor) -> PackedTensor:
    """Some rows of the weight's codes under block scales at the edges of what kernels keep and flush."""
    codes = np.ascontiguousarray(weight.codes[:_EDGE_ROWS])
    edges = np.array(_EDGE_BYTES[weight.format], dtype=np.uint8)
    shape = (codes.shape[0], weight.block_scales.shape[1])
    scales = np.resize(edges, shape[0] * shape[1]).reshape(shape)
    return PackedTensor(weight.format, codes, scales, weight.global_scale)
