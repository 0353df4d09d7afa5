from dataclasses import replace

import numpy as np
import pytest

from autoshard.core import KernelCosts, Pooling
from autoshard.core.errors import InvalidOptionError, ModelError
from autoshard.evaluation.analytic import AnalyticCostModel
from autoshard.formats import load_tables
from autoshard.formats.stores.samples import SampleTable
from bench.sampling.candidates import BATCH_SIZE, MostUncertain, spread_out
from bench.sampling.strategies import SetSource, SingleTables
from bench.sampling.stream import stream_sets
from bench.sampling.uncertainty import ErrorEstimate, set_features
from tests import builders as make

ANALYTIC = AnalyticCostModel.for_device("cpu")


def shard(rows, dim=16, pooling_factor=4.0, **fields):
    return make.held(f"t{rows}", rows, dim, num_bags=128, pooling_factor=pooling_factor, alpha=0.9, **fields)


def measured(shards, kernel_ms):
    """A sample with a latency of our choice, half of it forward."""
    return make.kernel_sample(*shards, forward_ms=kernel_ms / 2, backward_ms=kernel_ms / 2)


def priced(sets):
    codes = [ANALYTIC.encode(list(shards)).sum(axis=0) for shards in sets]
    return ANALYTIC.predict_ms(np.stack(codes))


def random_sets(rng, count, dims=(16, 32)):
    return [
        tuple(
            shard(int(rng.integers(100, 100_000)), int(rng.choice(dims)), float(rng.uniform(1, 40)))
            for _ in range(rng.integers(1, 9))
        )
        for _ in range(count)
    ]


def table_of(sets, kernel_ms):
    return SampleTable(samples=tuple(measured(shards, ms) for shards, ms in zip(sets, kernel_ms, strict=True)))


def ranks(values):
    return np.argsort(np.argsort(values))


def test_features_do_not_depend_on_order_and_tell_kinds_apart():
    sets = random_sets(np.random.default_rng(0), 5)
    np.testing.assert_allclose(set_features(sets), set_features([shards[::-1] for shards in sets]))
    plain, mean = [(shard(100),)], [(shard(100, pooling=Pooling.MEAN),)]
    assert (set_features(plain) != set_features(mean)).any()


def test_errors_are_expected_where_the_model_was_wrong():
    rng = np.random.default_rng(1)
    sets = random_sets(rng, 400)
    # The device is slower than the model says, by more the more shards there are; half of the sets is kept back.
    off = np.exp(
        0.05 * rng.normal(size=400) + np.array([0.1 * (len(shards) > 5) * rng.normal() * 8 for shards in sets])
    )
    estimate = ErrorEstimate.fit(table_of(sets[:200], 30 * priced(sets[:200]) * off[:200]), ANALYTIC)
    true_error = np.abs(np.log(off[200:]))
    assert np.corrcoef(ranks(estimate.relative_error(sets[200:])), ranks(true_error))[0, 1] > 0.25


def test_errors_are_expected_far_from_all_samples():
    rng = np.random.default_rng(2)
    near = random_sets(rng, 300)
    estimate = ErrorEstimate.fit(
        table_of(near[:250], priced(near[:250]) * np.exp(0.1 * rng.normal(size=250))), ANALYTIC
    )
    far = [(shard(5_000_000, 256, 200.0),), (shard(20, 4, 0.01),), (shard(1000, pooling=Pooling.SEQUENCE),)]
    assert estimate.relative_error(far).min() > 2 * np.median(estimate.relative_error(near[250:]))


class Hesitant:
    """The analytic model, unsure about large sets and unable to price small tables."""

    name = "hesitant"

    def encode(self, shards):
        if any(item.num_embeddings < 200 for item in shards):
            raise ModelError("too small")
        return np.pad(ANALYTIC.encode(shards), ((0, 0), (0, 1)), constant_values=1.0)

    def predict_ms(self, codes_SH):
        return ANALYTIC.predict_ms(codes_SH[:, :-1])

    def predict_parts(self, codes_SH):
        costs = ANALYTIC.predict_parts(codes_SH[:, :-1])
        half = np.where(codes_SH[:, -1] > 4, 0.9, 0.01) * costs.kernel_ms_S
        return KernelCosts(
            forward_ms_S=costs.forward_ms_S,
            backward_ms_S=costs.backward_ms_S,
            low_ms_S=costs.kernel_ms_S - half,
            high_ms_S=costs.kernel_ms_S + half,
        )


def test_the_models_own_intervals_count_where_they_differ():
    sets = random_sets(np.random.default_rng(3), 200)
    own = ErrorEstimate.fit(table_of(sets, priced(sets)), Hesitant())
    errors = own.relative_error(sets)
    unsure = np.array([len(shards) > 4 and min(item.num_embeddings for item in shards) >= 200 for shards in sets])
    assert errors[unsure].min() > 0.5
    small = [(shard(150),), (shard(150), shard(40_000))]
    assert np.isfinite(own.relative_error(small)).all()
    # The analytic model's interval is the same for all sets, so it says nothing.
    constant = ErrorEstimate.fit(table_of(sets, priced(sets)), ANALYTIC)
    assert constant.relative_error(sets).max() < 0.01


def test_without_a_model_a_line_is_judged():
    sets = random_sets(np.random.default_rng(4), 200)
    errors = ErrorEstimate.fit(table_of(sets, priced(sets))).relative_error(sets)
    assert 0 < np.median(errors) < 0.5


def test_too_few_samples_are_refused():
    sets = random_sets(np.random.default_rng(5), 8)
    with pytest.raises(InvalidOptionError, match=r"samples: must be more than 8 .* got 8"):
        ErrorEstimate.fit(table_of(sets, priced(sets)))


def test_near_duplicates_are_passed_over():
    features = np.array([[0.0], [0.001], [1.0], [2.0], [3.5], [5.0]])
    assert spread_out(features, [0, 1, 2, 3, 4, 5], 3) == [0, 2, 3]
    assert spread_out(features, [1, 0, 2, 3, 4, 5], 6) == [1, 2, 3, 4, 5, 0]


@pytest.fixture(scope="module")
def source():
    pool = load_tables("metasyn").scaled(256).sample(60, 2)
    singles = SingleTables(SetSource(tables=pool, max_tables=9), 0)
    sets = [singles.draw(number) for number in range(60)]
    noise = np.exp(0.1 * np.random.default_rng(0).normal(size=60))
    return SetSource(tables=pool, max_tables=9, samples=table_of(sets, priced(sets) * noise))


@pytest.mark.slow
def test_doubtful_sets_are_chosen_and_differ(source):
    strategy = MostUncertain(source, 0)
    chosen = [strategy.draw(number) for number in range(BATCH_SIZE)]
    errors = strategy.estimate.relative_error(chosen)
    assert np.median(errors) > 1.2 * np.median(strategy.estimate.relative_error(strategy.candidates(0)))
    assert len(set(chosen)) == BATCH_SIZE
    assert [MostUncertain(source, 0).draw(number) for number in range(3)] == chosen[:3]


def test_doubtful_sets_need_samples(source):
    with pytest.raises(InvalidOptionError, match="samples: the strategy uncertain needs samples"):
        stream_sets(replace(source, samples=None), seed=0, weights={"uncertain": 1.0})
    first = next(stream_sets(source, seed=0, weights={"uncertain": 1.0}))
    assert first.source == "uncertain"
