"""The quantizers against files that modelopt 0.47 wrote, and against the plain oracle on values it never saw."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from requant.kernels import reference
from requant.kernels.quantize import amax, bf16_to_mxfp4, bf16_to_nvfp4, nvfp4_global_scale
from safetensors.torch import load_file

GOLDENS = Path(__file__).parents[1] / "goldens" / "modelopt"
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def load(name):
    """Every tensor as numpy: BF16 as uint16 bits, E4M3 as bytes."""
    out = {}
    for key, tensor in load_file(GOLDENS / name / "model.safetensors").items():
        if tensor.dtype == torch.bfloat16:
            out[key] = tensor.view(torch.uint16).numpy()
        elif tensor.dtype == torch.float8_e4m3fn:
            out[key] = tensor.view(torch.uint8).numpy()
        else:
            out[key] = tensor.numpy()
    return out


def bits(values):
    """float32 that are BF16 values, as BF16 bits."""
    words = np.ascontiguousarray(values, np.float32).view(np.uint32)
    assert not (words & 0xFFFF).any()
    return (words >> 16).astype(np.uint16)


def to_bf16(values):
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


def mxfp4(w):
    codes, scales = (
        np.empty((w.shape[0], w.shape[1] // 2), np.uint8),
        np.empty((w.shape[0], w.shape[1] // 32), np.uint8),
    )
    bf16_to_mxfp4(w, codes, scales)
    return codes, scales


def nvfp4(w, global_scale, *args):
    codes, scales = (
        np.empty((w.shape[0], w.shape[1] // 2), np.uint8),
        np.empty((w.shape[0], w.shape[1] // 16), np.uint8),
    )
    bf16_to_nvfp4(w, global_scale, codes, scales, *args)
    return codes, scales


def test_mxfp4_equals_modelopt_byte_for_byte():
    source, golden = load("_src_llama_bf16"), load("llama_mxfp4")
    packed = [k.removesuffix("_scale") for k in golden if k.endswith("weight_scale")]
    assert len(packed) == 14
    for name in packed:
        codes, scales = mxfp4(source[name])
        assert (codes == golden[name]).all(), name
        assert (scales == golden[f"{name}_scale"]).all(), name


@pytest.mark.parametrize(
    ("source_name", "name", "tensors"),
    [
        ("_src_llama_bf16", "llama_w4a16_nvfp4", 14),
        ("_src_llama_bf16", "llama_nvfp4_kvfp8", 14),
        ("_src_llama_bf16", "llama_mixed_fp8attn_nvfp4mlp", 6),
        ("_src_qwen3moe_bf16", "qwen3moe_nvfp4_experts", 12),
    ],
)
def test_nvfp4_equals_modelopt_byte_for_byte(source_name, name, tensors):
    source, golden = load(source_name), load(name)
    packed = [k.removesuffix("_scale_2") for k in golden if k.endswith("weight_scale_2")]
    assert len(packed) == tensors
    for tensor in packed:
        prefix, module, _ = tensor.rsplit(".", 2)
        group = next((g for g in FUSED if module in g), (module,))
        top = max(amax(source[f"{prefix}.{member}.weight"]) for member in group)
        scale_2 = nvfp4_global_scale(top)
        assert scale_2 == golden[f"{tensor}_scale_2"], tensor
        codes, scales = nvfp4(source[tensor], scale_2)
        assert (codes == golden[tensor]).all(), tensor
        assert (scales == golden[f"{tensor}_scale"]).all(), tensor


def hard_blocks(rng, blocks, group, low, high):
    """BF16 values with zeros of both signs, ties, clipped values and every exponent between low and high."""
    grid = np.array([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7.9])
    values = np.where(
        rng.random((blocks, group)) < 0.6, rng.choice(grid, (blocks, group)), rng.random((blocks, group)) * 6
    )
    values *= rng.choice([-1.0, 1.0], (blocks, group))
    values *= rng.random((blocks, 1)) > 0.1
    return to_bf16(np.ldexp(values, rng.integers(low, high, (blocks, 1))).astype(np.float32))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([(-150, -100), (-20, 5), (100, 126)]))
def test_mxfp4_equals_the_oracle_at_every_magnitude(seed, exponents):
    rng = np.random.default_rng(seed)
    w = hard_blocks(rng, 8 * 3, 32, *exponents).reshape(8, 96)
    codes, scales = mxfp4(bits(w))
    want_codes, want_scales = reference.encode_mxfp4(w)
    assert (scales == want_scales).all()
    assert (codes == want_codes).all()
    for same in (w, np.asfortranarray(w)):
        assert all((a == b).all() for a, b in zip(mxfp4(same), (codes, scales), strict=True))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([(-140, -100), (-20, 5), (100, 125)]))
def test_nvfp4_equals_the_oracle_at_every_magnitude(seed, exponents):
    rng = np.random.default_rng(seed)
    w = hard_blocks(rng, 150 * 3, 16, *exponents).reshape(150, 48)  # several chunks, the last one ragged
    scale_2 = nvfp4_global_scale(amax(bits(w)))
    assert scale_2 == reference.nvfp4_global_scale([w])
    codes, scales = nvfp4(bits(w), scale_2)
    with np.errstate(all="ignore"):
        want_codes, want_scales = reference.encode_nvfp4(w, scale_2)
    assert (scales == want_scales).all()
    assert (codes == want_codes).all()
    assert all((a == b).all() for a, b in zip(nvfp4(w, scale_2), (codes, scales), strict=True))


def test_every_bf16_value_rounds_as_the_oracle_says():
    w = np.arange(0x7F80, dtype=np.uint32)  # every finite magnitude, both signs
    w = np.concatenate([w, w | 0x8000]).astype(np.uint16).reshape(-1, 64)
    values = (w.astype(np.uint32) << 16).view(np.float32)
    assert all((a == b).all() for a, b in zip(mxfp4(w), reference.encode_mxfp4(values), strict=True))
    scale_2 = np.float32(2.0**-20)
    with np.errstate(all="ignore"):
        want = reference.encode_nvfp4(values, scale_2)
    assert all((a == b).all() for a, b in zip(nvfp4(w, scale_2), want, strict=True))


def test_every_e4m3_midpoint_rounds_to_the_even_byte():
    values = reference.E4M3_VALUES[:0x7F].astype(np.float64)
    middles = (values[1:-1] + values[2:]) / 2
    around = np.concatenate([middles, np.nextafter(np.float32(middles), 0), np.nextafter(np.float32(middles), 999)])
    w = np.zeros((len(around), 16), np.float32)
    w[:, 0] = 6 * around.astype(np.float32)
    _, scales = nvfp4(w, np.float32(1.0))
    assert (scales == reference.encode_nvfp4(w, np.float32(1.0))[1]).all()
    assert (scales[: len(middles), 0] % 2 == 0).all()


def test_f16_counts_as_the_float32_it_is():
    w = np.arange(0x7C00, dtype=np.uint16).view(np.float16).reshape(-1, 64)
    assert all((a == b).all() for a, b in zip(mxfp4(w), mxfp4(w.astype(np.float32)), strict=True))
    scale_2 = nvfp4_global_scale(amax(w))
    assert amax(w) == 65504.0
    assert all((a == b).all() for a, b in zip(nvfp4(w, scale_2), nvfp4(w.astype(np.float32), scale_2), strict=True))
