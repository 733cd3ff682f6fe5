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
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple

from requant.convert.checkpoint import Catalogue
from requant.convert.input_scales import InputScales
from requant.convert.layouts.base import ReadingLayout, Rows, SourceWeight
from requant.convert.layouts.writing import Output, Part, parts_of
from requant.convert.placement import OutShard, OutTensor, place
from requant.convert.rules import Decision, RuleUse, decide, module_of, refuse_idle
from requant.convert.shards import DTYPE_BITS, TensorInfo, nbytes_of
from requant.kernels.formats import NumberFormat
from requant.manifests.errors import SourceError, UsageError
from requant.manifests.schema import Manifest

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

        digest = hashlib.sha256(f"requant {version('requant')} plan 1\n".encode())
        for shard in self.shards:
            digest.update(shard.file.encode() + struct.pack("<Q", shard.size) + shard.header)
        for source in self.catalogue.shards:
            digest.update(f"{source.file} {source.size} {source.header_sha256}\n".encode())
        for rule in self.manifest.layers:
            digest.update(f"{rule.match} {rule.to} {rule.scale}\n".encode())
        digest.update(f"{self.layout} {len(self.units)} {self.input_scale_note}\n".encode())
        return digest.hexdigest()


class _Builder:
    """Collects output tensors and units in source order."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.units: list[Unit] = []
        self.names: dict[str, str] = {}
        self._pieces: list[Piece] = []
        self._bytes = 0

    def add(self, output: Output, origin: str) -> int:
        """Register an output tensor; two origins for one name are an error."""
        if output.name in self.names:
            raise UsageError(
                f"would be written twice, from {self.names[output.name]} and from {origin}",
                where=output.name,
                hint="keep or drop one of them with a rule",
            )
        self.names[output.name] = origin
        self.outputs.append(output)
        return len(self.outputs) - 1

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
        for part in parts:
            origin = part.codes.tensor.name
            members.append(
                Member(
                    module=part.module,
                    rows=part.rows,
                    cols=part.cols,
                    codes=part.codes,
                    scales=part.scales,
                    out_codes=self.add(part.out_codes, origin),
                    out_scales=self.add(part.out_scales, origin),
                    out_global=self.add(part.out_global, origin) if part.out_global else None,
                    reciprocal=part.reciprocal,
                    transposed=part.transposed,
                )
            )
        nbytes = sum(m.codes.nbytes + (m.scales.nbytes if m.scales else 0) for m in members)
        self.units.append(GroupUnit(kind, scale, parts[0].group, tuple(members), nbytes))
        value = scales.of_group([part.module for part in parts]) if any(p.out_input for p in parts) else None
        for part in parts:
            if part.out_input and value is not None:
                scalar = 1.0 / value if part.reciprocal else value
                self.piece(self.add(part.out_input, "activations.input_scale"), struct.pack("<f", scalar))
            if part.bias:
                self.piece(self.add(part.bias.output, part.bias.source.tensor.name), part.bias.source)


def make_plan(
    manifest: Manifest, catalogue: Catalogue, layout: ReadingLayout, layout_reason: str, output: Path
) -> Plan:
    """Plan the conversion of `catalogue`. ManifestError, UsageError or SourceError; nothing is written."""
    weights = list(layout.weights(catalogue))
    decisions, _ = decide(manifest.layers, catalogue, weights)
    owners = {t.name: weight for weight in weights for t in weight.tensors}
    target = "nvfp4" if manifest.target.format.startswith("nvfp4") else manifest.target.format
    with_input = manifest.target.format == "nvfp4"
    converting = _check_conversions(manifest, layout.name, weights, decisions, target)
    refuse_idle(manifest.layers, decisions, (weight.module for weight in converting))
    _refuse_unclaimed(catalogue, owners, decisions, layout.name)
    scales = InputScales.from_manifest(manifest) if with_input else InputScales.none()
    parts_by_group: dict[str, list[Part]] = {}
    groups_of: dict[str, list[str]] = {}
    kinds: dict[str, tuple[str, str]] = {}
    choices: dict[str, str] = {}
    for weight in converting:
        keys: dict[str, None] = {}
        for part in parts_of(weight, target, manifest.target.layout, with_input):
            parts_by_group.setdefault(part.group, []).append(part)
            keys[part.group] = None
        groups_of[weight.module] = list(keys)
        scale = manifest.layers[decisions[weight.module].rule].scale
        for group in keys:
            _refuse_mixed(group, (weight.format, scale), kinds.setdefault(group, (weight.format, scale)))
            choices[group] = scale
    uses = [RuleUse() for _ in manifest.layers]
    builder, dropped, done = _Builder(), list[str](), set[str]()
    converted_modules = {w.module for w in converting}
    for tensor in _in_file_order(catalogue):
        weight = owners.get(tensor.name)
        module = weight.module if weight else module_of(tensor.name)
        decision = decisions[module]
        if decision.rule >= 0:
            uses[decision.rule].tensors += 1
            uses[decision.rule].bytes_in += tensor.nbytes
            if decision.note:
                notes = uses[decision.rule].notes
                notes[decision.note] = notes.get(decision.note, 0) + 1
        if decision.to == "drop":
            dropped.append(tensor.name)
        elif weight is not None and module in converted_modules:
            for group in groups_of[module]:
                if group not in done:
                    done.add(group)
                    builder.group(_kind(weight, target), choices[group], parts_by_group[group], scales)
        else:
            out = builder.add(Output(tensor.name, tensor.dtype, tensor.shape), tensor.name)
            builder.piece(out, tensor)
            if decision.rule >= 0:
                uses[decision.rule].bytes_out += tensor.nbytes
    builder.flush()
    for weight in converting:
        rule = decisions[weight.module].rule
        for group in groups_of[weight.module]:
            for part in parts_by_group[group]:
                if part.codes.tensor.name == weight.codes.name:
                    uses[rule].bytes_out += _nbytes(part.out_codes) + _nbytes(part.out_scales)
    scales.refuse_missing()
    shards, tensors = place(builder.outputs, manifest.target.shard_size)
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
        converted=tuple(part.module for parts in parts_by_group.values() for part in parts),
        dropped=tuple(dropped),
        target_format=manifest.target.format,
        input_scale_note=scales.note,
    )


def _nbytes(output: Output) -> int:
    return nbytes_of(output.dtype, output.shape)


def _in_file_order(catalogue: Catalogue) -> Iterable[TensorInfo]:
    for shard in catalogue.shards:
        yield from sorted(shard.tensors, key=lambda t: t.begin)


def _kind(weight: SourceWeight, target: str) -> str:
    if weight.format == "mxfp4":
        return "repack"
    return f"to-{target}"


def _check_conversions(
    manifest: Manifest,
    layout: str,
    weights: Iterable[SourceWeight],
    decisions: dict[str, Decision],
    target: str,
) -> list[SourceWeight]:
    """The weights to convert, after refusing what cannot be converted and what would mix formats unreadably."""
    converting: list[SourceWeight] = []
    for weight in weights:
        decision = decisions[weight.module]
        if decision.to == "drop":
            continue
        if decision.to == "keep":
            _refuse_kept_packed(weight, layout, target)
            continue
        rule = manifest.layers[decision.rule]
        where = f"layers.{decision.rule} (match: {rule.match}): {weight.module}"
        if decision.to != target:
            raise UsageError(
                f"the rule says {decision.to}, target.format says {manifest.target.format}",
                where=where,
                hint="one checkpoint holds one target format here: change one of the two",
            )
        _refuse_unsupported(weight, target, rule.scale, where)
        group = NumberFormat(target).group
        if weight.cols % group:
            if rule.match == weight.module:
                raise UsageError(
                    f"K = {weight.cols} is not a multiple of {group}, the group of {target}",
                    where=where,
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


def _refuse_unsupported(weight: SourceWeight, target: str, scale: str, where: str) -> None:
    choices = CONVERSIONS.get((weight.format, target))
    if choices is None:
        raise UsageError(
            f"{weight.format} -> {target} is not a conversion this version makes",
            where=where,
            hint="it makes MXFP4 -> NVFP4, and both of them from BF16, F16 or F32; keep this layer, or narrow the rule",
        )
    if scale not in choices:
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
