"""The step-2 loops against exact rational arithmetic in plain Python."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from requant.kernels.formats import E4M3_VALUES
from requant.kernels.repack_jit import half_census, lossy_error, repack_tile

MAGNITUDES = [Fraction(v) / 2 for v in (0, 1, 2, 3, 4, 6, 8, 12)]
E4M3 = [Fraction(b, 512) if b < 8 else Fraction(8 + b % 8) * Fraction(2) ** (b // 8 - 10) for b in range(0x7F)]
POW2_BYTE = {p: E4M3.index(Fraction(2) ** p) for p in range(-9, 9)}


def nibbles(row):
    return [c for byte in row for c in (int(byte) & 15, int(byte) >> 4)]


def packed(codes):
    codes = np.asarray(codes, dtype=np.uint8)
    return np.ascontiguousarray(codes[..., ::2] | codes[..., 1::2] << 4)


def shift(codes, k):
    """Codes times 2^k, or None where one of them is not a code."""
    wanted = [MAGNITUDES[c & 7] * Fraction(2) ** k for c in codes]
    if any(w not in MAGNITUDES for w in wanted):
        return None
    return [c & 8 | MAGNITUDES.index(w) for c, w in zip(codes, wanted, strict=True)]


@cache
def candidates(p):
    """Per E4M3 byte 1..0x7E: for each magnitude the nearest code (ties to even) and 4x its squared error."""
    table = []
    for byte in range(1, 0x7F):
        scale = E4M3[byte] / Fraction(2) ** p  # in units of the source scale
        row = []
        for value in MAGNITUDES:
            misses = [abs(q * scale - value) for q in MAGNITUDES]
            ties = [i for i in range(8) if misses[i] == min(misses)]
            code = next((i for i in ties if i % 2 == 0), ties[0])
            row.append((code, int(4 * misses[code] ** 2)))
            assert row[-1][1] == 4 * misses[code] ** 2
        table.append((byte, row))
    return table


def oracle_half(codes, p, block_is_dead):
    """(codes, scale byte, kind, squared error in half steps of the source) by the rule, in rationals."""
    if not any(c & 7 for c in codes):
        return codes, POW2_BYTE[p] if -6 <= p <= 8 and not block_is_dead else 8, "exact", 0
    if p > 8:
        return shift(codes, p - 8), POW2_BYTE[8], "shifted", 0
    if p >= -6:
        return codes, POW2_BYTE[p], "exact", 0
    if shift(codes, p + 6):
        return shift(codes, p + 6), POW2_BYTE[-6], "shifted", 0
    if p >= -9:
        return codes, POW2_BYTE[p], "exact", 0
    if shift(codes, p + 9):
        return shift(codes, p + 9), POW2_BYTE[-9], "shifted", 0
    counts = Counter(c & 7 for c in codes)
    error, byte, row = min(
        ((sum(n * row[v][1] for v, n in counts.items()), byte, row) for byte, row in candidates(p)), key=lambda t: t[:2]
    )
    new = [row[c & 7][0] for c in codes]
    return [c & 8 | q for c, q in zip(codes, new, strict=True)], byte if any(new) else 8, "lossy", error


def compare(codes, scales, m):
    """Run all three kernels on codes [N, K] and scales [N, K/32]; everything must equal the oracle."""
    codes, scales = np.asarray(codes, np.uint8), np.asarray(scales, np.uint8)
    n, k = codes.shape
    bytes_ = packed(codes)
    out_codes, out_scales = np.full_like(bytes_, 0xAA), np.full((n, k // 16), 0xAA, np.uint8)
    counts, err = np.zeros(4, np.int64), np.zeros(256, np.int64)
    repack_tile(bytes_, scales, m, out_codes, out_scales, counts)
    below = lossy_error(bytes_, scales, m, err)
    want_below = 0
    want_counts, want_err = dict.fromkeys(("exact", "shifted", "lossy", "small"), 0), np.zeros(256, np.int64)
    for row in range(n):
        for half in range(k // 16):
            e = int(scales[row, half // 2])
            block = codes[row, half // 2 * 32 : half // 2 * 32 + 32]
            source = [int(c) for c in codes[row, half * 16 : half * 16 + 16]]
            want, byte, kind, error = oracle_half(source, e - 127 - m, not (block & 7).any())
            assert nibbles(out_codes[row, half * 8 : half * 8 + 8]) == want, (e, m, source)
            assert out_scales[row, half] == byte, (e, m, source)
            want_counts[kind] += 1
            want_counts["small"] += byte < 8
            want_err[e] += error
            want_below += kind == "lossy" and byte < 8
    assert counts.tolist() == list(want_counts.values())
    assert err.tolist() == want_err.tolist()
    assert below == want_below
    return counts


def block_of(subset, seed):
    """A 16-half that holds exactly the magnitudes in the 8-bit set, at random places, with random signs."""
    rng = np.random.default_rng(seed)
    members = [i for i in range(8) if subset >> i & 1]
    codes = np.array(members + [members[i] for i in rng.integers(0, len(members), 16 - len(members))])
    return rng.permutation(codes) | rng.integers(0, 2, 16) << 3


def test_every_set_of_magnitudes_at_every_distance_from_the_top():
    subsets = list(range(1, 256))
    rng = np.random.default_rng(1)
    halves = np.stack([block_of(s, s) for s in subsets])
    partner = halves[rng.permutation(len(subsets))]
    codes = np.concatenate([halves, partner], axis=1)
    lossy = [int(compare(codes, np.full((len(subsets), 1), 127 + 8 - span), 0)[2]) for span in range(31)]
    assert lossy[:18] == [0] * 18
    assert lossy[18] > 0
    assert lossy[30] == 2 * 254, "far under the window every live half is lossy (the set {0} is not live)"


def test_doubling_rescues_a_half_above_the_window():
    for p in (9, 10, 11):
        small = [c for c in range(8) if MAGNITUDES[c] * 2 ** (p - 8) in MAGNITUDES]
        codes = [[small[i % len(small)] | (i & 1) << 3 for i in range(32)]]
        assert compare(codes, [[127 + p]], 0).tolist() == [0, 2, 0, 0]


def test_a_half_above_the_window_that_cannot_double_is_refused():
    codes, scales = packed([[7] * 32]), np.full((1, 1), 136, np.uint8)
    with pytest.raises(ValueError, match="too small"):
        repack_tile(
            codes, np.full((1, 1), 136, np.uint8), 0, codes.copy(), np.zeros((1, 2), np.uint8), np.zeros(4, np.int64)
        )
    with pytest.raises(ValueError, match="too small"):
        lossy_error(codes, scales, 0, np.zeros(256, np.int64))


def test_dead_blocks_and_dead_halves_keep_their_signed_zeros():
    codes = [[0, 8] * 16 + [0, 8] * 8 + [1] * 16 + [0] * 16 + [7] * 16]
    assert compare(codes, [[250, 122, 100]], 0).tolist() == [5, 0, 1, 0]


def test_the_ends_of_the_exponent_range():
    codes = [[3, 12, 0, 8] * 8 + [7, 15, 1, 9] * 8]
    assert compare(codes, [[0, 254]], 119).tolist() == [2, 0, 2, 0]
    assert compare(codes, [[0, 0]], -135).tolist() == [4, 0, 0, 0]


def test_negative_zero_survives_a_shift_and_a_lossy_half():
    compare([[8, 0, 4, 12] * 4 + [8, 0, 9, 7] * 4], [[112]], 0)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_tiles_equal_the_oracle(data):
    n, blocks = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    m = data.draw(st.integers(-140, 120))
    codes = rng.integers(0, 16, (n, blocks * 32))
    keep = rng.choice([0x0, 0x8, 0x9, 0xC, 0xD, 0xF], size=(n, blocks * 2, 1))
    codes = (codes.reshape(n, -1, 16) & keep).reshape(n, -1)
    scales = np.clip(127 + m + rng.integers(-18, 9, (n, blocks)), 0, 254)
    scales = np.minimum(scales, 127 + m + 8)
    if (scales < 0).any():
        return
    compare(codes, scales, m)


def census_oracle(codes, scales):
    hist = np.zeros((256, 4, 4, 2), np.int64)
    for row, e_row in zip(codes, scales, strict=True):
        for half in range(len(row) // 16):
            live = [int(c) & 7 for c in row[half * 16 : half * 16 + 16] if int(c) & 7]
            down = max(k for k in range(4) if shift(live, -k) is not None) if live else 0
            up = max(k for k in range(4) if shift(live, k) is not None) if live else 0
            hist[e_row[half // 2], down, up, int(bool(live))] += 1
    return hist


def test_census_counts_every_half_by_what_it_allows():
    halves = np.stack([block_of(s, s) for s in range(1, 255)])
    codes = halves.reshape(-1, 32)
    scales = np.arange(len(codes), dtype=np.uint8)[:, None] + np.uint8(129)
    assert scales.max() == 255
    hist = np.zeros((256, 4, 4, 2), np.int64)
    half_census(packed(codes), scales, hist)
    half_census(packed(codes), scales, hist)
    assert (hist == 2 * census_oracle(codes, scales)).all()
    assert hist.sum() == 2 * 254


def test_no_scale_byte_beats_two_to_the_minus_nine_for_any_code():
    """What makes the fit of a lossy half no search (repack_jit._fits): code by code, byte 1 errs least."""
    values = [0, 1, 2, 3, 4, 6, 8, 12]  # in half steps of the source
    steps = [int(v * 512) for v in E4M3_VALUES[1:0x7F]]  # in units of 2^-9

    def error(value, step):
        return min(abs(q * step - value) for q in values)

    for shift in range(1, 9):
        for value in values:
            assert all(error(value, 1 << shift) <= error(value, step << shift) for step in steps)
    assert all(error(value, 1 << 5) == value for value in values), "from shift 5 on every code becomes zero"


def test_reads_a_read_only_array_and_refuses_shapes_that_do_not_fit():
    codes, scales = np.zeros((2, 16), np.uint8), np.full((2, 1), 127, np.uint8)
    codes.flags.writeable = scales.flags.writeable = False
    hist = np.zeros((256, 4, 4, 2), np.int64)
    half_census(codes, scales, hist)
    assert hist[127, 0, 0, 0] == 4
    for bad_codes, bad_scales in (
        (codes[:, :8], scales),
        (codes, np.zeros((2, 2), np.uint8)),
        (codes.astype(np.int8), scales),
        (np.zeros((16, 2), np.uint8).T, scales),
    ):
        with pytest.raises(ValueError, match="codes"):
            half_census(bad_codes, bad_scales, hist)
    with pytest.raises(ValueError, match="out_scales"):
        repack_tile(codes, scales, 0, np.zeros_like(codes), np.zeros((2, 1), np.uint8), np.zeros(4, np.int64))
