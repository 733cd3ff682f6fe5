"""Static activation scales, and those of the KV cache: a constant, or the ones of another checkpoint of the model.

An NVFP4 layer stores amax / (6 * 448) of its activations, an FP8 layer amax / 448. Where the other checkpoint holds a
layer in the other format, its scale is restated.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from requant.convert.checkpoint import Catalogue, open_checkpoint
from requant.convert.shards import TensorInfo
from requant.manifests.errors import SourceError, UsageError
from requant.manifests.schema import FromCheckpoint, Manifest

if TYPE_CHECKING:
    from requant.convert.calibrate import Calibration

__all__ = ["KV_SUFFIXES", "UNMEASURED", "InputScales"]


class InputScales:
    """`input_scale` per module. Partners of a fused group get one value, the largest: it must hold all of them."""

    def __init__(
        self, constant: float | None, values: dict[str, Activation], note: str, kv: Mapping[str, float] | None = None
    ) -> None:
        self._constant = constant
        self._values = values
        self._kv = kv or {}
        self._missing: list[str] = []
        self._later = False
        self.note = note
        self.file = ""
        """Of the calibration, for units that need more of it."""
        self.explicit = False
        """Whether the manifest itself says where the scales come from; else a source's own are carried over."""
        self.measured = False
        """Whether they come from another checkpoint or a calibration, and not from a constant."""

    @classmethod
    def none(cls) -> Self:
        """For formats without activation scales."""
        return cls(None, {}, "none")

    @classmethod
    def from_manifest(cls, manifest: Manifest, calibration: Calibration | None = None) -> Self:
        """As `activations` says. UsageError where the format needs a scale and none is given."""
        wanted = manifest.activations.calibrate
        if wanted is None:
            scales = cls._given(manifest)
        elif calibration is None:
            scales = cls(1.0, {}, f"{UNMEASURED} on {wanted.text}")
            scales._later = True
        else:
            scales = cls._measured(calibration)
        scales.measured = wanted is not None or isinstance(manifest.activations.input_scale, FromCheckpoint)
        scales.explicit = wanted is not None or "input_scale" in manifest.activations.model_fields_set
        return scales

    @classmethod
    def _given(cls, manifest: Manifest) -> Self:
        given = manifest.activations.input_scale
        if isinstance(given, FromCheckpoint):
            catalogue = open_checkpoint(Path(given.path))
            values, kv = read_input_scales(catalogue), read_kv_scales(catalogue)
            digest = ",".join(f"{module}={value!r}" for module, value in sorted([*values.items(), *kv.items()]))
            note = f"from another checkpoint: {len(values)} scales {hash_text(digest)}"
            return cls(None, values, note, kv)
        if given is None:
            raise UsageError(
                "NVFP4 with activations needs an input_scale",
                where="activations",
                hint="give a constant (1.0 is modelopt's data-free choice), {from: FOLDER}, or target nvfp4-w4a16",
            )
        return cls(given, {}, f"constant {given!r}")

    @classmethod
    def _measured(cls, calibration: Calibration) -> Self:
        """amax / (6 * 448), or amax / 448 for an FP8 layer or the KV cache. An input of zeros gets amax 1."""
        values = {name: Activation((top or 1.0) / _AMAX["nvfp4"], "nvfp4") for name, top in calibration.amax.items()}
        kv: dict[str, float] = {}
        for name, top in calibration.kv.items():
            kind, _, attention = name.partition(".")
            kv[f"{attention}.{kind}_proj.{kind}_scale"] = (top or 1.0) / _AMAX["fp8"]
        scales = cls(None, values, calibration.note, kv)
        scales.file = str(calibration.path)
        return scales

    def of_group(self, modules: Sequence[str], number: str = "nvfp4") -> float:
        """The scale that the fused group shares; a module without one is remembered for `refuse_missing`."""
        if self._constant is not None:
            return self._constant
        found = [value.under(number) for module in modules if (value := self._of(module)) is not None]
        self._missing += [module for module in modules if self._of(module) is None]
        return max(found, default=1.0)

    def _of(self, module: str) -> Activation | None:
        """Of the module, or of the stack of experts that it was part of in the source."""
        if module in self._values:
            return self._values[module]
        match = _EXPERT.match(module)
        if match is None:
            return None
        stack = "down_proj" if match["leaf"] in ("down_proj", "w2") else "gate_up_proj"
        return self._values.get(f"{match['parent']}.{stack}")

    def kv_scales(self, manifest: Manifest, catalogue: Catalogue) -> Iterator[tuple[str, float]]:
        """(tensor, value) of the KV-cache scales that `kv_cache: fp8` adds; none where the source has them already.

        SourceError where the other checkpoint has none, or has them for other modules than the source's.
        """
        if manifest.kv_cache is None or self._later or any(name.endswith(KV_SUFFIXES) for name in catalogue.tensors):
            return
        place = "activations.calibrate" if self.file else "activations.input_scale.from"
        if not self._kv:
            raise SourceError(
                "kv_cache: fp8 needs k_scale and v_scale tensors, and there are none",
                where=place,
                hint="calibrate, name a checkpoint of this model that holds them, or delete kv_cache",
            )
        for name, value in self._kv.items():
            if f"{name.rpartition('.')[0]}.weight" not in catalogue.tensors:
                raise SourceError(
                    f"holds {name}, and the source has no such module", where=place, hint="it is of another model"
                )
            yield name, value

    def refuse_missing(self) -> None:
        """SourceError naming the modules for which the other checkpoint has no scale."""
        if self._missing:
            shown = ", ".join(self._missing[:5]) + (" ..." if len(self._missing) > 5 else "")
            raise SourceError(
                f"no input_scale for {len(self._missing)} modules: {shown}",
                where="activations.calibrate" if self.file else "activations.input_scale.from",
                hint="they were not met in the calibration run: keep them, or give input_scale a constant"
                if self.file
                else "the other checkpoint is of another model or incomplete; a constant would also do",
            )


def hash_text(text: str) -> str:
    """Short fingerprint of a text."""
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Activation(NamedTuple):
    """An activation scale as stored, and for which format."""

    value: float
    number: str

    def under(self, number: str) -> float:
        """The scale of the same amax for a layer in another format."""
        return self.value * _AMAX[self.number] / _AMAX[number] if number != self.number else self.value


_AMAX: Final = {"nvfp4": 6.0 * 448.0, "fp8": 448.0}
"""amax in units of the scale."""
KV_SUFFIXES: Final = (".k_scale", ".v_scale")
UNMEASURED: Final = "still to be measured"
"""How the note of a plan begins that must not be run."""
_EXPERT: Final = re.compile(r"^(?P<parent>.*\bexperts)\.\d+\.(?P<leaf>[^.]+)$")


def _scalar(catalogue: Catalogue, tensor: TensorInfo, what: str) -> float:
    """A stored F32 scalar. SourceError unless it is finite and positive."""
    if tensor.dtype != "F32" or tensor.nbytes != 4:
        raise SourceError(
            f"is {tensor.dtype} {list(tensor.shape)}, expected one F32",
            where=f"{tensor.file}: {tensor.name}",
            hint="not a checkpoint as modelopt or compressed-tensors write it",
        )
    with (catalogue.root / tensor.file).open("rb") as handle:
        handle.seek(tensor.begin)
        value = float(struct.unpack("<f", handle.read(4))[0])
    if not (math.isfinite(value) and value > 0):
        raise SourceError(
            f"{what} is {value!r}",
            where=f"{tensor.file}: {tensor.name}",
            hint="its calibration failed; scales must be finite and positive",
        )
    return value


def read_input_scales(catalogue: Catalogue) -> dict[str, Activation]:
    """Module -> activation scale of a checkpoint (modelopt: as stored; compressed-tensors: reciprocal).

    SourceError on a scale that is not a finite positive F32.
    """
    values: dict[str, Activation] = {}
    suffixes = ((".input_scale", False), ("_input_scale", False), (".input_global_scale", True))
    for tensor in catalogue.tensors.values():
        for suffix, reciprocal in suffixes:
            if tensor.name.endswith(suffix):
                value = _scalar(catalogue, tensor, "activation scale")
                module = tensor.name.removesuffix(suffix)
                weight = catalogue.tensors.get(f"{module}.weight")
                number = "fp8" if weight is not None and weight.dtype == "F8_E4M3" else "nvfp4"
                values[module] = Activation(1.0 / value if reciprocal else value, number)
                break
    return values


def read_kv_scales(catalogue: Catalogue) -> dict[str, float]:
    """Tensor name -> value of the KV-cache scales of a checkpoint."""
    found = (tensor for tensor in catalogue.tensors.values() if tensor.name.endswith(KV_SUFFIXES))
    return {tensor.name: _scalar(catalogue, tensor, "KV-cache scale") for tensor in found}
