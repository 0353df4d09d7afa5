import numpy as np
import pytest

from autoshard.core import Exchange, Update
from costmodel.kernel.dataset import CostDataset
from costmodel.kernel.features import shard_features
from studies.cost_models.baselines import (
    PaperNetwork,
    PaperOptions,
    fit_analytic,
    fit_boosted_trees,
    fit_factor,
    fit_paper_network,
    fit_pooled_linear,
    fit_table_weights,
    paper_features,
    pooled_features,
    smallest_error_factor,
    summed,
    torchrec_kernel_ms,
)
from tests import builders as make


@pytest.fixture(scope="module")
def parts(dataset):
    return dataset.split(0.2, 0)


@pytest.fixture
def make_dataset():
    """Sets of numbered shards, with the latencies that a function of the shards gives."""

    def make_one(sets, latency_of, num_shards=6):
        shards = tuple(
            make.held(table=f"t{index}", num_embeddings=1000 * (index + 1), pooling_factor=1.0 + index)
            for index in range(num_shards)
        )
        latency = np.array([latency_of([shards[index] for index in members]) for members in sets])
        return CostDataset(
            shards_U=shards,
            features_UF=shard_features(shards),
            shard_N=np.array([index for members in sets for index in members]),
            num_shards_S=np.array([len(members) for members in sets]),
            set_S=np.arange(len(sets)),
            latency_ms_SO=np.stack([latency / 3, 2 * latency / 3], axis=1),
            collected_at_S=np.full(len(sets), ""),
        )

    return make_one


def random_sets(num_sets, num_shards=6, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.permutation(num_shards)[: rng.integers(1, 5)].tolist() for _ in range(num_sets)]


def relative_error(pricing, dataset):
    return float(np.abs(pricing(dataset) / dataset.kernel_ms - 1).mean())


class TestPaperNetwork:
    def test_shape_is_the_papers(self):
        """AutoShard C.1: 21-128-32 per table, sum, 32-64-1."""
        shapes = [tuple(tensor.shape) for tensor in PaperNetwork().parameters()]
        assert shapes == [(128, 21), (128,), (32, 128), (32,), (64, 32), (64,), (1, 64), (1,)]

    def test_features_are_the_papers(self):
        """AutoShard B.2: dimension, rows, pooling factor, size in GB, and 17 shares that add up to 1."""
        shard = make.held(num_embeddings=10**6, embedding_dim=32, pooling_factor=7.0)
        for bins_of in ("rows", "lookups"):
            (features,) = paper_features([shard], bins_of)
            assert features.shape == (21,)
            assert features[:4].tolist() == [32, 1e6, 7, pytest.approx(0.128)]
            assert features[4:].sum() == pytest.approx(1)
        assert not np.allclose(paper_features([shard], "rows"), paper_features([shard], "lookups"))

    @pytest.mark.parametrize("loss", ["squared", "relative"])
    def test_training_lowers_its_error(self, parts, loss):
        train, held_out = parts
        errors = [
            relative_error(fit_paper_network(train, 0, PaperOptions(loss=loss, num_updates=updates)), held_out)
            for updates in (1, 80)
        ]
        assert errors[1] < 0.8 * errors[0]

    def test_same_seed_same_prices(self, parts):
        train, held_out = parts
        options = PaperOptions(num_updates=5)
        first, again, other = (fit_paper_network(train, seed, options)(held_out) for seed in (1, 1, 2))
        assert np.array_equal(first, again)
        assert not np.array_equal(first, other)


class TestLinear:
    def test_weights_of_tables_are_found(self, make_dataset):
        def latency(shards):
            return 0.5 + sum(shard.pooling_factor**1.5 for shard in shards)

        pricing = fit_table_weights(make_dataset(random_sets(80), latency))
        assert relative_error(pricing, make_dataset(random_sets(30, seed=1), latency)) < 0.01

    def test_a_table_without_samples_has_no_price(self, make_dataset):
        pricing = fit_table_weights(make_dataset(random_sets(80), len))
        prices = pricing(make_dataset([[0], [0, 6], [1, 2]], len, num_shards=7))
        assert np.isnan(prices).tolist() == [False, True, False]

    def test_pooled_features_find_what_is_linear_in_them(self, make_dataset):
        def latency(shards):
            return 0.2 + 0.01 * sum(shard.num_lookups for shard in shards) + 0.3 * len(shards)

        pricing = fit_pooled_linear(make_dataset(random_sets(80), latency))
        assert relative_error(pricing, make_dataset(random_sets(30, seed=1), latency)) < 0.01

    def test_pooled_features_are_sums(self, dataset):
        first = dataset.shard_N[: dataset.num_shards_S[0]]
        assert np.allclose(pooled_features(dataset)[0, :-1], dataset.features_UF[first].sum(axis=0))


@pytest.mark.smoke
def test_boosted_trees_beat_a_constant(parts):
    train, held_out = parts
    pricing = fit_boosted_trees(train, 0, 15)
    constant = np.median(train.kernel_ms)
    assert relative_error(pricing, held_out) < 0.6 * np.abs(constant / held_out.kernel_ms - 1).mean()


class TestFactor:
    def test_no_other_factor_is_better(self):
        rng = np.random.default_rng(0)
        predicted, measured = rng.lognormal(size=(2, 51))

        def error(factor):
            return np.abs(factor * predicted / measured - 1).mean()

        best = smallest_error_factor(predicted, measured)
        assert error(best) <= min(error(best * other) for other in np.geomspace(0.2, 5, 200))

    def test_units_do_not_decide(self, parts):
        train, held_out = parts
        pricing = fit_analytic("cpu")
        in_seconds = fit_factor(lambda dataset: pricing(dataset) / 1e3, train)
        assert np.allclose(in_seconds(held_out), fit_factor(pricing, train)(held_out))


class TestTorchRec:
    """By hand from its formulas: bytes over bandwidth, backward twice as long, a penalty for narrow rows."""

    @pytest.fixture
    def price(self, make_dataset):
        def price(shard):
            dataset = make_dataset([[0]], len, num_shards=1).with_features_of([shard])
            return float(torchrec_kernel_ms(dataset, "v100")[0])

        return price

    def test_whole_table(self, price):
        # 8-byte ids, rows and outputs of 128 x 4 bytes, at the V100's 900 GB/s.
        num_bytes = 64 * 2 * 8 + 64 * 2 * 128 * 4 + 64 * 128 * 4
        assert price(make.held(embedding_dim=128)) == pytest.approx(3 * num_bytes / 900e9 * 1e3)

    def test_narrow_rows_are_punished(self, price):
        num_bytes = 64 * 2 * 8 + 64 * 2 * 32 * 4 + 64 * 32 * 4
        assert price(make.held(embedding_dim=32)) == pytest.approx(3 * 1.75 * num_bytes / 900e9 * 1e3)

    def test_access_is_not_seen_but_kinds_are(self, price):
        shard = make.held(embedding_dim=128)
        assert price(make.held(embedding_dim=128, alpha=1.2)) == price(shard)
        assert price(make.held(embedding_dim=128, output=Exchange.ROWS)) > price(shard)
        assert price(make.held(embedding_dim=128, update=Update.ALL_REDUCED)) != price(shard)

    def test_sets_add_up(self, make_dataset):
        dataset = make_dataset([[0], [1], [0, 1], [1, 1]], len)
        one, other, both, twice = torchrec_kernel_ms(dataset, "cpu")
        assert (both, twice) == (pytest.approx(one + other), pytest.approx(2 * other))


def test_summed_asks_for_each_shard_once(dataset):
    asked = []

    def values_of(shards):
        asked.extend(shards)
        return np.array([shard.num_lookups for shard in shards])

    few = dataset.take(np.array([3, 1]))
    sums = summed(few, values_of)
    assert len(asked) == len(set(asked)) == len(np.unique(few.shard_N))
    members = few.shard_N[: few.num_shards_S[0]]
    assert sums[0] == pytest.approx(sum(dataset.shards_U[index].num_lookups for index in members))
