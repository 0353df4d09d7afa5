"""Parts of the evaluation one by one."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from autoshard.core.errors import InvalidOptionError, UnknownNameError
from autoshard.planners.registry import get_planner
from autoshard.table import Table
from env import NUM_CHOICE_KINDS, NUM_COST_COLUMNS
from policies.network.network import PlacementNetwork
from studies.policies import FIGURES, EvaluationSettings, choose
from studies.policies.figures.random_search import marks, random_costs
from studies.policies.figures.steps import FLEXSHARD, FLEXSHARD_CUT, OPER, memory_options, over_rival
from studies.policies.figures.targets import over_greedy
from studies.policies.figures.training_curves import first_crossing
from studies.policies.figures.unseen_tables import halves, mixed_task
from studies.policies.lab import COST_GREEDY, POLICY, RANDOM
from studies.policies.scores import planner_scores, write_factor, write_seconds, write_share
from studies.policies.trained import Learner, NetworkPart, hold_at_zero, train_network, training_curve
from tests import builders as make


class TestSettings:
    def test_the_defaults_are_the_papers(self):
        """AutoShard Sec. 5.2: 90 training and 10 test tasks of 80 tables on 8 devices, five seeds."""
        settings = EvaluationSettings()
        assert (settings.num_train_tasks, settings.num_test_tasks, settings.num_seeds) == (90, 10, 5)
        assert settings.size == (80, 8)
        assert settings.large == (800, 80)

    def test_quick_is_smaller_in_everything_that_takes_time(self):
        settings = EvaluationSettings()
        quick = settings.quick()
        for name in ("num_seeds", "num_train_tasks", "num_updates", "search_s", "num_random", "cost_updates"):
            assert getattr(quick, name) < getattr(settings, name), name
        assert quick.size in quick.transfer

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            *(("num_seeds", 0), ("num_train_tasks", 0), ("num_samples", 1), ("num_replayed", -1)),
            *(("auto_s", 0.0), ("memory_share", 1.0)),
        ],
    )
    def test_what_makes_no_sense_is_refused_by_name(self, field, value):
        with pytest.raises(InvalidOptionError, match=field):
            EvaluationSettings(**{field: value})

    def test_identity_lets_seeds_and_replays_be_added(self):
        settings = EvaluationSettings()
        more = replace(settings, num_seeds=7, num_replayed=3)
        assert more.identity() == settings.identity()
        assert replace(settings, num_tables=40).identity() != settings.identity()


class TestCatalogue:
    def test_all_figures_of_the_paper_are_there(self):
        names = {"fig8", "fig9", "table2", "table3", "fig10", "joint", "fig11", "fig12-training", "fig12-inference"}
        assert names < set(FIGURES)
        assert list(choose(None)) == list(FIGURES.values())
        assert [figure.name for figure in choose("fig9, fig8")] == ["fig8", "fig9"]

    def test_the_papers_features_can_be_removed(self, tmp_path):
        settings = EvaluationSettings(num_seeds=1)
        plain, more = (
            {part.name for part in FIGURES["table2"].parts(one)}
            for one in (settings, replace(settings, store=tmp_path))
        )
        assert plain < more
        assert all(name.startswith("features-") for name in more - plain)

    @pytest.mark.parametrize("names", ["fig8,fig80", "", ","])
    def test_unknown_names_are_told_with_what_there_is(self, names):
        with pytest.raises(UnknownNameError, match="fig12-training"):
            choose(names)


class TestRandomSearch:
    def test_costs_are_those_of_the_placements(self, make_problem):
        problem = make_problem([3.0, 1.0, 2.0, 5.0, 4.0], num_ranks=3)
        ranks_PN, costs_PR = map(np.concatenate, zip(*random_costs(problem, 300, seed=7), strict=True))
        assert ranks_PN.shape == (300, problem.num_items)
        assert costs_PR.shape == (300, problem.num_ranks)
        assert set(ranks_PN.flatten().tolist()) == set(range(problem.num_ranks))
        for ranks_N, cost_ms_R in zip(ranks_PN[::13], costs_PR[::13], strict=True):
            assert cost_ms_R == pytest.approx(problem.rank_ms(ranks_N), rel=1e-4, abs=1e-9)

    def test_marks_end_with_the_last(self):
        assert marks(30) == [1, 2, 5, 10, 20, 30]
        assert marks(10) == [1, 2, 5, 10]
        assert marks(1) == [1]


class TestHalves:
    def test_they_part_the_pool(self):
        pool, unseen_names = make.pool(list(range(1, 12))), {"t1", "t4", "t9"}
        seen, unseen = halves(pool, unseen_names)
        names = [{table.name for table in half.tables} for half in (seen, unseen)]
        assert names[0] | names[1] == {table.name for table in pool.tables}
        assert not names[0] & names[1]
        assert names[1] == unseen_names

    @pytest.mark.parametrize(("ratio", "num_unseen"), [(0.0, 0), (0.3, 1), (0.5, 2), (1.0, 4)])
    def test_tasks_have_as_many_unseen_tables_as_asked_for(self, ratio, num_unseen):
        seen, unseen = halves(make.pool(list(range(1, 12))), {"t0", "t2", "t3", "t7", "t8"})
        task = mixed_task(seen, unseen, 4, ratio, seed=5)
        assert len(task.tables) == 4
        assert len(set(task.tables) & set(unseen.tables)) == num_unseen


def score(max_ms, balance=0.5, **more):
    return {"max_ms": max_ms, "balance": balance, **more}


PARTS = (
    {"tasks": [{RANDOM: score(4.0), POLICY: score(2.0, 0.8)}, {RANDOM: score(3.0), POLICY: score(3.0, 0.6)}]},
    {"tasks": [{RANDOM: score(4.0), POLICY: score(1.0, 0.9)}, {RANDOM: score(4.0), POLICY: {"failure": "no"}}]},
)


class TestSummaries:
    def test_means_are_over_tasks_and_deviations_over_seeds(self):
        found = planner_scores(PARTS, POLICY)
        # Seeds: (0.8 + 0.6) / 2 and 0.9; speed-ups (2 + 1) / 2 and 4.
        assert (found.balance.mean, found.balance.deviation) == pytest.approx((0.8, 0.1))
        assert (found.speedup.mean, found.speedup.deviation) == pytest.approx((2.75, 1.25))
        assert (found.num_tasks, found.num_failed) == (4, 1)
        assert found.step_ms is None
        assert planner_scores(PARTS, "nobody") is None

    def test_without_random_sharding_there_is_no_speedup(self):
        parts = [{"tasks": [{POLICY: score(2.0, step_ms=3.0)}]}]
        assert planner_scores(parts, POLICY).speedup is None
        assert planner_scores(parts, POLICY).step_ms.mean == 3.0

    def test_against_greedy(self):
        tasks = [
            {COST_GREEDY: score(2.0), POLICY: score(1.0)},
            {COST_GREEDY: score(2.0), POLICY: score(2.0)},
            {COST_GREEDY: score(2.0), POLICY: score(3.5)},
            {COST_GREEDY: score(2.0), POLICY: {"failure": "no"}},
        ]
        ratio, better, equal, worse = over_greedy([{"tasks": tasks}], POLICY)
        assert ratio.mean == pytest.approx(6.5 / 6)
        assert (better, equal, worse) == (1, 1, 1)
        assert over_greedy([{"tasks": tasks[3:]}], POLICY)[0] is None

    def test_against_a_rival(self):
        tasks = [
            {"oper": {"step_ms": 4.0}, POLICY: {"step_ms": 3.0}},
            {"oper": {"failure": ""}, POLICY: {"step_ms": 9.0}},
        ]
        assert over_rival([{"tasks": tasks}], POLICY, "oper").mean == 0.75
        assert over_rival([{"tasks": tasks[1:]}], POLICY, "oper") is None

    def test_words(self):
        found = planner_scores(PARTS, POLICY)
        assert write_share(found.balance) == "80.0% ± 10.0"
        assert write_factor(found.speedup) == "2.750 ± 1.250"
        assert (write_seconds(0.0123), write_seconds(1.234), write_seconds(None)) == ("12.3 ms", "1.23 s", "n/a")

    def test_first_crossing(self):
        points = [{"num_updates": number, "balance": balance} for number, balance in enumerate((0.1, 0.5, 0.4, 0.6))]
        part = {"points": points, "best_known": {"balance": 0.8}}
        assert first_crossing(part, 0.5)["num_updates"] == 1
        assert first_crossing(part, 0.7)["num_updates"] == 3
        assert first_crossing(part, 0.9) is None

    def test_markdown(self):
        table = Table(columns=("a", "b"), rows=(("x", "1"), ("y", "2")), caption="c")
        assert table.to_markdown().splitlines() == ["| a | b |", "| --- | ---: |", "| x | 1 |", "| y | 2 |"]


class TestEqualMemory:
    def test_rivals_may_use_what_is_left(self, make_problem):
        """Five tables, ranks with room for twice as much: as much again for copies."""
        loose = make_problem([1.0, 2.0, 3.0, 4.0, 5.0], num_ranks=2)
        held = loose.tables.storage_bytes
        problem = make_problem([1.0, 2.0, 3.0, 4.0, 5.0], num_ranks=2, hbm_bytes=held)
        assert memory_options(OPER, problem) == ({}, {"extra_memory_ratio": pytest.approx(1.0)})
        for planner in (FLEXSHARD, FLEXSHARD_CUT):
            usual, all_of_it = memory_options(planner, problem)
            assert usual == {"tiers": 3, "count_activations": planner == FLEXSHARD}
            assert all_of_it == {**usual, "memory_budget_bytes": held // 2}
        assert memory_options(COST_GREEDY, problem) == ({},)

    def test_planners_take_these_options(self, make_problem, costs_of):
        problem = make_problem([1.0, 2.0, 3.0, 4.0, 5.0], num_ranks=2, hbm_bytes=1 << 21)
        for planner in (OPER, FLEXSHARD):
            for options in memory_options(planner, problem):
                request = make.request(problem.tables, problem.topology, costs=costs_of(problem), options=options)
                assert get_planner(planner).plan(request).shards


@pytest.fixture
def costs_of():
    return lambda problem: make.costs(problem.topology.device)


@pytest.fixture
def problems(make_problem):
    rng = np.random.default_rng(0)
    return [make_problem(rng.uniform(1, 10, 6).tolist(), num_ranks=2) for _ in range(4)]


class TestTraining:
    @pytest.mark.parametrize("part", NetworkPart)
    def test_a_part_at_zero_changes_nothing_and_stays_there(self, part, problems, tmp_path):
        network = train_network(problems, problems[:1], seed=0, num_updates=2, folder=tmp_path, without=part)
        whole = train_network(problems, problems[:1], seed=0, num_updates=2, folder=tmp_path / "whole")
        assert torch.any(network.policy_first.weight != whole.policy_first.weight)
        for one, is_blind in ((network, True), (whole, False)):
            logits, changed = (scores_of(one, part, value) for value in (0.0, 1.5))
            # What all choices have in common is no reason to take one.
            centred = [values - values.mean(dim=1, keepdim=True) for values in (logits, changed)]
            assert torch.allclose(*centred, atol=1e-6) is is_blind

    def test_gradients_of_other_weights_flow(self):
        network = PlacementNetwork(8)
        hold_at_zero(network, NetworkPart.RANK_CODES)
        network.policy_first.weight.square().sum().backward()
        assert torch.any(network.policy_first.weight.grad != 0)
        held = network.policy_first.weight.grad[:, network.state_width : network.state_width + 8]
        assert not torch.any(held)

    @pytest.mark.parametrize("learner", [Learner.VTRACE, Learner.PPO])
    def test_a_curve_starts_with_random_weights(self, learner, problems):
        points = training_curve(
            problems, problems[:1], problems[2:], learner=learner, device="cpu", seed=0, num_updates=5, every=2
        )
        assert [point.num_updates for point in points] == [0, 2, 4, 5]
        assert points[0].training_s == 0
        assert all(before.training_s < after.training_s for before, after in pairwise(points))
        assert all(0 <= point.score.balance <= 1 for point in points)
        last = points[-1].to_json()
        assert last["learn_s"] > 0
        assert last["collect_s"] + last["learn_s"] <= last["training_s"]
        assert last["measure_s"] == 0
        assert json.dumps(last)


def scores_of(network, part, value):
    """Scores of three choices, with what a part shows set to a value for the second choice, or the second state."""
    generator = torch.Generator().manual_seed(0)
    width = network.code_width
    states = torch.rand(2, network.state_width, generator=generator)
    codes = torch.rand(2, 3, width, generator=generator)
    costs = torch.rand(2, 3, NUM_COST_COLUMNS, generator=generator)
    kinds = torch.zeros(2, 3, NUM_CHOICE_KINDS)
    kinds[..., 0] = 1
    if part is NetworkPart.STATES:
        states[1] += value
    elif part is NetworkPart.RANK_CODES:
        codes[:, 1] += value
    else:
        costs[:, 1] += value
    with torch.no_grad():
        return network.logits(states, codes, costs, kinds, torch.ones(2, 3, dtype=torch.bool))
