"""A GGUF file as a shard of a checkpoint: its tensors under the names and shapes of the Hugging Face model.

The folder holds the `.gguf` file (or its parts) beside the `config.json` and tokenizer of the model that it was made
from: a GGUF has all of it in another form, and what a runtime needs is the original.

| in GGUF                                        | here                                                       |
|------------------------------------------------|------------------------------------------------------------|
| `blk.L.attn_q.weight`                          | `model.layers.L.self_attn.q_proj.weight`                   |
| `blk.L.ffn_gate_exps.weight` [E, N, K]         | `model.layers.L.mlp.experts.gate_proj`, a stack of experts |
| types Q4_0 ... Q6_K, MXFP4, NVFP4              | dtype `GGUF:Q4_0` ..., rows of whole blocks                |
| q and k of Llama, rows in rotary pairs         | the same bytes; the layout says how many heads there are   |

Dimensions are turned round (ggml names the fastest first). `rope_freqs` is llama.cpp's own and left out: config.json
says the same as `rope_scaling`. An architecture or a tensor that is not in the tables below is refused, not guessed.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from requant.convert.shards import Shard, TensorInfo
from requant.manifests.errors import EnvironmentFault, SourceError

if TYPE_CHECKING:
    from gguf import GGUFReader

__all__ = ["GGUF_PREFIX", "read_gguf"]

GGUF_PREFIX: Final = "GGUF:"
"""Of the dtype of a tensor in one of ggml's block formats."""
FLOATS: Final = {"F32": "F32", "F16": "F16", "BF16": "BF16"}
TYPES: Final = frozenset({"Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "MXFP4", "NVFP4"})
"""Block formats whose decoding by the gguf package is held to the formats' texts by a test."""
ARCHITECTURES: Final = frozenset({"llama", "qwen2", "qwen3", "qwen3moe"})
ROTARY: Final = frozenset({"llama"})
"""Architectures whose q and k rows llama.cpp reorders (convert_hf_to_gguf.py, LlamaModel.permute)."""
OWN: Final = frozenset({"rope_freqs.weight"})
_TOP: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_PARTS: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
"""llama.cpp's names (gguf-py constants.py) and transformers'."""
_BLOCK: Final = re.compile(r"^blk\.(\d+)\.([a-z_]+)\.(weight|bias)$")


def read_gguf(path: Path, file: str) -> tuple[Shard, list[tuple[str, str]]]:
    """The shard, and (tensor, reason) of what is left out. metadata: `architecture`, `heads`, `kv_heads`.

    SourceError for what is no such GGUF; EnvironmentFault without the package gguf.
    """
    reader = _open(path, file)
    architecture = str(_field(reader, "general.architecture", file))
    if architecture not in ARCHITECTURES:
        raise SourceError(
            f"architecture {architecture!r} is not one whose names are known",
            where=file,
            hint=f"known: {', '.join(sorted(ARCHITECTURES))}; convert the original checkpoint instead",
        )
    tensors: list[TensorInfo] = []
    ignored: list[tuple[str, str]] = []
    for tensor in reader.tensors:
        if tensor.name in OWN:
            ignored.append((f"{file}: {tensor.name}", "llama.cpp's own: config.json says it as rope_scaling"))
            continue
        shape = tuple(int(n) for n in reversed(tensor.shape.tolist()))
        kind = tensor.tensor_type.name
        if kind not in FLOATS and kind not in TYPES:
            hint = f"read: {', '.join(sorted(TYPES))}"
            raise SourceError(f"is {kind}, which is not read", where=f"{file}: {tensor.name}", hint=hint)
        name, dtype = _hf_name(tensor.name, file), FLOATS.get(kind, GGUF_PREFIX + kind)
        tensors.append(TensorInfo(name, dtype, shape, file, int(tensor.data_offset), int(tensor.n_bytes)))
    begin = min((t.begin for t in tensors), default=0)
    with path.open("rb") as handle:
        digest = hashlib.sha256(handle.read(begin)).hexdigest()
    stat = path.stat()
    heads = str(_field(reader, f"{architecture}.attention.head_count", file))
    kv_heads = str(_field(reader, f"{architecture}.attention.head_count_kv", file, heads))
    metadata = {"architecture": architecture, "heads": heads, "kv_heads": kv_heads}
    return Shard(file, stat.st_size, stat.st_mtime_ns, digest, metadata, tuple(tensors)), ignored


def _hf_name(name: str, file: str) -> str:
    block = _BLOCK.match(name)
    stem, _, leaf = name.rpartition(".")
    if block and block[2] in _PARTS:
        part = _PARTS[block[2]]
        full = f"model.layers.{int(block[1])}.{part}"
        return full if ".experts." in part else f"{full}.{block[3]}"
    if stem in _TOP:
        return f"{_TOP[stem]}.{leaf}"
    raise SourceError(
        "is a tensor whose place in the model is not known",
        where=f"{file}: {name}",
        hint="convert the original checkpoint instead",
    )


def _open(path: Path, file: str) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise EnvironmentFault("the package gguf is not installed", hint="pip install 'requant[gguf]'") from error
    try:
        return GGUFReader(path)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise SourceError(f"not a readable GGUF file: {error}", where=file, hint="download it again") from error


def _field(reader: GGUFReader, key: str, file: str, default: str | None = None) -> Any:
    field = reader.get_field(key)
    if field is not None:
        return field.contents()
    if default is None:
        raise SourceError(f"has no {key}", where=file, hint="download it again")
    return default
