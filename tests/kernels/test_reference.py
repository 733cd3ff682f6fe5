"""The oracle itself, held against the formats' definitions in exact rationals and against modelopt's own output."""

from __future__ import annotations

import itertools
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from requant.kernels import reference as ref
from requant.kernels.formats import E2M1_VALUES, E4M3_VALUES, E8M0_VALUES
from safetensors import safe_open

GOLDENS = Path(__file__).parents[1] / "goldens" / "modelopt"
MAGNITUDES = [Fraction(0), Fraction(1, 2), *map(Fraction, (1, Fraction(3, 2), 2, 3, 4, 6))]
PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
FUSED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)


def spec_e4m3(byte: int) -> Fraction | None:
    """E4M3 (fn) from its definition: sign, exponent bias 7, mantissa; None is NaN."""
    sign, exponent, mantissa = -1 if byte & 0x80 else 1, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return None
    if exponent == 0:
        return sign * Fraction(mantissa, 8) * Fraction(2) ** -6
    return sign * (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)


def spec_e2m1(code: int) -> Fraction:
    sign, exponent, mantissa = -1 if code & 8 else 1, code >> 1 & 3, code & 1
    if exponent == 0:
        return sign * Fraction(mantissa, 2)
    return sign * (1 + Fraction(mantissa, 2)) * Fraction(2) ** (exponent - 1)


def value(x: float) -> Fraction:
    return Fraction(float(x))


def tensors(name: str) -> dict[str, np.ndarray]:
    """A golden's tensors: BF16 as exact float32, FP8 and U8 as bytes, F32 as is."""
    import torch

    out: dict[str, np.ndarray] = {}
    with safe_open(GOLDENS / name / "model.safetensors", "pt") as file:
        for key in file.keys():  # noqa: SIM118 (safe_open is not a mapping)
            tensor = file.get_tensor(key)
            if tensor.dtype == torch.bfloat16:
                tensor = tensor.float()
            elif tensor.dtype == torch.float8_e4m3fn:
                tensor = tensor.view(torch.uint8)
            out[key] = tensor.numpy()
    return out


@pytest.mark.parametrize("byte", range(256))
def test_every_e4m3_byte_is_its_definition(byte: int) -> None:
    expected = spec_e4m3(byte)
    assert np.isnan(E4M3_VALUES[byte]) if expected is None else value(E4M3_VALUES[byte]) == expected


@pytest.mark.parametrize("byte", range(256))
def test_every_e8m0_byte_is_its_definition_and_255_is_nan_not_infinity(byte: int) -> None:
    if byte == 255:
        assert np.isnan(E8M0_VALUES[byte])
    else:
        assert value(E8M0_VALUES[byte]) == Fraction(2) ** (byte - 127)


def test_every_pair_of_codes_is_read_low_nibble_first_and_keeps_the_sign_of_zero() -> None:
    packed = np.arange(256, dtype=np.uint8)[:, None]
    values = E2M1_VALUES[ref.unpack_nibbles(packed)]
    for byte in range(256):
        assert value(values[byte, 0]) == spec_e2m1(byte & 15)
        assert value(values[byte, 1]) == spec_e2m1(byte >> 4)
        assert bool(np.signbit(values[byte, 0])) == bool(byte & 8)
        assert bool(np.signbit(values[byte, 1])) == bool(byte & 0x80)
    assert (ref.pack_nibbles(ref.unpack_nibbles(packed)) == packed).all()
    assert E2M1_VALUES[ref.unpack_nibbles(np.array([0x21], dtype=np.uint8))].tolist() == [0.5, 1.0]


@pytest.mark.parametrize("byte", [0, 1, 64, 127, 200, 254])
def test_mxfp4_decodes_to_the_exact_product(byte: int) -> None:
    codes = np.arange(16, dtype=np.uint8).repeat(2)[None]
    got = ref.dequantize_mxfp4(ref.pack_nibbles(codes), np.array([[byte]], dtype=np.uint8))
    assert [value(v) for v in got[0]] == [spec_e2m1(int(c)) * Fraction(2) ** (byte - 127) for c in codes[0]]


@pytest.mark.parametrize("s2", [2.0**-135, 2.0**119, float(np.float32(0.1)), float(np.float32(1e-30))])
def test_nvfp4_decodes_to_the_exact_product_for_every_finite_scale(s2: float) -> None:
    scales = np.array([[b] for b in range(0x7F)], dtype=np.uint8)
    codes = np.tile(np.arange(16, dtype=np.uint8), (0x7F, 1))
    got = ref.dequantize_nvfp4(ref.pack_nibbles(codes), scales, s2)
    for byte, code in itertools.product(range(0x7F), range(16)):
        exact = spec_e4m3(byte)
        assert exact is not None
        assert value(got[byte, code]) == spec_e2m1(code) * exact * Fraction(s2)


def test_fp8_blocks_share_the_last_scale_at_ragged_edges() -> None:
    values = np.full((130, 300), 0x38, dtype=np.uint8)  # 1.0
    scales = np.arange(120, 126, dtype=np.uint8).reshape(2, 3)
    got = ref.dequantize_fp8_block(values, scales, (128, 128))
    assert got.shape == (130, 300)
    assert (got[0, 0], got[0, 299], got[129, 127], got[129, 299]) == (2.0**-7, 2.0**-5, 2.0**-4, 2.0**-2)
    assert ref.dequantize_fp8_block(values, np.full((2, 3), 0.5, np.float32), (128, 128))[129, 299] == 0.5
    with pytest.raises(ValueError, match=r"expected \(3, 3\)"):
        ref.dequantize_fp8_block(values, scales, (64, 128))


def test_e4m3_encoding_rounds_to_the_even_byte_and_clamps_before_it_casts() -> None:
    table = [float(v) for v in E4M3_VALUES[:0x7F]]
    middles = np.array([(a + b) / 2 for a, b in itertools.pairwise(table[1:])], dtype=np.float32)
    got = ref.encode_e4m3(middles)
    assert got.tolist() == [b if b % 2 == 0 else b + 1 for b in range(1, 0x7E)]
    assert ref.encode_e4m3(np.nextafter(middles, np.float32(0))).tolist() == list(range(1, 0x7E))
    assert ref.encode_e4m3(np.array(table[1:], np.float32)).tolist() == list(range(1, 0x7F))
    assert ref.encode_e4m3(np.array([448, 464, 465, 480, 1e9, 0, 1e-9], np.float32)).tolist() == [0x7E] * 5 + [1, 1]


def test_llama_bf16_to_mxfp4_is_modelopts_bytes() -> None:
    source, golden = tensors("_src_llama_bf16"), tensors("llama_mxfp4")
    quantized = [k for k in golden if k.endswith(".weight_scale")]
    assert len(quantized) == 14
    for key in quantized:
        codes, scales = ref.encode_mxfp4(source[key.removesuffix("_scale")])
        assert np.array_equal(codes, golden[key.removesuffix("_scale")]), key
        assert np.array_equal(scales, golden[key]), key


def test_llama_bf16_to_nvfp4_is_modelopts_bytes_with_one_global_scale_per_fused_group() -> None:
    source, golden = tensors("_src_llama_bf16"), tensors("llama_w4a16_nvfp4")
    checked = 0
    for layer, group in itertools.product(range(2), FUSED):
        names = [f"model.layers.{layer}.{part}.weight" for part in group]
        s2 = ref.nvfp4_global_scale([source[n] for n in names])
        for name in names:
            codes, scales = ref.encode_nvfp4(source[name], s2)
            assert golden[f"{name}_scale_2"] == s2, name
            assert np.array_equal(codes, golden[name]), name
            assert np.array_equal(scales, golden[f"{name}_scale"]), name
            checked += 1
    assert checked == 14


def test_mxfp4_encoding_writes_every_zero_as_minus_zero_and_rounds_ties_down() -> None:
    weight = np.zeros((1, 32), np.float32)
    assert ref.encode_mxfp4(weight)[0].tolist() == [[0x88] * 16]
    assert ref.encode_mxfp4(weight)[1].tolist() == [[0]]
    weight[0, :9] = [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -5]
    codes, scales = ref.encode_mxfp4(weight)
    assert scales.tolist() == [[127]]
    assert ref.unpack_nibbles(codes)[0, :10].tolist() == [7, 0, 1, 2, 3, 4, 5, 6, 14, 8]


@pytest.mark.parametrize(("amax", "byte"), [(2.7, 126), (5.5, 127), (1.2, 125), (6.0, 127), (6.03125, 128), (3.0, 126)])
def test_mxfp4_exponent_rounds_up_so_that_nothing_saturates(amax: float, byte: int) -> None:
    weight = np.full((1, 32), amax, np.float32)
    _, scales = ref.encode_mxfp4(weight)
    assert scales.tolist() == [[byte]]
    assert amax / 2.0 ** (byte - 127) <= 6 < amax / 2.0 ** (byte - 128)


def test_nvfp4_encoding_rounds_ties_to_even_saturates_and_signs_only_negatives() -> None:
    weight = np.zeros((1, 32), np.float32)
    weight[0, :12] = [6 * 448, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.0, -0.01, 0.0, -5]
    weight[0, 16:28] = [6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.0, -0.01, 0.0, -5]
    codes, scales = ref.encode_nvfp4(weight, np.float32(1.0))
    assert scales.tolist() == [[0x7E, 0x38]]
    assert ref.unpack_nibbles(codes)[0, 16:28].tolist() == [7, 0, 2, 2, 4, 4, 6, 6, 0, 8, 0, 14]


def test_nvfp4_encoding_divides_by_the_rounded_scale_that_is_stored() -> None:
    """amax/6 midway between two E4M3 values: 1.0625 is stored as 1.0, so 5.3 codes against 1.0 (6), not 1.0625 (4)."""
    weight = np.zeros((1, 16), np.float32)
    weight[0, :2] = [6.375, 5.3]
    codes, scales = ref.encode_nvfp4(weight, np.float32(1.0))
    assert scales.tolist() == [[0x38]]
    assert ref.unpack_nibbles(codes)[0, :2].tolist() == [7, 7]


def test_an_all_zero_weight_gets_global_scale_one_and_zero_codes() -> None:
    weight = np.zeros((2, 16), np.float32)
    s2 = ref.nvfp4_global_scale([weight])
    assert s2 == 1
    codes, scales = ref.encode_nvfp4(weight, s2)
    assert not codes.any()
    assert (scales == 0x38).all()


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_encoders_refuse_values_that_e2m1_cannot_express(bad: float) -> None:
    weight = np.full((1, 32), bad, np.float32)
    with pytest.raises(ValueError, match="NaN"):
        ref.encode_mxfp4(weight)
    with pytest.raises(ValueError, match="K = 24 is not a multiple of 32"):
        ref.encode_mxfp4(np.zeros((1, 24), np.float32))


def test_matmul_is_x_times_the_transposed_weight() -> None:
    x, w = np.array([[1, 2], [3, 4]], np.float32), np.array([[5.0, 6.0]])
    assert ref.matmul(x, w).tolist() == [[17.0], [39.0]]
