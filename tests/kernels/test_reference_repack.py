"""The oracle of the repack against the rule, in exact rationals: windows, spans, ties, dead blocks, fused groups."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from requant.kernels import reference as ref
from requant.kernels.formats import E2M1_VALUES, E4M3_VALUES
from requant.kernels.reference_repack import repack_oracle

MAGNITUDES = [Fraction(0), Fraction(1, 2), *map(Fraction, (1, Fraction(3, 2), 2, 3, 4, 6))]


def value(x: float) -> Fraction:
    return Fraction(float(x))


def mx(*rows: list[tuple[list[int], int]]) -> tuple[np.ndarray, np.ndarray]:
    """MXFP4 (codes, scales) from rows of (32 codes, E8M0 byte)."""
    codes = np.array([[c for block, _ in row for c in block] for row in rows], dtype=np.uint8)
    scales = np.array([[byte for _, byte in row] for row in rows], dtype=np.uint8)
    return ref.pack_nibbles(codes), scales


def decoded(member: tuple[np.ndarray, np.ndarray], m: int) -> np.ndarray:
    return ref.dequantize_nvfp4(*member, 2.0**m)


def test_inside_the_marlin_window_codes_are_untouched_and_the_largest_scale_is_two_to_the_eighth() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (4, 32), dtype=np.uint8)
    scales = rng.integers(110, 125, (4, 2), dtype=np.uint8)
    scales[0] = [110, 124]
    m, [(new, block)], counts = repack_oracle([(codes, scales)])
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
        m, [member], counts = repack_oracle([source])
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
    m, [(codes, scales)], counts = repack_oracle([source])
    assert m == 120 - 127 - 8
    assert scales.tolist() == [[0x08, 0x08, 0x78, 0x78]]
    assert np.array_equal(codes, source[0])
    assert counts[:4] == (4, 0, 0, 0)


def test_a_live_block_with_scale_byte_zero_is_looked_at_and_counted_lossy() -> None:
    source = mx([([7, 1] * 16, 127), ([7, 1] * 16, 0)])
    _, [(codes, scales)], counts = repack_oracle([source])
    assert counts[:4] == (2, 0, 2, 0)
    assert scales[0, 2:].tolist() == [8, 8]
    assert not (codes[0, 16:] & 0x77).any()


def test_spread_18_is_reencoded_and_17_is_exact() -> None:
    block = [7, 1, 3, 13] * 8
    _, [(_, scales)], counts = repack_oracle([mx([(block, 127), (block, 110)])])
    assert (counts[:4], scales.tolist()) == ((4, 0, 0, 2), [[0x78, 0x78, 1, 1]])
    assert repack_oracle([mx([(block, 127), (block, 109)])]).counts.lossy == 2


def test_one_global_scale_for_all_members_of_a_fused_group() -> None:
    gate, up = mx([([7, 1] * 16, 127)]), mx([([7, 1] * 16, 120)])
    m, [(_, first), (_, second)], _ = repack_oracle([gate, up])
    assert (m, first.tolist(), second.tolist()) == (-8, [[0x78, 0x78]], [[0x40, 0x40]])


@pytest.mark.parametrize("doublings", [0, 1, 2, 3, 4])
def test_a_top_block_that_doubles_makes_room_below(doublings: int) -> None:
    """The largest block holds only 0.5, so m may sink by up to three octaves for the sake of the smallest."""
    source = mx([([1, 9] * 16, 127), ([7, 1] * 16, 127 - 17 - doublings)])
    m, [(codes, scales)], counts = repack_oracle([source])
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
    m, [member], counts = repack_oracle([source])
    assert m == -8
    assert counts.lossy == 40
    assert np.array_equal(decoded(member, m)[0, :32], ref.dequantize_mxfp4(*source)[0, :32])


def test_an_all_zero_group_outside_the_window_gets_global_scale_one() -> None:
    source = mx([([0, 8] * 16, 0), ([8] * 32, 200)])
    m, [(codes, scales)], counts = repack_oracle([source])
    assert (m, scales.tolist(), counts[:4]) == (0, [[8] * 4], (4, 0, 0, 0))
    assert np.array_equal(codes, source[0])


def test_a_dead_half_in_a_live_block_takes_a_scale_no_kernel_flushes() -> None:
    source = mx([([7, 1] * 16, 127), ([7, 1] * 8 + [8] * 16, 127 - 16)])
    _, [(_, scales)], counts = repack_oracle([source])
    assert scales.tolist() == [[0x78, 0x78, 0x02, 0x08]]
    assert counts.below_marlin == 1


def test_a_nan_scale_and_misfit_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"255 .NaN. at row 0, block 1"):
        repack_oracle([mx([([1] * 32, 127), ([1] * 32, 255)])])
    with pytest.raises(ValueError, match=r"expected \(1, 2\)"):
        repack_oracle([(np.zeros((1, 32), np.uint8), np.zeros((1, 1), np.uint8))])
