"""Make Kimi-K3's headers without its weights: 497,220 tensors in 96 sparse shards that claim 1.5 TB and take 60 MB.

    python tests/bench/make_sparse.py FOLDER [--layers 92] [--experts 896]

Names, dtypes and shapes of the routed experts are the published ones (moonshotai/Kimi-K3: config.json and the index);
what stands beside them is reduced to as many plain tensors as the published checkpoint has. Reading a hole gives
zeros, so such a folder can be planned and inspected, and not sensibly converted.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

LAYERS, EXPERTS = 92, 896
LATENT, INTER = 3584, 3072
"""config.json: num_hidden_layers less first_k_dense_replace, num_experts; routed_expert_hidden_size (half of
hidden_size 7168), moe_intermediate_size."""
TENSORS, SHARDS = 497_220, 96
PREFIX = "language_model.model.layers"

Entry = tuple[str, str, tuple[int, ...], int]


def expert_entries(layer: int, experts: int) -> list[Entry]:
    """(name, dtype, shape, bytes) of all routed experts of a layer."""
    out: list[Entry] = []
    for expert in range(experts):
        base = f"{PREFIX}.{layer}.block_sparse_moe.experts.{expert}"
        for leaf, n, k in (("w1", INTER, LATENT), ("w2", LATENT, INTER), ("w3", INTER, LATENT)):
            out.append((f"{base}.{leaf}.weight_packed", "U8", (n, k // 2), n * k // 2))
            out.append((f"{base}.{leaf}.weight_scale", "U8", (n, k // 32), n * k // 32))
    return out


def beside_entries(layer: int, count: int) -> list[Entry]:
    """`count` plain tensors of a layer: projections and norms."""
    out: list[Entry] = [(f"{PREFIX}.{layer}.block_sparse_moe.gate.weight", "BF16", (EXPERTS, 7168), EXPERTS * 14336)]
    for index in range(1, count):
        name = f"{PREFIX}.{layer}.self_attn.part_{index}"
        out.append(
            (f"{name}.weight", "BF16", (1536, 7168), 1536 * 7168 * 2)
            if index % 2
            else (f"{name}.norm_weight", "F32", (7168,), 7168 * 4)
        )
    return out


def make(folder: Path, layers: int = LAYERS, experts: int = EXPERTS) -> int:
    """Write config.json, the index and the shards' headers; the number of tensors."""
    folder.mkdir(parents=True)
    shards = [expert_entries(layer, experts) for layer in range(1, layers + 1)]
    whole = layers == LAYERS and experts == EXPERTS
    shards += [[] for _ in range(SHARDS - layers if whole else 1)]
    beside = TENSORS - sum(map(len, shards)) if whole else 8 * layers
    per_shard, left = divmod(beside, len(shards))
    for number in range(len(shards)):
        shards[number] += beside_entries(number + 1, per_shard + (number < left))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):06d}.safetensors"
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        position = 0
        for name, dtype, shape, nbytes in shard:
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + nbytes]}
            position += nbytes
            weight_map[name] = file
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        with (folder / file).open("wb") as handle:
            handle.write(len(raw).to_bytes(8, "little") + raw)
            os.truncate(handle.fileno(), 8 + len(raw) + position)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    quantization = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "version": "0.17.2"}
    config = {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "text_config": {"model_type": "kimi_linear", "num_experts": experts, "quantization_config": quantization},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return len(weight_map)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--experts", type=int, default=EXPERTS)
    given = parser.parse_args()
    print(f"{make(given.folder, given.layers, given.experts):,} tensors in {given.folder}")
