"""Contract, values: the scale planes and the scalars, read one tensor at a time in file order.

A plane is first asked for its smallest and largest byte, at memory speed. E4M3 bytes of a sound plane lie in
[0x08, 0x7E] as a rule, and then nothing else need be looked at; only a plane outside that range is counted byte by
byte, and only a plane with zeros has its codes read too. Memory is one chunk of rows (16 MiB) at a time.

| bytes       | as E4M3             | as a block scale                                             |
|-------------|---------------------|--------------------------------------------------------------|
| 0x00        | 0                   | only over zero codes                                         |
| 0x01 - 0x07 | below 2^-6          | exact on native FP4 units, flushed to zero by Marlin         |
| 0x08 - 0x7E | 2^-6 ... 448        | sound                                                        |
| 0x7F, 0xFF  | NaN                 | never                                                        |
| 0x80 - 0xFE | negative, also -0.0 | never                                                        |
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from requant.kernels.formats import (
    E2M1_MAX,
    E4M3_MAX_BYTE,
    E4M3_NAN_BYTE,
    E4M3_VALUES,
    E8M0_NAN_BYTE,
    MXFP4_GROUP,
    NVFP4_GROUP,
)
from requant.validate.collector import Collector
from requant.validate.matchers import FUSED_MODULES
from requant.validate.modules import Kind, Module
from requant.validate.opened import Tensor, TensorReader
from requant.validate.output_view import OutputView

__all__ = ["ScaleFacts", "check_fused", "check_scales"]

MARLIN_MIN_BYTE = 0x08
"""E4M3 byte of 2^-6, the smallest normal; Marlin's scale conversion flushes what lies below."""
MARLIN_MAX_GLOBAL = 2.0**9
"""Marlin folds the global scale into BF16/FP16 arithmetic and needs it below this."""
LARGEST_SANE_WEIGHT = 4096.0
"""No published checkpoint holds larger weights; a tensor beyond it has its global scale upside down."""
SMALLEST_SANE_WEIGHT = 2.0**-20
EQUAL_SETS: Sequence[tuple[str, ...]] = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Weights for which every runtime keeps one global scale and one input scale."""
OTHER_SETS: Sequence[tuple[str, ...]] = tuple(
    dict.fromkeys(shards for shards in FUSED_MODULES.values() if shards not in EQUAL_SETS)
)
"""Weights that some models' code fuses; unequal scales cost accuracy there."""


@dataclass(slots=True)
class ScaleFacts:
    """What one pass over the scales found. Keys are module names; s2 and input are multipliers in every dialect.

    below_marlin: nonzero block scales below 2^-6, per module that has any. largest: the largest block scale's byte.
    """

    s2: dict[str, float] = field(default_factory=dict[str, float])
    inputs: dict[str, float] = field(default_factory=dict[str, float])
    below_marlin: dict[str, int] = field(default_factory=dict[str, int])
    block_scales: int = 0
    kv: dict[str, float] = field(default_factory=dict[str, float])


def check_scales(view: OutputView, found: Collector) -> ScaleFacts:
    """Read every scale of every quantized module, and the KV scales, in file order."""
    facts = ScaleFacts()
    reader = TensorReader(view.folder)
    order = {file: place for place, file in enumerate(view.folder.files)}
    sized = [
        m for m in view.modules.values() if m.block_scale is not None or m.global_scale is not None or _kv_parts(m)
    ]
    for module in sorted(sized, key=lambda m: min(order[tensor.file] for tensor in m.parts.values())):
        for part in _kv_parts(module):
            facts.kv[module.parts[part].name] = _scalar(reader, module.parts[part], found, "kv-scale-invalid")
        if module.kind is Kind.NVFP4:
            _check_nvfp4(reader, module, facts, found)
        elif module.kind is Kind.MXFP4 and module.block_scale is not None:
            facts.block_scales += module.block_scale.elements
            _check_e8m0(reader, module.block_scale, found)
        elif module.kind is Kind.FP8 and module.block_scale is not None:
            _check_fp8(reader, module.block_scale, found)
    return facts


def _kv_parts(module: Module) -> list[str]:
    return [part for part in ("k_scale", "v_scale") if part in module.parts and part != module.name]


def _scalar(reader: TensorReader, tensor: Tensor, found: Collector, rule: str) -> float:
    """The value of an F32 scalar, or the largest of a few; 0.0 and a finding where it is not finite and positive."""
    if tensor.dtype != "F32" or tensor.elements < 1:
        if rule == "kv-scale-invalid":
            found.error(rule, f"is {tensor.dtype}{list(tensor.shape)}, not an F32 scalar", where=tensor.name)
        return 0.0
    values = reader.f32(tensor)
    wrong = [value for value in values if not 0 < value < math.inf]
    if wrong:
        message = f"is {wrong[0]}, must be finite and above 0"
        found.error(
            rule,
            message,
            where=tensor.name,
            hint="an all-zero weight has global scale 1, an input scale is 1 by default",
        )
        return 0.0
    return max(values)


def _check_nvfp4(reader: TensorReader, module: Module, facts: ScaleFacts, found: Collector) -> None:
    s2 = 0.0
    if module.global_scale is not None:
        stored = _scalar(reader, module.global_scale, found, "global-scale-invalid")
        s2 = 1.0 / stored if module.compressed_tensors and stored else stored
        facts.s2[module.name] = s2
    if module.input_scale is not None:
        facts.inputs[module.name] = _scalar(reader, module.input_scale, found, "input-scale-invalid")
    scale = module.block_scale
    if scale is None or scale.dtype != "F8_E4M3" or scale.elements == 0:
        return
    facts.block_scales += scale.elements
    histogram = _histogram(reader, scale)
    _check_e4m3(module, scale, histogram, found)
    if histogram[0] and scale.shape == module.scale_shape(NVFP4_GROUP):
        _check_zeros(reader, module, scale, found)
    below = int(histogram[1:MARLIN_MIN_BYTE].sum())
    if below:
        facts.below_marlin[module.name] = below
    positive = np.flatnonzero(histogram[: E4M3_MAX_BYTE + 1])
    if len(positive) and s2:
        _sniff_global(reader, module, s2, float(E4M3_VALUES[int(positive[-1])]), found)


def _histogram(reader: TensorReader, scale: Tensor) -> NDArray[np.int64]:
    """Occurrences of each byte. Rows that lie within [0x08, 0x7E] enter their extremes only: no rule asks for more."""
    counts = np.zeros(256, dtype=np.int64)
    for _, rows in reader.chunks(scale):
        low, high = int(rows.min()), int(rows.max())
        if low >= MARLIN_MIN_BYTE and high <= E4M3_MAX_BYTE:
            counts[low] += 1
            counts[high] += 1
        else:
            counts += np.bincount(rows.reshape(-1), minlength=256)
    return counts


def _check_e4m3(module: Module, scale: Tensor, histogram: NDArray[np.int64], found: Collector) -> None:
    nans = int(histogram[E4M3_NAN_BYTE] + histogram[0xFF])
    negative = int(histogram[0x80:0xFF].sum())
    if nans:
        message = f"{nans} block scales are NaN (0x7F or 0xFF)"
        found.error("scale-nan", message, where=scale.name, hint="one NaN poisons its whole row; convert again")
    if negative:
        message = f"{negative} block scales are negative (0x80 and above)"
        hint = "are these E8M0 bytes of an MXFP4 source?" if module.k // MXFP4_GROUP else "convert again"
        found.error("scale-negative", message, where=scale.name, hint=hint)


def _check_zeros(reader: TensorReader, module: Module, scale: Tensor, found: Collector) -> None:
    """A zero scale says that its 16 weights are zero; then their codes must say so too (0x0 or 0x8)."""
    weight = module.weight
    if weight is None or weight.dtype != "U8":
        return
    live_zeros = 0
    for start, scales in reader.chunks(scale):
        if bool((scales == 0).any()):
            codes = reader.rows(weight, start, start + len(scales)) & 0x77
            if module.stacked:  # [E, K/2, N]: groups lie along the middle axis
                live = codes.reshape(codes.shape[0], -1, NVFP4_GROUP // 2, codes.shape[-1]).any(axis=2)
            else:
                live = codes.reshape(*codes.shape[:-1], -1, NVFP4_GROUP // 2).any(axis=-1)
            live_zeros += int(((scales == 0) & live).sum())
    if live_zeros:
        message = f"{live_zeros} block scales are 0 over nonzero codes: those weights became 0"
        found.error(
            "scale-zero-over-live-codes", message, where=scale.name, hint="clamp block scales to 2^-9 and above"
        )


def _sniff_global(reader: TensorReader, module: Module, s2: float, largest: float, found: Collector) -> None:
    """Two lints on the global scale: written as its reciprocal, or never chosen at all."""
    where = module.global_scale.name if module.global_scale is not None else module.name
    amax, flipped = E2M1_MAX * largest * s2, E2M1_MAX * largest / s2
    if amax > LARGEST_SANE_WEIGHT and SMALLEST_SANE_WEIGHT < flipped <= LARGEST_SANE_WEIGHT:
        name = "weight_global_scale is 1/s2" if module.compressed_tensors else "weight_scale_2 is s2"
        message = f"weights would reach {amax:.3g}, with the reciprocal {flipped:.3g}: {name}, is it upside down?"
        severity = "error" if s2 >= MARLIN_MAX_GLOBAL else "warning"
        found.add(
            "global-scale-reciprocal", severity, message, where=where, hint="write the other dialect's reciprocal"
        )
    if s2 == 1.0 and largest < 1.0 and not _all_zero(reader, module):
        message = (
            f"global scale is 1 and no block scale exceeds {largest:.3g}: E4M3's range is wasted, some kernels fail"
        )
        hint = "choose the global scale so that the largest block scale is near 448"
        found.warning("global-scale-unset", message, where=where, hint=hint)


def _all_zero(reader: TensorReader, module: Module) -> bool:
    weight = module.weight
    return weight is not None and not any(bool((rows & 0x77).any()) for _, rows in reader.chunks(weight))


def _check_e8m0(reader: TensorReader, scale: Tensor, found: Collector) -> None:
    if scale.dtype not in ("U8", "F8_E8M0"):
        return
    nans = sum(int((rows == E8M0_NAN_BYTE).sum()) for _, rows in reader.chunks(scale) if rows.size)
    if nans:
        message = f"{nans} block scales are 255, E8M0's NaN"
        found.error("scale-nan", message, where=scale.name, hint="the source is corrupt: fetch it again")


def _check_fp8(reader: TensorReader, scale: Tensor, found: Collector) -> None:
    if scale.dtype == "F8_E8M0":
        _check_e8m0(reader, scale, found)
    elif scale.dtype == "F32" and not all(0 < value < math.inf for value in reader.f32(scale)):
        message = "holds a scale that is not finite and above 0"
        found.error("fp8-scale-invalid", message, where=scale.name, hint="convert again from the source")


def check_fused(view: OutputView, facts: ScaleFacts, found: Collector) -> None:
    """One format, one global scale and one input scale for all weights that a runtime fuses."""
    for name, module in view.modules.items():
        head, _, leaf = name.rpartition(".")
        for severe, sets in ((True, EQUAL_SETS), (False, OTHER_SETS)):
            for shards in sets:
                if leaf == shards[0]:
                    members = [f"{head}.{shard}" if head else shard for shard in shards]
                    partners = [view.modules[member] for member in members if member in view.modules]
                    if len(partners) > 1 and module.weight is not None:
                        _check_set(head, partners, facts, severe, found)


def _check_set(head: str, partners: Sequence[Module], facts: ScaleFacts, severe: bool, found: Collector) -> None:
    names = "/".join(partner.name.rpartition(".")[2] for partner in partners)
    kinds = {partner.kind for partner in partners if partner.weight is not None}
    if len(kinds) > 1:
        formats = ", ".join(f"{p.name.rpartition('.')[2]} {p.kind.value}" for p in partners)
        message = f"{names} are one module in every runtime and differ in format: {formats}"
        severity = "error" if severe else "warning"
        found.add("fused-mixed-formats", severity, message, where=head, hint="match all of them with one layer rule")
        return
    tables: tuple[tuple[str, str, Mapping[str, float]], ...] = (
        ("fused-global-scale-differs", "weight_scale_2", facts.s2),
        ("fused-input-scale-differs", "input_scale", facts.inputs),
    )
    for rule, label, table in tables:
        values = {partner.name: table[partner.name] for partner in partners if partner.name in table}
        if len(set(values.values())) > 1:
            spelled = ", ".join(f"{name.rpartition('.')[2]} {value:.6g}" for name, value in values.items())
            message = f"{label} differs within {names}: {spelled}; runtimes keep one of them"
            hint = "decide the global scale for the fused group as a whole"
            found.add(rule, "error" if severe else "warning", message, where=head, hint=hint)
