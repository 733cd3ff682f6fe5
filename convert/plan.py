"""Manifest + catalogue -> plan: every output byte has a place and an origin before the first one is written.

A plan reads headers only. It closes the books: every source tensor is converted, copied byte for byte, or dropped by a
named rule. The unit of work is a fused group (the weights that share a global scale, wherever their shards) or a batch
of copies. Output tensors are placed in the order of the source, so that both sides are read and written forward.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from requant.convert.checkpoint import Catalogue
from requant.convert.input_scales import InputScales
from requant.convert.layouts.base import ReadingLayout, Rows, SourceWeight
from requant.convert.layouts.writing import Leaf, Part, fuse_key, leaf_of, parts_of
from requant.convert.placement import OutShard, OutTensor, place
from requant.convert.rules import Decision, RuleUse, decide, module_of, refuse_idle
from requant.convert.shards import DTYPE_BITS, TensorInfo
from requant.kernels.formats import NumberFormat
from requant.manifests.errors import SourceError, UsageError
from requant.manifests.schema import LayerRule, Manifest

__all__ = ["CopyUnit", "GroupUnit", "Member", "OutShard", "OutTensor", "Piece", "Plan", "Unit", "make_plan"]

COPY_BATCH_BYTES: Final = 64 * 2**20
"""Copies are batched up to this size: small enough to balance threads, large enough that a journal line is cheap."""
COPY_BATCH_PIECES: Final = 256


CONVERSIONS: Final[Mapping[tuple[str, str], tuple[str, ...]]] = {
    ("mxfp4", "nvfp4"): ("lossless",),
    ("plain", "mxfp4"): ("nearest",),
    ("plain", "nvfp4"): ("nearest", "four-over-six", "mse"),
}
"""(source format, target format) -> the scale choices there are."""


class Member(NamedTuple):
    """One weight of a fused group. out_*: indices of output tensors. transposed: experts of a stacked layout, or 0."""

    module: str
    rows: int
    cols: int
    codes: Rows
    scales: Rows | None
    out_codes: int
    out_scales: int
    out_global: int | None
    reciprocal: bool
    transposed: int


class GroupUnit(NamedTuple):
    """A fused group to compute. kind: `repack` (MXFP4 -> NVFP4), `to-mxfp4` or `to-nvfp4` (from floats)."""

    kind: str
    scale: str
    group: str
    members: tuple[Member, ...]
    nbytes: int


class Piece(NamedTuple):
    """Bytes of an output tensor that need no computing: a source range, strided rows, or a constant."""

    out: int
    source: TensorInfo | Rows | bytes


class CopyUnit(NamedTuple):
    """A batch of pieces."""

    pieces: tuple[Piece, ...]
    nbytes: int


Unit = GroupUnit | CopyUnit


@dataclass(frozen=True)
class Plan:
    """All that a run will do. converted: output modules by format. kept: source tensors copied as they are."""

    manifest: Manifest
    catalogue: Catalogue
    layout: str
    layout_reason: str
    output: Path
    shards: tuple[OutShard, ...]
    tensors: tuple[OutTensor, ...]
    units: tuple[Unit, ...]
    rules: tuple[RuleUse, ...]
    converted: tuple[str, ...]
    dropped: tuple[str, ...]
    target_format: str
    input_scale_note: str

    @cached_property
    def groups(self) -> tuple[GroupUnit, ...]:
        """The units that compute."""
        return tuple(unit for unit in self.units if isinstance(unit, GroupUnit))

    @property
    def bytes_in(self) -> int:
        """Bytes of source that a run reads."""
        return sum(unit.nbytes for unit in self.units)

    @property
    def bytes_out(self) -> int:
        """Bytes of all output shards, headers included."""
        return sum(shard.size for shard in self.shards)

    @cached_property
    def sha256(self) -> str:
        """Fingerprint of everything that decides the bytes: output headers, source headers, rules, tool version."""
        from importlib.metadata import version

        digest = hashlib.sha256(f"requant {version('requant')} plan 2\n".encode())
        for shard in self.shards:
            digest.update(f"{shard.file} {shard.size} {shard.header_sha256}\n".encode())
        for source in self.catalogue.shards:
            digest.update(f"{source.file} {source.size} {source.header_sha256}\n".encode())
        for rule in self.manifest.layers:
            digest.update(f"{rule.match} {rule.to} {rule.scale}\n".encode())
        digest.update(f"{self.layout} {len(self.units)} {self.input_scale_note}\n".encode())
        return digest.hexdigest()


class _Builder:
    """Collects output tensors and units in source order.

    modules, leaves: of the output tensors, side by side; two lists are lighter than a million pairs.
    """

    def __init__(self) -> None:
        self.modules: list[str] = []
        self.leaves: list[Leaf] = []
        self.units: list[Unit] = []
        self._pieces: list[Piece] = []
        self._bytes = 0

    def add(self, module: str, leaf: Leaf) -> int:
        """Register an output tensor; its index."""
        self.modules.append(module)
        self.leaves.append(leaf)
        return len(self.leaves) - 1

    def piece(self, out: int, source: TensorInfo | Rows | bytes) -> None:
        """Queue a copy; full batches become units."""
        self._pieces.append(Piece(out, source))
        self._bytes += len(source) if isinstance(source, bytes) else source.nbytes
        if self._bytes >= COPY_BATCH_BYTES or len(self._pieces) >= COPY_BATCH_PIECES:
            self.flush()

    def flush(self) -> None:
        """Close the batch of copies."""
        if self._pieces:
            self.units.append(CopyUnit(tuple(self._pieces), self._bytes))
            self._pieces, self._bytes = [], 0

    def group(self, kind: str, scale: str, parts: Sequence[Part], scales: InputScales) -> None:
        """A fused group with its constants (activation scale) and its share of stacked biases."""
        members: list[Member] = []
        nbytes = 0
        with_input = False
        for module, _, form, codes, planes, _ in parts:
            members.append(
                Member(
                    module=module,
                    rows=form.rows,
                    cols=form.cols,
                    codes=codes,
                    scales=planes,
                    out_codes=self.add(module, form.codes),
                    out_scales=self.add(module, form.scales),
                    out_global=self.add(module, form.global_scale) if form.global_scale else None,
                    reciprocal=form.reciprocal,
                    transposed=form.transposed,
                )
            )
            nbytes += codes.nbytes + (planes.nbytes if planes else 0)
            with_input = with_input or form.input_scale is not None
        self.units.append(GroupUnit(kind, scale, parts[0].group, tuple(members), nbytes))
        value = scales.of_group([part.module for part in parts]) if with_input else None
        for module, _, form, _, _, bias in parts:
            if form.input_scale and value is not None:
                self.piece(self.add(module, form.input_scale), _scalar(1.0 / value if form.reciprocal else value))
            if bias:
                self.piece(self.add(module, bias.leaf), bias.source)

    def refuse_twins(self) -> None:
        """UsageError if two origins would write one tensor."""
        names = {module + leaf.suffix for module, leaf in zip(self.modules, self.leaves, strict=True)}
        if len(names) == len(self.leaves):
            return
        first: dict[str, str] = {}
        for out, origin in sorted(self._origins()):
            name = self.modules[out] + self.leaves[out].suffix
            if name in first:
                raise UsageError(
                    f"would be written twice, from {first[name]} and from {origin}",
                    where=name,
                    hint="keep or drop one of them with a rule",
                )
            first[name] = origin

    def _origins(self) -> Iterable[tuple[int, str]]:
        """(output tensor, what it is made from), in no order."""
        for unit in self.units:
            if isinstance(unit, CopyUnit):
                for out, source in unit.pieces:
                    tensor = source.tensor if isinstance(source, Rows) else source
                    yield out, "activations.input_scale" if isinstance(tensor, bytes) else tensor.name
            else:
                for member in unit.members:
                    for out in (member.out_codes, member.out_scales, member.out_global):
                        if out is not None:
                            yield out, member.codes.tensor.name


@lru_cache(maxsize=256)  # one constant, as a rule
def _scalar(value: float) -> bytes:
    """A float as F32."""
    return struct.pack("<f", value)


def make_plan(
    manifest: Manifest, catalogue: Catalogue, layout: ReadingLayout, layout_reason: str, output: Path
) -> Plan:
    """Plan the conversion of `catalogue`. ManifestError, UsageError or SourceError; nothing is written."""
    weights = list(layout.weights(catalogue))
    owners = {t.name: weight for weight in weights for t in weight.tensors}
    decisions = decide(manifest.layers, catalogue, owners)
    target = "nvfp4" if manifest.target.format.startswith("nvfp4") else manifest.target.format
    with_input = manifest.target.format == "nvfp4"
    converting = _check_conversions(manifest, layout.name, weights, decisions, target)
    refuse_idle(manifest.layers, decisions, (weight.module for weight in converting))
    _refuse_unclaimed(catalogue, owners, decisions, layout.name)
    scales = InputScales.from_manifest(manifest) if with_input else InputScales.none()
    by_group: dict[str, list[SourceWeight]] = {}
    mates: dict[str, list[SourceWeight]] = {}
    for weight in converting:
        mates[weight.module] = by_group.setdefault(fuse_key(weight.module), [])
        mates[weight.module].append(weight)
    uses = [RuleUse() for _ in manifest.layers]
    builder, dropped, converted = _Builder(), list[str](), list[str]()
    for tensor in _in_file_order(catalogue):
        weight = owners.get(tensor.name)
        module = weight.module if weight else module_of(tensor.name)
        decision = decisions[module]
        if decision.rule >= 0:
            uses[decision.rule].count(tensor.nbytes, decision.note)
        if decision.to == "drop":
            dropped.append(tensor.name)
        elif weight is None or (members := mates.get(module)) is None:
            builder.piece(builder.add(tensor.name, leaf_of("", tensor.dtype, tensor.shape)), tensor)
            if decision.rule >= 0:
                uses[decision.rule].bytes_out += tensor.nbytes
        elif members:  # the first tensor of its fused group, which takes this place
            groups: dict[str, list[Part]] = {}
            choices: dict[str, tuple[str, str]] = {}
            for member in members:
                rule = decisions[member.module].rule
                choice = (member.format, manifest.layers[rule].scale)
                for part in parts_of(member, target, manifest.target.layout, with_input):
                    _refuse_mixed(part.group, choice, choices.setdefault(part.group, choice))
                    groups.setdefault(part.group, []).append(part)
                    uses[rule].bytes_out += part.form.codes.nbytes + part.form.scales.nbytes
                    converted.append(part.module)
            members.clear()
            for group, parts in groups.items():
                source_format, scale = choices[group]
                kind = "repack" if source_format == "mxfp4" else f"to-{target}"
                builder.group(kind, scale, parts, scales)
    builder.flush()
    builder.refuse_twins()
    scales.refuse_missing()
    shards, tensors = place(builder.modules, builder.leaves, manifest.target.shard_size)
    return Plan(
        manifest=manifest,
        catalogue=catalogue,
        layout=layout.name,
        layout_reason=layout_reason,
        output=output,
        shards=shards,
        tensors=tensors,
        units=tuple(builder.units),
        rules=tuple(uses),
        converted=tuple(converted),
        dropped=tuple(dropped),
        target_format=manifest.target.format,
        input_scale_note=scales.note,
    )


def _in_file_order(catalogue: Catalogue) -> Iterable[TensorInfo]:
    for shard in catalogue.shards:
        yield from sorted(shard.tensors, key=lambda t: t.begin)


def _check_conversions(
    manifest: Manifest,
    layout: str,
    weights: Iterable[SourceWeight],
    decisions: dict[str, Decision],
    target: str,
) -> list[SourceWeight]:
    """The weights to convert, after refusing what cannot be converted and what would mix formats unreadably."""
    converting: list[SourceWeight] = []
    group = NumberFormat(target).group
    for weight in weights:
        decision = decisions[weight.module]
        if decision.to == "drop":
            continue
        if decision.to == "keep":
            _refuse_kept_packed(weight, layout, target)
            continue
        rule = manifest.layers[decision.rule]
        if decision.to != target:
            raise UsageError(
                f"the rule says {decision.to}, target.format says {manifest.target.format}",
                where=_place(decision.rule, rule, weight),
                hint="one checkpoint holds one target format here: change one of the two",
            )
        if rule.scale not in CONVERSIONS.get((weight.format, target), ()):
            _refuse_unsupported(weight, target, rule.scale, _place(decision.rule, rule, weight))
        if weight.cols % group:
            if rule.match == weight.module:
                raise UsageError(
                    f"K = {weight.cols} is not a multiple of {group}, the group of {target}",
                    where=_place(decision.rule, rule, weight),
                    hint="keep this layer, or choose a format whose group divides K",
                )
            decisions[weight.module] = Decision("keep", decision.rule, f"K is not a multiple of {group}: kept plain")
            continue
        converting.append(weight)
    if layout == "deepseek-v4" and manifest.target.layout != "modelopt":
        raise UsageError(
            f"target.layout {manifest.target.layout} cannot hold DeepSeek-V4's FP8 blocks",
            where="target.layout",
            hint="use layout modelopt: it writes the DeepSeek-V4 hybrid that vLLM and SGLang load",
        )
    return converting


def _place(index: int, rule: LayerRule, weight: SourceWeight) -> str:
    return f"layers.{index} (match: {rule.match}): {weight.module}"


def _refuse_unsupported(weight: SourceWeight, target: str, scale: str, where: str) -> NoReturn:
    choices = CONVERSIONS.get((weight.format, target))
    if choices is None:
        raise UsageError(
            f"{weight.format} -> {target} is not a conversion this version makes",
            where=where,
            hint="it makes MXFP4 -> NVFP4, and both of them from BF16, F16 or F32; keep this layer, or narrow the rule",
        )
    raise UsageError(
        f"scale: {scale} is not available for {weight.format} -> {target}",
        where=where,
        hint=f"use scale: {' or '.join(choices)}",
    )


def _refuse_mixed(group: str, one: tuple[str, str], other: tuple[str, str]) -> None:
    """Weights that a runtime fuses must come from one format by one choice of scales."""
    if one != other:
        raise UsageError(
            f"its members differ: {' with scale '.join(one)} and {' with scale '.join(other)}",
            where=f"fused group {group}",
            hint="runtimes load these weights as one: convert them by one rule, or keep them all",
        )


def _refuse_kept_packed(weight: SourceWeight, layout: str, target: str) -> None:
    """Outside the DeepSeek-V4 hybrid no target metadata can say `these layers are still MXFP4`."""
    if weight.format == "mxfp4" and layout != "deepseek-v4":
        raise UsageError(
            f"would stay MXFP4 in a {target} checkpoint, which its metadata cannot express",
            where=weight.module,
            hint="convert all packed weights: let a rule with `to: nvfp4` match this module",
        )


_PACKED_DTYPES: Final = {"F4", "U8", "I8", *(dtype for dtype in DTYPE_BITS if dtype.startswith("F8_"))}


def _refuse_unclaimed(
    catalogue: Catalogue, owners: Mapping[str, SourceWeight], decisions: Mapping[str, Decision], layout: str
) -> None:
    """Quantized bytes that no weight of the layout accounts for: copied, they would be read as something else."""
    for tensor in catalogue.tensors.values():
        if tensor.dtype not in _PACKED_DTYPES or len(tensor.shape) < 2 or tensor.name in owners:
            continue
        if decisions[module_of(tensor.name)].to != "drop":
            raise SourceError(
                f"is {tensor.dtype} {list(tensor.shape)}, which layout {layout} has no use for: a scale without its "
                "weight, or a weight quantized in another way",
                where=f"{tensor.file}: {tensor.name}",
                hint="name the right source.layout; if the tensor is not needed, drop it with a rule",
            )


def source_files(catalogue: Catalogue) -> Mapping[str, Mapping[str, object]]:
    """What the lock records of each source shard."""
    return {
        shard.file: {"size": shard.size, "mtime_ns": shard.mtime_ns, "header_sha256": shard.header_sha256}
        for shard in catalogue.shards
    }


def refuse_overlap(source: Path, output: Path) -> None:
    """Source and output must not lie in one another, links followed."""
    real_source, real_output = source.resolve(), output.resolve()
    if real_source.is_relative_to(real_output) or real_output.is_relative_to(real_source):
        raise SourceError(
            "source and output folders overlap",
            where=str(output),
            hint="choose an output folder beside the source: the source is never written to",
        )
