"""Make a synthetic MXFP4 checkpoint of real DeepSeek-V4-Flash shapes, any size, streamed to disk.

    python tests/bench/make_checkpoint.py FOLDER --gb 8 [--shard-gb 2.5] [--span 10]

Expert weights are random codes with random exponents inside `span`; beside them stand FP8 blocks, norms and a draft
layer, as in the published checkpoint. Values do not matter to the bytes that move; they are random so that no file
system can leave holes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

HIDDEN, INTER = 4096, 2048
"""deepseek-ai/DeepSeek-V4-Flash config.json: hidden_size, moe_intermediate_size."""
EXPERTS_PER_LAYER = 256


def expert_tensors(prefix: str) -> list[tuple[str, str, tuple[int, int]]]:
    """w1 and w3 [2048, 4096], w2 [4096, 2048], as the producer stores them."""
    shapes = {"w1": (INTER, HIDDEN), "w2": (HIDDEN, INTER), "w3": (INTER, HIDDEN)}
    out: list[tuple[str, str, tuple[int, int]]] = []
    for leaf, (n, k) in shapes.items():
        out += [(f"{prefix}.{leaf}.weight", "I8", (n, k // 2)), (f"{prefix}.{leaf}.scale", "F8_E8M0", (n, k // 32))]
    return out


def tensor_list(total_bytes: int) -> list[tuple[str, str, tuple[int, ...]]]:
    """Names, dtypes and shapes of about `total_bytes`: whole experts, then what stands beside them."""
    beside: list[tuple[str, str, tuple[int, ...]]] = [
        ("embed.weight", "BF16", (8192, HIDDEN)),
        ("head.weight", "BF16", (8192, HIDDEN)),
        ("layers.0.attn.wq_a.weight", "F8_E4M3", (1024, HIDDEN)),
        ("layers.0.attn.wq_a.scale", "F8_E8M0", (8, 32)),
        ("layers.0.ffn.gate.weight", "BF16", (EXPERTS_PER_LAYER, HIDDEN)),
        ("layers.0.ffn_norm.weight", "BF16", (HIDDEN,)),
        *expert_tensors("mtp.0.ffn.experts.0"),
    ]
    size = sum(nbytes(d, s) for _, d, s in beside)
    tensors = list(beside)
    one = sum(nbytes(d, s) for _, d, s in expert_tensors("x"))
    index = 0
    while size + one <= total_bytes:
        layer, expert = divmod(index, EXPERTS_PER_LAYER)
        tensors += expert_tensors(f"layers.{layer}.ffn.experts.{expert}")
        size += one
        index += 1
    return tensors


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of the dtypes used here."""
    return int(np.prod(shape)) * {"BF16": 2, "F32": 4}.get(dtype, 1)


def fill(dtype: str, count: int, rng: np.random.Generator, span: int) -> bytes:
    """Random content: exponents within `span` for E8M0, finite values for floats."""
    if dtype == "F8_E8M0":
        return rng.integers(121 - span, 122, count, dtype=np.uint8).tobytes()
    if dtype == "F8_E4M3":
        return rng.integers(0, 0x7E, count, dtype=np.uint8).tobytes()
    if dtype == "BF16":
        return (rng.standard_normal(count // 2).astype(np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
    return rng.bytes(count)


def make(folder: Path, total_bytes: int, shard_bytes: int, span: int = 10, seed: int = 0) -> int:
    """Write the checkpoint; its bytes."""
    folder.mkdir(parents=True)
    tensors = tensor_list(total_bytes)
    shards: list[list[tuple[str, str, tuple[int, ...]]]] = [[]]
    size = 0
    for tensor in tensors:
        if size + nbytes(*tensor[1:]) > shard_bytes and shards[-1]:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += nbytes(*tensor[1:])
    rng = np.random.default_rng(seed)
    pool = {d: fill(d, 64 * 2**20, rng, span) for d in {t[1] for t in tensors}}
    weight_map: dict[str, str] = {}
    written = 0
    for number, members in enumerate(shards):
        name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        position = 0
        for tensor, dtype, shape in members:
            end = position + nbytes(dtype, shape)
            header[tensor] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
            weight_map[tensor] = name
            position = end
        raw = json.dumps(header).encode()
        raw += b" " * (-len(raw) % 8)
        with (folder / name).open("wb") as handle:
            handle.write(len(raw).to_bytes(8, "little") + raw)
            for _, dtype, shape in members:
                count = nbytes(dtype, shape)
                begin = int(rng.integers(0, len(pool[dtype]) - min(count, len(pool[dtype])) + 1)) & ~1
                chunk = pool[dtype][begin : begin + count]
                while len(chunk) < count:
                    chunk += pool[dtype][: count - len(chunk)]
                handle.write(chunk)
        written += position
    index = {"metadata": {"total_size": written}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "expert_dtype": "fp4",
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INTER,
        "n_routed_experts": EXPERTS_PER_LAYER,
        "num_experts_per_tok": 6,
        "num_nextn_predict_layers": 1,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return written


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gb", type=float, default=8.0)
    parser.add_argument("--shard-gb", type=float, default=2.5)
    parser.add_argument("--span", type=int, default=10)
    given = parser.parse_args()
    total = make(given.folder, int(given.gb * 1e9), int(given.shard_gb * 1e9), given.span)
    print(f"{given.folder}: {total:,} bytes")
