"""Make a synthetic MXFP4 checkpoint of gpt-oss-120b's shapes: one layer, its experts stacked and interleaved.

python tests/gpu/make_gpt_oss.py FOLDER [--experts 128]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

HIDDEN = INTER = 2880
"""openai/gpt-oss-120b config.json: hidden_size, intermediate_size."""
TOP_K = 4
SPAN = 10
"""Octaves between the largest exponent and the least: within every window, as published gpt-oss-20b is."""


def make(folder: Path, experts: int, seed: int = 0) -> None:
    """Write the folder: 13.3 MB an expert."""
    rng = np.random.default_rng(seed)
    prefix = "model.layers.0.mlp.experts"

    def blocks(rows: int, k: int) -> tuple[np.ndarray, np.ndarray]:
        codes = np.frombuffer(rng.bytes(experts * rows * k // 2), dtype=np.uint8)
        scales = rng.integers(121 - SPAN, 122, (experts, rows, k // 32), dtype=np.uint8)
        return codes.reshape(experts, rows, k // 32, 16), scales

    gate_up, down = blocks(2 * INTER, HIDDEN), blocks(HIDDEN, INTER)
    tensors = {
        f"{prefix}.gate_up_proj_blocks": gate_up[0],
        f"{prefix}.gate_up_proj_scales": gate_up[1],
        f"{prefix}.down_proj_blocks": down[0],
        f"{prefix}.down_proj_scales": down[1],
        "model.norm.weight": np.ones(HIDDEN, np.float32),
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": HIDDEN,
        "intermediate_size": INTER,
        "num_hidden_layers": 1,
        "num_local_experts": experts,
        "num_experts_per_tok": TOP_K,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--experts", type=int, default=128)
    given = parser.parse_args()
    make(given.folder, given.experts)
