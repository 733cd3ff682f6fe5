"""The FP4 weights of a checkpoint: one by one for the kernel check, and in the shapes that a runtime multiplies.

A runtime joins what shares an input along N: q, k and v, gate and up (w1 and w3), and lays the experts of a layer side
by side. `layers_of` puts a checkpoint's weights together in the same way; layers of the same format, N, K, number of
experts and top-k have one `Shape`. Everything here is from headers; bytes are read by `read_packed` alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from requant.kernels.formats import NumberFormat, PackedTensor
from requant.validate.modules import Kind, Module, expert_of, modules_of
from requant.validate.numerics_read import MappedReader
from requant.validate.opened import OpenedFolder, Tensor
from requant.validate.output_view import config_int
from requant.validate.pairing import UnreadableError, Weight, weight_of

__all__ = [
    "Layer",
    "NamedWeight",
    "Shape",
    "layers_of",
    "packed_weights",
    "read_input_scale",
    "read_joined",
    "read_packed",
    "shapes_of",
]

_FUSED: Final = (
    (re.compile(r"(?<=\.)[qkv]_proj$"), ("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    (re.compile(r"(?<=\.)(?:gate|up)_proj$"), ("gate_proj", "up_proj"), "gate_up_proj"),
    (re.compile(r"(?<=\.)w[13]$"), ("w1", "w3"), "w13"),
)
"""Leaves that a runtime joins along N, in its order, and what it calls the result."""
_TOP_K: Final = ("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_top_k")


@dataclass(frozen=True, slots=True)
class NamedWeight:
    """One FP4 matrix. name: its module, with [expert] where a module is a stack. input_scale: of its activations."""

    name: str
    weight: Weight
    input_scale: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """What a kernel is given. experts = 0: dense; otherwise top_k of them take part for each token."""

    format: NumberFormat
    n: int
    k: int
    experts: int = 0
    top_k: int = 0

    def __str__(self) -> str:
        moe = f", {self.experts} experts, top {self.top_k}" if self.experts else ""
        return f"{self.n} x {self.k} {self.format}{moe}"


@dataclass(frozen=True, slots=True)
class Layer:
    """One weight as a runtime holds it: per expert (or once, where dense) the matrices that are joined along N."""

    name: str
    shape: Shape
    parts: tuple[tuple[NamedWeight, ...], ...]


def packed_weights(folder: OpenedFolder) -> list[NamedWeight]:
    """Every NVFP4 and MXFP4 matrix, in the order of the tensors. Modules that cannot be read as one are left out:
    the contract and numerics stages speak of them."""
    return [named for module in _fp4(folder) for named in _matrices(module)]


def read_packed(reader: MappedReader, weight: Weight) -> PackedTensor:
    """Codes, block scales and global scale (as FP32, inverted where the layout stores a reciprocal), in memory."""
    assert weight.scales is not None  # a packed weight has them: weight_of saw to it
    codes = reader.codes(weight.codes, 0, weight.rows)
    scales = reader.codes(weight.scales, 0, weight.rows)
    scale: np.float32 | None = None
    if weight.global_scale is not None:
        stored = np.float32(reader.scalar(weight.global_scale))
        scale = np.float32(1) / stored if weight.reciprocal else stored
    return PackedTensor(weight.format, np.array(codes), np.array(scales), scale)


def read_input_scale(reader: MappedReader, named: NamedWeight) -> float | None:
    """The static global scale of activations as a multiplier; None where there is none that is one F32 number."""
    tensor = named.input_scale
    if tensor is None or tensor.dtype != "F32" or tensor.shape not in ((), (1,)):
        return None
    value = np.float32(reader.scalar(tensor))
    return float(np.float32(1) / value if tensor.name.endswith("input_global_scale") else value)


def read_joined(reader: MappedReader, layer: Layer, expert: int) -> PackedTensor:
    """One expert's parts, one under the other; a runtime fuses only what shares a global scale, so the first counts."""
    parts = [read_packed(reader, named.weight) for named in layer.parts[expert]]
    codes = np.concatenate([p.codes for p in parts])
    scales = np.concatenate([p.block_scales for p in parts])
    return PackedTensor(parts[0].format, codes, scales, parts[0].global_scale)


def layers_of(folder: OpenedFolder) -> list[Layer]:
    """All FP4 weights, joined as a runtime joins them, in the order of the tensors."""
    top_k = config_int(folder.config, *_TOP_K) or 1
    joined: dict[str, dict[int | None, dict[str, NamedWeight]]] = {}
    for module in _fp4(folder):
        expert = expert_of(module.name)
        name = f"{expert[0]}.{expert[2]}" if expert else module.name
        fused = next(((rx.sub(to, name)) for rx, _, to in _FUSED if rx.search(name)), name)
        leaf = name.rpartition(".")[2]
        for index, named in enumerate(_matrices(module)):
            slot = expert[1] if expert else index if module.stacked else None
            joined.setdefault(fused, {}).setdefault(slot, {})[leaf] = named
    return [layer for name, members in joined.items() for layer in _layers(name, members, top_k)]


def shapes_of(layers: Sequence[Layer]) -> dict[Shape, list[Layer]]:
    """Layers by shape, in the order of their first."""
    found: dict[Shape, list[Layer]] = {}
    for layer in layers:
        found.setdefault(layer.shape, []).append(layer)
    return found


def _layers(name: str, members: Mapping[int | None, Mapping[str, NamedWeight]], top_k: int) -> Iterator[Layer]:
    """One layer, or where experts or joined parts differ in format or K, one for each kind."""
    kinds: dict[tuple[NumberFormat, int, int], list[tuple[NamedWeight, ...]]] = {}
    experts = None not in members
    for slot in sorted(members, key=lambda s: -1 if s is None else s):
        by_kind: dict[tuple[NumberFormat, int], list[NamedWeight]] = {}
        for leaf in sorted(members[slot], key=_place):
            named = members[slot][leaf]
            by_kind.setdefault((named.weight.format, named.weight.k), []).append(named)
        for (fmt, k), parts in by_kind.items():
            kinds.setdefault((fmt, sum(p.weight.rows for p in parts), k), []).append(tuple(parts))
    for (fmt, n, k), parts in kinds.items():
        count = len(parts) if experts else 0
        yield Layer(name, Shape(fmt, n, k, count, min(top_k, count)), tuple(parts))


def _place(leaf: str) -> int:
    return next((order.index(leaf) for _, order, _ in _FUSED if leaf in order), 0)


def _fp4(folder: OpenedFolder) -> list[Module]:
    return [m for m in modules_of(folder.tensors).values() if m.kind in (Kind.NVFP4, Kind.MXFP4)]


def _matrices(module: Module) -> Iterator[NamedWeight]:
    weight = module.weight
    experts = weight.shape[0] if module.stacked and weight is not None else 0
    try:
        if not experts:
            yield NamedWeight(module.name, weight_of(module, None), module.input_scale)
        for expert in range(experts):
            yield NamedWeight(f"{module.name}[{expert}]", weight_of(module, expert), module.input_scale)
    except UnreadableError:
        return
