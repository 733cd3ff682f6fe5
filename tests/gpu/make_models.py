"""Random checkpoints that transformers loads, with a tokenizer: a Llama of SmolLM2's shapes, a Qwen3-MoE, a gpt-oss.

python tests/gpu/make_models.py FOLDER       FOLDER/llama, FOLDER/qwen3moe (BF16), FOLDER/gptoss (MXFP4 experts)

For the stage `model` on a GPU: weights are random, so figures say whether two formats compute alike, and nothing of
accuracy.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file


def tokenizer(folder: Path) -> None:
    """Bytes as tokens, and an end of text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<end>").save_pretrained(folder)


def save(model, folder: Path, spread: float = 1.0) -> None:
    """The model in BF16. spread: of the output head, so that distributions are not flat."""
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(spread)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer(folder)


def llama(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True, initializer_range=0.04,
    )  # fmt: skip
    save(LlamaForCausalLM(config), folder)


def qwen3moe(folder: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=512, intermediate_size=1024, moe_intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2, head_dim=64, num_experts=32, num_experts_per_tok=4,
        norm_topk_prob=True, decoder_sparse_step=1, max_position_embeddings=2048, initializer_range=0.05,
    )  # fmt: skip
    save(Qwen3MoeForCausalLM(config), folder, 4.0)
    tensors = load_file(folder / "model.safetensors")
    if not any(".experts.0." in name for name in tensors):  # some releases save them stacked; published ones are not
        for name in [n for n in tensors if n.endswith("experts.gate_up_proj")]:
            stem = name.removesuffix("gate_up_proj")
            both, down = tensors.pop(name), tensors.pop(f"{stem}down_proj")
            for e in range(config.num_experts):
                gate, up = both[e].chunk(2, 0)
                for leaf, value in (("gate_proj", gate), ("up_proj", up), ("down_proj", down[e])):
                    tensors[f"{stem}{e}.{leaf}.weight"] = value.contiguous()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def gptoss(folder: Path) -> None:
    from transformers import GptOssConfig, GptOssForCausalLM

    hidden, inter, experts = 576, 576, 32
    config = GptOssConfig(
        vocab_size=512, hidden_size=hidden, intermediate_size=inter, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, num_local_experts=experts, num_experts_per_tok=4,
        max_position_embeddings=4096, sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 2,
        initializer_range=0.05,
    )  # fmt: skip
    save(GptOssForCausalLM(config), folder, 4.0)
    tensors = load_file(folder / "model.safetensors")
    rng = np.random.default_rng(0)
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        del tensors[name]
        rows = 2 * inter if "gate_up" in name else hidden
        k = hidden if "gate_up" in name else inter
        codes = rng.integers(0, 256, (experts, rows, k // 32, 16), dtype=np.uint8)
        tensors[f"{name}_blocks"] = torch.tensor(codes)
        tensors[f"{name}_scales"] = torch.tensor(rng.integers(117, 122, (experts, rows, k // 32), dtype=np.uint8))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    (folder / "config.json").write_text(json.dumps(raw, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    root: Path = parser.parse_args().folder
    torch.manual_seed(0)
    for make in (llama, qwen3moe, gptoss):
        make(root / make.__name__)
