"""A GGUF source as the second opinion reads it: tensors under the model's names, rows as float64.

Names and the rotary order are written down here once more, from llama.cpp's converter, so that the judge does not share
the converter's tables. Decoding is the package gguf's, which the tests hold to the formats' texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from requant.validate.collector import Collector
from requant.validate.opened import Tensor

__all__ = ["GgufTensor", "gguf_rows", "gguf_values", "read_gguf"]

_NAMES = (
    (re.compile(r"^token_embd\."), "model.embed_tokens."),
    (re.compile(r"^output_norm\."), "model.norm."),
    (re.compile(r"^output\."), "lm_head."),
    (re.compile(r"^blk\.(\d+)\.attn_(q|k)_norm\."), r"model.layers.\1.self_attn.\2_norm."),
    (re.compile(r"^blk\.(\d+)\.attn_norm\."), r"model.layers.\1.input_layernorm."),
    (re.compile(r"^blk\.(\d+)\.attn_output\."), r"model.layers.\1.self_attn.o_proj."),
    (re.compile(r"^blk\.(\d+)\.attn_(q|k|v)\."), r"model.layers.\1.self_attn.\2_proj."),
    (re.compile(r"^blk\.(\d+)\.ffn_norm\."), r"model.layers.\1.post_attention_layernorm."),
    (re.compile(r"^blk\.(\d+)\.ffn_gate_inp\."), r"model.layers.\1.mlp.gate."),
    (re.compile(r"^blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight$"), r"model.layers.\1.mlp.experts.\2_proj"),
    (re.compile(r"^blk\.(\d+)\.ffn_(gate|up|down)\."), r"model.layers.\1.mlp.\2_proj."),
)


@dataclass(frozen=True, slots=True)
class GgufTensor(Tensor):
    """A tensor of a GGUF file. begin: offset of its bytes. heads: whose rows lie in rotary pairs, or 0."""

    begin: int = 0
    heads: int = 0


def read_gguf(path: Path, found: Collector) -> Iterator[GgufTensor]:
    """The tensors of one file; what is wrong goes to `found`."""
    try:
        from gguf import GGUFReader

        reader = GGUFReader(path)
    except (ImportError, OSError, ValueError, KeyError, IndexError) as error:
        found.error("shard-unreadable", f"is no readable GGUF file: {error}", where=path.name)
        return
    fields = {key: field.contents() for key, field in reader.fields.items() if key.endswith(_WANTED)}
    kind = str(fields.get("general.architecture", ""))
    for entry in reader.tensors:
        name, count = entry.name, 0
        for pattern, new in _NAMES:
            name, count = pattern.subn(new, name)
            if count:
                break
        if not count:
            continue  # llama.cpp's own
        heads = 0
        if kind == "llama" and ".attn_q." in entry.name:
            heads = int(str(fields.get("llama.attention.head_count", 0)))
        elif kind == "llama" and ".attn_k." in entry.name:
            heads = int(str(fields.get("llama.attention.head_count_kv", fields.get("llama.attention.head_count", 0))))
        shape = tuple(int(n) for n in entry.shape.tolist()[::-1])
        dtype, begin = entry.tensor_type.name, int(entry.data_offset)
        yield GgufTensor(name, dtype, shape, path.name, int(entry.n_bytes), begin, heads)


_WANTED = ("general.architecture", "attention.head_count", "attention.head_count_kv")


def gguf_rows(folder: Path, tensor: GgufTensor, start: int, stop: int, expert: int = 0) -> NDArray[np.uint8]:
    """Bytes of rows [start, stop) along the last axis but one (of one expert of a stack), [R, row bytes]."""
    rows = tensor.shape[-2] if len(tensor.shape) > 1 else 1
    experts = tensor.shape[0] if len(tensor.shape) > 2 else 1
    width = tensor.nbytes // (rows * experts)
    begin = tensor.begin + (expert * rows + start) * width
    return np.memmap(folder / tensor.file, np.uint8, "r", begin, ((stop - start) * width,)).reshape(stop - start, -1)


def gguf_values(folder: Path, tensor: GgufTensor, start: int, stop: int, expert: int = 0) -> NDArray[np.float64]:
    """Rows [start, stop) of the model's matrix as float64: decoded, and put back in the model's order."""
    from gguf import GGMLQuantizationType, quants

    rows = tensor.shape[-2]
    if tensor.heads:  # row s * d/2 + i of a head is stored as its row 2i + s
        head = rows // tensor.heads
        wanted = np.arange(start, stop)
        inside = wanted % head
        stored = wanted - inside + 2 * (inside % (head // 2)) + inside // (head // 2)
        first, last = start // head * head, -(-stop // head) * head
        raw = np.asarray(gguf_rows(folder, tensor, first, last, expert))[stored - first]
    else:
        raw = np.asarray(gguf_rows(folder, tensor, start, stop, expert))
    kind = GGMLQuantizationType[tensor.dtype]
    plain = {"F32": "<f4", "F16": "<f2"}.get(tensor.dtype)
    if plain:
        return np.ascontiguousarray(raw).view(plain).astype(np.float64)
    return np.asarray(quants.dequantize(np.ascontiguousarray(raw), kind)).astype(np.float64)
