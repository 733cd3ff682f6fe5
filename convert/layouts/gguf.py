"""GGUF: rows of ggml's blocks, which the package gguf decodes, but for FP4 (convert/ggml.py).

See convert/gguf_source.py for names and shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from requant.convert.checkpoint import Catalogue
from requant.convert.gguf_source import GGUF_PREFIX, ROTARY
from requant.convert.layouts.base import NOTHING_MORE, More, SourceWeight
from requant.convert.layouts.checks import FLOATS, place
from requant.convert.layouts.layout import Layout
from requant.convert.shards import TensorInfo
from requant.manifests.errors import SourceError

__all__ = ["Gguf"]

_FP4: Final = {f"{GGUF_PREFIX}MXFP4": "mxfp4", f"{GGUF_PREFIX}NVFP4": "nvfp4"}
"""Types whose codes and scales are those of the formats, in another order."""


class Gguf(Layout):
    """llama.cpp's files."""

    name = "gguf"

    def recognise(self, catalogue: Catalogue) -> str | None:
        """Shards that are GGUF files."""
        shard = catalogue.shards[0]
        if not shard.file.endswith(".gguf"):
            return None
        return f"{shard.file}: GGUF of architecture {shard.metadata.get('architecture')}"

    def packed(self, catalogue: Catalogue) -> Iterator[SourceWeight]:
        """Weights in block formats, stacked experts, and Llama's q and k, whose rows lie in another order."""
        metadata = catalogue.shards[0].metadata
        rotary = metadata.get("architecture") in ROTARY
        for tensor in catalogue.tensors.values():
            stacked = ".experts." in tensor.name
            module = tensor.name.removesuffix(".weight")
            packed = tensor.dtype.startswith(GGUF_PREFIX)
            heads = 0
            if rotary and module.endswith((".q_proj", ".k_proj")):
                heads = int(metadata["heads" if module.endswith(".q_proj") else "kv_heads"])
            if not (packed or stacked or (heads and tensor.dtype in FLOATS)) or tensor.name.endswith(".bias"):
                continue
            if len(tensor.shape) != (3 if stacked else 2) or (heads and tensor.shape[0] % (2 * heads)):
                raise SourceError(f"has shape {list(tensor.shape)}", where=place(tensor), hint="damaged file")
            yield self._weight(module, tensor, packed, heads, tensor.shape[0] if stacked else 0)

    @staticmethod
    def _weight(module: str, tensor: TensorInfo, packed: bool, heads: int, experts: int) -> SourceWeight:
        rows, cols = tensor.shape[-2:]
        number = _FP4.get(tensor.dtype)
        plain = not (heads or experts or number)
        more = NOTHING_MORE if plain else More(rotary=heads, split=bool(experts), blocked=number is not None)
        kind = number or ("gguf" if packed else "plain")
        return SourceWeight(module, kind, rows, cols, tensor, None, experts, more=more)
