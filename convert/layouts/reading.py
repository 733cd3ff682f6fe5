"""The producers whose checkpoints can be read, and how `layout: auto` tells them apart.

| layout             | tensors                                                                  | seen in |
|--------------------|--------------------------------------------------------------------------|---------|
| deepseek-v4        | `X.weight` I8 [N, K/2] + `X.scale` F8_E8M0 [N, K/32]; FP8 blocks beside  | DeepSeek-V4 |
| gpt-oss            | `X_blocks` U8 [E, N, K/32, 16] + `X_scales` U8 [E, N, K/32]; `X_bias`    | gpt-oss |
| compressed-tensors | `X.weight_packed` U8 [N, K/2] + `X.weight_scale` U8 [N, K/32]            | Kimi-K3 |
| quark, modelopt    | `X.weight` U8 [N, K/2] + `X.weight_scale` U8 [N, K/32]                   | Quark, modelopt |
| plain              | `X.weight` BF16, F16 or F32 [N, K]                                       | the rest |

A weight is told by dtype and the shape of its scale plane, never by element size alone: DeepSeek stores nibbles as I8
beside FP8 weights of one byte, both with a sibling `.scale`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, cast

from requant.convert.checkpoint import Catalogue
from requant.convert.layouts.base import ReadingLayout, SourceWeight, check_mxfp4
from requant.convert.shards import TensorInfo
from requant.kernels.formats import MXFP4_GROUP
from requant.manifests.errors import SourceError

__all__ = ["LAYOUTS", "PLAIN_DTYPES", "recognise"]

PLAIN_DTYPES: Final = ("BF16", "F16", "F32")


def _plain_weights(catalogue: Catalogue, taken: set[str]) -> Iterator[SourceWeight]:
    """2-D float weights that no packed weight has claimed."""
    for tensor in catalogue.tensors.values():
        if tensor.name in taken or tensor.dtype not in PLAIN_DTYPES or len(tensor.shape) != 2:
            continue
        if tensor.name.endswith(".weight"):
            rows, cols = tensor.shape
            yield SourceWeight(tensor.name.removesuffix(".weight"), "plain", rows, cols, tensor, None)


class DeepSeekV4:
    """DeepSeek-V4: FP4 experts as I8 nibbles, everything else FP8 in 128x128 blocks, all scales `.scale` E8M0."""

    name = "deepseek-v4"

    def recognise(self, catalogue: Catalogue) -> str | None:
        """Top-level `expert_dtype: fp4` (V4) or the same inside quantization_config (V4.1)."""
        quant = catalogue.quantization_config
        if "fp4" in (catalogue.config.get("expert_dtype"), quant.get("expert_dtype")):
            return "config.json: expert_dtype is fp4"
        return None

    def weights(self, catalogue: Catalogue) -> Iterator[SourceWeight]:
        """FP4 weights, FP8 block weights (kept as they are today), plain ones."""
        taken: set[str] = set()
        for tensor in catalogue.tensors.values():
            if tensor.dtype not in ("I8", "F4", "F8_E4M3") or not tensor.name.endswith(".weight"):
                continue
            module = tensor.name.removesuffix(".weight")
            scales = catalogue.tensors.get(f"{module}.scale")
            if tensor.dtype != "F8_E4M3":
                rows, cols = check_mxfp4(tensor, scales, f"{module}.scale", ("F8_E8M0",))
                yield SourceWeight(module, "mxfp4", rows, cols, tensor, scales)
            elif scales is None:
                raise SourceError(
                    f"F8_E4M3 weight has no scale tensor {module}.scale",
                    where=f"{tensor.file}: {tensor.name}",
                    hint="read without its scale it would be wrong by orders of magnitude: is a shard missing?",
                )
            elif len(tensor.shape) == 2:
                rows, cols = tensor.shape
                yield SourceWeight(module, "fp8-block", rows, cols, tensor, scales)
            else:
                raise SourceError(
                    f"F8_E4M3 weight has shape {list(tensor.shape)}, expected [N, K]",
                    where=f"{tensor.file}: {tensor.name}",
                    hint="name the right source.layout in the manifest",
                )
            taken.update((tensor.name, f"{module}.scale"))
        yield from _plain_weights(catalogue, taken)


class GptOss:
    """gpt-oss: experts stacked, K in 16-byte chunks of 32 codes, gate and up rows interleaved."""

    name = "gpt-oss"

    def recognise(self, catalogue: Catalogue) -> str | None:
        """Stacked `_blocks` beside `_scales`."""
        for name in catalogue.tensors:
            if name.endswith("_blocks") and f"{name.removesuffix('_blocks')}_scales" in catalogue.tensors:
                return f"{name} and _scales beside it"
        return None

    def weights(self, catalogue: Catalogue) -> Iterator[SourceWeight]:
        """The stacked experts, then the plain weights."""
        taken: set[str] = set()
        for tensor in catalogue.tensors.values():
            if not tensor.name.endswith("_blocks"):
                continue
            module = tensor.name.removesuffix("_blocks")
            scales = catalogue.tensors.get(f"{module}_scales")
            bias = catalogue.tensors.get(f"{module}_bias")
            yield self._stacked(tensor, scales, bias, module)
            taken.update((tensor.name, f"{module}_scales", f"{module}_bias"))
        yield from _plain_weights(catalogue, taken)

    @staticmethod
    def _stacked(blocks: TensorInfo, scales: TensorInfo | None, bias: TensorInfo | None, module: str) -> SourceWeight:
        where = f"{blocks.file}: {blocks.name}"
        if len(blocks.shape) != 4 or blocks.shape[3] != MXFP4_GROUP // 2 or blocks.dtype != "U8" or 0 in blocks.shape:
            raise SourceError(
                f"is {blocks.dtype} {list(blocks.shape)}, expected U8 [experts, N, K/32, 16], not empty",
                where=where,
                hint="name the right source.layout in the manifest",
            )
        experts, rows, groups, _ = blocks.shape
        if scales is None:
            raise SourceError(f"has no scale tensor {module}_scales", where=where, hint="is a shard missing?")
        if scales.dtype != "U8" or scales.shape != (experts, rows, groups):
            raise SourceError(
                f"scale plane is {scales.dtype} {list(scales.shape)}, expected U8 {[experts, rows, groups]}",
                where=f"{scales.file}: {scales.name}",
                hint="blocks and scales are of two exports: download the checkpoint again",
            )
        if bias is not None and bias.shape != (experts, rows):
            raise SourceError(
                f"bias is {list(bias.shape)}, expected {[experts, rows]}",
                where=f"{bias.file}: {bias.name}",
                hint="download the checkpoint again",
            )
        interleaved = module.endswith("gate_up_proj")
        if interleaved and rows % 2:
            raise SourceError(f"{rows} rows cannot alternate gate and up", where=where, hint="damaged checkpoint")
        return SourceWeight(module, "mxfp4", rows, groups * MXFP4_GROUP, blocks, scales, experts, interleaved, bias)


def _quant_algo(catalogue: Catalogue) -> str | None:
    """quant_algo of a modelopt checkpoint, which states it in two files. SourceError if they disagree."""
    nested: object = (catalogue.hf_quant_config or {}).get("quantization")
    other = cast("dict[str, object]", nested).get("quant_algo") if isinstance(nested, dict) else None
    algo = catalogue.quantization_config.get("quant_algo")
    if algo and other and str(algo).lower() != str(other).lower():
        raise SourceError(
            f"says quant_algo {other}, config.json says {algo}",
            where="hf_quant_config.json",
            hint="the files are of two exports: download the checkpoint again",
        )
    return str(algo or other) if algo or other else None


LAST_LOW_SCALES: Final = (0, 13, 0)
"""compressed-tensors up to this release wrote MXFP4 exponents with bias 125 (its pull request 538, January 2026)."""


def _refuse_low_scales(version: object) -> None:
    """Exponents two too low would be read as weights a quarter of their size, and nothing downstream would notice."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", str(version or ""))[:3])
    if numbers and numbers <= LAST_LOW_SCALES:
        raise SourceError(
            f"written by compressed-tensors {version}, whose MXFP4 scales are two exponents too low (bias 125)",
            where="config.json",
            hint="quantize again with compressed-tensors 0.14 or later; if the scales of this checkpoint were mended, "
            "say source.layout: compressed-tensors",
        )


class Suffixed:
    """Producers that put codes and scales under two suffixes of one module."""

    def __init__(self, name: str, codes: str, scales: str) -> None:
        self.name = name
        self._codes = codes
        self._scales = scales

    def recognise(self, catalogue: Catalogue) -> str | None:
        """From quantization_config (top level or under text_config), or hf_quant_config.json for modelopt."""
        quant = catalogue.quantization_config
        method, kind = quant.get("quant_method"), str(quant.get("format", ""))
        if self.name == "compressed-tensors":
            if method == self.name and "mxfp4" in kind:
                _refuse_low_scales(quant.get("version"))
                return f"quantization_config: quant_method {method}, format {kind}"
            return None
        if self.name == "quark":
            return "quantization_config: quant_method quark" if method == "quark" else None
        algo = _quant_algo(catalogue)
        if method in ("modelopt", None) and str(algo).lower() == "mxfp4":
            return f"quant_algo {algo}"
        return None

    def weights(self, catalogue: Catalogue) -> Iterator[SourceWeight]:
        """Weights with both suffixes, then the plain ones. A packed tensor without its scales is an error."""
        taken: set[str] = set()
        for tensor in catalogue.tensors.values():
            if not tensor.name.endswith(self._codes) or tensor.dtype not in ("U8", "F4"):
                continue
            module = tensor.name.removesuffix(self._codes)
            scale_name = module + self._scales
            scales = catalogue.tensors.get(scale_name)
            rows, cols = check_mxfp4(tensor, scales, scale_name, ("U8", "F8_E8M0"))
            yield SourceWeight(module, "mxfp4", rows, cols, tensor, scales)
            taken.update((tensor.name, scale_name))
        yield from _plain_weights(catalogue, taken)


class Plain:
    """An unquantized checkpoint."""

    name = "plain"

    def recognise(self, catalogue: Catalogue) -> str | None:
        """No quantization_config anywhere, and only float tensors."""
        if catalogue.quantization_config or catalogue.hf_quant_config:
            return None
        odd = next((t for t in catalogue.tensors.values() if t.dtype not in PLAIN_DTYPES and len(t.shape) > 1), None)
        return None if odd else "no quantization_config, all weights are floats"

    def weights(self, catalogue: Catalogue) -> Iterator[SourceWeight]:
        """All 2-D float weights."""
        return _plain_weights(catalogue, set())


LAYOUTS: Final[dict[str, ReadingLayout]] = {
    layout.name: layout
    for layout in (
        DeepSeekV4(),
        GptOss(),
        Suffixed("compressed-tensors", ".weight_packed", ".weight_scale"),
        Suffixed("quark", ".weight", ".weight_scale"),
        Suffixed("modelopt", ".weight", ".weight_scale"),
        Plain(),
    )
}


def recognise(catalogue: Catalogue, wanted: str) -> tuple[ReadingLayout, str]:
    """The layout named by the manifest, or for `auto` the one that recognises the checkpoint; with the reason."""
    if wanted != "auto":
        return LAYOUTS[wanted], "named by the manifest"
    for layout in LAYOUTS.values():
        reason = layout.recognise(catalogue)
        if reason:
            return layout, reason
    quant = catalogue.quantization_config
    raise SourceError(
        f"quantization is not one that can be read: quant_method {quant.get('quant_method')!r}, "
        f"format {quant.get('format') or quant.get('quant_algo')!r}",
        where="config.json",
        hint=f"known source layouts: {', '.join(LAYOUTS)}; name one as source.layout if config.json is wrong",
    )
