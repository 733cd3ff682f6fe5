"""How a weight is converted, once it is known what it becomes: the kind of its unit, and whether it takes a static
activation scale. What compute.py then does for each kind stands there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from requant.convert.conversions import Conversion
from requant.convert.input_scales import InputScales
from requant.convert.layouts.base import SourceWeight
from requant.convert.layouts.writing import STRICT_LEAVES, Form, Part
from requant.manifests.errors import SourceError
from requant.manifests.schema import Manifest, Runtime

__all__ = ["is_fusing", "kind_of", "refuse_partly_static", "takes_input"]

_FUSING: Final[frozenset[Runtime]] = frozenset(("vllm", "sglang", "trtllm"))
"""Runtimes that load q, k and v, or gate and up, as one weight with one global scale."""


def is_fusing(manifest: Manifest) -> bool:
    """Whether a runtime of the target keeps one global scale for weights that it fuses."""
    return not _FUSING.isdisjoint(manifest.target.runtimes)


def kind_of(weight: SourceWeight, part: Part, fusing: bool) -> str:
    """`repack`, `relayout`, `share` or `encode` (plan.GroupUnit). fusing: see `is_fusing`."""
    form = part.form
    if (weight.format, form.number) == ("mxfp4", "nvfp4"):
        return "repack"
    if weight.format != form.number or form.number == "bf16" or weight.more.block != form.block:
        return "encode"
    fused = (
        fusing
        and form.number == "nvfp4"
        and part.group != part.module
        and part.module.rpartition(".")[2] in STRICT_LEAVES
    )
    return "share" if fused else "relayout"


def takes_input(manifest: Manifest, conversion: Conversion, scales: InputScales) -> bool:
    """Whether a weight gets a static activation scale where its form has a place for one.

    compressed-tensors' FP8 scales activations anew for every token, which is better than a constant: only scales that
    were measured are worth their place.
    """
    if conversion.target != "fp8" or manifest.target.layout != "compressed-tensors":
        return True
    return scales.measured or (conversion.weight.input is not None and not scales.explicit)


def refuse_partly_static(forms: Sequence[tuple[str, Form]]) -> None:
    """SourceError where some FP8 modules have a static activation scale and others none.

    forms: (module, form) of everything that is converted.
    """
    fp8 = [(module, form) for module, form in forms if form.number == "fp8"]
    without = [module for module, form in fp8 if form.input_scale is None]
    if without and len(without) < len(fp8):
        raise SourceError(
            f"has no activation scale, {len(fp8) - len(without)} other FP8 weights have one",
            where=without[0],
            hint="compressed-tensors describes them together: write activations.input_scale, and the scales become "
            "dynamic, or convert these layers to bf16",
        )
