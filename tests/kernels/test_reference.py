"""The oracle itself, held against the formats' definitions in exact rationals and against modelopt's own output."""

from __future__ import annotations

import itertools
import math
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


def mx(*rows: list[tuple[list[int], int]]) -> tuple[np.ndarray, np.ndarray]:
    """MXFP4 (codes, scales) from rows of (32 codes, E8M0 byte)."""
    codes = np.array([[c for block, _ in row for c in block] for row in rows], dtype=np.uint8)
    scales = np.array([[byte for _, byte in row] for row in rows], dtype=np.uint8)
    return ref.pack_nibbles(codes), scales


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


# --- the repack -------------------------------------------------------------------------------------------------------


def decoded(member: tuple[np.ndarray, np.ndarray], m: int) -> np.ndarray:
    return ref.dequantize_nvfp4(*member, 2.0**m)


def test_inside_the_marlin_window_codes_are_untouched_and_the_largest_scale_is_two_to_the_eighth() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (4, 32), dtype=np.uint8)
    scales = rng.integers(110, 125, (4, 2), dtype=np.uint8)
    scales[0] = [110, 124]
    m, [(new, block)], counts = ref.repack_oracle([(codes, scales)])
    assert m == 124 - 127 - 8
    assert np.array_equal(new, codes)
    assert (block[0] == [0x08, 0x08, 0x78, 0x78]).all()
    assert counts[:4] == (16, 0, 0, 0)
    assert np.array_equal(decoded((new, block), m), ref.dequantize_mxfp4(codes, scales))


def subset_block(subset: int) -> list[int]:
    """32 codes whose magnitudes are exactly the set's members (0 alone for the empty set), with mixed signs."""
    members = [i for i in range(8) if subset >> i & 1] or [0]
    return [members[i % len(members)] | (8 if i // len(members) % 2 else 0) for i in range(32)]


def halvings(subset: int, factor: Fraction) -> float:
    members = {MAGNITUDES[i] for i in range(1, 8) if subset >> i & 1}
    if not members:
        return math.inf
    steps = 0
    while all(v * factor ** (steps + 1) in MAGNITUDES for v in members):
        steps += 1
    return steps


@pytest.mark.parametrize("span", range(31))
def test_every_span_with_every_subset_of_magnitudes(span: int) -> None:
    """One block of full range fixes k_max; a second, `span` under it, holds each of the 256 magnitude subsets.

    The top block holds 6 and 0.5, so it neither doubles nor halves and m must be k_max - 8.
    """
    top = [7, 1, 15, 9] * 8
    for subset in range(256):
        low = subset_block(subset)
        source = mx([(top, 127), (low, 127 - span)])
        m, [member], counts = ref.repack_oracle([source])
        assert m == -8
        assert counts.exact + counts.shifted + counts.lossy == 4
        want, got = ref.dequantize_mxfp4(*source)[0], decoded(member, m)[0]
        can = halvings(subset, Fraction(1, 2))
        dead = math.isinf(can)
        lossless = dead or span <= 17 + can
        assert (counts.lossy == 0) == lossless
        assert np.array_equal(want[:32], got[:32])
        assert np.array_equal(want, got) == lossless
        assert np.array_equal(np.signbit(want), np.signbit(got)), "a sign was lost"
        assert counts.shifted == (0 if dead or span <= 14 or (span <= 17 and span > 14 + can) or not lossless else 2)
        scale_floor_met = dead or span <= 14 + can
        assert (counts.below_marlin == 0) == (scale_floor_met or member[1][0, 2] == 8)
        error = [abs(value(a) - value(b)) for a, b in zip(want, got, strict=True)]
        assert counts.max_error == max(error)
        assert counts.squared_error == sum(e * e for e in error)
        if not lossless:
            assert_least_squares(want[32:48], got[32:48], int(member[1][0, 2]), m)


def assert_least_squares(want: np.ndarray, got: np.ndarray, byte: int, m: int) -> None:
    """No E4M3 scale and no codes do better, and no smaller byte does as well (float64 holds these sums exactly)."""
    error = float(((want - got) ** 2).sum())
    grid = np.unique(np.abs(E2M1_VALUES.astype(np.float64)))
    for other in range(1, 0x7F):
        steps = grid * float(E4M3_VALUES[other]) * 2.0**m
        best = float((np.abs(np.abs(want)[:, None] - steps).min(axis=1) ** 2).sum())
        assert best >= error
        if best == error and (got != 0).any():
            assert byte <= other
            return
    assert byte == 0x08


def test_a_dead_block_with_a_huge_exponent_does_not_push_out_the_live_ones() -> None:
    dead, live = [0, 8] * 16, [7, 1, 2, 11] * 8
    source = mx([(dead, 250), (live, 120)])
    m, [(codes, scales)], counts = ref.repack_oracle([source])
    assert m == 120 - 127 - 8
    assert scales.tolist() == [[0x08, 0x08, 0x78, 0x78]]
    assert np.array_equal(codes, source[0])
    assert counts[:4] == (4, 0, 0, 0)


def test_a_live_block_with_scale_byte_zero_is_looked_at_and_counted_lossy() -> None:
    source = mx([([7, 1] * 16, 127), ([7, 1] * 16, 0)])
    _, [(codes, scales)], counts = ref.repack_oracle([source])
    assert counts[:4] == (2, 0, 2, 0)
    assert scales[0, 2:].tolist() == [8, 8]
    assert not (codes[0, 16:] & 0x77).any()


def test_spread_18_is_reencoded_and_17_is_exact() -> None:
    block = [7, 1, 3, 13] * 8
    _, [(_, scales)], counts = ref.repack_oracle([mx([(block, 127), (block, 110)])])
    assert (counts[:4], scales.tolist()) == ((4, 0, 0, 2), [[0x78, 0x78, 1, 1]])
    assert ref.repack_oracle([mx([(block, 127), (block, 109)])]).counts.lossy == 2


def test_one_global_scale_for_all_members_of_a_fused_group() -> None:
    gate, up = mx([([7, 1] * 16, 127)]), mx([([7, 1] * 16, 120)])
    m, [(_, first), (_, second)], _ = ref.repack_oracle([gate, up])
    assert (m, first.tolist(), second.tolist()) == (-8, [[0x78, 0x78]], [[0x40, 0x40]])


@pytest.mark.parametrize("doublings", [0, 1, 2, 3, 4])
def test_a_top_block_that_doubles_makes_room_below(doublings: int) -> None:
    """The largest block holds only 0.5, so m may sink by up to three octaves for the sake of the smallest."""
    source = mx([([1, 9] * 16, 127), ([7, 1] * 16, 127 - 17 - doublings)])
    m, [(codes, scales)], counts = ref.repack_oracle([source])
    if doublings <= 3:
        # as far down as the small block needs; at span 17, three octaves lift it into Marlin's window as well
        assert m == {0: -11, 1: -9, 2: -10, 3: -11}[doublings]
        assert counts.below_marlin == (0 if doublings == 0 else 2)
        assert counts.lossy == 0
        assert counts.shifted == 2
        assert np.array_equal(decoded((codes, scales), m), ref.dequantize_mxfp4(*source))
    else:
        assert counts.lossy == 2


def test_an_m_that_would_clamp_the_largest_block_is_never_taken() -> None:
    small = [(([7, 1] * 16), 127 - 18)] * 20
    source = mx([([7, 1] * 16, 127), *small])
    m, [member], counts = ref.repack_oracle([source])
    assert m == -8
    assert counts.lossy == 40
    assert np.array_equal(decoded(member, m)[0, :32], ref.dequantize_mxfp4(*source)[0, :32])


def test_an_all_zero_group_outside_the_window_gets_global_scale_one() -> None:
    source = mx([([0, 8] * 16, 0), ([8] * 32, 200)])
    m, [(codes, scales)], counts = ref.repack_oracle([source])
    assert (m, scales.tolist(), counts[:4]) == (0, [[8] * 4], (4, 0, 0, 0))
    assert np.array_equal(codes, source[0])


def test_a_dead_half_in_a_live_block_takes_a_scale_no_kernel_flushes() -> None:
    source = mx([([7, 1] * 16, 127), ([7, 1] * 8 + [8] * 16, 127 - 16)])
    _, [(_, scales)], counts = ref.repack_oracle([source])
    assert scales.tolist() == [[0x78, 0x78, 0x02, 0x08]]
    assert counts.below_marlin == 1


def test_a_nan_scale_and_misfit_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"255 .NaN. at row 0, block 1"):
        ref.repack_oracle([mx([([1] * 32, 127), ([1] * 32, 255)])])
    with pytest.raises(ValueError, match=r"expected \(1, 2\)"):
        ref.repack_oracle([(np.zeros((1, 32), np.uint8), np.zeros((1, 1), np.uint8))])


def test_matmul_is_x_times_the_transposed_weight() -> None:
    x, w = np.array([[1, 2], [3, 4]], np.float32), np.array([[5.0, 6.0]])
    assert ref.matmul(x, w).tolist() == [[17.0], [39.0]]
