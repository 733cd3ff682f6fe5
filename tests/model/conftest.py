"""A golden checkpoint with a tokenizer of single characters beside it, and a text: enough to run both models."""

import json
import shutil
from pathlib import Path

import pytest

GOLDENS = Path(__file__).resolve().parent.parent / "goldens" / "modelopt"
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 40


def write_tokenizer(folder, chat_template=None, **more):
    """Characters 1..127 as tokens; token 0 stands for the rest."""
    from tokenizers import Tokenizer, models

    vocab = {"<unk>": 0, **{chr(code): code for code in range(1, 128)}}
    Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>")).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", **more}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture
def golden(tmp_path):
    """Copies a golden checkpoint, tokenizer added."""

    def copied(name, **tokenizer):
        folder = tmp_path / name
        shutil.copytree(GOLDENS / name, folder)
        write_tokenizer(folder, **tokenizer)
        return folder

    return copied


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


@pytest.fixture
def lossless_nvfp4():
    return _lossless_nvfp4


def _lossless_nvfp4(source, output, layout):
    """llama_mxfp4 as NVFP4 with the same values, in modelopt's or compressed-tensors' names."""
    import numpy as np
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, output)
    made = {}
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        if f"{module}.weight_scale" not in tensors:
            made[name] = tensor
        elif leaf == "weight_scale":
            exponents = tensor.numpy().astype(int) - 127
            m = exponents.max() - 8
            assert exponents.min() - m >= -6
            scales = np.repeat(((exponents - m + 7) << 3).astype(np.uint8), 2, axis=1)
            made[f"{module}.weight_scale"] = torch.tensor(scales).view(torch.float8_e4m3fn)
            if layout == "modelopt":
                made[f"{module}.weight_scale_2"] = torch.tensor(2.0**m, dtype=torch.float32)
            else:
                made[f"{module}.weight_global_scale"] = torch.tensor([2.0**-m], dtype=torch.float32)
        else:
            made[f"{module}.weight_packed" if layout == "compressed-tensors" else name] = tensor
    save_file(made, output / "model.safetensors", metadata={"format": "pt"})
    return output
