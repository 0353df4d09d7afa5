from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoshard.core import Update
from autoshard.core.errors import InvalidOptionError, SampleStoreError
from autoshard.formats.stores.drift import corrected_ms
from autoshard.formats.stores.samples import SampleTable
from costmodel.kernel.dataset import CostDataset
from costmodel.kernel.features import FeatureScaling, shard_features
from costmodel.kernel.metrics import PricedSamples, calibrated_interval, held_out_metrics, kendall_tau
from costmodel.kernel.network import CostNetwork
from costmodel.kernel.predictor import CostPredictor
from costmodel.kernel.training import MIN_SAMPLES, CostTrainingOptions, sample_batches, train_cost_model
from costmodel.kernel.weights import LOG_SPREAD_RANGE


def with_shards(sample, **changes):
    shards = [replace(item, shard=replace(item.shard, **changes)) for item in sample.shards]
    return replace(sample, shards=tuple(shards))


# -- data ------------------------------------------------------------------------------------------------------------


def test_dataset_holds_what_the_samples_hold(samples, dataset):
    assert len(dataset) == len(samples) == 400
    forward_ms_S, backward_ms_S = corrected_ms(samples.samples)
    assert dataset.latency_ms_SO.tolist() == np.stack([forward_ms_S, backward_ms_S], axis=1).tolist()
    assert dataset.kernel_ms == pytest.approx(forward_ms_S + backward_ms_S)
    for index in (0, 17, 399):
        shard_N, starts_B = dataset.shards_of(np.array([index]))
        shards = samples.samples[index].local_shards
        assert starts_B.tolist() == [0]
        assert [dataset.shards_U[place] for place in shard_N] == list(shards)
        assert dataset.features_UF[shard_N].tolist() == shard_features(shards).tolist()
    assert dataset.coverage.kinds == ("fused/hbm/fp32/rowwise_adagrad/sum",)
    assert dataset.coverage.ranges["num_bags"] == (1024, 1024)
    assert dataset.coverage.num_tables == (1, max(len(sample.shards) for sample in samples.samples))


@given(st.lists(st.integers(0, 399), min_size=1, max_size=20))
def test_batches_keep_samples_whole(dataset, chosen):
    shard_N, starts_B = dataset.shards_of(np.array(chosen))
    ends = np.append(starts_B[1:], len(shard_N))
    for index, start, stop in zip(chosen, starts_B, ends, strict=True):
        assert shard_N[start:stop].tolist() == dataset.shards_of(np.array([index]))[0].tolist()


def test_split_divides_samples(dataset):
    first, second = dataset.split(0.2, 0)
    assert len(second) == pytest.approx(80, abs=3 * (400 * 0.2 * 0.8) ** 0.5)
    both = np.concatenate([first.kernel_ms, second.kernel_ms])
    assert sorted(both.tolist()) == sorted(dataset.kernel_ms.tolist())
    assert len(first.shard_N) + len(second.shard_N) == len(dataset.shard_N)


def test_samples_of_one_set_stay_together(samples):
    twice = SampleTable(samples=tuple(item for sample in samples.samples[:40] for item in (sample, sample)))
    first, second = CostDataset.from_samples(twice).split(0.3, 0)
    assert not set(first.set_S.tolist()) & set(second.set_S.tolist())
    assert len(second) >= 22


def test_what_is_held_out_stays_held_out_when_the_store_grows(dataset):
    def held_out(num_samples, seed=0):
        return set(dataset.take(np.arange(num_samples)).split(0.2, seed)[1].set_S.tolist())

    assert held_out(200) == held_out(400) & set(dataset.set_S[:200].tolist())
    assert len(held_out(400, seed=1) & held_out(400)) < 0.4 * len(held_out(400))


def test_something_is_held_out_of_the_smallest_dataset(dataset):
    for seed in range(10):
        first, second = dataset.take(np.arange(2)).split(0.01, seed)
        assert (len(first), len(second)) == (1, 1)


def test_several_batch_sizes_and_kinds_are_one_dataset(samples):
    others = [
        with_shards(samples.samples[10], num_bags=64),
        with_shards(samples.samples[11], update=Update.ALL_REDUCED),
    ]
    dataset = CostDataset.from_samples(SampleTable(samples=(*samples.samples[:10], *others)))
    assert len(dataset) == 12
    assert dataset.coverage.ranges["num_bags"] == (64, 1024)
    assert dataset.coverage.kinds == ("all_reduced/hbm/fp32/none/sum", "fused/hbm/fp32/rowwise_adagrad/sum")


def test_shards_can_be_said_to_be_others(dataset):
    wide = dataset.with_features_of(replace(shard, embedding_dim=64) for shard in dataset.shards_U)
    assert wide.coverage.ranges["embedding_dim"] == (64, 64)
    assert wide.latency_ms_SO is dataset.latency_ms_SO
    assert not np.array_equal(wide.features_UF, dataset.features_UF)


def test_how_far_apart_speeds_of_one_minute_are(samples):
    """Five groups of four samples, 5% apart; what an hour does is no part of it."""
    start = samples.samples[0].collected_at.replace(second=0)

    def measured(index, hours=0):
        factor = np.exp(0.05 * (index // 4) + hours)
        references = {"reference_forward_ms": 1.0 * factor, "reference_backward_ms": 2.0 * factor}
        at = start + timedelta(seconds=index, hours=hours)
        return replace(samples.samples[index], is_noisy=False, collected_at=at, **references)

    minute = [measured(index) for index in range(20)]
    dataset = CostDataset.from_samples(replace(samples, samples=tuple(minute)))
    assert dataset.speed_spread == pytest.approx(1.4826 * 0.05)
    hours = [measured(index, hours=1) for index in range(20)]
    both = CostDataset.from_samples(replace(samples, samples=(*minute, *hours)))
    assert both.speed_spread == pytest.approx(dataset.speed_spread)
    assert CostDataset.from_samples(replace(samples, samples=tuple(minute[:4]))).speed_spread == 0


def test_noisy_samples_are_left_out(samples):
    noisy = replace(samples.samples[0], is_noisy=True, forward_ms=1e6)
    dataset = CostDataset.from_samples(SampleTable(samples=(noisy, *samples.samples[1:10])))
    assert len(dataset) == 9
    assert dataset.latency_ms_SO.max() < 1e5
    with pytest.raises(SampleStoreError, match="none of 1 samples can be trained on"):
        CostDataset.from_samples(SampleTable(samples=(noisy,)))


# -- batches ---------------------------------------------------------------------------------------------------------


@given(num_samples=st.integers(1, 50), batch_size=st.integers(1, 60), num_updates=st.integers(1, 30))
def test_shuffled_batches_see_each_sample_once_per_order(num_samples, batch_size, num_updates):
    options = CostTrainingOptions(num_updates=num_updates, batch_size=batch_size)
    batches = list(sample_batches(num_samples, options, np.random.default_rng(0)))
    size = min(batch_size, num_samples)
    assert [len(batch) for batch in batches] == [size] * num_updates
    per_order = num_samples // size
    for start in range(0, num_updates, per_order):
        seen = np.concatenate(batches[start : start + per_order])
        assert len(set(seen.tolist())) == len(seen)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: CostTrainingOptions(batch_size=0), "batch_size"),
        (lambda: CostTrainingOptions(learning_rate=0), "learning_rate"),
        (lambda: CostTrainingOptions(held_out_share=1), "held_out_share"),
        (lambda: CostTrainingOptions(weight_decay=-1), "weight_decay"),
        (lambda: CostTrainingOptions(least_share=1), "least_share"),
        (lambda: CostTrainingOptions(num_updates=0), "num_updates"),
    ],
)
def test_options_are_checked(make, field):
    with pytest.raises(InvalidOptionError, match=field):
        make()


# -- metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_by_hand():
    metrics = held_out_metrics(np.array([1.0, 3.0, 2.0]), np.array([2.0, 3.0, 4.0]))
    assert (metrics.num_samples, metrics.mae_ms, metrics.mse_ms2) == (3, 1.0, pytest.approx(5 / 3))
    assert metrics.relative_error == pytest.approx((1 / 2 + 0 + 2 / 4) / 3)
    # Pairs: (1, 3) agrees, (1, 2) agrees, (3, 2) does not.
    assert metrics.kendall_tau == pytest.approx(1 / 3)


def test_the_interval_holds_nine_of_ten():
    rng = np.random.default_rng(0)
    predicted_S, spread_S = rng.uniform(1, 10, 2001), rng.choice([0.01, 0.2], 2001)
    measured_S = predicted_S * np.exp(0.01 + spread_S * rng.normal(0, 1, 2001))
    interval = calibrated_interval(predicted_S, spread_S, measured_S)
    low_S, high_S = (predicted_S * np.exp(end * spread_S) for end in (interval.low, interval.high))
    inside_S = (measured_S >= low_S) & (measured_S <= high_S)
    assert inside_S.mean() == pytest.approx(0.9, abs=0.002)
    assert interval.coverage == pytest.approx(0.9, abs=0.03)  # on samples that did not set it
    for spread in (0.01, 0.2):
        assert inside_S[spread_S == spread].mean() == pytest.approx(0.9, abs=0.06)


def test_the_interval_holds_the_prediction_itself():
    ones = np.ones(100)
    slower = calibrated_interval(ones, ones, np.linspace(1.1, 1.2, 100))
    assert slower.low == 0 < slower.high


def test_wide_intervals_of_few_samples_are_written_and_read():
    """A prediction that is far off by its own spread, as after a training on some dozens of samples."""
    predicted_ms = np.full(40, 1.0)
    interval = calibrated_interval(predicted_ms, np.full(40, 0.005), np.linspace(0.5, 2.0, 40))
    assert interval.low < -50
    low, high = interval.factors(np.array([0.005, 2.7]))
    assert np.isfinite([low, high]).all()
    assert (low < 1).all()
    assert (high > 1).all()


def test_coverage_of_a_few_samples_is_not_told():
    assert calibrated_interval(np.ones(9), np.ones(9), np.linspace(0.9, 1.1, 9)).coverage is None


def test_kendall_tau_of_known_orders():
    first = np.arange(50.0)
    assert kendall_tau(first, first**3) == 1
    assert kendall_tau(first, -first) == -1
    assert kendall_tau(first, np.ones(50)) == 0
    assert kendall_tau(first[:1], first[:1]) == 0


# -- training --------------------------------------------------------------------------------------------------------


def test_same_seed_same_weights(dataset, short_options):
    options = replace(short_options, num_updates=30)
    first, again, other = (train_cost_model(dataset, device="cpu", options=options, seed=seed) for seed in (1, 1, 2))
    weights, same, different = (one.model.tensors() for one in (first, again, other))
    assert all((weights[name] == same[name]).all() for name in weights)
    assert first.model.card == again.model.card
    assert any((weights[name] != different[name]).any() for name in weights)


def test_training_leaves_torch_as_it_was(dataset, short_options):
    torch.manual_seed(5)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    train_cost_model(dataset, device="cpu", options=replace(short_options, num_updates=1))
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_training_counts_its_updates(dataset, short_options):
    done = []
    options = replace(short_options, num_updates=7)
    train_cost_model(dataset, device="cpu", options=options, advance=done.append)
    assert sum(done) == 7


def test_the_trained_model_beats_bytes_and_lookups(dataset, trained):
    """320 samples, 400 updates: already better than a line through what moves the most bytes."""
    train_part, held_out = dataset.split(0.2, 0)

    def moved(part):
        per_shard = np.array([shard.pooling_factor * shard.embedding_dim for shard in part.shards_U])
        return np.add.reduceat(per_shard[part.shard_N], part.shards_of(np.arange(len(part)))[1])

    slope, offset = np.polyfit(moved(train_part), train_part.kernel_ms, 1)
    line = held_out_metrics(slope * moved(held_out) + offset, held_out.kernel_ms)
    metrics = trained.model.card.metrics
    assert metrics.num_samples == len(held_out)
    assert metrics.relative_error < 0.6 * line.relative_error
    assert metrics.mae_ms < line.mae_ms
    assert metrics.relative_error < 0.12
    assert metrics.kendall_tau > 0.85


def test_metrics_are_of_samples_that_training_did_not_see(dataset, short_options, trained):
    """Nonsense in the held-out samples changes the metrics, not the weights."""
    _, held_out = dataset.split(0.2, 0)
    latency_ms_SO = dataset.latency_ms_SO.copy()
    latency_ms_SO[np.isin(dataset.set_S, held_out.set_S)] *= 10
    spoilt = train_cost_model(
        replace(dataset, latency_ms_SO=latency_ms_SO), device="cpu", options=short_options, seed=0
    )
    weights = spoilt.model.tensors()
    assert all((weights[name] == tensor).all() for name, tensor in trained.model.tensors().items())
    assert spoilt.model.card.metrics.relative_error == pytest.approx(0.9, abs=0.05)


def test_too_few_samples(dataset):
    few = dataset.take(np.arange(MIN_SAMPLES - 1))
    with pytest.raises(SampleStoreError, match=f"at least {MIN_SAMPLES} samples, there are {MIN_SAMPLES - 1}"):
        train_cost_model(few, device="cpu")


def test_the_card_says_how_it_was_trained(dataset, trained):
    training = trained.model.card.training
    assert training["schedule"] == {"kind": "shuffled", "num_updates": 400}
    assert (training["num_samples"], training["seed"]) == (len(dataset) - trained.model.card.metrics.num_samples, 0)


def test_numpy_predicts_what_torch_does(dataset):
    scaling = FeatureScaling.fit(dataset.features_UF[dataset.shard_N])
    network = CostNetwork((40, 24))
    weights = {name: tensor.numpy() for name, tensor in network.state_dict().items()}
    predictor = CostPredictor(weights, encoder_hidden=(40, 24), scaling=scaling, scale_ms=3.0)
    shard_N, starts_S = dataset.shards_of(np.arange(len(dataset)))
    with torch.no_grad():
        expected_SO, log_spread_S = network(
            torch.from_numpy(scaling.apply(dataset.features_UF)),
            torch.from_numpy(shard_N),
            torch.from_numpy(starts_S),
        )
    expected_SO = expected_SO.numpy() * 3.0
    assert (expected_SO > 0).all()
    priced = PricedSamples.of(predictor, dataset)
    assert priced.ms_SO == pytest.approx(expected_SO, rel=1e-4, abs=1e-5)
    assert priced.spread_S == pytest.approx(np.exp(log_spread_S.numpy().clip(*LOG_SPREAD_RANGE)), rel=1e-3)
