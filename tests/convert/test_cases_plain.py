"""What others got wrong with unquantized parts: tied heads, draft layers, zero blocks, plain beside packed tensors.

Ids in the docstrings are those of the failure catalogue.
"""

import json
import math

import numpy as np
import pytest
from requant.manifests.errors import SourceError

MXFP4 = [{"match": "*", "to": "mxfp4", "scale": "nearest"}]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def bf16_of(values):
    """BF16 bytes of floats that BF16 holds exactly."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any()
    return (bits >> 16).astype("<u2").tobytes()


def values_of(found, name):
    """Values of an MXFP4 weight in modelopt's layout."""
    _, shape, data = found[f"{name}.weight"]
    codes = np.frombuffer(data, np.uint8).reshape(shape)
    scales = np.frombuffer(found[f"{name}.weight_scale"][2], np.uint8).reshape(shape[0], -1).astype(int)
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(shape[0], -1)
    return E2M1[nibbles] * np.repeat(2.0 ** (scales - 127), 32, axis=1)


def tiny(kit, **config):
    """A one-layer Llama-like checkpoint without lm_head."""
    tensors = {"model.embed_tokens.weight": kit.bf16(kit.rng, 96, 64), "model.norm.weight": kit.bf16(kit.rng, 64)}
    for leaf in ("q_proj", "k_proj", "v_proj", "o_proj"):
        tensors[f"model.layers.0.self_attn.{leaf}.weight"] = kit.bf16(kit.rng, 64, 64)
    for leaf, shape in {"gate_proj": (128, 64), "up_proj": (128, 64), "down_proj": (64, 128)}.items():
        tensors[f"model.layers.0.mlp.{leaf}.weight"] = kit.bf16(kit.rng, *shape)
    return kit.write_checkpoint(kit.tmp / "src", [tensors], {"model_type": "llama", **config}), tensors


def test_a_tied_embedding_stays_plain_and_tied(kit):
    """C73."""
    source, tensors = tiny(kit, tie_word_embeddings=True)
    output, _ = kit.convert(source, MXFP4, format="mxfp4")
    found = kit.load(output)
    assert found["model.embed_tokens.weight"] == tensors["model.embed_tokens.weight"]
    assert not [n for n in found if n.startswith("lm_head")]
    config = json.loads((output / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert config["quantization_config"]["ignore"] == ["lm_head", "model.embed_tokens"]
    assert len([n for n in found if n.endswith("weight_scale")]) == 7


@pytest.mark.parametrize("amax", [2.6875, 5.5, 1.203125, 6.0, 6.03125, 0.75, 0.0078125])
def test_the_blocks_exponent_is_rounded_up_so_that_nothing_saturates(kit, amax):
    """C16: half of all blocks clip where the exponent is rounded down."""
    values = np.linspace(-1, 1, 32)
    values = np.float32(np.round(values * 8) / 8) * np.float32(amax / 2)
    values[0] = amax
    values = (values.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32).reshape(1, 32)
    tensors = {"a.weight": ("BF16", (1, 32), bf16_of(values))}
    output, _ = kit.convert(kit.write_checkpoint(kit.tmp / "src", [tensors], {}), MXFP4, format="mxfp4")
    found = kit.load(output)
    exponent = found["a.weight_scale"][2][0] - 127
    assert exponent == math.ceil(math.log2(amax / 6))
    assert amax / 2.0**exponent <= 6
    steps = np.abs(values_of(found, "a") - values) / 2.0**exponent
    assert steps.max() <= 1.0  # half of the widest step, 4 to 6


def test_a_zero_block_quantizes_to_zeros(kit):
    """C01, C05: no 0/0, no NaN, in a weight that is zero altogether or in part."""
    values = np.zeros((2, 64), np.float32)
    values[1, 40] = 1.0
    tensors = {"a.weight": ("BF16", (2, 64), bf16_of(values)), "z.weight": ("BF16", (2, 64), bytes(256))}
    output, _ = kit.convert(kit.write_checkpoint(kit.tmp / "src", [tensors], {}), MXFP4, format="mxfp4")
    found = kit.load(output)
    assert (values_of(found, "a") == values).all()
    assert (values_of(found, "z") == 0).all()
    assert 255 not in found["a.weight_scale"][2] + found["z.weight_scale"][2]


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_a_value_that_is_not_finite_is_named_with_its_place(kit, dtype):
    """C46, C113."""
    width = {"BF16": 2, "F16": 2, "F32": 4}[dtype]
    raw = bytearray(64 * 4 * width)
    bits = {"BF16": 0x7FC0, "F16": 0x7E00, "F32": 0x7FC00000}[dtype]
    raw[(64 * 2 + 33) * width : (64 * 2 + 33) * width + width] = bits.to_bytes(width, "little")
    source = kit.write_checkpoint(kit.tmp / "src", [{"a.weight": (dtype, (4, 64), bytes(raw))}], {})
    with pytest.raises(SourceError, match=r"model.safetensors: a.weight: value at row 2, column 33 is NaN") as caught:
        kit.convert(source, MXFP4, format="mxfp4")
    assert caught.value.exit_code == 3
    assert not (kit.tmp / "out").exists()


def test_biases_norms_and_odd_tensors_keep_their_bytes(kit):
    """C23, C69, C81: scalars, empty tensors, names without a dot, every dtype."""
    odd = {
        "scalar": ("F32", (), b"\x00\x00\x80\x3f"),
        "empty": ("BF16", (0, 4), b""),
        "a.b.c.d.e": ("I64", (3,), bytes(range(24))),
        "flags": ("BOOL", (3,), b"\x01\x00\x01"),
        "complex": ("C64", (1,), b"12345678"),
        "k_scale": ("F8_E4M3", (4,), b"\x38\x39\x3a\x3b"),
        "name with spaces/\u00e4": ("U16", (2,), b"abcd"),
    }
    codes, scales = kit.mx(kit.rng, 32, 64)
    tensors = {**odd, "layers.0.ffn.experts.0.w1.weight": codes, "layers.0.ffn.experts.0.w1.scale": scales}
    output, _ = kit.convert(kit.write_checkpoint(kit.tmp / "src", [tensors], kit.DSV4_CONFIG))
    found = kit.load(output)
    assert {name: found[name] for name in odd} == odd


def test_the_draft_layers_packed_experts_keep_their_bytes(kit):
    """C70, C71: a draft transcoded to NVFP4 accepted 1.8% of its tokens instead of 80%."""
    source = kit.dsv4()
    output, _ = kit.convert(source)
    before, after = kit.load(source), kit.load(output)
    draft = {n for n in before if n.startswith("mtp.")}
    assert {n: after[n] for n in draft} == {n: before[n] for n in draft}
    assert {n for n in after if n.startswith("mtp.")} == draft
    assert "mtp.*" in json.loads((output / "config.json").read_text())["quantization_config"]["ignore"]


def test_no_tensor_is_all_zero_unless_its_source_is(kit):
    """C113."""
    source = kit.dsv4(shards=3, experts=3, layers=2)
    output, _ = kit.convert(source, shard_size="20KB")
    before, after = kit.load(source), kit.load(output)
    zero = {n for n, (_, _, data) in before.items() if not any(data)}
    assert {n for n, (_, _, data) in after.items() if not any(data)} == zero
    assert zero
