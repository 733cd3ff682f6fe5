"""GPTQ and AWQ checkpoints: `X.qweight`, `X.qzeros`, `X.scales`, (`X.g_idx`), four bits to a weight, turned [K, N].

What the integers mean stands in config.json alone: bits, the version of the format (GPTQ's first stores zero points
less one), and AWQ's kernel (`gemm`; `gemv` packs another way).
"""

from __future__ import annotations

from collections.abc import Iterator

from requant.convert.checkpoint import Catalogue
from requant.convert.layouts.base import More, SourceWeight
from requant.convert.layouts.checks import check_turned_int4
from requant.convert.layouts.layout import Layout
from requant.manifests.errors import SourceError

__all__ = ["Awq", "Gptq"]


class Gptq(Layout):
    """AutoGPTQ, GPTQModel and what transformers calls gptq."""

    name = "gptq"

    def recognise(self, catalogue: Catalogue) -> str | None:
        """quant_method gptq."""
        quant = catalogue.quantization_config
        if quant.get("quant_method") != self.name:
            return None
        return f"quantization_config: quant_method {self.name}, {quant.get('bits')} bits"

    def packed(self, catalogue: Catalogue) -> Iterator[SourceWeight]:
        """Every `qweight` with its siblings."""
        quant, tensors = catalogue.quantization_config, catalogue.tensors
        awq = self.name == "awq"
        bits = quant.get("bits", quant.get("w_bit", 4))
        if bits != 4:
            raise SourceError(f"has {bits} bits", where="config.json", hint=f"of {self.name} only 4 bits can be read")
        version = str(quant.get("version", "gemm")).lower()
        if awq and version != "gemm":
            raise SourceError(f"AWQ version is {version}", where="config.json", hint="only gemm can be read")
        offset = 0 if awq or quant.get("checkpoint_format") == "gptq_v2" else 1
        for tensor in tensors.values():
            if not tensor.name.endswith(".qweight"):
                continue
            module = tensor.name.removesuffix(".qweight")
            scales, zeros = tensors.get(f"{module}.scales"), tensors.get(f"{module}.qzeros")
            order = None if awq else tensors.get(f"{module}.g_idx")
            rows, cols = check_turned_int4(tensor, scales, zeros, order, awq)
            extra = tuple(t for t in (tensors.get(f"{module}.g_idx"),) if awq and t is not None)
            more = More(turned=True, offset=offset, zeros=zeros, order=order, extra=extra)
            yield SourceWeight(module, self.name, rows, cols, tensor, scales, more=more)


class Awq(Gptq):
    """AutoAWQ's checkpoints."""

    name = "awq"
