"""Where a unit of a plan writes, and how what every format has in common is written there: scalars, turned planes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from requant.convert.files import write_all
from requant.convert.plan import GroupUnit, Member, OutTensor
from requant.convert.rows import Opened
from requant.convert.scalars import turned_over
from requant.kernels.repack import Choice, Counts
from requant.manifests.errors import SourceError

__all__ = ["Accelerator", "Places", "scales_out", "write_global", "write_scalar", "write_transposed"]


class Places(Protocol):
    """Of a plan, what a unit needs: the places of its output tensors, by index."""

    @property
    def tensors(self) -> Mapping[int, OutTensor] | Sequence[OutTensor]: ...


class Accelerator(Protocol):
    """What else may compute a group (gpu_units.py), to the same bytes."""

    def repack(self, plan: Places, unit: GroupUnit, files: Opened) -> tuple[Choice, Counts]:
        """Step 2 of MXFP4 -> NVFP4: codes and block scales written."""
        ...

    def encode(self, plan: Places, unit: GroupUnit, files: Opened) -> np.float32 | None:
        """Floats -> NVFP4: codes and block scales written; the global scale. None: let the CPU say what is wrong."""
        ...


def write_global(plan: Places, member: Member, scalar: np.float32, files: Opened) -> None:
    if member.out_global is not None:
        if member.form.reciprocal and scalar < np.finfo(np.float32).tiny:
            tensor = member.weight.codes
            raise SourceError(
                f"global scale {scalar!r} has no finite reciprocal, which target.layout compressed-tensors stores",
                where=f"{tensor.file}: {tensor.name}",
                hint="weights this small are as good as zero: keep this layer plain, or use target.layout modelopt",
            )
        write_scalar(plan, member.out_global, turned_over(scalar) if member.form.reciprocal else scalar, files)


def write_transposed(plane: NDArray[np.uint8], fd: int, begin: int) -> None:
    write_all(fd, np.ascontiguousarray(plane.T), begin)


def scales_out(member: Member) -> int:
    if member.out_scales is None:
        raise ValueError(f"{member.module} has no place for block scales")
    return member.out_scales


def write_scalar(plan: Places, out: int, stored: np.float32, files: Opened) -> None:
    """A scale that is one number, as it is to be stored."""
    target = plan.tensors[out]
    write_all(files.output(target.shard), np.asarray(stored, dtype="<f4").tobytes(), target.begin)
