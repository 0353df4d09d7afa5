"""Batches play by the rules: observations, rewards and ends are those of a plain environment, step for step."""

import numpy as np
import pytest

from autoshard.core import Tier
from autoshard.core.errors import InvalidOptionError
from autoshard.planners.space.placement import PlacementProblem
from autoshard.planners.space.step_cost import StepSums
from env import Objective, PlacementBatch, PlacementTask, SplitBy
from env.lookahead import Lookahead
from env.observation import (
    ACTION_MASK,
    CHOICE_CODES,
    CHOICE_COSTS,
    CHOICE_KINDS,
    ITEM_CODE,
    NUM_COST_COLUMNS,
    REMAINING,
    CostColumn,
)
from env.reward import kernel_score, placement_reward, time_score
from env.task_stack import TaskStack

TIERS = (Tier.DATA_PARALLEL, Tier.FLEX, Tier.ROW_WISE)

OWNERS = np.array([0, 1, 2, 3, 0, 3])


@pytest.fixture(scope="module")
def problems(make_problem):
    """Of different sizes, with pinned tables, and short of memory."""
    tight = int(make_problem(num_tables=9, seed=2).bytes_N.sum() * 0.45)
    return [
        make_problem(num_tables=7, seed=0),
        make_problem(num_tables=4, seed=1, pinned={0: (1,), 2: (0, 2)}),
        make_problem(num_tables=9, seed=2, hbm_bytes=tight),
        make_problem(num_tables=1, seed=3),
    ]


@pytest.fixture(scope="module")
def grouped(make_problem):
    """Row groups on four ranks of two nodes, that may be shared."""

    def make(num_tables, seed, share=None, **options):
        options = {"num_tables": num_tables, "num_ranks": 4, "seed": seed, "groups": True, "tiers": TIERS, **options}
        if share is not None:
            options["hbm_bytes"] = int(make_problem(**options).bytes_N.sum() * share)
        return make_problem(**options)

    return [make(3, 0), make(2, 1, pinned={0: (1,)}), make(4, 2, share=0.28), make(1, 3)]


@pytest.fixture(scope="module")
def shared(make_problem):
    """Whole tables on four ranks of two nodes, that may be shared."""

    def make(num_tables, seed, share=None, **options):
        options = {"num_tables": num_tables, "num_ranks": 4, "seed": seed, "tiers": TIERS, **options}
        if share is not None:
            options["hbm_bytes"] = int(make_problem(**options).bytes_N.sum() * share)
        return make_problem(**options)

    return [make(3, 0), make(2, 1, pinned={0: (1,)}), make(4, 2, share=0.28), make(1, 3)]


class PlainEnv:
    """PlacementEnv's rules one episode at a time, with everything added up anew from all that was placed."""

    def __init__(self, problems, *, reward_ms=None, **options):
        self.tasks = [PlacementTask.of(problem, **options) for problem in problems]
        self._stack = TaskStack(self.tasks)
        self.reward_ms = reward_ms
        self._lookahead = Lookahead(self._stack, 1)

    def reset(self, task):
        self.task_index = task
        self._begin()
        return self._observe()

    def _begin(self):
        task = self.tasks[self.task_index]
        self._part = int(task.parts.root_N[task.order_N[0]])
        self._choice_M = np.full(task.parts.num_parts, -1, dtype=np.int64)
        self._num_forbidden = 0
        self._lookahead.begin(np.array([0]), np.array([self.task_index]))

    @property
    def _is_done(self):
        return self._part == len(self._choice_M)

    def step(self, action):
        task = self.tasks[self.task_index]
        self._act(task, int(action))
        if not self._is_done:
            return self._observe(), 0.0, False, {}
        reward, info = self._final()
        return self._observe(), reward, True, info

    def _act(self, task, action):
        part, problem = self._part, task.parts.problem
        is_split = action == problem.num_choices
        if is_split and task.parts.halves_M2[part, 0] < 0:
            action, is_split = 0, False
            self._num_forbidden += 1
        elif not is_split:
            self._num_forbidden += not problem.allowed_NA[part, action]
        index = np.array([self._stack.offset_P[self.task_index] + part])
        self._lookahead.take(np.array([0]), index, np.array([action]))
        if is_split:
            self._part = int(task.parts.halves_M2[part, 0])
            return
        self._choice_M[part] = action
        self._part = int(task.parts.after_M[part])

    def _final(self):
        task = self.tasks[self.task_index]
        problem, ranks_N = task.parts.placed(task.problem, self._choice_M)
        is_feasible = self._num_forbidden == 0 and problem.is_feasible(ranks_N)
        measure = self.reward_ms if self.reward_ms is not None and is_feasible else PlacementProblem.rank_ms
        cost_ms_R = measure(problem, ranks_N)
        if task.step_cost is not None:
            objective_ms = float(task.step_cost.step_ms(self._sums(self._held()[0]))[0])
            score_E = time_score(np.array([task.even_objective_ms]), np.array([objective_ms]))
        else:
            objective_ms = float(cost_ms_R.max())
            score_E = kernel_score(task.objective, cost_ms_R[None], np.array([task.even_ms]))
        held_R = problem.rank_bytes(ranks_N)
        reward_E = placement_reward(score_E, held_R[None], problem.capacity_R[None], np.array([self._num_forbidden]))
        info = {
            "problem": problem,
            "ranks": ranks_N,
            "cost_ms": cost_ms_R,
            "objective_ms": objective_ms,
            "is_feasible": is_feasible,
        }
        return float(reward_E[0]), info

    def _held(self):
        """Codes and bytes on each rank, shapes (R, H) and (R,), added up from all that was placed."""
        problem = self.tasks[self.task_index].parts.problem
        return problem.rank_codes(self._choice_M), problem.rank_bytes(self._choice_M)

    def _sums(self, codes_RH):
        """What each rank holds and moves."""
        moved_RC = self.tasks[self.task_index].moved(self._choice_M)
        return StepSums(codes_BRH=codes_RH[None], moved_BRC=moved_RC[None])

    def _observe(self):
        task, problem, part = self.tasks[self.task_index], self.tasks[self.task_index].parts.problem, self._part
        codes_WH = np.zeros((1 + task.num_tiers, task.code_width), dtype=np.float32)
        half_H, remaining, index = codes_WH[0], 0.0, self._stack.end
        if not self._is_done:
            codes_WH, remaining = problem.codes_WNH[:, part], task.parts.remaining_M[part]
            index = int(self._stack.offset_P[self.task_index]) + part
            half = task.parts.halves_M2[part, 0]
            half_H = problem.codes_NH[half] if half >= 0 else half_H
        codes_RH, held_R = self._held()
        codes_AH = [codes_RH, codes_WH[1:], half_H[None]] if task.may_split else [codes_RH, codes_WH[1:]]
        mask_EA = self._lookahead.mask(np.array([index]))
        return {
            ITEM_CODE: (codes_WH[0] / task.item_scale).astype(np.float32),
            REMAINING: np.array([remaining], dtype=np.float32),
            CHOICE_CODES: (np.concatenate(codes_AH) / task.rank_scale).astype(np.float32),
            CHOICE_COSTS: self._choice_costs(codes_RH, held_R, codes_WH),
            CHOICE_KINDS: self._stack.kinds_AZ.copy(),
            ACTION_MASK: mask_EA[0].astype(np.int8),
        }

    def _choice_costs(self, codes_RH, held_R, codes_WH):
        task, problem = self.tasks[self.task_index], self.tasks[self.task_index].parts.problem
        num_ranks = task.num_ranks
        price = problem.model.predict_ms
        now_R, with_item_R = price(codes_RH), price(codes_RH + codes_WH[0])
        costs_AC = np.empty((task.num_actions, NUM_COST_COLUMNS))
        costs_AC[:] = now_R.max()
        costs_AC[:num_ranks, CostColumn.AS_IS] = now_R
        costs_AC[:num_ranks, CostColumn.WITH_ITEM] = with_item_R
        for index, tier_H in enumerate(codes_WH[1:], num_ranks):
            costs_AC[index, [CostColumn.WITH_ITEM, CostColumn.OBJECTIVE]] = price(codes_RH + tier_H).max()
        after_RR = np.where(np.eye(num_ranks, dtype=np.bool_), with_item_R, now_R)
        costs_AC[:num_ranks, CostColumn.OBJECTIVE] = after_RR.max(axis=1)
        costs_AC /= task.even_ms
        if task.step_cost is not None:
            costs_AC[:, CostColumn.OBJECTIVE] = self._steps_ms(codes_RH, codes_WH) / task.even_objective_ms
        taken_AR = np.zeros((task.num_actions, num_ranks), dtype=np.int64)
        if not self._is_done:
            bytes_W = problem.bytes_WN[:, self._part]
            np.fill_diagonal(taken_AR, bytes_W[0])
            taken_AR[num_ranks : problem.num_choices] = bytes_W[1:, None]
        share_AR = (problem.capacity_R - held_R - taken_AR) / np.maximum(problem.capacity_R, 1)
        room_A = share_AR.min(axis=1)
        room_A[:num_ranks] = share_AR.diagonal()
        costs_AC[:, CostColumn.ROOM] = np.maximum(room_A, -1)
        return costs_AC.astype(np.float32)

    def _steps_ms(self, codes_RH, codes_WH):
        """Time of the step after each choice, shape (A,)."""
        task = self.tasks[self.task_index]
        step_cost, sums = task.step_cost, self._sums(codes_RH)
        assert step_cost is not None
        moved_WC = np.zeros_like(step_cost.moved_WNC[:, 0]) if self._is_done else step_cost.moved_WNC[:, self._part]
        steps_ms_A = step_cost.choices_ms(sums, codes_WH[:, None], moved_WC[:, None])[0]
        return np.concatenate([steps_ms_A, step_cost.step_ms(sums)]) if task.may_split else steps_ms_A


def assert_same(single, batch, episode):
    assert single.keys() == batch.keys()
    for key, value in single.items():
        assert batch[key].dtype == value.dtype, key
        assert batch[key][episode] == pytest.approx(value, rel=1e-4, abs=2e-6), key


def play_both(envs, batch, rng, *, by_mask):
    """Plays the same episodes alone and in a batch, and compares them; returns the steps that were compared."""
    singles = [env.reset(int(owner)) for env, owner in zip(envs, OWNERS, strict=True)]
    batch.begin(np.arange(len(OWNERS)), OWNERS)
    live, num_steps = set(range(len(OWNERS))), 0
    while live:
        num_steps += len(live)
        observed = batch.observe()
        for episode in live:
            assert_same(singles[episode], observed, episode)
        mask = observed["action_mask"]
        actions = (rng.random(mask.shape) * (mask if by_mask else 1)).argmax(axis=1)
        finished = batch.step(actions)
        for episode in sorted(live):
            singles[episode], reward, done, info = envs[episode].step(actions[episode])
            assert done == (episode in finished.episodes_D)
            if not done:
                assert reward == 0
                continue
            live.remove(episode)
            place = finished.episodes_D.tolist().index(episode)
            assert finished.rewards_D[place] == pytest.approx(reward, rel=1e-4)
            assert finished.cost_ms_DR[place] == pytest.approx(info["cost_ms"], rel=1e-4)
            assert finished.objective_ms_D[place] == pytest.approx(info["objective_ms"], rel=1e-4)
            assert finished.ranks[place].tolist() == info["ranks"].tolist()
            assert finished.problems[place].shards == info["problem"].shards
            assert bool(finished.is_feasible_D[place]) == info["is_feasible"]
            assert info["is_feasible"] or not by_mask
            assert_same(singles[episode], batch.observe(), episode)
    assert batch.is_done.all()
    return num_steps


def num_items(problems):
    """Items of all episodes: as many steps, where nothing is split and episodes end with their last item."""
    return sum(problems[owner].num_items for owner in OWNERS)


@pytest.mark.parametrize("by_mask", [False, True])
@pytest.mark.parametrize("measured", [False, True])
def test_every_step_equals_that_of_single_environments(problems, measured, by_mask):
    reward_ms = (lambda problem, ranks_N: problem.rank_ms(ranks_N) ** 2 + 0.1) if measured else None
    envs = [PlainEnv(problems, reward_ms=reward_ms) for _ in OWNERS]
    batch = PlacementBatch([PlacementTask.of(problem) for problem in problems], len(OWNERS), reward_ms)
    for seed in range(3):
        assert play_both(envs, batch, np.random.default_rng(seed), by_mask=by_mask) == num_items(problems)


@pytest.mark.slow
@pytest.mark.parametrize("objective", Objective)
@pytest.mark.parametrize("max_splits", [0, 2])
@pytest.mark.parametrize("mode", ["tables", "groups"])
def test_it_does_so_in_all_modes_for_all_objectives(problems, grouped, costs, mode, max_splits, objective):
    chosen = problems if mode == "tables" else grouped
    options = {"objective": objective, "costs": costs, "max_splits": max_splits}
    envs = [PlainEnv(chosen, **options) for _ in OWNERS]
    batch = PlacementBatch([PlacementTask.of(problem, **options) for problem in chosen], len(OWNERS))
    for by_mask in (False, True):
        num_steps = play_both(envs, batch, np.random.default_rng(0), by_mask=by_mask)
        assert num_steps > num_items(chosen) if batch.may_split else num_steps == num_items(chosen)


@pytest.mark.parametrize("objective", [Objective.BALANCE, Objective.STEP])
def test_it_does_so_where_hot_rows_may_be_cut_off(shared, costs, objective):
    options = {"objective": objective, "costs": costs, "max_splits": 2, "split_by": SplitBy.HOT_ROWS}
    envs = [PlainEnv(shared, **options) for _ in OWNERS]
    batch = PlacementBatch([PlacementTask.of(problem, **options) for problem in shared], len(OWNERS))
    assert batch.may_split
    for by_mask in (False, True):
        assert play_both(envs, batch, np.random.default_rng(0), by_mask=by_mask) > num_items(shared)


@pytest.mark.parametrize("mode", ["tables", "groups"])
def test_it_does_so_by_a_learned_model(problems, grouped, learned, mode):
    chosen = [
        PlacementProblem.of(one.tables, one.topology, learned, one.shards, one.tiers)
        for one in (problems if mode == "tables" else grouped)
    ]
    envs = [PlainEnv(chosen) for _ in OWNERS]
    batch = PlacementBatch([PlacementTask.of(problem) for problem in chosen], len(OWNERS))
    assert play_both(envs, batch, np.random.default_rng(0), by_mask=True) == num_items(chosen)
    assert play_both(envs, batch, np.random.default_rng(1), by_mask=False) == num_items(chosen)


def test_an_episode_that_is_begun_anew_starts_from_nothing(problems):
    batch = PlacementBatch([PlacementTask.of(problem) for problem in problems], 2)
    batch.begin(np.array([0, 1]), np.array([0, 1]))
    first = batch.observe()
    batch.step(np.array([2, 1]))
    batch.observe()
    batch.begin(np.array([0]), np.array([0]))
    assert_same({key: value[0] for key, value in first.items()}, batch.observe(), 0)
    assert batch.observe()["remaining"][1] == pytest.approx(0.75)


def test_tasks_that_cannot_share_a_batch_are_refused(make_problem):
    tasks = [PlacementTask.of(make_problem()), PlacementTask.of(make_problem(num_ranks=4))]
    with pytest.raises(InvalidOptionError, match="as many ranks"):
        PlacementBatch(tasks, 2)
