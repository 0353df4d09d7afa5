"""The twin is the environment: same observations, rewards and ends, step for step."""

import numpy as np
import pytest

from autoshard.core import Tier
from autoshard.core.errors import InvalidOptionError
from autoshard.planners.space.placement import PlacementProblem
from env import Objective, PlacementBatch, PlacementEnv, PlacementTask, SplitBy

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


def assert_same(single, batch, episode):
    assert single.keys() == batch.keys()
    for key, value in single.items():
        assert batch[key].dtype == value.dtype, key
        assert batch[key][episode] == pytest.approx(value, rel=1e-4, abs=2e-6), key


def play_both(envs, batch, rng, *, by_mask):
    """Plays the same episodes alone and in a batch, and compares them; returns the steps that were compared."""
    singles = [env.reset(options={"task": owner})[0] for env, owner in zip(envs, OWNERS, strict=True)]
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
            singles[episode], reward, done, _, info = envs[episode].step(actions[episode])
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
    envs = [PlacementEnv(problems, reward_ms=reward_ms) for _ in OWNERS]
    batch = PlacementBatch([PlacementTask.of(problem) for problem in problems], len(OWNERS), reward_ms)
    for seed in range(3):
        assert play_both(envs, batch, np.random.default_rng(seed), by_mask=by_mask) == num_items(problems)


@pytest.mark.parametrize("objective", Objective)
@pytest.mark.parametrize("max_splits", [0, 2])
@pytest.mark.parametrize("mode", ["tables", "groups"])
def test_it_does_so_in_all_modes_for_all_objectives(problems, grouped, costs, mode, max_splits, objective):
    chosen = problems if mode == "tables" else grouped
    options = {"objective": objective, "costs": costs, "max_splits": max_splits}
    envs = [PlacementEnv(chosen, **options) for _ in OWNERS]
    batch = PlacementBatch([PlacementTask.of(problem, **options) for problem in chosen], len(OWNERS))
    for by_mask in (False, True):
        num_steps = play_both(envs, batch, np.random.default_rng(0), by_mask=by_mask)
        assert num_steps > num_items(chosen) if batch.may_split else num_steps == num_items(chosen)


@pytest.mark.parametrize("objective", [Objective.BALANCE, Objective.STEP])
def test_it_does_so_where_hot_rows_may_be_cut_off(shared, costs, objective):
    options = {"objective": objective, "costs": costs, "max_splits": 2, "split_by": SplitBy.HOT_ROWS}
    envs = [PlacementEnv(shared, **options) for _ in OWNERS]
    batch = PlacementBatch([PlacementTask.of(problem, **options) for problem in shared], len(OWNERS))
    assert batch.may_split
    for by_mask in (False, True):
        assert play_both(envs, batch, np.random.default_rng(0), by_mask=by_mask) > num_items(shared)


@pytest.mark.parametrize("mode", ["tables", "groups"])
def test_it_does_so_by_a_learned_model(problems, grouped, learned, mode):
    chosen = [
        PlacementProblem.of(one.tables, one.topology, learned, one.shards, [tier.tier for tier in one.tiers])
        for one in (problems if mode == "tables" else grouped)
    ]
    envs = [PlacementEnv(chosen) for _ in OWNERS]
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
