"""E4M3 encoding: modelopt's bytes, another library's bytes, and the scale of every block."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from requant.kernels.cpu_dequant import dequantize_fp8_block
from requant.kernels.fp8 import block_amax, encode_fp8, encoded_amax, fp8_scales
from requant.kernels.quantize import NonFiniteError

GOLDENS = Path(__file__).resolve().parent.parent / "goldens" / "modelopt"


def bits(values):
    """BF16 bits of float32 values, by another library's rounding."""
    return values.astype(ml_dtypes.bfloat16).view(np.uint16)


def encoded(w, block, quotient="f32"):
    grid = np.zeros((-(-w.shape[0] // block[0]), -(-w.shape[1] // block[1])), np.float32)
    block_amax(w, block, grid)
    scales, out = fp8_scales(grid), np.empty(w.shape, np.uint8)
    encode_fp8(w, scales, block, out, quotient=quotient)
    return out, scales


def spread(grid, block, shape):
    return np.repeat(np.repeat(grid, block[0], axis=0), block[1], axis=1)[: shape[0], : shape[1]]


def test_bf16_per_tensor_is_modelopts_byte_for_byte():
    """Eight attention weights; a quotient not rounded to BF16 first gives other bytes in most of them."""
    from safetensors.torch import load_file

    source = load_file(GOLDENS / "_src_llama_bf16" / "model.safetensors")
    golden = load_file(GOLDENS / "llama_mixed_fp8attn_nvfp4mlp" / "model.safetensors")
    other = 0
    for layer in (0, 1):
        for leaf in "qkvo":
            name = f"model.layers.{layer}.self_attn.{leaf}_proj"
            w = source[f"{name}.weight"].view(dtype=torch.int16).numpy().view(np.uint16)
            wanted = golden[f"{name}.weight"].view(dtype=torch.uint8).numpy()
            out, scales = encoded(w, w.shape, "bf16")
            assert scales[0, 0] == golden[f"{name}.weight_scale"].item()
            assert (out == wanted).all()
            other += int((encoded(w, w.shape)[0] != wanted).sum())
    assert other > 100


@pytest.mark.parametrize("block", [(128, 128), (32, 32), (1, 333), (300, 333), (1, 32)])
def test_every_block_rounds_as_ml_dtypes_does(block):
    """Ragged edges, subnormals, ties, over 25 octaves."""
    rng = np.random.default_rng(0)
    w = (rng.standard_normal((300, 333)) * np.exp2(rng.integers(-20, 5, (300, 333)))).astype(np.float32)
    w[0, :6] = [0.0, -0.0, 1.0, -1.0, 1e-30, -1e-30]
    out, scales = encoded(w, block)
    tops = [[np.abs(w[i : i + block[0], j : j + block[1]]).max() for j in range(0, 333, block[1])]
            for i in range(0, 300, block[0])]  # fmt: skip
    assert (scales == np.float32(tops) / np.float32(448)).all()
    assert (out == (w / spread(scales, block, w.shape)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)).all()


@pytest.mark.parametrize(("quotient", "dtype"), [("bf16", ml_dtypes.bfloat16), ("f16", np.float16)])
def test_a_narrow_quotient_is_rounded_twice(quotient, dtype):
    rng = np.random.default_rng(3)
    w = rng.standard_normal((64, 128)).astype(dtype).astype(np.float32)
    source = bits(w) if quotient == "bf16" else w.astype(np.float16)
    out, scales = encoded(source, w.shape, quotient)
    twice = (w / scales[0, 0]).astype(dtype).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert (out == twice).all()
    assert (twice != (w / scales[0, 0]).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)).any()


def test_rows_may_come_in_any_tiles():
    rng = np.random.default_rng(2)
    w = rng.standard_normal((300, 256)).astype(np.float32)
    whole, scales = encoded(w, (128, 128))
    grid, parts = np.zeros_like(scales), np.empty_like(whole)
    for first in range(0, 300, 77):
        block_amax(w[first : first + 77], (128, 128), grid, first)
    for first in range(0, 300, 77):
        encode_fp8(w[first : first + 77], fp8_scales(grid), (128, 128), parts[first : first + 77], first)
    assert (parts == whole).all()


def test_the_decoder_gives_every_code_back():
    codes = np.array([b for b in range(256) if b & 0x7F != 0x7F], np.uint8).reshape(2, 127)
    values, out = np.empty(codes.shape, np.float32), np.empty(codes.shape, np.uint8)
    dequantize_fp8_block(codes, np.ones((1, 1), np.float32), codes.shape, values)
    encode_fp8(values, np.ones((1, 1), np.float32), codes.shape, out)
    assert (out == codes).all()


def test_zeros_have_scale_one_and_nan_is_refused():
    out, scales = encoded(np.zeros((4, 8), np.float32), (4, 8))
    assert scales[0, 0] == 1
    assert not out.any()
    w = np.zeros((4, 8), np.float32)
    w[2, 5] = np.inf
    with pytest.raises(NonFiniteError, match="row 2, column 5"):
        encoded(w, (4, 8))


@pytest.mark.parametrize("block", [(128, 128), (32, 32), (1, 333), (300, 333), (1, 32)])
@pytest.mark.parametrize("e8m0", [False, True])
def test_the_amax_of_codes_is_that_of_the_decoded_values(block, e8m0):
    rng = np.random.default_rng(4)
    codes = rng.integers(0, 256, (300, 333), dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x11
    shape = -(-300 // block[0]), -(-333 // block[1])
    scales = rng.integers(100, 140, shape, dtype=np.uint8) if e8m0 else rng.random(shape).astype(np.float32)
    values = np.empty(codes.shape, np.float32)
    dequantize_fp8_block(codes, scales, block, values)
    assert encoded_amax(codes, scales, block) == np.abs(values).max()
    codes[299, 332] = 0xFF
    with pytest.raises(NonFiniteError, match="row 299, column 332"):
        encoded_amax(codes, scales, block)
