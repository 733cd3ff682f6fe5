"""A BF16 checkpoint with a Llama's names, shapes and shards, of any size, filled with noise.

    python tests/bench/make_llama.py FOLDER --gb 1.35

Geometry of Llama-3.2-1B (hidden 2048, MLP 8192, 32 heads of 64, 8 for keys), a vocabulary of 32,000, tied embeddings,
as many decoder layers as fill the size; shards of about 0.5 GB. Weights are normal, 0.02 wide, each row and each block
of 64 columns a little wider or narrower than its neighbours, so that amaxes differ as they do in trained models.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

HIDDEN, INTER, HEADS, KEYS, HEAD, VOCAB = 2048, 8192, 32, 8, 64, 32_000
LAYER = {
    "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
    "self_attn.k_proj": (KEYS * HEAD, HIDDEN),
    "self_attn.v_proj": (KEYS * HEAD, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
    "mlp.gate_proj": (INTER, HIDDEN),
    "mlp.up_proj": (INTER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTER),
}
SHARD = 500_000_000


def noise(rng: np.random.Generator, rows: int, columns: int) -> bytes:
    """BF16 [rows, columns]."""
    width = 0.02 * np.exp(
        0.3 * rng.standard_normal((rows, 1)) + 0.3 * np.repeat(rng.standard_normal(columns // 64), 64)
    )
    values = rng.standard_normal((rows, columns), dtype=np.float32) * width.astype(np.float32)
    return (values.view(np.uint32) >> 16).astype("<u2").tobytes()


def names(layers: int) -> list[tuple[str, tuple[int, ...]]]:
    """Every tensor in file order, with its shape."""
    found: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (VOCAB, HIDDEN))]
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        found += [(f"{prefix}.{leaf}.weight", shape) for leaf, shape in LAYER.items()]
        found += [(f"{prefix}.{norm}.weight", (HIDDEN,)) for norm in ("input_layernorm", "post_attention_layernorm")]
    return [*found, ("model.norm.weight", (HIDDEN,))]


def make(folder: Path, gb: float) -> int:
    """Write it; bytes of tensors."""
    per_layer = 2 * sum(rows * columns for rows, columns in LAYER.values())
    layers = max(round((gb * 1e9 - 2 * VOCAB * HIDDEN) / per_layer), 1)
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    size = 0
    for name, shape in names(layers):
        nbytes = 2 * int(np.prod(shape))
        if size + nbytes > SHARD:
            shards.append([])
            size = 0
        shards[-1].append((name, shape))
        size += nbytes
    weight_map, total = {}, 0
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header, at = {"__metadata__": {"format": "pt"}}, 0
        for name, shape in shard:
            end = at + 2 * int(np.prod(shape))
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
            at, weight_map[name] = end, file
        raw = json.dumps(header).encode()
        raw += b" " * (-len(raw) % 8)
        with (folder / file).open("wb") as out:
            out.write(len(raw).to_bytes(8, "little") + raw)
            for _, shape in shard:
                out.write(noise(rng, *shape) if len(shape) == 2 else np.full(shape, 0x3F80, "<u2").tobytes())
        total += at
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "intermediate_size": INTER,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEYS,
        "head_dim": HEAD,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return total


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gb", type=float, default=1.35)
    given = parser.parse_args()
    print(f"{given.folder}: {make(given.folder, given.gb):,} bytes")
