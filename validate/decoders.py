"""Weights in other formats than FP4, as float64: FP8 in every granularity, INT4 of three producers, stacked floats.

The second opinion's own reading of them, from names, dtypes, shapes and the config, through the plain decoders of
`kernels/reference.py`. A `Decoded` says what tensors a weight is made of; `values` reads a range of its rows.

| kind    | tensors                                                                   | value                         |
|---------|---------------------------------------------------------------------------|-------------------------------|
| fp8     | E4M3 [N, K], scale: one, [N], [N, 1], a grid, or E8M0 [N, K/32]           | code * scale of its block     |
| int4    | `weight_packed` I32 [N, K/8], `weight_scale` [N, G], `weight_zero_point`  | (nibble - zero) * scale       |
| gptq    | `qweight` I32 [K/8, N], `scales` [G, N], `qzeros` I32 [G, N/8], `g_idx`   | (nibble - zero - 1) * scale   |
| gguf    | rows of ggml's blocks, or of floats in llama.cpp's order                  | by the package gguf           |
| awq     | `qweight` I32 [K, N/8], `scales` [G, N], `qzeros` I32 [G, N/8]            | (nibble - zero) * scale       |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray
from requant.kernels.reference import dequantize_awq, dequantize_fp8_block, dequantize_gptq, dequantize_packed_int4
from requant.validate.gguf_tensors import GgufTensor
from requant.validate.modules import Kind, Module
from requant.validate.opened import Tensor, as_object

__all__ = ["Decoded", "decoded_of", "split_family"]

Floats = NDArray[np.float64]

_HALVES = frozenset(
    {"qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text", "mixtral", "deepseek_v3", "glm4_moe"}
    | {"minimax_m2"}
)
"""Model types whose stacked experts lie [E, 2I, H], gate in the first half (transformers, the model files)."""
_TURNED_HALVES = frozenset({"llama4", "llama4_text", "qwen3_vl_moe", "qwen3_vl_moe_text"})
"""The same, lying [E, H, 2I]."""
_BLOCKS = ((128, 128), (32, 32))


class Reader(Protocol):
    """What a decoder asks of a checkpoint's reader."""

    def rows(self, tensor: Tensor, start: int, stop: int) -> NDArray[np.uint8]: ...

    def tensor(self, tensor: Tensor) -> object: ...

    def gguf(self, tensor: GgufTensor, start: int, stop: int, expert: int) -> Floats: ...


def split_family(config: Mapping[str, object] | None) -> bool | None:
    """How unquantized experts are stacked: True for halves [E, 2I, H], False for halves [E, H, 2I], None otherwise."""
    places = [config or {}, as_object((config or {}).get("text_config")) or {}]
    types = {str(place.get("model_type", "")) for place in places}
    return True if types & _HALVES else False if types & _TURNED_HALVES else None


@dataclass(frozen=True, slots=True)
class Decoded:
    """A weight [rows, k] in a format of the table.

    block: (h, w) of FP8. offset: added to stored zero points. expert: which one of a stack.
    """

    kind: str
    rows: int
    k: int
    parts: Mapping[str, Tensor]
    block: tuple[int, int] = (0, 0)
    offset: int = 0
    expert: int = 0

    @property
    def step(self) -> int:
        """Row ranges must begin at multiples of this."""
        return 8 if self.kind in ("gptq", "awq") else 1

    def values(self, reader: Reader, start: int, stop: int) -> Floats:
        """Rows [start, stop) as float64, exact."""
        if self.kind == "gguf":
            return reader.gguf(cast("GgufTensor", self.parts["weight"]), start, stop, self.expert)
        if self.kind == "fp8":
            return self.codes_and_steps(reader, start, stop)[0]
        if self.kind == "int4":
            return self._int4(reader, start, stop)
        return self._turned(reader, start, stop)

    def codes_and_steps(self, reader: Reader, start: int, stop: int) -> tuple[Floats, Floats]:
        """Of FP8: the values of rows [start, stop), and the scale of each, both [R, K]."""
        weight, scale = self.parts["weight"], self.parts["scale"]
        high, wide = self.block
        codes = reader.rows(weight, start, stop).reshape(stop - start, self.k)
        lines, across = -(-self.rows // high), -(-self.k // wide)
        whole = reader.rows(scale, 0, scale.shape[0] if scale.shape else 1)
        grid = whole.reshape(lines, across) if scale.dtype in _E8M0 else _numbers(whole, scale).reshape(lines, across)
        first = start // high
        part = grid[first : -(-stop // high)]
        skip = start - first * high  # rows of the first block that lie before the range
        padded = np.vstack([np.zeros((skip, self.k), np.uint8), codes])
        values = dequantize_fp8_block(padded, part, self.block)[skip:]
        ones = np.full_like(padded, 0x38)  # E4M3's 1.0
        return values, dequantize_fp8_block(ones, part, self.block)[skip:]

    def _int4(self, reader: Reader, start: int, stop: int) -> Floats:
        words = reader.rows(self.parts["weight_packed"], start, stop).view("<u4").reshape(stop - start, -1)
        scale = self.parts["weight_scale"]
        scales = _numbers(reader.rows(scale, start, stop), scale).reshape(stop - start, -1)
        zeros = None
        if "weight_zero_point" in self.parts:
            packed = self.parts["weight_zero_point"]
            first = start // 8
            raw = reader.rows(packed, first, -(-stop // 8)).view("<u4").reshape(-1, scales.shape[1])
            skip = start - first * 8
            padded = np.vstack([np.zeros((skip, words.shape[1]), np.uint32), words])
            filled = np.vstack([np.zeros((skip, scales.shape[1])), scales])
            return dequantize_packed_int4(padded, filled, raw, self.k)[skip:]
        if "weight_g_idx" in self.parts:
            order = _whole(reader, self.parts["weight_g_idx"]).astype(np.intp)
            wide = dequantize_packed_int4(words, np.ones((len(words), 1)), zeros, self.k)
            return wide * scales[:, order]
        return dequantize_packed_int4(words, scales, zeros, self.k)

    def _turned(self, reader: Reader, start: int, stop: int) -> Floats:
        words, zeros = _whole(reader, self.parts["qweight"]), _whole(reader, self.parts["qzeros"])
        scales = _whole(reader, self.parts["scales"])[:, start:stop].astype(np.float64)
        packed = np.ascontiguousarray(zeros[:, start // 8 : -(-stop // 8)]).view(np.uint32)
        if self.kind == "awq":
            part = np.ascontiguousarray(words[:, start // 8 : -(-stop // 8)]).view(np.uint32)
            return dequantize_awq(part, scales, packed)
        part = np.ascontiguousarray(words[:, start:stop]).view(np.uint32)
        order = np.arange(self.k) // (self.k // scales.shape[0])
        if "g_idx" in self.parts:
            order = _whole(reader, self.parts["g_idx"]).astype(np.int64)
        return dequantize_gptq(part, scales, packed, order, self.offset)


_E8M0 = ("U8", "F8_E8M0")


def _whole(reader: Reader, tensor: Tensor) -> NDArray[np.generic]:
    """A whole tensor as the view that its file's mapping gives."""
    return cast("_Torch", reader.tensor(tensor)).numpy()


class _Torch(Protocol):
    def numpy(self) -> NDArray[np.generic]: ...


def _numbers(raw: NDArray[np.uint8], tensor: Tensor) -> Floats:
    """Bytes of a float tensor as float64."""
    if tensor.dtype == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return raw.view({"F32": "<f4", "F16": "<f2", "F64": "<f8"}[tensor.dtype]).astype(np.float64)


def decoded_of(module: Module, config: Mapping[str, object] | None, expert: int = 0) -> Decoded | str:
    """How to read an FP8, INT4 or GGUF module, or why it cannot be read."""
    if module.kind is Kind.GGUF and module.weight is not None:
        rows, k = module.weight.shape[-2:]
        return Decoded("gguf", rows, k, {"weight": module.weight}, expert=expert)
    quant = as_object((config or {}).get("quantization_config"))
    quant = quant or as_object((as_object((config or {}).get("text_config")) or {}).get("quantization_config")) or {}
    if module.kind is Kind.FP8:
        return _fp8(module, _block_of(quant))
    if module.kind is not Kind.INT4:
        return f"is {module.kind.value}: no comparison is known for it"
    parts = dict(module.parts)
    if "weight_packed" in parts:
        rows, words = parts["weight_packed"].shape
        return Decoded("int4", rows, words * 8, parts)
    method = str(quant.get("quant_method", ""))
    if method == "awq":
        k, words = parts["qweight"].shape
        return Decoded("awq", words * 8, k, parts)
    if method == "gptq":
        words, rows = parts["qweight"].shape
        return Decoded("gptq", rows, words * 8, parts, offset=0 if quant.get("checkpoint_format") == "gptq_v2" else 1)
    return f"has qweight under quant_method {method or '(none)'}: GPTQ's and AWQ's bits are told by the config alone"


def _block_of(quant: Mapping[str, object]) -> tuple[int, int] | None:
    found = quant.get("weight_block_size")
    for group in (as_object(quant.get("config_groups")) or {}).values():
        found = found or (as_object((as_object(group) or {}).get("weights")) or {}).get("block_structure")
    match found:
        case [int(high), int(wide)]:
            return high, wide
        case _:
            return None


def _fp8(module: Module, block: tuple[int, int] | None) -> Decoded | str:
    weight, scale = module.weight, module.block_scale
    if weight is None or scale is None or len(weight.shape) != 2 or weight.dtype != "F8_E4M3":
        return "is an FP8 weight without a scale, or in no E4M3 matrix: no comparison is known for it"
    rows, k = weight.shape
    shape = (scale.shape[0], scale.shape[2]) if len(scale.shape) == 4 else scale.shape
    candidates = [(rows, k), (1, k), *([block] if block else _BLOCKS), (1, 32)]
    if scale.elements > 1:
        candidates.pop(0)
    for high, wide in candidates:
        grid = (-(-rows // high), -(-k // wide))
        if shape == grid or (grid[1] == 1 and shape in ((), (grid[0],))):
            return Decoded("fp8", rows, k, {"weight": weight, "scale": scale}, (high, wide))
    return f"{scale.name} has shape {list(scale.shape)}, which no block of {list(weight.shape)} gives"
