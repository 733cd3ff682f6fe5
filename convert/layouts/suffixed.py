"""Producers that put codes and scales under suffixes of one module: compressed-tensors, modelopt, Quark, DeepSeek-V3.

One checkpoint may mix formats, so the tensors decide, module by module:

| tensors of X                                                                   | format |
|--------------------------------------------------------------------------------|--------|
| `weight_packed` U8 [N, K/2], `weight_scale` E4M3 [N, K/16], `weight_global_scale` F32 = 1/s2 | NVFP4, compressed-tensors |
| `weight` U8 [N, K/2], `weight_scale` E4M3 [N, K/16], `weight_scale_2` F32      | NVFP4, modelopt and Quark |
| `weight_packed` or `weight` U8 [N, K/2], `weight_scale` U8 or E8M0 [N, K/32]   | MXFP4  |
| `weight_packed` I32 [N, K/8], `weight_scale` [N, K/g], (`weight_zero_point`)   | INT4   |
| `weight` E4M3 [N, K], `weight_scale` or `weight_scale_inv`: one, [N], [N, 1], a grid, or E8M0 [N, K/32] (MXFP8) | FP8 |
"""  # noqa: E501

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, Final, cast

from requant.convert.checkpoint import Catalogue
from requant.convert.layouts.base import NOTHING_MORE, More, SourceWeight
from requant.convert.layouts.checks import FLOATS, check_fp8, check_int4, check_mxfp4, check_nvfp4, place
from requant.convert.layouts.layout import Layout
from requant.convert.shards import TensorInfo
from requant.manifests.errors import SourceError

__all__ = ["CompressedTensors", "DeepSeekV3", "ModelOpt", "Quark", "block_size", "fp8_weight", "quant_algo"]

_RECIPROCAL: Final = More(reciprocal=True)
CT_FORMATS: Final = (
    "mxfp4-pack-quantized",
    "nvfp4-pack-quantized",
    "float-quantized",
    "naive-quantized",
    "pack-quantized",
    "mixed-precision",
)
"""compressed-tensors' formats whose weights are FP4, FP8 or INT4 as above."""
MODELOPT_ALGOS: Final = (
    "mxfp4",
    "w4a8_mxfp4_fp8",
    "nvfp4",
    "w4a16_nvfp4",
    "w4a8_nvfp4_fp8",
    "fp8",
    "fp8_per_channel_per_token",
    "fp8_pb_wo",
    "mxfp8",
    "mixed_precision",
)
"""modelopt's algorithms whose weights follow from codes and scales alone (NVFP4_AWQ's need a vector beside them)."""


def quant_algo(catalogue: Catalogue) -> str | None:
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


def block_size(catalogue: Catalogue) -> tuple[int, int] | None:
    """weight_block_size of the config, or compressed-tensors' block_structure; None where neither stands."""
    quant = catalogue.quantization_config
    found: object = quant.get("weight_block_size")
    if found is None:
        for group in _groups(catalogue):
            found = found or group.get("block_structure")
    match found:
        case [int(high), int(wide)] if high > 0 and wide > 0:
            return high, wide
        case None:
            return None
        case _:
            raise SourceError(
                f"weight_block_size is {found!r}, expected two positive numbers", where="config.json", hint="mend it"
            )


def _groups(catalogue: Catalogue) -> list[dict[str, Any]]:
    """The `weights` object of every config group of a compressed-tensors checkpoint."""
    raw: Any = catalogue.quantization_config.get("config_groups")
    values = cast("list[Any]", list(raw.values())) if isinstance(raw, dict) else []  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    inner = [cast("dict[str, Any]", v).get("weights") for v in values if isinstance(v, dict)]
    return [cast("dict[str, Any]", w) for w in inner if isinstance(w, dict)]


def fp8_weight(
    catalogue: Catalogue, codes: TensorInfo, module: str, suffixes: tuple[str, ...], block: tuple[int, int] | None
) -> SourceWeight:
    """An E4M3 weight with the first scale tensor there is among module + suffixes."""
    scales = next((catalogue.tensors[module + s] for s in suffixes if module + s in catalogue.tensors), None)
    own = check_fp8(codes, scales, " or ".join(module + s for s in suffixes), block)
    own_input = catalogue.tensors.get(f"{module}.input_scale")
    if own_input is not None and (own_input.dtype not in FLOATS or math.prod(own_input.shape) != 1):
        raise SourceError(
            f"activation scale is {own_input.dtype} {list(own_input.shape)}, expected one float",
            where=place(own_input),
            hint="only static scales per tensor can be carried; drop it with a rule, or export the checkpoint again",
        )
    rows, cols = codes.shape
    return SourceWeight(module, "fp8", rows, cols, codes, scales, input=own_input, more=More(block=own))


class Suffixed(Layout):
    """What these producers have in common: the table above."""

    name = ""
    _fp8_suffixes: tuple[str, ...] = (".weight_scale", ".weight_scale_inv")
    _input: tuple[str, ...] = (".input_scale", ".input_global_scale")

    def packed(self, catalogue: Catalogue) -> Iterator[SourceWeight]:
        """Quantized weights. A packed tensor without its scales is an error."""
        block = block_size(catalogue)
        ends = {name.rpartition(".")[2] for name in catalogue.tensors}  # what no module has is not looked for
        own_inputs = tuple(suffix for suffix in self._input if suffix[1:] in ends)
        direct = More(fp8_input=True) if self._fp8_activations(catalogue) else NOTHING_MORE
        for name, tensor in catalogue.tensors.items():
            if name.endswith(".weight_packed"):
                module = name.removesuffix(".weight_packed")
                if tensor.dtype == "I32":
                    yield self._int4(catalogue, tensor, module)
                elif tensor.dtype in ("U8", "F4"):
                    second = ".weight_global_scale"
                    yield self._fp4(catalogue, tensor, module, second, _RECIPROCAL, second[1:] in ends, own_inputs)
            elif name.endswith(".weight") and tensor.dtype in ("U8", "F4"):
                second, module = ".weight_scale_2", name.removesuffix(".weight")
                yield self._fp4(catalogue, tensor, module, second, direct, second[1:] in ends, own_inputs)
            elif name.endswith(".weight") and tensor.dtype == "F8_E4M3":
                yield fp8_weight(catalogue, tensor, name.removesuffix(".weight"), self._fp8_suffixes, block)

    @staticmethod
    def _fp4(
        catalogue: Catalogue,
        codes: TensorInfo,
        module: str,
        second: str,
        more: More,
        has_second: bool,
        own_inputs: tuple[str, ...],
    ) -> SourceWeight:
        tensors = catalogue.tensors
        scales, scalar = tensors.get(f"{module}.weight_scale"), tensors.get(module + second) if has_second else None
        own_input = None
        for suffix in own_inputs:
            own_input = own_input or tensors.get(module + suffix)
        if scalar is None and (scales is None or scales.dtype != "F8_E4M3"):
            rows, cols = check_mxfp4(codes, scales, f"{module}.weight_scale", ("U8", "F8_E8M0"))
            return SourceWeight(module, "mxfp4", rows, cols, codes, scales, input=own_input)
        rows, cols = check_nvfp4(codes, scales, scalar, (f"{module}.weight_scale", module + second))
        if f"{module}.pre_quant_scale" in tensors:
            raise SourceError(
                "belongs to the weight (AWQ), and no target can hold it",
                where=place(tensors[f"{module}.pre_quant_scale"]),
                hint="convert the unquantized checkpoint instead",
            )
        return SourceWeight(module, "nvfp4", rows, cols, codes, scales, scalar=scalar, input=own_input, more=more)

    def _fp8_activations(self, catalogue: Catalogue) -> bool:
        """Whether activations beside NVFP4 weights are FP8: no tensor tells."""
        return False

    @staticmethod
    def _int4(catalogue: Catalogue, codes: TensorInfo, module: str) -> SourceWeight:
        tensors, groups = catalogue.tensors, _groups(catalogue)
        bits = {str(g.get("num_bits")) for g in groups if g.get("type") == "int"}
        if bits - {"4"}:
            raise SourceError(
                f"holds integers of {', '.join(sorted(bits))} bits",
                where=place(codes),
                hint="of pack-quantized only num_bits: 4 can be read",
            )
        sizes: set[int | None] = {g.get("group_size") for g in groups if g.get("type") == "int"}
        size = sizes.pop() if len(sizes) == 1 else None
        scales, zeros = tensors.get(f"{module}.weight_scale"), tensors.get(f"{module}.weight_zero_point")
        rows, cols = check_int4(codes, scales, zeros, size)
        shape, order = tensors.get(f"{module}.weight_shape"), tensors.get(f"{module}.weight_g_idx")
        more = More(zeros=zeros, order=order, extra=(shape,) if shape else ())
        return SourceWeight(module, "int4", rows, cols, codes, scales, more=more)


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


class CompressedTensors(Suffixed):
    """llm-compressor's and Kimi's checkpoints."""

    name = "compressed-tensors"

    def recognise(self, catalogue: Catalogue) -> str | None:
        """quant_method compressed-tensors with a format that can be read (top level or under text_config)."""
        quant = catalogue.quantization_config
        kind = str(quant.get("format", ""))
        if quant.get("quant_method") != self.name or kind not in CT_FORMATS:
            return None
        if "mxfp4" in kind:
            _refuse_low_scales(quant.get("version"))
        return f"quantization_config: quant_method {self.name}, format {kind}"


class Quark(Suffixed):
    """AMD Quark's file exports."""

    name = "quark"
    _input = (".input_scale_2", ".input_scale")

    def recognise(self, catalogue: Catalogue) -> str | None:
        """quant_method quark."""
        method = catalogue.quantization_config.get("quant_method")
        return "quantization_config: quant_method quark" if method == self.name else None


class ModelOpt(Suffixed):
    """nvidia-modelopt's unified exports."""

    name = "modelopt"

    def recognise(self, catalogue: Catalogue) -> str | None:
        """quant_algo in either file."""
        algo, method = quant_algo(catalogue), catalogue.quantization_config.get("quant_method")
        if method in ("modelopt", "modelopt_mixed", None) and str(algo).lower() in MODELOPT_ALGOS:
            return f"quant_algo {algo}"
        return None

    def _fp8_activations(self, catalogue: Catalogue) -> bool:
        return str(quant_algo(catalogue)).lower() == "w4a8_nvfp4_fp8"


class DeepSeekV3(Suffixed):
    """Fine-grained FP8 as DeepSeek-V3 introduced it, and Qwen, MiniMax and transformers took over."""

    name = "deepseek-v3"
    _fp8_suffixes = (".weight_scale_inv", ".weight_scale", ".scale")

    def recognise(self, catalogue: Catalogue) -> str | None:
        """quant_method fp8."""
        quant = catalogue.quantization_config
        fp4 = "fp4" in (catalogue.config.get("expert_dtype"), quant.get("expert_dtype"))
        if quant.get("quant_method") != "fp8" or quant.get("quant_algo") or fp4:
            return None
        return f"quantization_config: quant_method fp8, blocks {quant.get('weight_block_size')}"
