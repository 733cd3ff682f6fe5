"""The decode bench without a GPU: every kind of a config holds the same numbers, and its tables tell each point."""

import pytest
import torch
from module_files import TESTS, load
from requant.convert.synthetic import config_of
from requant.validate.decode_load import decoded
from requant.validate.decode_model import Moe
from requant.validate.decode_products import Products
from requant.validate.decode_speed import step_bytes

SMALL = {
    "hidden_size": 64, "vocab_size": 96, "intermediate_size": 96, "moe_intermediate_size": 32, "head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2,
}  # fmt: skip


def small(name):
    config = {**config_of(name, 2, None)[0], **SMALL}
    return {**config, **{key: 8 for key in ("num_local_experts", "num_experts") if key in config}}


def numbers(matrix):
    if matrix.packed is None:
        return matrix.plain.double()
    if matrix.experts:
        return torch.stack([decoded(matrix.packed, expert) for expert in range(matrix.experts)])
    return decoded(matrix.packed, None)


@pytest.mark.parametrize("name", ["gpt-oss-20b", "qwen3-30b-a3b", "llama-3.1-8b"])
def test_every_kind_holds_the_same_numbers_in_fewer_bytes(name):
    made = load("gpu/random_decoder.py")
    makers = made.RandomDecoders(small(name), 64, "cpu")
    decoders = {kind: makers.make(kind) for kind in made.KINDS}
    base = decoders["bf16"]
    for kind, decoder in decoders.items():
        for ours, plain in zip(decoder.matrices(), base.matrices(), strict=True):
            assert torch.equal(numbers(ours), numbers(plain)), kind
        assert torch.equal(decoder.embedding, base.embedding)
        for ours, plain in zip(decoder.layers, base.layers, strict=True):
            assert ours.attention.window == plain.attention.window
            if isinstance(ours.mlp, Moe):
                assert torch.equal(ours.mlp.router.weight, plain.mlp.router.weight)
    k = base.head.shape[1]
    spread = numbers(base.head).std() * k**0.5
    assert 0.5 < spread < 1.5, "logits neither vanish nor overflow"
    sizes = {kind: step_bytes(decoder, 1, 2.0, 10) for kind, decoder in decoders.items()}
    assert sizes["nvfp4-all"] < sizes["nvfp4-out"] < sizes["nvfp4-head"] < sizes["nvfp4"] < sizes["bf16"]
    assert sizes["mxfp4"] < sizes["nvfp4"]
    assert Products(base).chosen == {}


def test_the_tables_have_each_point_and_its_ratio_to_bf16(monkeypatch):
    monkeypatch.syspath_prepend(TESTS / "gpu")
    bench = load("gpu/bench_decode.py")

    def point(us):
        return {
            "concurrency": 8, "bytes": 2_050_000_000, "step_us_median": us, "step_us_p95": us + 10, "of_roofline": 0.5,
            "stream_tokens_per_s": 1e6 / us, "decode_tokens_per_s": 8e6 / us, "output_tokens_per_s": 1500.4,
            "ttft_ms_median": 9.04, "ttft_ms_p95": 31.0,
            "breakdown": [{"kind": "moe", "us": 750.0}, {"kind": "norm", "us": 250.0}],
        }  # fmt: skip

    points = {"bf16 8": point(2500.0), "nvfp4-all 8": point(1000.0)}
    assert bench.rows(points, ["nvfp4-all", "bf16"]) == [
        "| attention and head NVFP4 too | 8 | 2.05 | 1,000 / 1,010 | 50% | 1,000 | 8,000 | 1,500 | 2.50 | 9.0 / 31.0 |",
        "| BF16 | 8 | 2.05 | 2,500 / 2,510 | 50% | 400 | 3,200 | 1,500 | - | 9.0 / 31.0 |",
    ]
    assert bench.parts(points)[1] == "| nvfp4-all 8 | 750, 75% | - | 250, 25% | - | - |"
