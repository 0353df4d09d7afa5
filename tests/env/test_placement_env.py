import gymnasium
import numpy as np
import pytest
import stable_baselines3.common.env_checker
from gymnasium.utils.env_checker import check_env

from autoshard.core import Tier
from autoshard.core.errors import InfeasiblePlanError, InvalidOptionError
from autoshard.evaluation import evaluate
from autoshard.validator import validate_plan
from env import ENV_ID, CostColumn, Objective, PlacementEnv, SplitBy
from env.splits import HOT_SHARES
from tests import builders as make

TIERS = (Tier.DATA_PARALLEL, Tier.FLEX, Tier.ROW_WISE)


def play(env, actions, task=0):
    """Observations, rewards and the last info of an episode."""
    observation, _ = env.reset(options={"task": task})
    observations, rewards, done = [observation], [], False
    for action in actions:
        assert not done
        observation, reward, done, truncated, info = env.step(np.int64(action))
        assert not truncated
        observations.append(observation)
        rewards.append(reward)
    assert done
    return observations, rewards, info


@pytest.fixture
def env(make_problem):
    return PlacementEnv([make_problem(seed=0), make_problem(num_tables=5, seed=1)])


def rich(make_problem, costs):
    """All that there is at once."""
    problems = [make_problem(num_tables=3, num_ranks=4, seed=seed, groups=True, tiers=TIERS) for seed in range(2)]
    return {"problems": problems, "objective": Objective.STEP, "costs": costs, "max_splits": 2}


def hot(make_problem, costs):
    """Tables that may be shared, and whose hot rows may be cut off."""
    problems = [make_problem(num_tables=3, num_ranks=4, seed=seed, tiers=TIERS) for seed in range(2)]
    splits = {"max_splits": 2, "split_by": SplitBy.HOT_ROWS}
    return {"problems": problems, "objective": Objective.STEP, "costs": costs, **splits}


def test_the_registered_environment_passes_gymnasiums_checks(make_problem, costs):
    tables = {"problems": [make_problem(), make_problem(seed=1)]}
    for arguments in (tables, rich(make_problem, costs), hot(make_problem, costs)):
        check_env(gymnasium.make(ENV_ID, **arguments).unwrapped)


# Its advice for matrices is a custom policy, which there is.
@pytest.mark.filterwarnings("ignore:Your observation choice_:UserWarning")
def test_it_passes_the_checks_of_stable_baselines3(env, make_problem, costs):
    stable_baselines3.common.env_checker.check_env(env)
    stable_baselines3.common.env_checker.check_env(PlacementEnv(**rich(make_problem, costs)))
    stable_baselines3.common.env_checker.check_env(PlacementEnv(**hot(make_problem, costs)))


def test_the_same_seed_draws_the_same_tasks(make_problem):
    problems = [make_problem(seed=seed) for seed in range(5)]

    def tasks():
        env = PlacementEnv(problems)
        return [env.reset(seed=seed)[1]["task"] for seed in (7, None, None, None, None, None)]

    assert tasks() == tasks()
    assert len(set(tasks())) > 1


def test_items_come_in_falling_price(env):
    task = env.tasks[0]
    observations, _, _ = play(env, [0] * task.num_items)
    problem = task.problem
    assert (np.diff(problem.kernel_ms_N[task.order_N]) <= 0).all()
    for step, item in enumerate(task.order_N):
        assert observations[step]["item_code"] == pytest.approx(problem.codes_NH[item] / task.item_scale)
    assert (observations[-1]["item_code"] == 0).all()


def test_observed_costs_are_those_of_the_ranks_without_and_with_the_item(env):
    task = env.tasks[0]
    problem = task.problem
    actions = [0, 1, 1, 2, 0, 1, 2]
    observations, _, _ = play(env, actions)
    for step in range(task.num_items):
        for rank in range(3):
            held = [task.order_N[index] for index in range(step) if actions[index] == rank]
            expected = [
                problem.model.predict_ms(problem.codes_NH[items].sum(axis=0, keepdims=True))[0] / task.even_ms
                for items in (held, [*held, task.order_N[step]])
            ]
            assert observations[step]["choice_costs"][rank, :2] == pytest.approx(expected, rel=1e-5)


def test_the_reward_is_the_balance_of_the_prices_that_a_plan_has(env):
    task = env.tasks[0]
    actions = np.array([0, 1, 2, 2, 1, 0, 0])
    _, rewards, info = play(env, actions)
    problem = task.problem
    ranks_N = np.empty(7, dtype=np.int64)
    ranks_N[task.order_N] = actions
    cost_ms = problem.rank_ms(ranks_N)
    assert rewards[:-1] == [0.0] * 6
    assert rewards[-1] == pytest.approx(cost_ms.min() / cost_ms.max())
    assert (info["ranks"] == ranks_N).all()
    assert info["cost_ms"] == pytest.approx(cost_ms)
    assert info["is_feasible"]


def test_a_measured_reward_replaces_the_prediction(make_problem):
    seen = []

    def measure(problem, ranks_N):
        seen.append((problem, ranks_N.tolist()))
        return np.array([1.0, 2.0, 4.0])

    env = PlacementEnv([make_problem()], reward_ms=measure)
    _, rewards, info = play(env, [0, 1, 2, 0, 1, 2, 0])
    assert rewards[-1] == 0.25
    assert seen == [(env.tasks[0].problem, info["ranks"].tolist())]


def test_nothing_is_measured_beyond_the_memory_limit(make_problem):
    hbm_bytes = int(make_problem().bytes_N.sum() * 0.6)

    def measure(*_):
        raise AssertionError("this placement cannot run")

    env = PlacementEnv([make_problem(hbm_bytes=hbm_bytes)], reward_ms=measure)
    problem = env.tasks[0].problem
    _, rewards, info = play(env, [0] * 7)
    assert rewards[-1] == pytest.approx(-(problem.bytes_N.sum() / hbm_bytes - 1))
    assert not info["is_feasible"]


def test_the_mask_offers_allowed_ranks_with_room(make_problem):
    free = make_problem()
    hbm_bytes = int(free.bytes_N.sum() * 0.8)
    first = int(np.argmax(free.kernel_ms_N))
    env = PlacementEnv([make_problem(hbm_bytes=hbm_bytes, pinned={first: (0, 1)})])
    problem, order_N = env.tasks[0].problem, env.tasks[0].order_N
    observations, _, _ = play(env, [0] * 7)
    assert observations[0]["action_mask"].tolist() == [1, 1, 0]
    held = problem.bytes_N[order_N[0]]
    for step in range(1, 7):
        fits = held + problem.bytes_N[order_N[step]] <= hbm_bytes
        assert observations[step]["action_mask"].tolist() == [int(fits), 1, 1]
        held += problem.bytes_N[order_N[step]]
    assert held > hbm_bytes


def test_after_an_action_against_the_mask_it_offers_what_fits_and_then_what_is_allowed(make_problem):
    hbm_bytes = int(make_problem().bytes_N.sum() * 0.4)
    env = PlacementEnv([make_problem(hbm_bytes=hbm_bytes)])
    observations, rewards, info = play(env, [0] * 7)
    assert rewards[-1] < 0
    assert not info["is_feasible"]
    bytes_N = env.tasks[0].problem.bytes_N[env.tasks[0].order_N]
    for step in range(int(np.argmax(bytes_N.cumsum() > hbm_bytes)) + 1, 7):
        assert observations[step]["action_mask"].tolist() == [0, *[int(bytes_N[step] <= hbm_bytes)] * 2]


def test_a_task_without_any_placement_is_refused(make_problem):
    hbm_bytes = int(make_problem().bytes_N.sum() * 0.6)
    with pytest.raises(InfeasiblePlanError, match=make.AMOUNT):
        PlacementEnv([make_problem(hbm_bytes=hbm_bytes, pinned=dict.fromkeys(range(7), (2,)))])


def test_a_split_brings_both_halves(make_problem, model):
    env = PlacementEnv([make_problem()], max_splits=2)
    env.reset(options={"task": 0})
    task = env.tasks[0]
    split = task.num_ranks
    item = task.order_N[0]
    shard = task.problem.shards[item]
    width = shard.embedding_dim
    assert width >= 16
    observation, *_ = env.step(np.int64(split))
    assert observation["remaining"] == pytest.approx(1.0)
    observation, *_ = env.step(np.int64(0))
    assert observation["remaining"] == pytest.approx(1 - 0.5 / 7)
    assert observation["action_mask"][split] == 1
    env.step(np.int64(split))
    observation, *_ = env.step(np.int64(1))
    assert observation["action_mask"][split] == 0, "two levels are all"
    observation, *_ = env.step(np.int64(2))
    done = False
    while not done:
        observation, reward, done, _, info = env.step(np.int64(0))
    problem, ranks_N = info["problem"], info["ranks"]
    plan = problem.to_plan(ranks_N)
    validate_plan(plan)
    held = {placed.shard.columns: placed.replicas[0][0] for placed in plan.shards if placed.shard.table is shard.table}
    assert held == {(0, width // 2): 0, (width // 2, width * 3 // 4): 1, (width * 3 // 4, width): 2}
    cost_ms = [model.predict_ms(model.encode(part).sum(axis=0, keepdims=True))[0] for part in plan.local_shards()]
    assert info["cost_ms"] == pytest.approx(cost_ms, rel=1e-5)
    assert reward == pytest.approx(min(cost_ms) / max(cost_ms), rel=1e-5)


def test_a_split_cuts_the_hot_rows_off_and_then_the_next(make_problem):
    problem = make_problem(num_tables=4, num_ranks=4, tiers=TIERS)
    env = PlacementEnv([problem], max_splits=2, split_by=SplitBy.HOT_ROWS)
    env.reset(options={"task": 0})
    task = env.tasks[0]
    split, data_parallel, row_wise = env.action_space.n - 1, 4, 6
    shard = problem.shards[task.order_N[0]]
    env.step(np.int64(split))
    observation, *_ = env.step(np.int64(data_parallel))
    assert observation["remaining"] == pytest.approx(1 - 0.5 / 4)
    observation, *_ = env.step(np.int64(split))
    assert observation["action_mask"][split] == 0, "what is cut off stays as it is"
    env.step(np.int64(row_wise))
    env.step(np.int64(1))
    done = False
    while not done:
        _, _, done, _, info = env.step(np.int64(0))
    plan = info["problem"].to_plan(info["ranks"])
    validate_plan(plan)
    parts = sorted(
        (placed for placed in plan.shards if placed.shard.table is shard.table), key=lambda one: one.shard.rows.start
    )
    assert [placed.tier for placed in parts] == [Tier.DATA_PARALLEL, Tier.ROW_WISE, Tier.TABLE_WISE]
    shares = [float(shard.table.access.coverage(placed.shard.rows.stop)) for placed in parts]
    assert shares == pytest.approx([*HOT_SHARES, 1.0], abs=0.01)
    # All other tables are whole.
    assert len(plan.shards) == 4 + 2


def test_splits_that_there_are_not_are_refused(make_problem):
    for arguments, told in (
        ({"max_splits": -1}, "max_splits: must be at least 0, got -1"),
        ({"max_splits": 3, "split_by": SplitBy.HOT_ROWS}, r"max_splits: must be in \[0, 2\] for hot_rows, got 3"),
    ):
        with pytest.raises(InvalidOptionError, match=told):
            PlacementEnv([make_problem()], **arguments)


def test_splitting_what_may_not_be_split_is_punished(make_problem):
    env = PlacementEnv([make_problem()], max_splits=1)
    env.reset(options={"task": 0})
    done, num_steps = False, 0
    while not done:
        _, reward, done, _, info = env.step(np.int64(3))
        num_steps += 1
    halves = env.tasks[0].parts.halves_M2[:, 0] >= 0
    assert num_steps == 7 + 2 * halves.sum()
    assert reward == -(7 + halves.sum())
    assert not info["is_feasible"]


@pytest.mark.parametrize("split_by", SplitBy)
def test_the_step_objective_is_what_evaluate_says_of_the_plan(make_problem, costs, split_by):
    problem = make_problem(num_tables=5, num_ranks=4, groups=split_by is SplitBy.COLUMNS, tiers=TIERS)
    env = PlacementEnv([problem], objective=Objective.STEP, costs=costs, max_splits=1, split_by=split_by)
    rng = np.random.default_rng(0)
    observation, _ = env.reset(options={"task": 0})
    done = False
    while not done:
        action = rng.choice(np.flatnonzero(observation["action_mask"]))
        chosen = observation["choice_costs"][action, CostColumn.OBJECTIVE]
        observation, reward, done, _, info = env.step(action)
    plan = info["problem"].to_plan(info["ranks"])
    validate_plan(plan)
    step_ms = evaluate(plan, costs).step_ms.value
    assert info["objective_ms"] == pytest.approx(step_ms, rel=1e-4)
    assert reward == pytest.approx(env.tasks[0].even_objective_ms / step_ms, rel=1e-4)
    assert chosen == pytest.approx(step_ms / env.tasks[0].even_objective_ms, rel=1e-4)


def test_steps_need_their_costs(make_problem):
    with pytest.raises(InvalidOptionError, match="costs: objective step needs them"):
        PlacementEnv([make_problem()], objective=Objective.STEP)


def test_a_forbidden_rank_is_punished(make_problem):
    env = PlacementEnv([make_problem(pinned={3: (1,)})])
    position = env.tasks[0].order_N.tolist().index(3)
    actions = np.array([0, 1, 2, 0, 1, 2, 0])
    actions[position] = 1
    assert play(env, actions)[1][-1] > 0
    actions[position] = 0
    assert play(env, actions)[1][-1] == -1.0


def test_misuse_is_told_in_plain_words(env, make_problem):
    env.reset(seed=0)
    with pytest.raises(InvalidOptionError, match=r"must be in \[0, 3\), got 3"):
        env.step(3)
    with pytest.raises(InvalidOptionError, match=r"options.task: must be in \[0, 2\), got 2"):
        env.reset(options={"task": 2})
    with pytest.raises(InvalidOptionError, match="at least one"):
        PlacementEnv([])
    with pytest.raises(InvalidOptionError, match=r"problems\[1\]: must have as many ranks as the first \(3\), got 2"):
        PlacementEnv([make_problem(), make_problem(num_ranks=2)])
    play(env, [0] * 7)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(np.int64(0))
