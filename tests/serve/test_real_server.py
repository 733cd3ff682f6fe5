"""`requant bench --launch` and `compare` on `transformers serve` under guidellm's load: neither of them a mock.

The model is a Llama of 0.1 M random weights with a byte tokenizer, so the question is not asked; what is tested is that
the two programs, their options and their reports are what serving.py takes them for.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("guidellm", reason="the extra serve is not installed")
pytest.importorskip("fastapi", reason="transformers[serving] is not installed")

from requant.convert.cli import main

SERVE = f"{Path(sys.executable).parent / 'transformers'} serve --port {{port}} --device cpu --dtype float32"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A folder that transformers loads."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("models") / "tiny"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, bos_token_id=256, eos_token_id=256, pad_token_id=256,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def requant(*arguments) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(a) for a in arguments])
    return int(ended.value.code or 0)


def bench(model: Path, out: Path, label: str, *more: str) -> int:
    load = ("--concurrency", "1,2", "--requests", "4,6", "--prompt-tokens", "16", "--output-tokens", "6")
    return requant("bench", model, "--launch", SERVE, "--label", label, "--out", out, "--quiet", *load, *more)


def test_two_runs_are_measured_and_compared(model: Path, tmp_path: Path, capsys) -> None:
    for label in ("first", "second"):
        assert bench(model, tmp_path, label, "--answer", "") == 0, capsys.readouterr()
        run = json.loads((tmp_path / f"{label}.json").read_text())
        assert (run["complete"], run["error"], run["answer"]) == (True, "", "not asked")
        assert run["server"].startswith("transformers ")
        assert run["prompts"]["fixed_lengths"] is False  # transformers refuses ignore_eos
        assert [(p["concurrency"], p["completed"], p["errors"], p["empty"]) for p in run["points"]] == [
            (1, 4, 0, 0),
            (2, 6, 0, 0),
        ]
        for point in run["points"]:
            assert point["output_tokens_per_s"] > 0
            assert 0 < point["ttft_ms_median"] <= point["ttft_ms_p95"]
            assert all(1 <= count <= 6 for count in point["samples"]["output_tokens"])
    capsys.readouterr()
    assert requant("compare", tmp_path / "first.json", tmp_path / "second.json", "--format", "json") == 0
    ratios = json.loads(capsys.readouterr().out)["ratios"]
    assert [r["concurrency"] for r in ratios] == [1, 1, 1, 2, 2, 2]
    assert all(r["low"] <= r["ratio"] <= r["high"] for r in ratios if r["low"] is not None)


def test_random_weights_do_not_know_the_capital_of_france(model: Path, tmp_path: Path, capsys) -> None:
    assert bench(model, tmp_path, "asked") == 5
    assert "without 'Paris'" in capsys.readouterr().err
    assert json.loads((tmp_path / "asked.json").read_text())["points"] == []
