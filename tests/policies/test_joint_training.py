from dataclasses import replace

import numpy as np
import pytest
import torch

from autoshard.core import LocalShard, Tier
from autoshard.core.errors import InvalidOptionError, SampleStoreError
from autoshard.planners.space.placement import PlacementProblem
from costmodel import shard_features
from costmodel.kernel.dataset import CostDataset
from env import PlacementTask
from policies.choices import Algorithm, CostLoss, RewardSource
from policies.training.cost_buffer import CostBuffer
from policies.training.joint import JointTrainer
from policies.training.joint_cost import CostUpdates, JointCost
from policies.training.trainer import Budget, TrainingOptions
from tests import builders as make

OPTIONS = TrainingOptions(num_groups=2, num_rollouts=3, evaluate_every=2)


@pytest.fixture(scope="module")
def pool():
    rng = np.random.default_rng(0)
    return make.pool(rng.uniform(1, 10, 20).tolist(), rng.integers(100, 9000, 20).tolist())


@pytest.fixture(scope="module")
def dataset(pool, cost):
    """Sets of 1 to 6 tables of the pool, at the prices of the model with weights set by hand."""
    locals_: tuple[LocalShard, ...] = PlacementProblem.table_wise(pool, make.topology(1), cost).locals_by(
        Tier.TABLE_WISE
    )
    rng = np.random.default_rng(1)
    num_shards_S = rng.integers(1, 7, 400)
    shard_N = rng.integers(0, len(locals_), num_shards_S.sum())
    ends = np.cumsum(num_shards_S)
    codes = cost.encode(locals_)
    parts = cost.predict_parts(np.stack([codes[part].sum(axis=0) for part in np.split(shard_N, ends[:-1])]))
    return CostDataset(
        shards_U=locals_,
        features_UF=shard_features(locals_),
        shard_N=shard_N,
        num_shards_S=num_shards_S,
        set_S=np.arange(400),
        latency_ms_SO=np.stack([parts.forward_ms_S, parts.backward_ms_S], axis=1),
    )


@pytest.fixture
def joint_cost(dataset):
    return JointCost(dataset, device="cpu", seed=0, updates=CostUpdates(num_updates=5, batch_size=64))


@pytest.fixture
def make_trainer(pool):
    def make_one(joint_cost, measure=None, options=OPTIONS):
        model = joint_cost.model()
        problems = [PlacementProblem.table_wise(pool.sample(6, seed), make.topology(2), model) for seed in range(7)]
        return JointTrainer(problems[:4], problems[4:], cost=joint_cost, options=options, seed=0, measure=measure)

    return make_one


def flat(module):
    return torch.cat([value.detach().flatten() for value in module.parameters()])


def test_the_learner_makes_the_codes_that_the_environment_showed(joint_cost, make_trainer, monkeypatch):
    trainer, seen = make_trainer(joint_cost), []
    make_one = trainer.algorithm.learner_observations

    def remember(data):
        made = make_one(data)
        seen.append((data.observations, made))
        return made

    monkeypatch.setattr(trainer.algorithm, "learner_observations", remember)
    for _ in range(3):
        trainer.update()
    assert len(seen) == 3
    for shown, made in seen:
        assert made["item_code"].requires_grad
        for key, value in shown.items():
            assert torch.allclose(made[key].to(value.dtype), value, rtol=1e-4, atol=1e-5), key


def test_updates_of_the_policy_reach_the_encoder(dataset, make_trainer):
    cost = JointCost(dataset, device="cpu", seed=0, updates=CostUpdates(num_updates=0))
    trainer = make_trainer(cost)
    encoder, heads = flat(cost.encoder), flat(cost.network.get_submodule("fusion"))
    trainer.update()
    assert not torch.equal(flat(cost.encoder), encoder)
    assert torch.equal(flat(cost.network.get_submodule("fusion")), heads)


@pytest.mark.slow
def test_the_cost_model_learns_while_the_policy_does(dataset, make_trainer):
    cost = JointCost(dataset, device="cpu", seed=0)
    before = cost.current().card.metrics.relative_error
    trainer = make_trainer(cost)
    trainer.run(Budget(num_updates=20))
    assert cost.current().card.metrics.relative_error < min(0.1, before / 3)
    evaluation = trainer.evaluations[-1]
    assert evaluation.baselines.cost_greedy != trainer.evaluations[0].baselines.cost_greedy
    assert torch.equal(flat(trainer.best_network), flat(trainer.network))


def test_tasks_are_priced_by_the_cost_model_as_it_is_now(joint_cost, make_trainer):
    trainer = make_trainer(joint_cost)
    trainer.update()
    model = joint_cost.model()
    for task in [*trainer.train_tasks, *trainer.validation_tasks]:
        anew = PlacementProblem.table_wise(task.problem.tables, task.problem.topology, model)
        assert task.problem.codes_NH == pytest.approx(anew.codes_NH, abs=1e-5)
        assert task.problem.kernel_ms_N == pytest.approx(anew.kernel_ms_N, abs=1e-5)
        assert task.order_N.tolist() == PlacementTask.of(anew).order_N.tolist()


def test_measured_rewards_become_samples(joint_cost, make_trainer):
    measured = []

    def measure(plans):
        measured.extend(plans)
        held = [[bool(shards) for shards in plan.local_shards()] for plan in plans]
        return [np.where(held_R, [3.0, 6.0], 0.0) for held_R in held]

    num_before = len(joint_cost.buffer)
    trainer = make_trainer(joint_cost, measure, replace(OPTIONS, reward=RewardSource.MEASURED))
    trainer.update()
    num_episodes = OPTIONS.num_groups * OPTIONS.num_rollouts
    assert 0 < len(measured) == trainer.measured.num_measured <= num_episodes
    assert num_before + num_episodes <= len(joint_cost.buffer) <= num_before + 2 * num_episodes
    features_MF, starts_B, latency_BO = next(joint_cost.buffer.batches(1, 2000, np.random.default_rng(0)))
    of_rank_B = latency_BO[np.isnan(latency_BO[:, 0])]
    assert set((of_rank_B[:, 2] * joint_cost.scale_ms).round(3).tolist()) == {3.0, 6.0}
    assert len(features_MF) > starts_B.max()


@pytest.mark.parametrize(
    ("options", "told"),
    [({"algorithm": Algorithm.PPO}, "algorithm: must be vtrace"), ({"num_actors": 1}, "num_actors")],
)
def test_what_cannot_train_a_cost_model_along_is_refused(joint_cost, make_trainer, options, told):
    with pytest.raises(InvalidOptionError, match=told):
        make_trainer(joint_cost, options=replace(OPTIONS, **options))


def test_a_resumed_joint_training_goes_on_where_it_was(dataset, make_trainer, tmp_path):
    def run(num_updates, folder):
        cost = JointCost(dataset, device="cpu", seed=0, updates=CostUpdates(num_updates=3, batch_size=32))
        trainer = make_trainer(cost)
        trainer.run(Budget(num_updates=num_updates), folder=folder)
        return torch.cat([flat(trainer.network), flat(cost.network)])

    whole = run(4, tmp_path / "whole")
    run(2, tmp_path / "parts")
    assert torch.allclose(run(4, tmp_path / "parts"), whole, atol=1e-6)


def test_a_joint_training_with_measured_rewards_is_resumed(dataset, make_trainer, tmp_path):
    def measure(plans):
        return [np.arange(1.0, 1.0 + len(plan.local_shards())) for plan in plans]

    for num_updates in (2, 3):
        cost = JointCost(dataset, device="cpu", seed=0, updates=CostUpdates(num_updates=1, batch_size=32))
        trainer = make_trainer(cost, measure, replace(OPTIONS, reward=RewardSource.MEASURED))
        trainer.run(Budget(num_updates=num_updates), folder=tmp_path)
    assert trainer.num_updates == 3


def test_a_full_buffer_forgets_the_oldest_samples(dataset, joint_cost):
    buffer = CostBuffer(joint_cost.scaling, 1.0, size=50)
    buffer.add_dataset(dataset)
    assert len(buffer) == 50
    _, _, latency_BO = next(buffer.batches(1, 5000, np.random.default_rng(0)))
    latest = np.float32(dataset.kernel_ms[-50:])
    assert set(latency_BO[:, 2].tolist()) <= set(latest.tolist())


@pytest.fixture
def machine(cost):
    """Measures plans at the prices of the model with weights set by hand."""

    def rank_ms(shards):
        return float(cost.predict_ms(cost.encode(shards).sum(axis=0, keepdims=True))[0]) if shards else 0.0

    return lambda plans: [np.array([rank_ms(shards) for shards in plan.local_shards()]) for plan in plans]


class TestFromAnEmptyBuffer:
    """AutoShard's Algorithm 1: all samples are placements that the policy tried."""

    @pytest.fixture
    def make_empty(self, dataset):
        def make_one(**updates):
            return JointCost(dataset.shards_U, device="cpu", seed=0, updates=CostUpdates(**updates))

        return make_one

    def test_nothing_is_learned_before_anything_is_measured(self, make_empty):
        cost = make_empty()
        before = flat(cost.network)
        cost.train()
        assert torch.equal(flat(cost.network), before)
        assert (cost.num_stored, len(cost.buffer), cost.current().card.metrics.num_samples) == (0, 0, 0)

    @pytest.mark.slow
    @pytest.mark.parametrize("loss", CostLoss)
    def test_the_cost_model_learns_from_what_the_policy_tried(self, make_empty, make_trainer, machine, cost, loss):
        empty = make_empty(loss=loss)
        trainer = make_trainer(empty, machine, replace(OPTIONS, reward=RewardSource.MEASURED))

        def error():
            problems = [task.problem for task in trainer.validation_tasks]
            priced = [PlacementProblem.table_wise(one.tables, one.topology, cost).kernel_ms_N for one in problems]
            return np.mean([abs(one.kernel_ms_N / ms_N - 1) for one, ms_N in zip(problems, priced, strict=True)])

        untrained = error()
        trainer.run(Budget(num_updates=20))
        assert error() < min(0.2, untrained / 3)
        metrics = empty.current().card.metrics
        assert metrics.num_samples == empty.num_measured // 5 > 0
        assert metrics.relative_error < 0.2
        assert len(empty.buffer) + metrics.num_samples == empty.num_measured

    @pytest.mark.slow
    def test_squared_errors_make_costly_sets_count(self, make_empty, dataset):
        """Of two sets of the same table that disagree, the squared error takes the mean, the relative one the median
        by weights of 1 / time: the cheaper one."""
        features_MF, found = shard_features(dataset.shards_U[:1]), {}
        for loss in CostLoss:
            cost = make_empty(loss=loss, num_updates=400, learning_rate=1e-2)
            for kernel_ms in (2.0, 2.0, 8.0, 8.0):
                cost.add_measured(features_MF, kernel_ms)
            cost.train()
            predictor = cost.predictor()
            found[loss] = predictor.predict(predictor.encode(features_MF)).sum()
        assert found[CostLoss.SQUARED] == pytest.approx(5.0, rel=0.1)
        assert found[CostLoss.RELATIVE] < 4.0

    def test_a_checkpoint_goes_on_with_the_learned_prices(self, make_empty, make_trainer, machine, tmp_path):
        for num_updates in (2, 3):
            cost = make_empty(num_updates=1, batch_size=32)
            trainer = make_trainer(cost, machine, replace(OPTIONS, reward=RewardSource.MEASURED))
            trainer.run(Budget(num_updates=num_updates), folder=tmp_path)
        assert trainer.num_updates == 3
        assert cost.has_level


def test_too_few_samples_are_refused(dataset):
    with pytest.raises(SampleStoreError, match="there are 10"):
        JointCost(dataset.take(np.arange(10)), device="cpu")
