"""What only several sections of a manifest together can get wrong.

The sections arrive one by one, and any may be missing because it is faulty itself: so the loader reports these faults
beside all others instead of after them. Each fault is a path into the manifest and a sentence.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Final

from requant.manifests.gates import Validate
from requant.manifests.sections import (
    Activations,
    Execute,
    LayerRule,
    Publish,
    Source,
    Target,
    TargetFormat,
    TensorFormat,
)
from requant.manifests.urls import is_url

__all__ = ["UNSCALED_FORMATS", "disagreements"]

UNSCALED_FORMATS: Final[tuple[TargetFormat, ...]] = ("nvfp4-w4a16", "mxfp4", "bf16")
"""Formats whose layers hold no static activation scale."""

MADE_BY: Final[dict[TargetFormat, tuple[TensorFormat, ...]]] = {
    "nvfp4": ("nvfp4", "fp8", "bf16"),
    "nvfp4-w4a16": ("nvfp4", "fp8", "bf16"),
    "mxfp4": ("mxfp4", "fp8", "bf16"),
    "fp8": ("fp8", "bf16"),
    "bf16": ("bf16",),
}
"""What a rule's `to` may be under each target format besides keep and drop; the first gives it its name."""


def disagreements(
    *,
    source: Source | None,
    target: Target | None,
    layers: Sequence[LayerRule] | None,
    activations: Activations | None,
    execute: Execute | None,
    validation: Validate | None,
    publish: Publish | None,
) -> Iterator[tuple[str, str]]:
    """Every contradiction between the sections that are there, as (dotted path, sentence)."""
    if layers is not None:
        yield from _unreachable(layers)
    if layers is not None and target is not None:
        yield from _formats(layers, target)
    if layers is not None and source is not None:
        yield from _lossless_from_plain(layers, source)
    if layers is not None and validation is not None:
        yield from _lossless_gate(layers, validation)
    if target is not None and activations is not None:
        yield from _activation_scales(target, activations, layers or ())
    if layers is not None and activations is not None:
        yield from _uncalibrated(layers, activations)
    if source is not None and target is not None:
        yield from _same_folder(source, target)
    if source is not None and execute is not None and execute.stream and not _is_elsewhere(source):
        yield (
            "execute.stream",
            "stream fetches from the Hub or an object store, and the source is a folder; set source.repo or delete it",
        )
    if target is not None and execute is not None and execute.work is not None and not is_url(target.output):
        yield "execute.work", "work is for outputs in an object store, and target.output is a folder; delete it"
    if source is not None and publish is not None and source.repo == publish.repo:
        yield "publish.repo", "the result would go into the repository that the source came from"


def _is_elsewhere(source: Source) -> bool:
    return source.repo is not None or (source.path is not None and is_url(source.path))


def _unreachable(layers: Sequence[LayerRule]) -> Iterator[tuple[str, str]]:
    """Rules that no module can reach because an earlier rule takes all that they match."""
    first: dict[str, int] = {}
    for index, rule in enumerate(layers):
        catch_all = next((place for match, place in first.items() if not match.strip("*")), None)
        if rule.match in first:
            yield f"layers.{index}.match", f"no module gets here: layers.{first[rule.match]} has the same match"
        elif catch_all is not None:
            yield (
                f"layers.{index}.match",
                f"no module gets here: layers.{catch_all} matches everything; put the catch-all last",
            )
        _ = first.setdefault(rule.match, index)


def _formats(layers: Sequence[LayerRule], target: Target) -> Iterator[tuple[str, str]]:
    """Rules that make another format than the target's, and a target that no rule makes."""
    allowed = MADE_BY[target.format]
    strange = [index for index, rule in enumerate(layers) if rule.to not in (*allowed, "keep", "drop")]
    for index in strange:
        yield (
            f"layers.{index}.to",
            f"to: {layers[index].to} does not go with target.format: {target.format}, which takes "
            f"{', '.join(allowed)}, keep and drop",
        )
    if all(rule.to in ("keep", "drop") for rule in layers):
        yield "layers", f"no rule converts anything; target.format: {target.format} needs a rule with to: {allowed[0]}"
    elif not strange and all(rule.to != allowed[0] for rule in layers):
        yield "target.format", f"no rule makes {target.format}: none of them says to: {allowed[0]}"


def _lossless_from_plain(layers: Sequence[LayerRule], source: Source) -> Iterator[tuple[str, str]]:
    """Exact conversion asked of a source that holds no quantized weights."""
    if source.layout != "plain":
        return
    for index, rule in enumerate(layers):
        if rule.scale == "lossless" and rule.to in ("nvfp4", "mxfp4", "fp8"):
            yield (
                f"layers.{index}.scale",
                f"to: {rule.to} from source.layout: plain must round; write scale: nearest (only FP4 sources need not)",
            )


def _lossless_gate(layers: Sequence[LayerRule], validation: Validate) -> Iterator[tuple[str, str]]:
    """A lossless gate over rules that round."""
    if validation.numerics is None or validation.numerics.lossless != "required":
        return
    for index, rule in enumerate(layers):
        if rule.scale != "lossless":
            yield (
                "validate.numerics.lossless",
                f"lossless: required cannot hold: layers.{index} rounds (scale: {rule.scale}); bound it by min_sqnr_db",
            )


def _uncalibrated(layers: Sequence[LayerRule], activations: Activations) -> Iterator[tuple[str, str]]:
    """Rules that need what calibration measures, without it."""
    if activations.calibrate is not None:
        return
    for index, rule in enumerate(layers):
        if rule.needs_calibration:
            key, value = ("rounding", "gptq") if rule.rounding == "gptq" else ("scale", "weighted")
            yield f"layers.{index}.{key}", f"{key}: {value} needs activations.calibrate: {{text: FILE}}"


def _activation_scales(
    target: Target, activations: Activations, layers: Sequence[LayerRule]
) -> Iterator[tuple[str, str]]:
    """Activation scales where the format has none, or none where it needs them."""
    if target.format in UNSCALED_FORMATS:
        if activations.calibrate is not None and any(rule.needs_calibration for rule in layers):
            return
        key = "calibrate" if activations.calibrate is not None else "input_scale"
        if activations.calibrate is not None or activations.input_scale is not None:
            yield f"activations.{key}", f"target.format: {target.format} has no activation scales; delete {key}"
    elif target.format == "nvfp4" and activations.calibrate is None and activations.input_scale is None:
        yield (
            "activations.input_scale",
            "target.format: nvfp4 needs activation scales (vLLM computes NaN without); "
            "write 1.0, or use target.format: nvfp4-w4a16",
        )


def _same_folder(source: Source, target: Target) -> Iterator[tuple[str, str]]:
    """Source and output spelled as the same folder (links and nesting are judged when the folders are opened), or one
    address in the other."""
    if source.path is None:
        return
    if is_url(source.path) and is_url(target.output):
        if f"{target.output}/".startswith(f"{source.path}/") or f"{source.path}/".startswith(f"{target.output}/"):
            yield "target.output", "source and output lie in one another; the source is never written to"
    elif os.path.normpath(source.path) == os.path.normpath(target.output):
        yield "target.output", "the output folder is the source folder; the source is never written to"
