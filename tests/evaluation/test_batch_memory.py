"""How much longer than the mean batches of sequences get."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.core import Feature, Pooling
from autoshard.evaluation.batch_memory import largest_share, peak_factor
from tests.builders import table, tables


def history(*features):
    return table("history", features=features, pooling=Pooling.SEQUENCE)


@pytest.mark.parametrize("batch_size", [1, 4, 64])
@pytest.mark.parametrize(("mean", "deviation"), [(100.0, 100.0), (40.0, 10.0)])
def test_the_99th_percentile_is_that_of_drawn_batches(batch_size, mean, deviation):
    # Gamma-distributed lengths: at a deviation as large as the mean, exponential ones.
    shape = (mean / deviation) ** 2
    lengths = np.random.default_rng(0).gamma(shape, mean / shape, size=(40_000, batch_size))
    drawn = np.percentile(lengths.sum(axis=1), 99) / (batch_size * mean)
    feature = Feature(
        name="f", pooling_factor=mean, pooling_variance=deviation**2, pooling_p99=float(np.percentile(lengths, 99))
    )
    assert peak_factor(history(feature), batch_size) == pytest.approx(drawn, rel=0.03)


def test_features_of_a_table_deviate_together():
    # Two features of variance 100 and skewness g: the sum's variance is 200, its skewness g / sqrt(2).
    feature = Feature(name="f", pooling_factor=10.0, pooling_variance=100.0, pooling_p99=50.0)
    both = (feature, replace(feature, name="g"))
    alone, together = peak_factor(history(feature), 1), peak_factor(history(*both), 1)
    assert alone == pytest.approx(5.0)
    beyond = (4.0 - 2.3263) / 2**0.5 + 2.3263
    assert together == pytest.approx(1 + beyond * 200**0.5 / 20)


def test_batches_are_normal_about_their_mean():
    def steady(**changes):
        return history(Feature(name="f", pooling_factor=100.0, **changes))

    # The sum of 512 samples of variance 512 x 100 deviates by 512 x 10, which is a tenth of its mean of 51,200.
    assert peak_factor(steady(), 512) == 1.0
    assert peak_factor(steady(pooling_variance=51_200.0), 512) == pytest.approx(1.23263)
    assert peak_factor(steady(pooling_p99=100 + 2.3263 * 10), 100) == pytest.approx(1 + 2.3263 / 100)
    assert peak_factor(replace(steady(pooling_variance=51_200.0), pooling=Pooling.SUM), 512) == 1.0


@pytest.mark.parametrize(("num_ranks", "expected"), [(1, 1.0), (2, 1.0360), (8, 1.0876), (64, 1.1427)])
def test_one_rank_gets_more_of_what_is_dealt_at_random(num_ranks, expected):
    # 64 samples a rank of four features of mean 20 and variance 382: the sum deviates by 6.1% of its mean.
    features = [Feature(name=f"f{number}", pooling_factor=20.0, pooling_variance=382.0) for number in range(4)]
    task = tables(history(*features), batch_size=64 * num_ranks)
    found = largest_share(task, num_ranks)
    assert found == pytest.approx(expected, abs=1e-4)
    shape, ratio = 64 * 4 * 400 / 382, 382 / 20
    drawn = np.random.default_rng(0).gamma(shape, ratio, size=(20_000, num_ranks)).max(axis=1).mean()
    # Sums of 256 lengths are a little skewed, which a normal distribution leaves out.
    assert found == pytest.approx(drawn / (64 * 80), rel=0.01)


def test_samples_of_one_length_are_even():
    task = tables(history(Feature(name="f", pooling_factor=20.0)), batch_size=512)
    assert largest_share(task, 8) == 1.0
