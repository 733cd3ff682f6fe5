"""Whether the activation scale beside a converted weight is the one that the source was calibrated to.

    stored scale = amax / room      room: 6 * 448 under NVFP4 activations, 448 under FP8; compressed-tensors' NVFP4
                                    stores the reciprocal

A conversion restates it for its own format and dialect, and weights that a runtime fuses share the largest amax; the
amax itself does not change. So both sides are turned into one and compared. A manifest may give scales of its own: a
constant is then the other value that is right (unless the lock says that the source's were taken), and of scales from
another checkpoint or a calibration it is known that they are finite and positive. Given scales are written apart from
their weights, so that a streamed run asks for them at its end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray
from requant.validate.modules import Kind, Module, modules_of
from requant.validate.numerics_read import MappedReader
from requant.validate.opened import OpenedFolder, Tensor, as_object
from requant.validate.pairing import Pair

__all__ = ["CarriedScales", "numbers_of"]

_ROOM: Final = {Kind.NVFP4: 6.0 * 448.0, Kind.FP8: 448.0}
"""amax in units of the scale, by what the weight is stored in: modelopt's, and what compressed-tensors' inverts."""
_FP8_INPUT: Final = "w4a8_nvfp4_fp8"
"""modelopt's algorithm whose NVFP4 weights meet FP8 activations."""
_CLOSE: Final = 2.0**-21
"""FP32 divided twice."""
_FUSED: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


def numbers_of(tensor: Tensor, reader: MappedReader) -> NDArray[np.float32] | None:
    """The values of a BF16, F16 or F32 tensor, flat; None of any other dtype."""
    if tensor.dtype not in ("BF16", "F16", "F32"):
        return None
    raw = np.ascontiguousarray(reader.rows(tensor, 0, max(1, tensor.shape[0]) if tensor.shape else 1))
    if tensor.dtype == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return raw.view("<f2" if tensor.dtype == "F16" else "<f4").astype(np.float32)


class CarriedScales:
    """Compares activation scales of two checkpoints, one converted weight at a time."""

    def __init__(self, theirs: OpenedFolder, ours: OpenedFolder) -> None:
        self._theirs, self._ours = modules_of(theirs.tensors), modules_of(ours.tensors)
        self._fp8_input = _has_fp8_input(theirs.config)
        self._known, self._gives, self._constant = _said(ours.path)
        self._scales = {m.input_scale.name: m for m in self._ours.values() if m.input_scale is not None}

    def wrong(
        self, pairs: Sequence[Pair], before: MappedReader, after: MappedReader, there: Collection[str] | None = None
    ) -> str:
        """The empty string, or how the scale of this output weight differs from the source's; see `given`.

        there: the source tensors that can be read now; a scale that needs another is not judged.
        """
        if not self._known:
            return ""
        for pair in pairs:
            output = self._ours[pair.output.module]
            sources = list(self._sources(pair))
            if output.input_scale is None or not sources or output.kind not in _ROOM:
                continue
            if there is not None and any(
                m.input_scale is not None and m.input_scale.name not in there for m in sources
            ):
                continue
            if not after.holds(output.input_scale):
                return "its activation scale was not there to be compared"
            says = self._wrong(pair, output, sources, before, after)
            if says:
                return says
        return ""

    def given(self, pairs: Sequence[Pair], after: MappedReader) -> bool:
        """Whether the scales of this output weight are those that the manifest gives."""
        scales = (self._ours[pair.output.module].input_scale for pair in pairs)
        return all(scale is not None and self.gives(scale.name, after) for scale in scales)

    def gives(self, name: str, after: MappedReader) -> bool:
        """Whether this tensor of the output is an activation scale, and that which the manifest gives."""
        module = self._scales.get(name)
        if not self._gives or module is None or module.kind not in _ROOM:
            return False
        stored = self._amax(module, after, of_source=False)
        if stored is None or not stored.size:
            return False
        if self._constant is None:
            return bool((np.isfinite(stored) & (stored > 0)).all())
        right = _ROOM[module.kind] * self._constant
        return all(math.isclose(value, right, rel_tol=_CLOSE) for value in stored.tolist())

    def _sources(self, pair: Pair) -> Iterator[Module]:
        """The source module with its scale, then those of the weights that a runtime fuses with this one."""
        own = self._theirs.get(pair.source.module)
        if own is None or own.input_scale is None or own.kind not in _ROOM:
            return
        yield own
        parent, _, leaf = own.name.rpartition(".")
        for other in next((leaves for leaves in _FUSED if leaf in leaves), ()):
            partner = self._theirs.get(f"{parent}.{other}")
            if other != leaf and partner is not None and partner.input_scale is not None and partner.kind in _ROOM:
                yield partner

    def _wrong(
        self, pair: Pair, output: Module, sources: Sequence[Module], before: MappedReader, after: MappedReader
    ) -> str:
        expert = pair.source.codes.expert
        amaxes = [self._amax(module, before, of_source=True) for module in sources]
        stored = self._amax(output, after, of_source=False)
        if stored is None or not stored.size or any(amax is None or not amax.size for amax in amaxes):
            return ""  # other dtypes: the contract's business
        known = [cast("NDArray[np.float64]", amax) for amax in amaxes]
        own = _at(known[0], expert)
        right = {own, max(_at(amax, expert) for amax in known), max(float(amax.max()) for amax in known)}
        says = _at(stored, pair.output.codes.expert)
        if any(math.isclose(says, value, rel_tol=_CLOSE) for value in right):
            return ""
        shared = f", {max(right):.6g} with what is fused with it" if max(right) > own else ""
        return f"the activation scale stands for a largest input of {says:.6g}, the source's for {own:.6g}{shared}"

    def _amax(self, module: Module, reader: MappedReader, *, of_source: bool) -> NDArray[np.float64] | None:
        """The largest input that the module's scales stand for; several for a stack of experts."""
        values = numbers_of(cast("Tensor", module.input_scale), reader)
        if values is None:
            return None
        fp8 = of_source and self._fp8_input and module.kind is Kind.NVFP4
        room = _ROOM[Kind.FP8 if fp8 else module.kind]
        wide = values.astype(np.float64)
        with np.errstate(divide="ignore"):
            return room / wide if "input_global_scale" in module.parts else room * wide


def _at(values: NDArray[np.float64], expert: int | None) -> float:
    return float(values[expert if expert is not None and values.size > 1 else 0])


def _has_fp8_input(config: Mapping[str, object] | None) -> bool:
    quantization = as_object((config or {}).get("quantization_config")) or {}
    return str(quantization.get("quant_algo")).lower() == _FP8_INPUT


def _said(output: Path) -> tuple[bool, bool, float | None]:
    """(whether the manifest leaves the scales to the source or to a constant, whether it gives any, the constant)."""
    import yaml

    try:
        loaded = cast("object", yaml.safe_load((output / "requant.manifest.yaml").read_text(encoding="utf-8")))
        given = cast("Mapping[str, Mapping[str, object]]", loaded).get("activations") or {}
        if given.get("calibrate") is not None or isinstance(given.get("input_scale"), Mapping):
            return False, True, None
        constant = given.get("input_scale")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError):
        return False, False, None  # no manifest, no knowing where its scales were to come from
    number = float(constant) if isinstance(constant, int | float) else None
    try:
        lock = cast("Mapping[str, object]", json.loads((output / "requant.lock.json").read_text(encoding="utf-8")))
        if str(lock["input_scale"]).startswith("the source's own"):
            return True, False, None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        pass  # while the conversion runs there is no lock yet
    return True, number is not None, number
