"""A GGUF file of the Llama architecture as a Hugging Face BF16 folder: the source that `make demo` starts from.

GGUF stores what llama.cpp computes with, so three things are turned back on the way:

| in GGUF                                    | in the Hugging Face folder                                   |
|--------------------------------------------|--------------------------------------------------------------|
| blocks of Q4_1, Q8_0, F32                  | BF16, rounded to nearest even from the float32 value          |
| q and k rows with the rotary pairs (2i, 2i+1) adjacent | pairs (i, i + head/2), as `LlamaForCausalLM` rotates |
| names `blk.L.attn_q`                       | `model.layers.L.self_attn.q_proj`                             |
| tokens, merges, chat template as metadata  | tokenizer.json, tokenizer_config.json                         |

A missing `output.weight` means that the head is tied to the embedding. Tensors go to disk one at a time at offsets
known beforehand, into `<output>.partial`, which is renamed at the end: memory is one tensor, and no half-made folder
bears the final name. `gguf` and `tokenizers` belong to the `demo` extra and are imported when used.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray
from requant.convert.shards import render_header
from requant.manifests.errors import EnvironmentFault, SourceError, UsageError

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

__all__ = ["ImportedModel", "convert_gguf", "hf_name", "interleaved_to_halves", "round_to_bf16"]

Json: TypeAlias = "str | int | float | bool | Sequence[Json] | Mapping[str, Json] | None"

_BF16_BYTES: Final = 2
_CONTROL_TOKEN: Final = 3
"""`LLAMA_TOKEN_TYPE_CONTROL` in llama.cpp's llama.h: never produced by a merge."""

# llama.cpp's names on the left (gguf-py constants.py, MODEL_ARCH.LLAMA), transformers' LlamaForCausalLM on the right.
_TOP_NAMES: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK_NAMES: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


@dataclass(frozen=True, slots=True)
class ImportedModel:
    """What was written: the folder, its tensors, their elements and bytes."""

    folder: Path
    tensors: int
    weights: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor on its way: where it comes from, its new name and shape, and the heads to un-permute (0: none)."""

    source: ReaderTensor
    name: str
    shape: tuple[int, ...]
    rotary_heads: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _BF16_BYTES


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; KeyError for a name that Llama lacks."""
    stem = name.removesuffix(".weight")
    if not stem.startswith("blk."):
        return f"{_TOP_NAMES[stem]}.weight"
    _, layer, part = stem.split(".", 2)
    return f"model.layers.{int(layer)}.{_BLOCK_NAMES[part]}.weight"


def interleaved_to_halves(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's rotary permutation: weight [heads * d, K], row 2i + s of a head -> row s * d/2 + i."""
    rows, columns = weight.shape
    half = rows // heads // 2
    return weight.reshape(heads, half, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def round_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """BF16 bit patterns of finite float32 values, to nearest, ties to even; overflow becomes infinity."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + (np.uint32(0x7FFF) + odd)) >> np.uint32(16)).astype("<u2")


def convert_gguf(gguf_path: Path, output: Path) -> ImportedModel:
    """Write the Hugging Face folder of a Llama-architecture GGUF file.

    Raises UsageError if `output` exists, SourceError if the file is not such a GGUF or holds a non-finite weight,
    EnvironmentFault without the `demo` extra.
    """
    if output.exists():
        raise UsageError("the output folder exists already", where=str(output), hint="name another folder or remove it")
    reader = _open(gguf_path)
    architecture = _text(reader, "general.architecture", gguf_path)
    if architecture != "llama":
        raise SourceError(
            f"architecture {architecture!r}, and only 'llama' is known", where=str(gguf_path), hint="use a Llama GGUF"
        )
    entries = _entries(reader, gguf_path)
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with (partial / "model.safetensors").open("wb") as file:
        _write_tensors(file, entries, gguf_path)
    tied = all(entry.name != "lm_head.weight" for entry in entries)
    _write_json(partial / "config.json", _config(reader, gguf_path, tied=tied))
    _write_json(partial / "generation_config.json", _special_ids(reader, gguf_path))
    _write_tokenizer(partial, reader, gguf_path)
    partial.rename(output)
    return ImportedModel(
        folder=output,
        tensors=len(entries),
        weights=sum(math.prod(entry.shape) for entry in entries),
        payload_bytes=sum(entry.nbytes for entry in entries),
    )


def _open(path: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise EnvironmentFault("the package gguf is not installed", hint="pip install 'requant[demo]'") from error
    try:
        return GGUFReader(path)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise SourceError(f"not a readable GGUF file: {error}", where=str(path), hint="fetch it again") from error


def _field(reader: GGUFReader, key: str, path: Path) -> object:
    field = reader.fields.get(key)
    if field is None:
        raise SourceError(f"the metadata key {key!r} is missing", where=str(path), hint="use a complete GGUF")
    value: object = field.contents()
    return value


def _text(reader: GGUFReader, key: str, path: Path) -> str:
    return str(_field(reader, key, path))


def _integer(reader: GGUFReader, key: str, path: Path) -> int:
    value = _field(reader, key, path)
    if not isinstance(value, int):
        raise SourceError(f"{key} is {value!r} and not an integer", where=str(path), hint="use a complete GGUF")
    return value


def _real(reader: GGUFReader, key: str, path: Path) -> float:
    value = _field(reader, key, path)
    if not isinstance(value, int | float):
        raise SourceError(f"{key} is {value!r} and not a number", where=str(path), hint="use a complete GGUF")
    # GGUF keeps float32; its shortest decimal form is what the model's config said (1e-05, not 9.999999747378752e-06).
    return float(str(np.float32(value)))


def _items(reader: GGUFReader, key: str, path: Path) -> Sequence[object]:
    value = _field(reader, key, path)
    if not isinstance(value, list):
        raise SourceError(f"{key} is not a list", where=str(path), hint="use a complete GGUF")
    return cast("list[object]", value)


def _entries(reader: GGUFReader, path: Path) -> list[_Entry]:
    """The tensors in the order of their new names, as the safetensors header will list them."""
    heads = {
        "attn_q": _integer(reader, "llama.attention.head_count", path),
        "attn_k": _integer(reader, "llama.attention.head_count_kv", path),
    }
    entries: list[_Entry] = []
    for tensor in reader.tensors:
        try:
            name = hf_name(tensor.name)
        except (KeyError, ValueError) as error:
            raise SourceError(
                f"tensor {tensor.name!r} has no place in a Llama checkpoint", where=str(path), hint="use a Llama GGUF"
            ) from error
        shape = tuple(int(size) for size in reversed(tensor.shape))  # GGUF lists the fastest axis first
        rotary_heads = next((count for part, count in heads.items() if f".{part}." in tensor.name), 0)
        if rotary_heads and shape[0] % (2 * rotary_heads):
            raise SourceError(
                f"tensor {tensor.name!r} has {shape[0]} rows, which {rotary_heads} heads do not divide evenly",
                where=str(path),
                hint="use a complete GGUF",
            )
        entries.append(_Entry(tensor, name, shape, rotary_heads))
    return sorted(entries, key=lambda entry: entry.name)


def _write_tensors(file: IO[bytes], entries: Sequence[_Entry], path: Path) -> None:
    """The safetensors file: its header, then one tensor after the other."""
    from gguf import dequantize

    ends = list(itertools.accumulate(entry.nbytes for entry in entries))
    spans = zip(entries, [0, *ends], ends, strict=False)
    file.write(render_header([(e.name, "BF16", e.shape, begin, end) for e, begin, end in spans], {"format": "pt"}))
    for entry in entries:
        values = dequantize(entry.source.data, entry.source.tensor_type).astype(np.float32, copy=False)
        if not bool(np.isfinite(values).all()):
            raise SourceError(
                f"tensor {entry.source.name!r} holds an infinity or NaN", where=str(path), hint="fetch the file again"
            )
        if entry.rotary_heads:
            values = interleaved_to_halves(values, entry.rotary_heads)
        file.write(round_to_bf16(values).tobytes())
    file.flush()
    os.fsync(file.fileno())


def _config(reader: GGUFReader, path: Path, *, tied: bool) -> Mapping[str, Json]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _integer(reader, "llama.embedding_length", path),
        "intermediate_size": _integer(reader, "llama.feed_forward_length", path),
        "num_hidden_layers": _integer(reader, "llama.block_count", path),
        "num_attention_heads": _integer(reader, "llama.attention.head_count", path),
        "num_key_value_heads": _integer(reader, "llama.attention.head_count_kv", path),
        "rms_norm_eps": _real(reader, "llama.attention.layer_norm_rms_epsilon", path),
        "rope_theta": _real(reader, "llama.rope.freq_base", path),
        "max_position_embeddings": _integer(reader, "llama.context_length", path),
        "vocab_size": len(_items(reader, "tokenizer.ggml.tokens", path)),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        **_special_ids(reader, path),
    }


def _special_ids(reader: GGUFReader, path: Path) -> Mapping[str, Json]:
    return {
        "bos_token_id": _integer(reader, "tokenizer.ggml.bos_token_id", path),
        "eos_token_id": _integer(reader, "tokenizer.ggml.eos_token_id", path),
        "pad_token_id": _integer(reader, "tokenizer.ggml.padding_token_id", path),
    }


def _write_tokenizer(folder: Path, reader: GGUFReader, path: Path) -> None:
    """tokenizer.json and tokenizer_config.json: byte-level BPE with single digits (llama.cpp's `smollm`)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = _text(reader, "tokenizer.ggml.pre", path)
    if kind != "smollm":
        raise SourceError(f"pre-tokenizer {kind!r}, and only 'smollm' is known", where=str(path), hint="use SmolLM2")
    tokens = [str(token) for token in _items(reader, "tokenizer.ggml.tokens", path)]
    kinds = _items(reader, "tokenizer.ggml.token_type", path)
    merges = [str(merge).split(" ", 1) for merge in _items(reader, "tokenizer.ggml.merges", path)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)}, merges=[(left, right) for left, right in merges]
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(  # pyright: ignore[reportUnknownMemberType]  (tokenizers types its list bare)
        [
            AddedToken(token, special=True, normalized=False)
            for token, token_kind in zip(tokens, kinds, strict=True)
            if token_kind == _CONTROL_TOKEN
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[_integer(reader, "tokenizer.ggml.bos_token_id", path)],
            "eos_token": tokens[_integer(reader, "tokenizer.ggml.eos_token_id", path)],
            "pad_token": tokens[_integer(reader, "tokenizer.ggml.padding_token_id", path)],
            "unk_token": tokens[_integer(reader, "tokenizer.ggml.unknown_token_id", path)],
            "model_max_length": _integer(reader, "llama.context_length", path),
            "clean_up_tokenization_spaces": False,
            "chat_template": _text(reader, "tokenizer.chat_template", path),
        },
    )


def _write_json(path: Path, content: Mapping[str, Json]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
