"""Static activation scales: a constant, or the ones of another NVFP4 checkpoint of the same model."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from requant.convert.checkpoint import Catalogue, open_checkpoint
from requant.manifests.errors import ManifestError, SourceError, UsageError
from requant.manifests.schema import FromCheckpoint, Manifest

__all__ = ["InputScales"]


class InputScales:
    """`input_scale` per module. Partners of a fused group get one value, the largest: it must hold all of them."""

    def __init__(self, constant: float | None, values: dict[str, float], note: str) -> None:
        self._constant = constant
        self._values = values
        self._missing: list[str] = []
        self.note = note

    @classmethod
    def none(cls) -> Self:
        """For formats without activation scales."""
        return cls(None, {}, "none")

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> Self:
        """As activations.input_scale says. UsageError where the format needs a scale and none is given."""
        given = manifest.activations.input_scale
        if isinstance(given, FromCheckpoint):
            catalogue = open_checkpoint(Path(given.path))
            values = read_input_scales(catalogue)
            digest = ",".join(f"{module}={value!r}" for module, value in sorted(values.items()))
            return cls(None, values, f"from another checkpoint: {len(values)} scales {hash_text(digest)}")
        if given is None:
            raise UsageError(
                "NVFP4 with activations needs an input_scale",
                where="activations",
                hint="give a constant (1.0 is modelopt's data-free choice), {from: FOLDER}, or target nvfp4-w4a16",
            )
        if manifest.activations.calibrate is not None:
            raise ManifestError("calibration is not part of this version", where="activations.calibrate")
        return cls(given, {}, f"constant {given!r}")

    def of_group(self, modules: Sequence[str]) -> float:
        """The scale that the fused group shares; a module without one is remembered for `refuse_missing`."""
        if self._constant is not None:
            return self._constant
        found = [self._values[module] for module in modules if module in self._values]
        self._missing += [module for module in modules if module not in self._values]
        return max(found, default=1.0)

    def refuse_missing(self) -> None:
        """SourceError naming the modules for which the other checkpoint has no scale."""
        if self._missing:
            shown = ", ".join(self._missing[:5]) + (" ..." if len(self._missing) > 5 else "")
            raise SourceError(
                f"no input_scale for {len(self._missing)} modules: {shown}",
                where="activations.input_scale.from",
                hint="the other checkpoint is of another model or incomplete; a constant would also do",
            )


def hash_text(text: str) -> str:
    """Short fingerprint of a text."""
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_input_scales(catalogue: Catalogue) -> dict[str, float]:
    """Module -> input_scale of an NVFP4 checkpoint (modelopt: as stored; compressed-tensors: reciprocal).

    SourceError on a scale that is not a finite positive F32.
    """
    values: dict[str, float] = {}
    suffixes = ((".input_scale", False), ("_input_scale", False), (".input_global_scale", True))
    for tensor in catalogue.tensors.values():
        for suffix, reciprocal in suffixes:
            if not tensor.name.endswith(suffix):
                continue
            if tensor.dtype != "F32" or tensor.nbytes != 4:
                raise SourceError(
                    f"is {tensor.dtype} {list(tensor.shape)}, expected one F32",
                    where=f"{tensor.file}: {tensor.name}",
                    hint="not an NVFP4 checkpoint as modelopt or compressed-tensors write it",
                )
            with (catalogue.root / tensor.file).open("rb") as handle:
                handle.seek(tensor.begin)
                value = float(struct.unpack("<f", handle.read(4))[0])
            if not (math.isfinite(value) and value > 0):
                raise SourceError(
                    f"activation scale is {value!r}",
                    where=f"{tensor.file}: {tensor.name}",
                    hint="its calibration failed; scales must be finite and positive",
                )
            values[tensor.name.removesuffix(suffix)] = 1.0 / value if reciprocal else value
            break
    return values
