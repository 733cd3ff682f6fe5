"""KL, agreement and perplexity against float64 by hand, and verdicts that a short or misleading text cannot win."""

import math

import numpy as np
import pytest
import torch
from requant.validate.divergence import Positions, Verdict, compare_logits, mean_of, ratio_of


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.fixture
def logits():
    rng = np.random.default_rng(5)
    source = rng.normal(0, 3, (200, 50)).astype(np.float32)
    target = source + rng.normal(0, 0.5, source.shape).astype(np.float32)
    return torch.tensor(source), torch.tensor(target), torch.tensor(rng.integers(0, 50, 200))


def test_every_position_is_what_float64_gives(logits):
    source, target, following = logits
    seen = compare_logits(source, target, following)
    p, q = softmax(source.double().numpy()), softmax(target.double().numpy())
    np.testing.assert_allclose(seen.kl, (p * np.log(p / q)).sum(-1), rtol=1e-9)
    np.testing.assert_array_equal(seen.agree, (p.argmax(-1) == q.argmax(-1)).astype(float))
    rows = np.arange(200)
    np.testing.assert_allclose(seen.nll_source, -np.log(p[rows, following.numpy()]), rtol=1e-9)
    np.testing.assert_allclose(seen.nll_target, -np.log(q[rows, following.numpy()]), rtol=1e-9)


def test_equal_logits_are_exactly_zero_apart_and_one_bit_is_seen(logits):
    source, _, following = logits
    assert compare_logits(source, source.clone(), following).kl.max() == 0.0
    moved = source.clone()
    moved[7, source[7].argmax()] *= 1 + 1e-5
    kl = compare_logits(source, moved, following).kl
    assert kl[7] > 0
    assert np.count_nonzero(kl) == 1


def test_a_wrecked_distribution_with_the_same_first_token_does_not_pass_for_equal():
    source = torch.tensor([[8.0, 7.0, 0.0, 0.0]] * 130)
    wrecked = torch.tensor([[8.0, -20.0, -20.0, -20.0]] * 130)
    seen = compare_logits(source, wrecked, torch.ones(130, dtype=torch.long))
    assert seen.agree.min() == 1.0
    assert seen.kl.min() > 5
    assert ratio_of(seen).verdict(1.35) is Verdict.INFERIOR


def test_nan_and_infinity_reach_the_result(logits):
    source, target, following = logits
    target[3, 0] = math.nan
    target[4, 0] = -math.inf  # a token ruled out that the source holds possible
    kl = compare_logits(source, target, following).kl
    assert math.isnan(kl[3])
    assert kl[4] == math.inf
    assert np.isfinite(kl[:3]).all()


def test_shapes_that_do_not_belong_together_are_refused(logits):
    source, target, following = logits
    with pytest.raises(ValueError, match="logits"):
        compare_logits(source, target[:, :49], following)
    with pytest.raises(ValueError, match="tokens"):
        compare_logits(source, target, following[1:])


def test_the_error_of_a_mean_counts_blocks_not_positions():
    blocks = np.repeat([1.0, 3.0, 5.0, 7.0], 64)
    mean = mean_of(blocks)
    assert mean.value == 4.0
    assert mean.error == pytest.approx(np.std([1, 3, 5, 7], ddof=1) / 2)
    assert mean_of(np.ones(100)).error is None


def positions(difference, noise, blocks):
    rng = np.random.default_rng(1)
    source = rng.normal(3, 2, 64 * blocks)
    target = source + difference + np.repeat(rng.normal(0, noise, blocks), 64)
    zero = np.zeros_like(source)
    return Positions(zero, zero, source, target)


@pytest.mark.parametrize(
    ("difference", "noise", "blocks", "verdict"),
    [
        (0.01, 0.02, 32, Verdict.NOT_INFERIOR),
        (0.10, 0.02, 32, Verdict.INFERIOR),
        (0.04, 0.10, 4, Verdict.INCONCLUSIVE),
        (0.00, 0.00, 1, Verdict.INCONCLUSIVE),  # one block has no error: ten items prove nothing
    ],
)
def test_non_inferiority_at_five_percent(difference, noise, blocks, verdict):
    assert ratio_of(positions(difference, noise, blocks)).verdict(1.05) is verdict


def test_the_ratio_and_its_interval_come_from_paired_differences():
    seen = positions(0.05, 0.02, 32)
    ratio = ratio_of(seen)
    assert ratio.value == pytest.approx(math.exp((seen.nll_target - seen.nll_source).mean()))
    assert ratio.low < ratio.value < ratio.high
    assert ratio.high / ratio.low < 1.03


def test_few_blocks_have_the_interval_of_student():
    """Three blocks whose means differ by 0.01: t is 4.303 two-sided and 2.920 one-sided, not 1.960 and 1.645."""
    zero = np.zeros(192)
    seen = Positions(zero, zero, zero, np.repeat([0.01, 0.02, 0.03], 64))
    ratio, error = ratio_of(seen), 0.01 / math.sqrt(3)
    assert ratio.low == pytest.approx(math.exp(0.02 - 4.30265 * error), rel=1e-6)
    assert ratio.high == pytest.approx(math.exp(0.02 + 4.30265 * error), rel=1e-6)
    assert ratio.verdict(math.exp(0.02 + 2.93 * error)) is Verdict.NOT_INFERIOR
    assert ratio.verdict(math.exp(0.02 + 2.91 * error)) is Verdict.INCONCLUSIVE
    assert ratio.verdict(math.exp(0.02 - 2.91 * error)) is Verdict.INCONCLUSIVE
    assert ratio.verdict(math.exp(0.02 - 2.93 * error)) is Verdict.INFERIOR
