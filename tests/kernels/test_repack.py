"""The repack rule, fast path against the exact rational oracle: exhaustive where the domain is small."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from requant.kernels.formats import E4M3_VALUES, e4m3_pow2_byte
from requant.kernels.reference import dequantize_mxfp4, dequantize_nvfp4, pack_nibbles
from requant.kernels.reference_repack import repack_oracle
from requant.kernels.repack import global_scale, repack, window_exponent, window_scales

K_MAX = 120


def block(magnitudes, rng):
    """32 codes in which exactly the magnitude indices of the 8-bit set occur, signs at random; both halves alike."""
    present = [i for i in range(8) if magnitudes >> i & 1] or [0]
    half = np.array([present[i % len(present)] for i in range(16)])
    return np.concatenate([rng.permutation(half), rng.permutation(half)]) | (rng.integers(0, 2, 32) << 3)


def group(codes, scales):
    """One member from unpacked codes [blocks, 32] and E8M0 bytes [blocks], as a single row."""
    row = np.asarray(codes, dtype=np.uint8).reshape(1, -1)
    return pack_nibbles(row), np.asarray(scales, dtype=np.uint8).reshape(1, -1)


def assert_equals_oracle(members):
    fast, slow = repack(members), repack_oracle(members)
    assert fast.m == slow.m
    for (codes, scales), (want_codes, want_scales) in zip(fast.members, slow.members, strict=True):
        np.testing.assert_array_equal(codes, want_codes)
        np.testing.assert_array_equal(scales, want_scales)
    counts = fast.counts
    assert (counts.exact, counts.shifted, counts.lossy, counts.below_marlin) == slow.counts[:4]
    return fast, slow


@pytest.mark.parametrize("distance", range(31))
def test_every_distance_from_the_largest_block_with_every_set_of_magnitudes(distance):
    """k_max - k from 0 to 30 with all 256 sets of magnitudes in the small block, against exact arithmetic."""
    rng = np.random.default_rng(distance)
    for magnitudes in range(256):
        codes = np.stack([block(0xFF, rng), block(magnitudes, rng)])
        fast, slow = assert_equals_oracle([group(codes, [K_MAX, K_MAX - distance])])
        live = magnitudes & 0xFE
        if distance <= 17 or not live:
            assert fast.counts.lossy == 0
            assert slow.counts.squared_error == 0
        elif live & 0b0000_1010:  # 0.5 or 1.5 present: nothing halves
            assert fast.counts.lossy == 2


@pytest.mark.parametrize("distance", range(18, 22))
def test_every_set_of_magnitudes_in_the_largest_block(distance):
    """A top block that doubles exactly lets the window slide down; one that does not, never overflows."""
    rng = np.random.default_rng(distance)
    for top, bottom in itertools.product(range(2, 256, 2), (0xFE, 0b0101_0100, 0b0001_0000)):
        codes = np.stack([block(top, rng), block(bottom, rng)])
        fast, _ = assert_equals_oracle([group(codes, [K_MAX, K_MAX - distance])])
        (_, scales) = fast.members[0]
        decoded = dequantize_nvfp4(*fast.members[0], float(global_scale(fast.m)))
        source = dequantize_mxfp4(*group(codes, [K_MAX, K_MAX - distance]))
        assert (decoded[:, :32] == source[:, :32]).all(), "the largest block is never clamped"
        assert not np.isnan(E4M3_VALUES[scales]).any()


@settings(max_examples=60)
@given(st.data())
def test_any_group_of_members_equals_the_oracle(data):
    """Groups of one to three members of any shape, spans to 40, zeros and dead blocks included."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    members = []
    top = data.draw(st.integers(45, 254))
    span = data.draw(st.integers(0, 40))
    for _ in range(data.draw(st.integers(1, 3))):
        rows, blocks = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
        allowed = data.draw(st.lists(st.integers(0, 15), min_size=1, max_size=16))
        codes = rng.choice(allowed, size=(rows, blocks * 32)).astype(np.uint8)
        scales = rng.integers(max(top - span, 0), top + 1, size=(rows, blocks), dtype=np.uint8)
        members.append((pack_nibbles(codes), scales))
    assert_equals_oracle(members)


def test_all_dead_group_gets_a_global_scale_of_one():
    codes = np.full((2, 32), 0x88, dtype=np.uint8)
    scales = np.array([[0, 200], [100, 254]], dtype=np.uint8)
    result = repack([(codes, scales)])
    assert global_scale(result.m) == 1.0
    assert (result.members[0][1] == 0x08).all()
    assert (result.members[0][0] == codes).all(), "-0 stays -0"


def test_a_dead_block_with_a_huge_exponent_does_not_flush_live_ones():
    """C11: block 0 is zero under scale 2^123, block 1 is live under 2^-7; block 1 stays exact."""
    rng = np.random.default_rng(0)
    codes = np.stack([np.zeros(32, dtype=np.int64), block(0xFF, rng)])
    result = repack([group(codes, [250, 120])])
    assert result.m == 120 - 127 - 8
    assert result.counts.lossy == 0
    assert result.members[0][1].tolist() == [[0x08, 0x08, 0x78, 0x78]]


def test_scale_byte_zero_of_a_live_block_is_two_to_minus_127():
    """C12: byte 0 does not mean `empty`; the block counts, and is lossy next to 2^0."""
    rng = np.random.default_rng(0)
    result = repack([group(np.stack([block(0xFF, rng), block(0xFE, rng)]), [127, 0])])
    assert (result.counts.exact, result.counts.lossy) == (2, 2)


def test_window_of_seventeen_is_exact_and_eighteen_is_not():
    """C13: bytes 127 and 110 (17 apart) are exact; 127 and 109 (18 apart) are not, and are re-encoded, not clamped."""
    rng = np.random.default_rng(0)
    codes = np.stack([block(0xFF, rng), block(0xFF, rng)])
    assert repack([group(codes, [127, 110])]).counts.lossy == 0
    lossy = repack([group(codes, [127, 109])])
    assert lossy.counts.lossy == 2
    source = dequantize_mxfp4(*group(codes, [127, 109]))
    clamped = dequantize_nvfp4(group(codes, [127, 109])[0], np.array([[0x78, 0x78, 1, 1]], np.uint8), 2.0**-8)
    ours = dequantize_nvfp4(*lossy.members[0], 2.0**-8)
    assert ((ours - source) ** 2).sum() < ((clamped - source) ** 2).sum() / 2


def test_nan_scale_is_refused_by_row_and_block():
    """C10: byte 255 is NaN, not infinity."""
    codes, scales = group(np.zeros((3, 32)), [1, 255, 3])
    with pytest.raises(ValueError, match=r"member 0: E8M0 scale 255 \(NaN\) at row 0, block 1"):
        repack([(codes, scales)])


def test_step_one_needs_no_codes_and_keeps_every_scale_in_marlins_window():
    for span in range(15):
        m = window_exponent(100 - span, 100)
        assert m == 100 - 127 - 8
        plane = np.arange(100 - span, 101, dtype=np.uint8)[None]
        pairs = window_scales(plane, m)
        for byte, (first, second) in zip(plane[0], pairs.reshape(-1, 2), strict=True):
            assert first == second == e4m3_pow2_byte(int(byte) - 127 - m)
            assert E4M3_VALUES[first] >= 2.0**-6
    assert window_exponent(85, 100) is None
    assert window_exponent(255, 255) is None


def test_zeros_under_scale_byte_zero_do_not_get_a_subnormal_global_scale():
    """Encoders write byte 0 over blocks of zeros: 2^-135 would be flushed by kernels and has no finite reciprocal."""
    codes, scales = np.zeros((2, 32), dtype=np.uint8), np.zeros((2, 2), dtype=np.uint8)
    assert window_exponent(0, 0) is None
    fast, _ = assert_equals_oracle([(codes, scales)])
    assert fast.m == 0
    live, _ = assert_equals_oracle([(codes + 0x11, scales)])
    assert (live.m, live.counts.exact) == (-135, 8), "live ones stay exact, whatever it takes"


@pytest.mark.parametrize("top", range(9, 255))
def test_step_one_is_right_for_every_largest_byte(top):
    """The uint8 arithmetic wraps around; every (k_max, k) of the window against the table of powers of two."""
    low = max(top - 14, 0)
    m = window_exponent(low, top)
    plane = np.arange(low, top + 1, dtype=np.uint8)[:, None]
    want = [[e4m3_pow2_byte(byte - 127 - m)] * 2 for byte in range(low, top + 1)]
    np.testing.assert_array_equal(window_scales(plane, m), want)


def test_global_scale_is_exact_at_both_ends():
    """Integer exponents, not amax: 6 * 448 * 2^m would overflow or underflow FP32 at the ends of E8M0."""
    for byte in (9, 254):
        m = window_exponent(byte, byte)
        assert Fraction(float(global_scale(m))) == Fraction(2) ** (byte - 127 - 8)


def modelopt_cast(codes, scales):
    """(lossy 16-blocks, squared error) of modelopt's rule in numbers: m = k_max - 8 over all nonzero scale bytes, dead
    blocks' too; a block out of the window gets the nearest codes under the clamped power of two (as the golden shows).
    """
    k = scales.astype(int) - 127
    m = int(k[scales > 0].max()) - 8
    source = dequantize_mxfp4(codes, scales)
    scale = np.repeat(2.0 ** (np.repeat(np.clip(k - m, -9, 8), 2, axis=1) + m), 16, axis=1)
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nearest = grid[np.abs(np.abs(source)[..., None] / scale[..., None] - grid).argmin(-1)]
    decoded = np.sign(source) * nearest * scale
    lossy = (decoded != source).reshape(source.shape[0], -1, 16).any(-1)
    return int(lossy.sum()), float(((decoded - source) ** 2).sum())


def synthetic(span):
    """Random weights whose live exponents span `span`: 30% coarse halves, 5% dead blocks, some of those two octaves
    above every live one (encoders leave any exponent in a block of zeros)."""
    rng = np.random.default_rng(span)
    codes = rng.integers(0, 16, (64, 256), dtype=np.uint8)
    for row, half in np.argwhere(rng.random((64, 256 // 16)) < 0.3):
        codes[row, half * 16 : half * 16 + 16] = rng.choice([0, 4, 6, 12, 14], 16)
    scales = rng.integers(120 - span, 121, (64, 256 // 32), dtype=np.uint8)
    dead = rng.random(scales.shape) < 0.05
    codes.reshape(64, -1, 32)[dead] = 0
    scales[dead] = rng.choice([100, 122], int(dead.sum()))
    return pack_nibbles(codes), scales


@pytest.mark.parametrize("span", range(15, 25))
def test_fewer_lossy_blocks_and_less_error_than_modelopts_rule(span):
    """Spans 15 to 24: nothing is lost up to 17; beyond, less than by modelopt's rule, in blocks and in error."""
    member = synthetic(span)
    result = repack([member])
    ours = dequantize_nvfp4(*result.members[0], float(global_scale(result.m)))
    error = float(((ours - dequantize_mxfp4(*member)) ** 2).sum())
    their_lossy, their_error = modelopt_cast(*member)
    if span <= 17:
        assert (result.counts.lossy, error) == (0, 0.0)
        assert (their_lossy > 0) == (span > 15)
    else:
        assert 0 < result.counts.lossy < their_lossy
        assert 0 < error < their_error
