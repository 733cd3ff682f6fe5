"""What a model needs of a GPU before anything is copied there: the FP32 head is counted, where there is one."""

from types import SimpleNamespace

import pytest
import torch
from requant.kernels.empty_model import ModelUnavailableError
from requant.validate import load_model
from requant.validate.opened import Tensor
from torch import nn

VOCABULARY, HIDDEN = 1000, 64
EMBEDDING = 2 * VOCABULARY * HIDDEN
"""Bytes in BF16."""


class Model(nn.Module):
    def __init__(self, head):
        super().__init__()
        with torch.device("meta"):
            self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
            self.lm_head = head

    def get_output_embeddings(self):
        return self.lm_head


def tensor(name, dtype, *shape, size):
    elements = torch.Size(shape).numel()
    return Tensor(name=name, dtype=dtype, shape=shape, nbytes=elements * size, file="model.safetensors")


def folder(*more):
    embedding = tensor("model.embed_tokens.weight", "BF16", VOCABULARY, HIDDEN, size=2)
    return SimpleNamespace(tensors={t.name: t for t in (embedding, *more)})


def needed(monkeypatch, folder, model):
    """Bytes at which the check begins to pass."""
    low, high = 0, 1 << 30
    while low < high:
        middle = (low + high) // 2
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=middle: (free, 1 << 40))
        try:
            load_model._check_gpu(folder, model)
            high = middle
        except ModelUnavailableError:
            low = middle + 1
    return low


def linear():
    return nn.Linear(HIDDEN, VOCABULARY, bias=False, device="meta")


def test_a_tied_head_is_a_copy_of_the_embedding_in_fp32(monkeypatch):
    assert needed(monkeypatch, folder(), Model(linear())) == EMBEDDING + 2 * EMBEDDING


def test_a_head_of_its_own_is_there_in_both_for_a_moment(monkeypatch):
    own = tensor("lm_head.weight", "BF16", VOCABULARY, HIDDEN, size=2)
    assert needed(monkeypatch, folder(own), Model(linear())) == 2 * EMBEDDING + 2 * EMBEDDING


def test_a_packed_head_and_none_stay_as_they_are(monkeypatch):
    packed = (
        tensor("lm_head.weight", "U8", VOCABULARY, HIDDEN // 2, size=1),
        tensor("lm_head.weight_scale", "F8_E4M3", VOCABULARY, HIDDEN // 16, size=1),
        tensor("lm_head.weight_scale_2", "F32", size=4),
    )
    scales = VOCABULARY * HIDDEN // 16  # E4M3 counts as what plain FP8 would become
    assert needed(monkeypatch, folder(*packed), Model(linear())) == EMBEDDING + EMBEDDING // 4 + 2 * scales + 2
    assert needed(monkeypatch, folder(), Model(None)) == EMBEDDING


def test_the_message_says_how_much_is_missing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**9, 1 << 40))
    large = tensor("model.layers.0.mlp.down_proj.weight", "BF16", 10**6, 1000, size=2)
    with pytest.raises(ModelUnavailableError, match=r"needs 2\.0 GB of the GPU, 1\.0 GB are free"):
        load_model._check_gpu(folder(large), Model(linear()))
