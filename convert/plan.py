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
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from requant.convert.activation_scales import refuse_half
from requant.convert.checkpoint import Catalogue
from requant.convert.conversions import Conversion, is_copy, settle
from requant.convert.decode import code_rows, scale_rows, source_nbytes
from requant.convert.input_scales import InputScales
from requant.convert.layouts.base import Rows, SourceWeight
from requant.convert.layouts.layout import Layout
from requant.convert.layouts.writing import Form, Leaf, Part, fuse_key, leaf_of, parts_of
from requant.convert.placement import OutShard, OutTensor, OutTensors, place
from requant.convert.rules import Decision, RuleUse, decide, module_of, refuse_idle
from requant.convert.scalars import turned_over
from requant.convert.shards import DTYPE_BITS, TensorInfo
from requant.convert.unit_kinds import is_fusing, kind_of, refuse_partly_static, takes_input
from requant.manifests.errors import SourceError, UsageError
from requant.manifests.schema import Manifest

if TYPE_CHECKING:
    from requant.convert.calibrate import Calibration

__all__ = ["CopyUnit", "GroupUnit", "Member", "OutShard", "OutTensor", "Piece", "Plan", "Unit", "make_plan"]

COPY_BATCH_BYTES: Final = 64 * 2**20
"""Copies are batched up to this size: small enough to balance threads, large enough that a journal line is cheap."""
COPY_BATCH_PIECES: Final = 256


class Member(NamedTuple):
    """One output weight of a fused group: rows start, start + step, ... of a source weight, in a form.

    out_*: indices of output tensors. out_input: only where the source's own activation scale is carried over.
    """

    module: str
    form: Form
    weight: SourceWeight
    start: int
    step: int
    out_codes: int
    out_scales: int | None
    out_global: int | None
    out_input: int | None = None

    @property
    def codes(self) -> Rows:
        """Its rows of the source tensor of codes, or values."""
        return code_rows(self.weight, self.start, self.step, self.form.rows)

    @property
    def scales(self) -> Rows | None:
        """Its rows of an FP4 source's block scales."""
        return scale_rows(self.weight, self.start, self.step, self.form.rows)

    @property
    def outputs(self) -> tuple[int, ...]:
        """Indices of all tensors it writes."""
        outs = (self.out_codes, self.out_scales, self.out_global, self.out_input)
        return tuple(out for out in outs if out is not None)


class GroupUnit(NamedTuple):
    """A fused group to compute. kind: `repack` (MXFP4 -> NVFP4), `relayout` (FP4 or FP8 as it is), `share` (NVFP4 as it
    is, but under one global scale), `encode` (from floats).

    calibration: the file of measurements that scale or rounding rest on, or "".
    """

    kind: str
    scale: str
    group: str
    members: tuple[Member, ...]
    nbytes: int
    rounding: str = "nearest"
    calibration: str = ""


class Piece(NamedTuple):
    """Bytes of an output tensor that need no computing: a source range, strided rows, or a constant."""

    out: int
    source: TensorInfo | Rows | bytes


class CopyUnit(NamedTuple):
    """A batch of pieces."""

    pieces: tuple[Piece, ...]
    nbytes: int


Unit = GroupUnit | CopyUnit

Way = tuple[str, str, str]
"""How a fused group is made: kind, scale, rounding."""


@dataclass(frozen=True)
class Plan:
    """All that a run will do. converted: output modules by format. kept: source tensors copied as they are."""

    manifest: Manifest
    catalogue: Catalogue
    layout: str
    layout_reason: str
    output: Path
    shards: tuple[OutShard, ...]
    tensors: OutTensors
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
            digest.update(f"{rule.match} {rule.to} {rule.scale} {rule.granularity} {rule.rounding}\n".encode())
        digest.update(f"{self.layout} {len(self.units)} {self.input_scale_note} {is_fusing(self.manifest)}\n".encode())
        return digest.hexdigest()


class _Builder:
    """Collects output tensors and units in source order.

    modules, leaves: of the output tensors, side by side; two lists are lighter than a million pairs. carried, given:
    activation scales that are the source's own, and others.
    """

    def __init__(self) -> None:
        self.modules: list[str] = []
        self.leaves: list[Leaf] = []
        self.units: list[Unit] = []
        self.carried = self.given = 0
        self._pieces: list[Piece] = []
        self._bytes = 0
        self._parts: set[str] = set()
        self._bare = False
        self._copied: list[int] = []

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

    def group(self, way: Way, parts: Sequence[Part], scales: InputScales) -> None:
        """A fused group with its constants (activation scale) and its share of stacked biases."""
        kind, scale, rounding = way
        own = not scales.explicit
        if kind == "share" and len(parts) == 1:
            kind = "relayout"
        if own and kind != "relayout" and any(part.form.input_scale for part in parts):
            refuse_half(parts[0].group, [part.weight for part in parts])
        members: list[Member] = []
        open_ones: list[Part] = []
        nbytes = 0
        for part in parts:
            module, _, form, weight, start, step, _ = part
            carried = form.input_scale if own and weight.input is not None else None
            out = len(self.leaves)
            leaves = [leaf for leaf in (form.codes, form.scales, form.global_scale, carried) if leaf is not None]
            self.leaves += leaves
            self.modules += [module] * len(leaves)
            second = None if form.scales is None else out + 1
            third = None if form.global_scale is None else out + 1 + (second is not None)
            fourth = None if carried is None else out + len(leaves) - 1
            members.append(Member(module, form, weight, start, step, out, second, third, fourth))
            if carried is None and form.input_scale is not None:
                open_ones.append(part)
            self._parts.add(module)
            nbytes += source_nbytes(weight, form.rows)
            self.carried += carried is not None
        self.given += len(open_ones)
        self._bare |= not parts[0].form.codes.suffix
        file = scales.file if scale == "weighted" or rounding == "gptq" else ""
        self.units.append(GroupUnit(kind, scale, parts[0].group, tuple(members), nbytes, rounding, file))
        if open_ones:
            form = open_ones[0].form
            value = _scalar(scales.of_group([part.module for part in open_ones], form.number), form.reciprocal)
            for part in open_ones:
                if part.form.input_scale is not None:
                    self.piece(self.add(part.module, part.form.input_scale), value)
        for part in parts:
            if part.bias:
                self.copy(part.module, part.bias.leaf, part.bias.source)

    def copy(self, module: str, leaf: Leaf, source: TensorInfo | Rows | bytes) -> None:
        """An output tensor that needs no computing."""
        self._copied.append(len(self.leaves))
        self.piece(self.add(module, leaf), source)

    def note(self, scales: InputScales) -> str:
        """Where the activation scales come from, in one line."""
        if not self.carried:
            return scales.note
        return f"the source's own, else {scales.note}" if self.given else "the source's own"

    def forms(self) -> list[tuple[str, Form]]:
        """(module, form) of everything that is converted."""
        return [(m.module, m.form) for unit in self.units if isinstance(unit, GroupUnit) for m in unit.members]

    def refuse_twins(self) -> None:
        """UsageError if two origins would write one tensor."""
        if not self._may_have_twins():
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

    def _may_have_twins(self) -> bool:
        """Whether two converted modules share a name, or a copied tensor has a name that a converted module may write.

        Modules and suffixes are compared, not names: those of a large checkpoint would take a hundred megabytes.
        """
        if len(self._parts) != sum(len(unit.members) for unit in self.units if isinstance(unit, GroupUnit)):
            return True
        if self._bare:  # stacks, of which there are few: their own names are tensors' names, too
            return True
        names = [self.modules[out] + self.leaves[out].suffix for out in self._copied]
        suffixes = {leaf.suffix for leaf in {id(leaf): leaf for leaf in self.leaves}.values()}
        if len(set(names)) != len(names):
            return True
        ends = [(suffix, -len(suffix) or None) for suffix in suffixes]
        return any(name.endswith(suffix) and name[:end] in self._parts for suffix, end in ends for name in names)

    def _origins(self) -> Iterable[tuple[int, str]]:
        """(output tensor, what it is made from), in no order."""
        for unit in self.units:
            if isinstance(unit, CopyUnit):
                for out, source in unit.pieces:
                    tensor = source.tensor if isinstance(source, Rows) else source
                    yield out, "activations.input_scale" if isinstance(tensor, bytes) else tensor.name
            else:
                for member in unit.members:
                    for out in member.outputs:
                        yield out, member.weight.codes.name


@lru_cache(maxsize=256)  # one constant, as a rule
def _scalar(value: float, reciprocal: bool) -> bytes:
    """A float as F32, turned over if need be."""
    if not reciprocal:
        return struct.pack("<f", value)
    import numpy as np

    return struct.pack("<f", float(turned_over(np.float32(value))))


def make_plan(
    manifest: Manifest,
    catalogue: Catalogue,
    layout: Layout,
    layout_reason: str,
    output: Path,
    calibration: Calibration | None = None,
) -> Plan:
    """Plan the conversion of `catalogue`. ManifestError, UsageError or SourceError; nothing is written.

    calibration: what activations.calibrate asks for; without it the plan is for looking at only.
    """
    weights = list(layout.weights(catalogue))
    owners = {tensor[0]: weight for weight in weights for tensor in weight.tensors}
    rest = [tensor for name, tensor in catalogue.tensors.items() if name not in owners]
    decisions = decide(manifest.layers, catalogue, weights, rest)
    target = manifest.target
    with_input = target.format in ("nvfp4", "fp8")
    settled = settle(manifest, layout.name, catalogue, weights, decisions)
    _refuse_unclaimed(rest, decisions, layout.name)
    converting = [conversion for conversion in settled if not is_copy(conversion)]
    refuse_idle(manifest.layers, decisions, (conversion.rule for conversion in converting))
    calibrated = manifest.activations.calibrate is not None
    scales = InputScales.from_manifest(manifest, calibration) if with_input or calibrated else InputScales.none()
    by_group: dict[str, list[Conversion]] = {}
    mates: dict[str, list[Conversion]] = {}
    for conversion in converting:
        module = conversion[0][0]
        mates[module] = group = by_group.setdefault(fuse_key(module), [])
        group.append(conversion)
    uses = [RuleUse() for _ in manifest.layers]
    fusing = is_fusing(manifest)
    builder, dropped, converted = _Builder(), list[str](), list[str]()
    weight, module, decision = None, "", Decision("keep", -1)
    for tensor in _in_file_order(catalogue):
        if weight is None or weight[5] is not tensor:  # else the scales of the weight whose codes came just before
            weight = owners.get(tensor[0])
            module = weight[0] if weight else module_of(tensor[0])
            decision = decisions[module]
        if decision.rule >= 0:
            uses[decision.rule].count(tensor[5], decision.note)
        if decision.to == "drop":
            dropped.append(tensor.name)
        elif weight is None or (members := mates.get(module)) is None:
            builder.copy(tensor.name, leaf_of("", tensor.dtype, tensor.shape), tensor)
            if decision.rule >= 0:
                uses[decision.rule].bytes_out += tensor.nbytes
        elif members:  # the first tensor of its fused group, which takes this place
            groups: dict[str, tuple[Way, list[Part]]] = {}
            for member in members:
                static = with_input and takes_input(manifest, member, scales)
                for part in parts_of(member.weight, member.target, target.layout, static, member.granularity):
                    way = (kind_of(member.weight, part, fusing), member.scale, member.rounding)
                    known, parts = groups.setdefault(part.group, (way, []))
                    _refuse_mixed(part.group, way, known)
                    parts.append(part)
                    uses[member.rule].bytes_out += part.form.nbytes
                    if member.target != "bf16":
                        converted.append(part.module)
            members.clear()
            for way, parts in groups.values():
                builder.group(way, parts, scales)
    for name, value in scales.kv_scales(manifest, catalogue):
        builder.copy(name, leaf_of("", "F32", ()), struct.pack("<f", value))
    builder.flush()
    if manifest.target.layout == "compressed-tensors":
        refuse_partly_static(builder.forms())
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
        input_scale_note=builder.note(scales),
    )


def _refuse_mixed(group: str, one: Way, other: Way) -> None:
    """Weights that share a global scale must be made in one way."""
    if one != other:
        names = [f"{kind} with scale {scale}, rounding {rounding}" for kind, scale, rounding in (one, other)]
        raise UsageError(
            f"its members differ: {names[0]} and {names[1]}",
            where=f"fused group {group}",
            hint="runtimes load these weights as one: convert them by one rule, or keep them all",
        )


def _in_file_order(catalogue: Catalogue) -> Iterable[TensorInfo]:
    for shard in catalogue.shards:
        yield from sorted(shard.tensors, key=itemgetter(4))  # begin


_PACKED_DTYPES: Final = {"F4", "U8", "I8", *(dtype for dtype in DTYPE_BITS if dtype.startswith("F8_"))}


def _refuse_unclaimed(rest: Sequence[TensorInfo], decisions: Mapping[str, Decision], layout: str) -> None:
    """Quantized bytes that no weight of the layout accounts for: copied, they would be read as something else."""
    for tensor in rest:
        if tensor.dtype not in _PACKED_DTYPES or len(tensor.shape) < 2:
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
