"""Paired scores: errors by hand, and verdicts that few questions cannot win."""

import math

import numpy as np
import pytest
from requant.kernels.empty_model import ModelUnavailableError
from requant.validate.divergence import Verdict
from requant.validate.model_tasks import _by_metric, judge_task
from requant.validate.paired import paired


def ones(right, of):
    return [1.0] * right + [0.0] * (of - right)


def test_means_and_errors_are_those_of_the_textbook():
    both = paired(ones(70, 100), ones(60, 100))
    assert (both.source.value, both.target.value, both.difference.value) == pytest.approx((0.7, 0.6, -0.1))
    assert both.source.error == pytest.approx(math.sqrt(0.7 * 0.3 / 99))
    # Agresti and Min: 0 won, 10 lost, half a question more in each cell
    assert both.difference.error == pytest.approx(math.sqrt(11 - 100 / 102) / 102)


def test_other_scores_have_the_error_of_their_mean_difference():
    rng = np.random.default_rng(1)
    s = rng.random(50)
    t = s + rng.normal(-0.01, 0.02, 50)
    both = paired(s.tolist(), t.tolist())
    assert both.difference.error == pytest.approx(float((t - s).std(ddof=1)) / math.sqrt(50))


@pytest.mark.parametrize(
    ("source", "target", "verdict"),
    [
        (ones(500, 1000), ones(498, 1000), Verdict.NOT_INFERIOR),
        (ones(500, 1000), ones(400, 1000), Verdict.INFERIOR),
        (ones(500, 1000), ones(480, 1000), Verdict.INCONCLUSIVE),
        (ones(5, 10), ones(5, 10), Verdict.INCONCLUSIVE),  # ten questions are no proof
        (ones(50, 200), ones(50, 200), Verdict.NOT_INFERIOR),
        (ones(1, 1), ones(1, 1), Verdict.INCONCLUSIVE),
        ([], [], Verdict.INCONCLUSIVE),
    ],
)
def test_the_verdict_at_a_margin_of_two_percent(source, target, verdict):
    assert paired(source, target).verdict(0.02) is verdict


def test_few_other_scores_are_judged_by_student_and_not_by_the_normal_distribution():
    """Four differences of mean -0.01 and error 0.005: t is 2.353, so that a margin of 0.02 is not proved."""
    s = [0.5, 0.6, 0.7, 0.8]
    t = [a + d for a, d in zip(s, (-0.01 - 0.0122474, -0.01, -0.01, -0.01 + 0.0122474), strict=True)]
    both = paired(s, t)
    assert both.difference.error == pytest.approx(0.005, rel=1e-5)
    assert both.degrees == 3
    assert both.verdict(0.0217) is Verdict.INCONCLUSIVE  # 1.645 errors reach 0.0182, 2.353 reach 0.0218
    assert both.verdict(0.0219) is Verdict.NOT_INFERIOR
    assert paired(s, [a - 0.05 - 0.001 * i for i, a in enumerate(s)]).verdict(0.02) is Verdict.INFERIOR


def test_differences_without_any_spread_are_no_proof_from_a_few_questions():
    scores = [0.25, 0.5, 0.75]
    both = paired(scores, scores)
    assert both.equal
    assert both.difference.error == pytest.approx(0.75 / 5)
    assert both.verdict(0.02) is Verdict.INCONCLUSIVE
    assert paired(scores * 40, scores * 40).verdict(0.02) is Verdict.NOT_INFERIOR


@pytest.mark.parametrize("questions", [4, 8, 60])
def test_the_verdict_on_other_scores_errs_as_often_as_it_says(questions):
    """Worse by exactly the margin: called not inferior in 5% of all tries, however few the questions."""
    rng = np.random.default_rng(questions)
    s = rng.random((4000, questions))
    t = s + rng.normal(-0.05, 0.1, s.shape)
    wrong = sum(paired(a, b).verdict(0.05) is Verdict.NOT_INFERIOR for a, b in zip(s, t, strict=True))
    assert wrong / 4000 == pytest.approx(0.05, abs=0.012)


@pytest.mark.filterwarnings("error")
def test_the_verdict_errs_as_often_as_it_says():
    """A model that is worse by exactly the margin is called not inferior in at most 5% of all tries."""
    rng = np.random.default_rng(3)
    wrong = 0
    for _ in range(2000):
        u = rng.random(400)
        kind = np.select([u < 0.10, u < 0.15], [1, 2], 0)  # 10% lost, 5% won: worse by 0.05
        s = np.where(kind == 1, 1.0, np.where(kind == 2, 0.0, rng.integers(0, 2, 400)))
        t = np.where(kind == 1, 0.0, np.where(kind == 2, 1.0, s))
        wrong += paired(s.tolist(), t.tolist()).verdict(0.05) is Verdict.NOT_INFERIOR
    assert wrong / 2000 < 0.06


def test_different_numbers_of_scores_do_not_belong_together():
    with pytest.raises(ValueError, match="2 scores of the source and 1"):
        paired([1.0, 0.0], [1.0])


def test_equal_weights_are_held_to_equal_scores_and_others_to_the_margin():
    same, lower = paired(ones(5, 10), ones(5, 10)), paired(ones(5, 10), ones(4, 10))
    told, finding = judge_task("t", "acc", same, 0.02, True)
    assert (told["verdict"], told["margin"], finding) == ("not inferior", 0.0, None)
    told, finding = judge_task("t", "acc", lower, 0.02, True)
    assert (finding.rule, finding.where) == ("task-differs", "t")
    told, finding = judge_task("t", "acc", lower, 0.02, False)
    assert told["verdict"] == "inconclusive"
    assert finding.message == (
        "acc is 0.400, the source's 0.500; the difference of -0.100 +- 0.115 is inconclusive against a margin of 0.02"
    )


def test_a_metric_that_is_better_where_it_is_lower_is_not_judged():
    def samples(*metrics):
        return [
            {"filter": "none", "doc_id": n, "metrics": list(metrics), "wer": 0.1 * n, "acc": 1.0, "ppl": (0.5, 3)}
            for n in (1, 0)
        ]

    better = {"wer": False, "acc": True, "ppl": False}
    assert _by_metric(samples("ppl", "acc", "wer"), better, "t") == {"acc": [1.0, 1.0], "wer": [0.0, 0.1]}
    assert _by_metric(samples("wer"), {}, "t") == {"wer": [0.0, 0.1]}
    with pytest.raises(ModelUnavailableError, match="t: its first metric, wer, is better where it is lower"):
        _by_metric(samples("wer", "acc"), better, "t")
