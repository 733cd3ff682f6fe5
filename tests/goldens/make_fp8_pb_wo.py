"""The goldens modelopt/llama_fp8_pb_wo and modelopt/_src_llama_144_bf16: 128 x 128 weight-only FP8, ragged edges.

    python -m venv VENV && VENV/bin/pip install torch==2.13.0 nvidia-modelopt==0.47.0 transformers==5.14.1 accelerate \
        datasets requests
    VENV/bin/python tests/goldens/make_fp8_pb_wo.py FOLDER

A Llama of one layer whose sizes are no multiples of 128. A weight of a single block is avoided: modelopt squeezes its
scale to 0-d, which no loader of this format expects.
"""

import sys
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from transformers import LlamaConfig, LlamaForCausalLM


def main(folder: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=144,
        intermediate_size=160,
        num_hidden_layers=1,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=48,
        vocab_size=16,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder / "_src_llama_144_bf16")
    model.config.dtype = torch.bfloat16
    mtq.quantize(model, mtq.FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG, forward_loop=lambda m: m(torch.arange(16)[None]))
    export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=folder / "llama_fp8_pb_wo")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
