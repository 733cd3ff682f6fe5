"""From tensor names to modules: which tensors make up one weight, and in which number format it really is stored.

A module is what stands before the last dot (`model.layers.0.mlp.down_proj`); its parts are the tensors after it. The
stacked experts of gpt-oss join with an underscore instead (`experts.down_proj_weight_scale`) and carry all experts in
one tensor. The kind comes from dtypes and siblings alone, never from what a config claims: comparing the two is the
contract's business.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from requant.kernels.formats import MXFP4_GROUP, NVFP4_GROUP
from requant.validate.gguf_tensors import GgufTensor
from requant.validate.opened import Tensor

__all__ = ["Kind", "Module", "expert_of", "is_mtp", "modules_of"]

FLOAT_DTYPES = frozenset({"BF16", "F16", "F32", "F64"})
BYTE_DTYPES = frozenset({"U8", "I8", "F4"})
FP8_DTYPES = frozenset({"F8_E4M3", "F8_E5M2"})
E8M0_DTYPES = frozenset({"U8", "F8_E8M0"})
WEIGHT_PARTS = ("weight", "weight_packed", "blocks")
BLOCK_SCALE_PARTS = ("weight_scale", "scale", "scales", "weight_scale_inv")
GLOBAL_SCALE_PARTS = ("weight_scale_2", "weight_global_scale")
INPUT_SCALE_PARTS = ("input_scale", "input_global_scale", "input_scale_2")
INTEGER_PARTS = ("qweight", "qzeros", "g_idx", "weight_shape", "weight_zero_point", "weight_g_idx")
"""What INT4 modules of GPTQ, AWQ and compressed-tensors hold beside what others hold too."""
PARTS = frozenset(
    {*WEIGHT_PARTS, *BLOCK_SCALE_PARTS, *GLOBAL_SCALE_PARTS, *INPUT_SCALE_PARTS}
    | {"bias", "k_scale", "v_scale", "q_scale", "pre_quant_scale", *INTEGER_PARTS}
)
_STACKED = re.compile(
    r"^(?P<module>.*\bexperts\.(?:gate_up_proj|down_proj|gate_proj|up_proj|w1|w2|w3))"
    r"(?:_(?P<part>weight_scale_2|weight_scale|input_scale|blocks|scales|bias))?$"
)
_MTP = re.compile(r"(?:^|\.)mtp(?:\.|_|$)|nextn")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EXPERT = re.compile(r"^(?P<parent>.*\bexperts)\.(?P<index>\d+)\.(?P<tail>.+)$")


class Kind(StrEnum):
    """How a module's weight is stored."""

    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"
    FP8 = "fp8"
    PLAIN = "plain"
    INT4 = "int4"
    GGUF = "gguf"
    UNSCALED = "packed without scales"
    INTEGER = "integer"
    ORPHAN = "scales without a weight"


@dataclass(frozen=True)
class Module:
    """One weight and its side tensors. parts: by role, as the checkpoint spells the role.

    Without slots, so that what the rules ask again and again is worked out once per module.
    """

    name: str
    kind: Kind
    parts: Mapping[str, Tensor]
    stacked: bool = False

    @cached_property
    def weight(self) -> Tensor | None:
        """The tensor that holds the codes or the values."""
        return self._first(WEIGHT_PARTS)

    @cached_property
    def block_scale(self) -> Tensor | None:
        """The plane of block scales."""
        return self._first(BLOCK_SCALE_PARTS)

    @cached_property
    def global_scale(self) -> Tensor | None:
        """weight_scale_2 (a multiplier) or weight_global_scale (its reciprocal)."""
        return self._first(GLOBAL_SCALE_PARTS)

    @cached_property
    def input_scale(self) -> Tensor | None:
        """input_scale or input_global_scale."""
        return self._first(INPUT_SCALE_PARTS)

    @property
    def compressed_tensors(self) -> bool:
        """Whether the parts bear compressed-tensors' names."""
        return "weight_packed" in self.parts

    @cached_property
    def k(self) -> int:
        """Logical input features K of a packed or plain weight; 0 where there is no weight."""
        weight = self.weight
        if weight is None or not weight.shape:
            return 0
        if "blocks" in self.parts:
            return weight.shape[-2] * weight.shape[-1] * 2
        axis = weight.shape[-2] if self.stacked else weight.shape[-1]
        return axis * 2 if weight.dtype in BYTE_DTYPES and weight.dtype != "F4" else axis

    @property
    def n(self) -> int:
        """Output features N (per expert where stacked); 0 where there is no weight."""
        weight = self.weight
        if weight is None or len(weight.shape) < 2:
            return 0
        if "blocks" in self.parts:
            return weight.shape[1]
        return weight.shape[-1] if self.stacked else weight.shape[-2]

    def scale_shape(self, group: int) -> tuple[int, ...]:
        """The shape that linear block scales of `group` elements along K must have."""
        weight = self.weight
        if weight is None:
            return ()
        if "blocks" in self.parts:
            return (*weight.shape[:-2], self.k // group)
        if self.stacked:
            return (*weight.shape[:-2], self.k // group, weight.shape[-1])
        return (*weight.shape[:-1], self.k // group)

    @property
    def group(self) -> int:
        """Elements along K per block scale of this kind; 0 where there is none."""
        return {Kind.NVFP4: NVFP4_GROUP, Kind.MXFP4: MXFP4_GROUP}.get(self.kind, 0)

    def _first(self, names: tuple[str, ...]) -> Tensor | None:
        return next((self.parts[name] for name in names if name in self.parts), None)


def modules_of(tensors: Mapping[str, Tensor]) -> dict[str, Module]:
    """Every module of a checkpoint by name, in the order of the tensors; a bare parameter is a module of its own."""
    parts: dict[str, dict[str, Tensor]] = {}
    stacked: set[str] = set()
    for name, tensor in tensors.items():
        match = _STACKED.match(name)
        head, _, leaf = name.rpartition(".")
        if match:
            module, role = match["module"], match["part"] or "weight"
            stacked.add(module)
        elif head and leaf in PARTS:
            module, role = head, leaf
        else:
            module, role = name, "parameter"
        parts.setdefault(module, {})[role] = tensor
    return {name: Module(name, _kind(own), own, name in stacked) for name, own in parts.items()}


def _kind(parts: Mapping[str, Tensor]) -> Kind:
    weight = next((parts[name] for name in WEIGHT_PARTS if name in parts), None)
    scale = next((parts[name] for name in BLOCK_SCALE_PARTS if name in parts), None)
    has_global = any(name in parts for name in GLOBAL_SCALE_PARTS)
    if isinstance(weight, GgufTensor) and len(weight.shape) > 1:
        return Kind.GGUF
    if "qweight" in parts and "scales" in parts:
        return Kind.INT4
    if weight is None:
        quantized = has_global or "weight_scale" in parts or "input_scale" in parts or "scales" in parts
        return Kind.ORPHAN if quantized or (scale is not None and scale.dtype == "F8_E8M0") else Kind.PLAIN
    if weight.dtype in FP8_DTYPES:
        return Kind.FP8
    if "weight_packed" in parts and weight.dtype == "I32" and scale is not None:
        return Kind.INT4
    if weight.dtype in BYTE_DTYPES:
        if scale is None and not has_global:
            return Kind.UNSCALED
        is_mxfp4 = scale is not None and scale.dtype in E8M0_DTYPES and not has_global
        return Kind.MXFP4 if is_mxfp4 else Kind.NVFP4
    return Kind.PLAIN if weight.dtype in FLOAT_DTYPES else Kind.INTEGER


def expert_of(name: str) -> tuple[str, int, str] | None:
    """(parent, index, rest) of a name inside `...experts.<index>.`, None for any other; shared experts are other."""
    match = _EXPERT.match(name)
    return (match["parent"], int(match["index"]), match["tail"]) if match else None


def is_mtp(name: str, hidden_layers: int | None) -> bool:
    """Whether a tensor belongs to a multi-token-prediction block: by name, or a layer index past the last layer."""
    if ("mtp" in name or "nextn" in name) and _MTP.search(name):
        return True
    layer = _LAYER.search(name)
    return layer is not None and hidden_layers is not None and int(layer[1]) >= hidden_layers
