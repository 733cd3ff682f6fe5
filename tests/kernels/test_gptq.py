"""GPTQ against a column-by-column loop in float64, and what it is for: less error of the output."""

import numpy as np
import pytest
from requant.kernels import reference
from requant.kernels.formats import NumberFormat
from requant.kernels.gptq import compensation, round_compensated
from requant.kernels.quantize import amax, bf16_to_mxfp4, bf16_to_nvfp4, nvfp4_global_scale

GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@pytest.fixture
def case():
    """A weight [24, 256], inputs whose channels go together and differ in size, and their H."""
    rng = np.random.default_rng(2)
    w = rng.normal(0, 0.05, (24, 256)).astype(np.float32)
    mix = rng.normal(size=(40, 256)) * rng.lognormal(0, 1, 256)
    x = (rng.normal(size=(2000, 40)) @ mix + rng.normal(size=(2000, 256)) * 0.3).astype(np.float32)
    return w, x, (x.T @ x / len(x)).astype(np.float32)


def nearest(w, number):
    codes, scales = np.empty((len(w), 128), np.uint8), np.empty((len(w), 256 // number.group), np.uint8)
    if number is NumberFormat.MXFP4:
        bf16_to_mxfp4(w, codes, scales)
        return codes, scales, None
    s2 = nvfp4_global_scale(amax(w))
    bf16_to_nvfp4(w, s2, codes, scales)
    return codes, scales, s2


def decode(codes, scales, s2):
    if s2 is None:
        return np.asarray(reference.dequantize_mxfp4(codes, scales))
    return np.asarray(reference.dequantize_nvfp4(codes, scales, float(s2)))


def rounded(w, number, scales, s2, how):
    codes = np.empty((len(w), 128), np.uint8)
    round_compensated(w, number, scales, s2, how, codes)
    return codes


BOTH = pytest.mark.parametrize("number", [NumberFormat.NVFP4, NumberFormat.MXFP4])


@BOTH
def test_the_output_is_much_closer_than_by_rounding_to_nearest(case, number):
    w, x, h = case
    codes, scales, s2 = nearest(w, number)
    ours = rounded(w, number, scales, s2, compensation(h))
    exact = x @ w.T
    before, after = (np.square(x @ decode(c, scales, s2).T - exact).sum() for c in (codes, ours))
    assert after < 0.5 * before
    assert np.square(decode(ours, scales, s2) - w).sum() > np.square(decode(codes, scales, s2) - w).sum()


@BOTH
def test_without_correlation_it_is_rounding_to_nearest(case, number):
    w, _, _ = case
    _, scales, s2 = nearest(w, number)
    ours = rounded(w, number, scales, s2, compensation(np.eye(256, dtype=np.float32)))
    step = np.repeat(decode(np.full_like(ours, 0x22), scales, s2)[:, :: number.group], number.group, axis=1)
    expected = np.abs(np.abs(w / step)[..., None] - GRID).min(-1)
    np.testing.assert_allclose(np.abs(decode(ours, scales, s2) - w) / step, expected, atol=1e-5)


def by_hand(w, scales, s2, h):
    """The algorithm as the paper has it, in float64: the inverse is reduced after every column."""
    order = np.argsort(-np.diagonal(h), kind="stable")
    damped = h.astype(np.float64) + 0.01 * np.diagonal(h).mean() * np.eye(len(h))
    inverse = np.linalg.inv(damped)
    rest, out = w.astype(np.float64).copy(), np.empty(w.shape)
    steps = np.repeat(decode(np.full((len(w), 128), 0x22, np.uint8), scales, s2)[:, ::16], 16, axis=1)
    for k in order:
        x = rest[:, k] / steps[:, k]
        out[:, k] = np.sign(x) * GRID[np.abs(np.abs(x)[:, None] - GRID).argmin(1)] * steps[:, k]
        error = (rest[:, k] - out[:, k]) / inverse[k, k]
        rest -= error[:, None] * inverse[k]
        inverse -= np.outer(inverse[:, k], inverse[k]) / inverse[k, k]
    return out


def test_it_is_the_published_algorithm(case):
    w, _, h = case
    _, scales, s2 = nearest(w, NumberFormat.NVFP4)
    ours = decode(rounded(w, NumberFormat.NVFP4, scales, s2, compensation(h)), scales, s2)
    expected = by_hand(w, scales, s2, h)
    same = np.isclose(ours, expected, rtol=1e-6, atol=1e-12)
    # a quotient that FP32 puts on the other side of a bound sends its row another way
    assert same.mean() > 0.97


def test_rows_may_be_done_in_any_parts(case):
    w, _, h = case
    _, scales, s2 = nearest(w, NumberFormat.NVFP4)
    how = compensation(h)
    whole = rounded(w, NumberFormat.NVFP4, scales, s2, how)
    parts = [rounded(w[a:b], NumberFormat.NVFP4, scales[a:b], s2, how) for a, b in ((0, 1), (1, 9), (9, 24))]
    assert np.mean(np.concatenate(parts) == whole) > 0.99  # BLAS sums in another order for other heights


def test_a_channel_without_tokens_and_a_singular_hessian_are_borne(case):
    w, x, _ = case
    x = x[:50].copy()
    x[:, 7] = 0
    h = (x.T @ x / len(x)).astype(np.float32)
    codes, scales, s2 = nearest(w, NumberFormat.NVFP4)
    ours = rounded(w, NumberFormat.NVFP4, scales, s2, compensation(h))
    assert np.array_equal(decode(ours, scales, s2)[:, 7], decode(codes, scales, s2)[:, 7])
    assert np.isfinite(decode(ours, scales, s2)).all()


def test_zero_is_spelled_as_each_format_spells_it(case):
    w, _, h = case
    w[:, :32] = 0
    for number, zero in ((NumberFormat.NVFP4, 0x00), (NumberFormat.MXFP4, 0x88)):
        _, scales, s2 = nearest(w, number)
        codes = rounded(w, number, scales, s2, compensation(np.diag(np.diagonal(h))))
        assert (codes[:, :16] == zero).all()


@pytest.mark.parametrize("hessian", [np.ones((3, 4)), np.full((4, 4), np.nan), -np.eye(4)])
def test_what_is_no_hessian_is_refused(hessian):
    with pytest.raises(ValueError, match="Hessian"):
        compensation(hessian.astype(np.float32))


def test_shapes_that_do_not_fit_are_refused(case):
    w, _, h = case
    with pytest.raises(ValueError, match="do not fit"):
        round_compensated(
            w[:, :128],
            NumberFormat.NVFP4,
            np.ones((24, 8), np.uint8),
            np.float32(1),
            compensation(h),
            np.empty((24, 64), np.uint8),
        )
