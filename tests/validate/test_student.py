"""Student's t against the printed tables, and what the widened bootstrap covers."""

import numpy as np
import pytest
from requant.validate.student import expanded, t_quantile

TABLE = {  # degrees: (95%, 97.5%, 99.5%) one-sided, as every table has them
    1: (6.3138, 12.7062, 63.6567),
    2: (2.9200, 4.3027, 9.9248),
    3: (2.3534, 3.1824, 5.8409),
    4: (2.1318, 2.7764, 4.6041),
    7: (1.8946, 2.3646, 3.4995),
    10: (1.8125, 2.2281, 3.1693),
    29: (1.6991, 2.0452, 2.7564),
    120: (1.6577, 1.9799, 2.6174),
    1999: (1.6456, 1.9612, 2.5783),
    10**6: (1.6449, 1.9600, 2.5758),
}


@pytest.mark.parametrize("degrees", TABLE)
def test_quantiles_are_those_of_the_tables(degrees):
    found = tuple(t_quantile(p, degrees) for p in (0.95, 0.975, 0.995))
    assert found == pytest.approx(TABLE[degrees], abs=6e-5)


@pytest.mark.parametrize(("probability", "degrees"), [(0.5, 3), (1.0, 3), (0.95, 0)])
def test_what_has_no_quantile_is_an_error(probability, degrees):
    with pytest.raises(ValueError, match="no quantile"):
        t_quantile(probability, degrees)


def test_a_bootstrap_over_few_takes_quantiles_further_out():
    # n = 10: sqrt(10 / 9) * 2.262 = 2.384; the normal distribution leaves 0.86% there instead of 2.5%
    assert expanded(0.025, 10) == pytest.approx(0.00855, rel=2e-3)
    assert expanded(0.975, 10) == pytest.approx(1 - expanded(0.025, 10), rel=1e-12)
    assert expanded(0.025, 100_000) == pytest.approx(0.025, rel=1e-3)


def test_an_interval_of_five_normal_observations_misses_as_often_as_it_says():
    rng = np.random.default_rng(5)
    samples = rng.normal(size=(20_000, 5))
    errors = np.abs(samples.mean(1)) / (samples.std(1, ddof=1) / np.sqrt(5))
    assert (errors > t_quantile(0.975, 4)).mean() == pytest.approx(0.05, abs=0.005)
    assert (errors > 1.96).mean() > 0.11  # what the normal distribution's would do
