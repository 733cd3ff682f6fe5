"""One product of the stage `kernels`, by a path and by float64: a matrix on its own, or the experts of a layer in one
grouped product, as a server multiplies them.

A path that rounds activations to FP4 is held to the float64 product of the rounded activations, made by the oracle
under the same global scales; what the rounding itself costs is a figure of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from requant.kernels import bounds
from requant.kernels.dispatch import Path
from requant.kernels.formats import PackedTensor
from requant.kernels.matmul import decode, grouped_matmul, matmul, stack
from requant.kernels.reference_w4a4 import round_activations
from requant.kernels.w4a4_operands import Fp4Tensor

__all__ = ["Dense", "Experts", "Held", "Measured", "Subject"]

Floats = NDArray[np.float64]
X = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Measured:
    """relative: Frobenius norm; of_bound: the largest error as a multiple of its bound; rounding: what rounding x to
    FP4 costs (None for paths that do not); chip: where it ran."""

    relative: float
    of_bound: float
    rounding: float | None
    chip: str


class Held:
    """A weight: as stored, in float64, and on the GPU; each made when it is first asked for."""

    def __init__(self, packed: PackedTensor) -> None:
        self.packed = packed
        self._numbers: Floats | None = None
        self._copy: Fp4Tensor | None = None

    def numbers(self) -> Floats:
        """float64 [N, K], exact."""
        if self._numbers is None:
            self._numbers = decode(self.packed)
        return self._numbers

    def on_gpu(self) -> Fp4Tensor:
        """[N, K]."""
        if self._copy is None:
            stacked = stack([self.packed])
            self._copy = Fp4Tensor(stacked.format, stacked.codes[0], stacked.scales[0], stacked.global_scale)
        return self._copy


class Subject(ABC):
    """Activations [M, K] and what they are multiplied by. name: of the activations. input_scale: their static global
    scale, for paths that round them."""

    def __init__(self, name: str, x: X, packed: PackedTensor, input_scale: float | None = None) -> None:
        self.name = name
        self.x = x
        self.packed = packed
        self.input_scale = input_scale
        self._made: dict[str, tuple[Floats, Floats]] = {}

    def measure(self, path: Path) -> Measured:
        """KernelUnavailableError where the path does not take this shape or cannot be built, ValueError for operands
        that it refuses."""
        y, chip = self._multiply(path)
        product, terms = self._of(path)
        rounding = bounds.relative_error(product, self._of(None)[0]) if path.rounds_activations else None
        return Measured(bounds.relative_error(y, product), bounds.excess(y, product, terms), rounding, chip)

    def _of(self, path: Path | None) -> tuple[Floats, Floats]:
        """(product, sum |w x|) of what this path multiplies; None: of x itself. Each made once."""
        rounding = path.granularity if path is not None and path.rounds_activations else ""
        if rounding not in self._made:
            x = self.x.astype(np.float64)
            if rounding:
                scale = self.input_scale
                x = round_activations(self.x, self.packed.format, input_scale=scale, granularity=rounding)
            self._made[rounding] = self._exact(x)
        return self._made[rounding]

    @abstractmethod
    def _multiply(self, path: Path) -> tuple[Floats, str]:
        """What the path makes of it, and the chip."""

    @abstractmethod
    def _exact(self, x: Floats) -> tuple[Floats, Floats]: ...


class Dense(Subject):
    """x times one matrix."""

    def __init__(self, name: str, x: X, weight: Held, input_scale: float | None = None) -> None:
        super().__init__(name, x, weight.packed, input_scale)
        self._weight = weight

    def _multiply(self, path: Path) -> tuple[Floats, str]:
        if not path.on_gpu:
            y, choice = matmul(self.x, self._weight.packed, path, input_scale=self.input_scale)
            return y.astype(np.float64), choice.chip
        import torch

        on_gpu = torch.as_tensor(self.x).to(torch.bfloat16).cuda()
        result, choice = matmul(on_gpu, self._weight.on_gpu(), path, input_scale=self.input_scale)
        return result.double().cpu().numpy(), choice.chip

    def _exact(self, x: Floats) -> tuple[Floats, Floats]:
        numbers = self._weight.numbers()
        return x @ numbers.T, np.abs(x) @ np.abs(numbers).T


class Experts(Subject):
    """x times each token's own experts: ids int32 [M, top_k]."""

    def __init__(self, name: str, x: X, experts: Sequence[Held], ids: NDArray[np.int32]) -> None:
        super().__init__(name, x, experts[0].packed)
        self._experts = experts
        self._ids = ids

    def _multiply(self, path: Path) -> tuple[Floats, str]:
        packed = [weight.packed for weight in self._experts]
        if not path.on_gpu:
            y, choice = grouped_matmul(self.x, packed, self._ids, path)
            return y.astype(np.float64), choice.chip
        import torch

        x, ids = torch.as_tensor(self.x).to(torch.bfloat16).cuda(), torch.as_tensor(self._ids).cuda()
        result, choice = grouped_matmul(x, stack(packed), ids, path)
        return result.double().cpu().numpy(), choice.chip

    def _exact(self, x: Floats) -> tuple[Floats, Floats]:
        product = np.zeros((*self._ids.shape, self.packed.codes.shape[0]))
        terms = np.zeros_like(product)
        for expert, weight in enumerate(self._experts):
            token, slot = np.nonzero(self._ids == expert)
            if not token.size:
                continue
            numbers = weight.numbers()
            product[token, slot] = x[token] @ numbers.T
            terms[token, slot] = np.abs(x[token]) @ np.abs(numbers).T
        return product, terms
