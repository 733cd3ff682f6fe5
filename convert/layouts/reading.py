"""The producers whose checkpoints can be read, and how `layout: auto` tells them apart.

| layout             | tensors                                                                  | seen in |
|--------------------|--------------------------------------------------------------------------|---------|
| deepseek-v4        | `X.weight` I8 [N, K/2] + `X.scale` F8_E8M0 [N, K/32]; FP8 blocks beside  | DeepSeek-V4 |
| deepseek-v3        | `X.weight` E4M3 [N, K] + `X.weight_scale_inv` per block                  | DeepSeek-V3, Qwen3 |
| gpt-oss            | `X_blocks` U8 [E, N, K/32, 16] + `X_scales` U8 [E, N, K/32]; `X_bias`    | gpt-oss |
| compressed-tensors | `X.weight_packed` + `X.weight_scale`: MXFP4, NVFP4, INT4; `X.weight`: FP8 | Kimi-K2, Kimi-K3 |
| quark, modelopt    | `X.weight` + `X.weight_scale`: MXFP4, NVFP4, FP8                         | Quark, modelopt |
| gptq, awq          | `X.qweight`, `X.qzeros`, `X.scales`                                      | GPTQ, AWQ |
| gguf               | ggml's blocks, under the names of the Hugging Face model                 | llama.cpp |
| plain              | `X.weight` BF16, F16 or F32 [N, K]; stacked experts without `.weight`    | the rest |

Every layout also yields the plain weights that no packed weight has claimed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from requant.convert.checkpoint import Catalogue
from requant.convert.layouts.base import SourceWeight
from requant.convert.layouts.checks import FLOATS, check_mxfp4
from requant.convert.layouts.gguf import Gguf
from requant.convert.layouts.integers import Awq, Gptq
from requant.convert.layouts.layout import Layout
from requant.convert.layouts.suffixed import CompressedTensors, DeepSeekV3, ModelOpt, Quark, block_size, fp8_weight
from requant.convert.shards import TensorInfo
from requant.kernels.formats import MXFP4_GROUP
from requant.manifests.errors import SourceError

__all__ = ["LAYOUTS", "PLAIN_DTYPES", "recognise"]

PLAIN_DTYPES: Final = FLOATS


class DeepSeekV4(Layout):
    """DeepSeek-V4: FP4 experts as I8 nibbles, everything else FP8 in 128x128 blocks, all scales `.scale` E8M0."""

    name = "deepseek-v4"

    def recognise(self, catalogue: Catalogue) -> str | None:
        """Top-level `expert_dtype: fp4` (V4) or the same inside quantization_config (V4.1)."""
        quant = catalogue.quantization_config
        if "fp4" in (catalogue.config.get("expert_dtype"), quant.get("expert_dtype")):
            return "config.json: expert_dtype is fp4"
        return None

    def packed(self, catalogue: Catalogue) -> Iterator[SourceWeight]:
        """FP4 weights and FP8 block weights."""
        block = block_size(catalogue)
        for tensor in catalogue.tensors.values():
            if tensor.dtype not in ("I8", "F4", "F8_E4M3") or not tensor.name.endswith(".weight"):
                continue
            module = tensor.name.removesuffix(".weight")
            if tensor.dtype == "F8_E4M3":
                yield fp8_weight(catalogue, tensor, module, (".scale",), block)
            else:
                scales = catalogue.tensors.get(f"{module}.scale")
                rows, cols = check_mxfp4(tensor, scales, f"{module}.scale", ("F8_E8M0",))
                yield SourceWeight(module, "mxfp4", rows, cols, tensor, scales)


class GptOss(Layout):
    """gpt-oss: experts stacked, K in 16-byte chunks of 32 codes, gate and up rows interleaved."""

    name = "gpt-oss"

    def recognise(self, catalogue: Catalogue) -> str | None:
        """Stacked `_blocks` beside `_scales`."""
        for name in catalogue.tensors:
            if name.endswith("_blocks") and f"{name.removesuffix('_blocks')}_scales" in catalogue.tensors:
                return f"{name} and _scales beside it"
        return None

    def packed(self, catalogue: Catalogue) -> Iterator[SourceWeight]:
        """The stacked experts."""
        for tensor in catalogue.tensors.values():
            if not tensor.name.endswith("_blocks"):
                continue
            module = tensor.name.removesuffix("_blocks")
            scales = catalogue.tensors.get(f"{module}_scales")
            bias = catalogue.tensors.get(f"{module}_bias")
            yield self._stacked(tensor, scales, bias, module)

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


class Plain(Layout):
    """An unquantized checkpoint."""

    name = "plain"

    def recognise(self, catalogue: Catalogue) -> str | None:
        """No quantization_config anywhere, and only float tensors."""
        if catalogue.quantization_config or catalogue.hf_quant_config:
            return None
        odd = next((t for t in catalogue.tensors.values() if t.dtype not in PLAIN_DTYPES and len(t.shape) > 1), None)
        return None if odd else "no quantization_config, all weights are floats"

    def packed(self, catalogue: Catalogue) -> Iterator[SourceWeight]:
        """None of its own: all are plain."""
        yield from ()


LAYOUTS: Final[dict[str, Layout]] = {
    layout.name: layout
    for layout in (
        DeepSeekV4(),
        DeepSeekV3(),
        GptOss(),
        CompressedTensors(),
        Quark(),
        ModelOpt(),
        Gptq(),
        Awq(),
        Gguf(),
        Plain(),
    )
}


def recognise(catalogue: Catalogue, wanted: str) -> tuple[Layout, str]:
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
