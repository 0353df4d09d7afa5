from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoshard.core import Update
from autoshard.core.errors import InvalidOptionError, SampleStoreError
from autoshard.formats.samples import SampleTable
from costmodel.dataset import CostDataset
from costmodel.features import FeatureScaling
from costmodel.metrics import held_out_metrics, kendall_tau
from costmodel.network import CostNetwork
from costmodel.predictor import CostPredictor
from costmodel.schedules import Buffer, Shuffled
from costmodel.training import MIN_SAMPLES, PAPER_OPTIONS, Loss, TrainingOptions, predict, train_cost_model
from costmodel.weights import weight_shapes


def with_shards(sample, **changes):
    shards = [replace(item, shard=replace(item.shard, **changes)) for item in sample.shards]
    return replace(sample, shards=tuple(shards))


# -- data ------------------------------------------------------------------------------------------------------------


def test_dataset_holds_what_the_samples_hold(samples, dataset):
    assert len(dataset) == len(samples) == 400
    forward_ms_S, backward_ms_S = samples.corrected_ms()
    assert dataset.latency_ms_SO.tolist() == np.stack([forward_ms_S, backward_ms_S], axis=1).tolist()
    assert dataset.kernel_ms == pytest.approx(forward_ms_S + backward_ms_S)
    for index in (0, 17, 399):
        shard_N, starts_B = dataset.shards_of(np.array([index]))
        shards = samples.samples[index].local_shards
        assert starts_B.tolist() == [0]
        assert dataset.features_UF[shard_N, 1].tolist() == [shard.num_embeddings for shard in shards]
        assert dataset.features_UF[shard_N, 2].tolist() == [shard.pooling_factor for shard in shards]
    assert dataset.coverage.num_bags == 1024
    assert dataset.coverage.num_tables == (1, max(len(sample.shards) for sample in samples.samples))


@given(st.lists(st.integers(0, 399), min_size=1, max_size=20))
def test_batches_keep_samples_whole(dataset, chosen):
    shard_N, starts_B = dataset.shards_of(np.array(chosen))
    ends = np.append(starts_B[1:], len(shard_N))
    for index, start, stop in zip(chosen, starts_B, ends, strict=True):
        assert shard_N[start:stop].tolist() == dataset.shards_of(np.array([index]))[0].tolist()


def test_split_divides_samples(dataset):
    first, second = dataset.split(0.2, np.random.default_rng(0))
    assert (len(first), len(second)) == (320, 80)
    both = np.concatenate([first.kernel_ms, second.kernel_ms])
    assert sorted(both.tolist()) == sorted(dataset.kernel_ms.tolist())
    assert len(first.shard_N) + len(second.shard_N) == len(dataset.shard_N)


def test_several_batch_sizes_need_a_choice(samples):
    mixed = SampleTable(samples=(*samples.samples[:10], with_shards(samples.samples[10], num_bags=64)))
    with pytest.raises(SampleStoreError, match="there are samples of: 64, 1024"):
        CostDataset.from_samples(mixed)
    assert len(CostDataset.from_samples(mixed, num_bags=1024)) == 10
    assert len(CostDataset.from_samples(mixed, num_bags=64)) == 1
    with pytest.raises(SampleStoreError, match="there are samples of: 64, 1024"):
        CostDataset.from_samples(mixed, num_bags=2)


def test_kinds_that_no_model_covers(samples):
    odd = with_shards(samples.samples[0], update=Update.ALL_REDUCED)
    with pytest.raises(SampleStoreError, match="update all_reduced"):
        CostDataset.from_samples(SampleTable(samples=(*samples.samples[1:], odd)))


def test_noisy_samples_are_left_out(samples):
    noisy = replace(samples.samples[0], is_noisy=True, forward_ms=1e6)
    dataset = CostDataset.from_samples(SampleTable(samples=(noisy, *samples.samples[1:10])))
    assert len(dataset) == 9
    assert dataset.latency_ms_SO.max() < 1e5
    with pytest.raises(SampleStoreError, match="there are samples of: none"):
        CostDataset.from_samples(SampleTable(samples=(noisy,)))


# -- schedules -------------------------------------------------------------------------------------------------------


@given(num_samples=st.integers(1, 50), batch_size=st.integers(1, 60), num_updates=st.integers(1, 30))
def test_shuffled_batches_see_each_sample_once_per_order(num_samples, batch_size, num_updates):
    schedule = Shuffled(num_updates=num_updates)
    batches = list(schedule.batches(num_samples, batch_size, np.random.default_rng(0)))
    size = min(batch_size, num_samples)
    assert [len(batch) for batch in batches] == [size] * num_updates
    per_order = num_samples // size
    for start in range(0, num_updates, per_order):
        seen = np.concatenate(batches[start : start + per_order])
        assert len(set(seen.tolist())) == len(seen)


def test_the_buffer_holds_the_newest_samples_that_arrived():
    schedule = Buffer(num_rounds=10, updates_per_round=3, buffer_size=25)
    batches = list(schedule.batches(100, 200, np.random.default_rng(0)))
    assert len(batches) == schedule.num_updates == 30
    for round_, group in enumerate(batches[index : index + 3] for index in range(0, 30, 3)):
        arrived = 10 * (round_ + 1)
        seen = np.concatenate(group)
        assert (seen.min(), seen.max()) == (max(0, arrived - 25), arrived - 1)


def test_the_papers_settings():
    schedule = PAPER_OPTIONS.schedule
    assert (schedule.updates_per_round, schedule.buffer_size) == (20, 5000)
    assert (PAPER_OPTIONS.batch_size, PAPER_OPTIONS.learning_rate) == (512, 1e-3)
    shapes = weight_shapes(PAPER_OPTIONS.encoder_hidden)
    assert [shape for name, shape in shapes.items() if name.endswith("weight")] == [
        *[(128, 21), (32, 128)],
        *[(64, 32), (1, 64)] * 2,
    ]


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: TrainingOptions(batch_size=0), "batch_size"),
        (lambda: TrainingOptions(learning_rate=0), "learning_rate"),
        (lambda: TrainingOptions(held_out_share=1), "held_out_share"),
        (lambda: TrainingOptions(weight_decay=-1), "weight_decay"),
        (lambda: Shuffled(num_updates=0), "num_updates"),
        (lambda: Buffer(buffer_size=0), "buffer_size"),
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
    predicted_S = rng.uniform(1, 10, 1001)
    measured_S = predicted_S * rng.normal(1.02, 0.05, 1001)
    metrics = held_out_metrics(predicted_S, measured_S)
    inside = (measured_S >= metrics.low_ratio * predicted_S) & (measured_S <= metrics.high_ratio * predicted_S)
    assert inside.mean() == pytest.approx(0.9, abs=0.002)


def test_kendall_tau_of_known_orders():
    first = np.arange(50.0)
    assert kendall_tau(first, first**3) == 1
    assert kendall_tau(first, -first) == -1
    assert kendall_tau(first, np.ones(50)) == 0
    assert kendall_tau(first[:1], first[:1]) == 0


# -- training --------------------------------------------------------------------------------------------------------


def test_same_seed_same_weights(dataset, short_options, trained):
    options = replace(short_options, schedule=Shuffled(num_updates=30))
    first, again, other = (train_cost_model(dataset, device="cpu", options=options, seed=seed) for seed in (1, 1, 2))
    assert all((first.weights[name] == again.weights[name]).all() for name in first.weights)
    assert first.card == again.card
    assert any((first.weights[name] != other.weights[name]).any() for name in first.weights)


def test_training_leaves_torch_as_it_was(dataset, short_options):
    torch.manual_seed(5)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    train_cost_model(dataset, device="cpu", options=replace(short_options, schedule=Shuffled(num_updates=1)))
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_training_counts_its_updates(dataset, short_options):
    done = []
    options = replace(short_options, schedule=Shuffled(num_updates=7))
    train_cost_model(dataset, device="cpu", options=options, advance=done.append)
    assert sum(done) == 7


def test_the_trained_model_beats_bytes_and_lookups(dataset, trained):
    """320 samples, 400 updates: already better than a line through what moves the most bytes."""
    train_part, held_out = dataset.split(0.2, np.random.default_rng(0))

    def moved(part):
        per_shard = part.features_UF[:, 2] * part.features_UF[:, 0]
        return np.add.reduceat(per_shard[part.shard_N], part.shards_of(np.arange(len(part)))[1])

    slope, offset = np.polyfit(moved(train_part), train_part.kernel_ms, 1)
    line = held_out_metrics(slope * moved(held_out) + offset, held_out.kernel_ms)
    metrics = trained.card.metrics
    assert metrics.num_samples == len(held_out)
    assert metrics.relative_error < 0.6 * line.relative_error
    assert metrics.mae_ms < line.mae_ms
    assert metrics.relative_error < 0.12
    assert metrics.kendall_tau > 0.85


def test_metrics_are_of_samples_that_training_did_not_see(dataset, short_options, trained):
    """Nonsense in the held-out samples changes the metrics, not the weights."""
    held_out = np.random.default_rng(0).permutation(len(dataset))[:80]
    latency_ms_SO = dataset.latency_ms_SO.copy()
    latency_ms_SO[held_out] *= 10
    spoilt = train_cost_model(
        replace(dataset, latency_ms_SO=latency_ms_SO), device="cpu", options=short_options, seed=0
    )
    assert all((spoilt.weights[name] == trained.weights[name]).all() for name in trained.weights)
    assert spoilt.card.metrics.relative_error == pytest.approx(0.9, abs=0.05)


def test_the_papers_recipe_trains(dataset):
    options = replace(PAPER_OPTIONS, schedule=Buffer(num_rounds=10, updates_per_round=20))
    before = train_cost_model(dataset, device="cpu", options=replace(options, schedule=Buffer(num_rounds=1)))
    after = train_cost_model(dataset, device="cpu", options=options)
    assert after.card.metrics.mse_ms2 < before.card.metrics.mse_ms2
    assert after.card.training["loss"] == Loss.SQUARED


def test_too_few_samples(dataset):
    few = dataset.take(np.arange(MIN_SAMPLES - 1))
    with pytest.raises(SampleStoreError, match=f"at least {MIN_SAMPLES} samples, there are {MIN_SAMPLES - 1}"):
        train_cost_model(few, device="cpu")


def test_the_card_says_how_it_was_trained(trained):
    training = trained.card.training
    assert training["schedule"] == {"kind": "shuffled", "num_updates": 400}
    assert (training["num_samples"], training["seed"], training["loss"]) == (320, 0, "relative")


def test_numpy_predicts_what_torch_does(dataset):
    scaling = FeatureScaling.fit(dataset.features_UF[dataset.shard_N])
    network = CostNetwork((40, 24))
    weights = {name: tensor.numpy() for name, tensor in network.state_dict().items()}
    predictor = CostPredictor(weights, encoder_hidden=(40, 24), scaling=scaling, scale_ms=3.0)
    shard_N, starts_S = dataset.shards_of(np.arange(len(dataset)))
    with torch.no_grad():
        expected_SO = network(
            torch.from_numpy(scaling.apply(dataset.features_UF)),
            torch.from_numpy(shard_N),
            torch.from_numpy(starts_S),
        )
    expected_SO = np.maximum(expected_SO.numpy() * 3.0, 0)
    assert (expected_SO > 0).any()
    assert predict(predictor, dataset) == pytest.approx(expected_SO, rel=1e-4, abs=1e-5)
