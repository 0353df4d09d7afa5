"""Figures whose cost models know one half of the tables, or begin with nothing, as small as they can be."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autoshard.core.errors import InvalidOptionError
from autoshard.formats import write_tables
from autoshard.formats.stores.samples import MeasuredShard, read_samples, write_samples
from costmodel import Registry
from policies.planning.tasks import whole_tables
from studies.policies import FIGURES, EvaluationSettings, Lab
from studies.policies.figures.blind_costs import KERNEL, LOOKUPS, PRINTED, SEEN, UNSEEN, blind_lab, half_samples
from studies.policies.figures.joint_training import stand_in
from studies.policies.lab import COST_GREEDY, POLICY, RANDOM
from tests import builders as make

pytestmark = pytest.mark.slow

NUM_TABLES = 48
NUM_SETS = 160


@pytest.fixture(scope="module")
def pool():
    rng = np.random.default_rng(0)
    rows = rng.integers(200, 3000, NUM_TABLES).tolist()
    return make.pool(rng.uniform(1, 10, NUM_TABLES).round(2).tolist(), rows)


@pytest.fixture(scope="module")
def settings(tmp_path_factory, cost, pool):
    """A registry that prices the pool, and a store of sets at these prices: of four files of tables each."""
    root = tmp_path_factory.mktemp("evaluation")
    Registry(root / "registry").publish("cost", "cpu", cost.tensors(), cost.card.to_json())
    write_tables(pool, root / "tables.json")
    write_samples(root / "store", sets_of(whole_tables(pool, "cpu"), cost))
    return EvaluationSettings(
        tables=str(root / "tables.json"),
        scale=1,
        registry=root / "registry",
        store=root / "store",
        num_seeds=2,
        num_train_tasks=3,
        num_validation_tasks=2,
        num_test_tasks=2,
        num_target_tasks=2,
        num_tables=8,
        num_ranks=2,
        num_updates=2,
        num_samples=4,
        auto_s=0.02,
        cost_updates=150,
        unseen_ratios=(0.0, 0.5, 1.0),
        joint_updates=4,
        curve_every=2,
    )


def sets_of(locals_, cost):
    """Sets of 1, 4 or 10 tables of one of four files, as the benchmark stores them."""
    template = read_samples(Path(__file__).parents[2] / "data" / "samples", "cpu").samples[0]
    rng, samples = np.random.default_rng(1), []
    files = np.array_split(np.arange(len(locals_)), 4)
    for number in range(4 * NUM_SETS):
        size = (1, 4, 10, 10)[number // 4 % 4]
        shards = [locals_[index] for index in rng.choice(files[number % 4], size=size, replace=False)]
        parts = cost.predict_parts(cost.encode(shards).sum(axis=0, keepdims=True))
        measured = tuple(
            MeasuredShard(shard=one, num_lookups=round(one.num_lookups), num_distinct=1, reuse_bins=(0.0,) * 17)
            for one in shards
        )
        sample = replace(
            template,
            shards=measured,
            source="random",
            is_noisy=False,
            forward_ms=float(parts.forward_ms_S[0]),
            backward_ms=float(parts.backward_ms_S[0]),
        )
        samples.append(sample.identified())
    return samples


@pytest.fixture(scope="module")
def lab(settings, tmp_path_factory):
    lab = Lab(settings, tmp_path_factory.mktemp("output"))
    for name in ("table3", "fig10", "joint"):
        FIGURES[name].run(lab)
    return lab


@pytest.mark.smoke
def test_blind_cost_models_saw_no_set_with_an_unseen_table(lab):
    samples = half_samples(lab, 0)
    assert len(samples.unseen_names) == NUM_TABLES / 2
    assert not {samples.seen.shards_U[index].table for index in samples.seen.shard_N} & samples.unseen_names
    assert {samples.unseen.shards_U[index].table for index in samples.unseen.shard_N} <= samples.unseen_names
    trained = blind_lab(lab, 0).cost.card
    assert trained.training["num_samples"] + trained.metrics.num_samples == len(samples.seen)
    assert blind_lab(lab, 0).cost.version != lab.cost.version


def test_errors_are_those_of_sets_of_ten_tables(lab):
    for seed in range(2):
        part = lab.parts.read(f"table3/seed-{seed}")
        assert part.keys() == {KERNEL, PRINTED, LOOKUPS}
        for errors in part.values():
            for half in (SEEN, UNSEEN):
                assert errors[half]["num_sets"] >= 10
                # The mean of squares is at least the square of the mean.
                assert errors[half]["mse_ms2"] >= errors[half]["mae_ms"] ** 2 * (1 - 1e-9)
    text = FIGURES["table3"].section(lab).tables[0].lines
    assert text[-1][1:5] == ("1.321", "3.408", "3.061", "10.835")


def test_plans_of_blind_models_are_priced_by_the_one_that_knows_all_tables(lab):
    for ratio in (0, 50, 100):
        for task in lab.parts.read(f"fig10/blind-{ratio}-1")["tasks"]:
            assert task.keys() >= {RANDOM, COST_GREEDY, POLICY}
            assert task[POLICY]["max_ms"] != task[POLICY]["expected_ms"]
            assert task[COST_GREEDY]["max_ms"] <= task[RANDOM]["max_ms"] * 1.1
    assert "from what the blind models expect" in FIGURES["fig10"].section(lab).caption


def test_joint_training_begins_with_nothing_and_measures_what_it_tries(lab):
    for seed in range(2):
        points = lab.parts.read(f"joint/4-{seed}")["points"]
        assert [point["num_updates"] for point in points] == [0, 2, 4]
        assert points[0]["num_measured"] == 0 < points[1]["num_measured"] < points[2]["num_measured"]
        assert points[-1]["relative_error"] < points[0]["relative_error"]
    assert len(FIGURES["joint"].section(lab).tables[0].lines) == 3


def test_the_stand_in_measures_what_its_model_says_up_to_noise(lab):
    (problem,) = lab.problems(lab.target_seeds()[:1])
    ranks_N = np.arange(problem.num_items) % 2
    plan = problem.to_plan(ranks_N)
    (exact_ms_R,) = stand_in(lab.model, seed=0, noise=0.0)([plan])
    assert exact_ms_R == pytest.approx(problem.rank_ms(ranks_N), rel=1e-5)
    noisy = np.array(stand_in(lab.model, seed=0)([plan] * 200))
    assert np.log(noisy / exact_ms_R).std() == pytest.approx(0.02, rel=0.2)


def test_without_a_store_there_are_no_blind_figures(settings, tmp_path):
    without = Lab(replace(settings, store=None), tmp_path)
    for name in ("table3", "fig10"):
        FIGURES[name].run(without)
        assert FIGURES[name].section(without) is None
    with pytest.raises(InvalidOptionError, match="--store: needs the folder of samples"):
        half_samples(without, 0)
