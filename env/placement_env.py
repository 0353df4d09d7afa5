"""The Gymnasium environment: one shard after the other is given its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat

import gymnasium
import numpy as np
from gymnasium import spaces

from autoshard.core import CostModels
from autoshard.core.errors import InvalidOptionError
from autoshard.planners.space.placement import PlacementProblem
from env.observation import Observation, observation_space
from env.placement_batch import PlacementBatch
from env.reward import Objective
from env.splits import SplitBy
from env.task import PlacementTask, RewardMs


class PlacementEnv(gymnasium.Env):
    """Gives each item of a task its place, one per step.

    ## Description
    An episode is a placement problem drawn at random from those given. Items are shards: whole tables, groups of
    rows, segments of tables in falling access frequency, or several that must share a rank. They come in falling
    price, and the agent names a place for each: a rank, or a tier that all ranks share, if the problem offers any. It
    may also split an item, if that is asked for: its columns are halved, or its hottest rows are cut off; the two
    parts come next. The aim is the objective,
    within the memory of the ranks.

    ## Action Space
    `Discrete(A)` with A = R + K, or R + K + 1 with splits:

    | action | meaning |
    | --- | --- |
    | r < R | rank r takes the upcoming item |
    | R + k | all ranks hold it, by the problem's shared tier k |
    | R + K | it is split in two (halves of its columns, or hot rows and the rest), which come next |

    ## Observation Space
    A `Dict`; codes are the cost model's, and have no unit.

    | key | shape | meaning | unit |
    | --- | --- | --- | --- |
    | `item_code` | (H,) | code of the upcoming item; zeros at the end | root mean square of all items' codes |
    | `remaining` | (1,) | share of the items not placed yet; each of two parts counts as half | 1 |
    | `choice_codes` | (A, H) | codes by choice, below | root mean square of an even share's code |
    | `choice_costs` | (A, 4) | columns below | |
    | `choice_kinds` | (A, 5) | one-hot: rank, data parallel, flex, row-wise, split | |
    | `action_mask` | (A,) | 1 for what may be done | |

    The code of a rank is the sum of those it holds; of a shared tier, what every rank would get; of a split, that of
    its first part. Costs are:

    | column | rank | shared tier | split | unit |
    | --- | --- | --- | --- | --- |
    | 0 | its kernel time | the slowest rank's | the slowest rank's | price of an even share |
    | 1 | the same with the item | the same with the item | the slowest rank's | price of an even share |
    | 2 | objective after the choice | as for a rank | objective as it is | the objective of an even share |
    | 3 | share of its memory left after the choice | of the fullest rank | of the fullest rank, as it is | 1 |

    The objective after a choice is the slowest rank's kernel time, or the whole step's time if steps are the
    objective. An even share is the sum of all codes divided by R. So observations look alike whatever the number of
    items and ranks and however slow the device, and a policy can move between them.

    The mask looks ahead (`env.lookahead.Lookahead`): an episode that keeps to it always ends within memory limits and
    constraints. After an action against it, it offers what has room for the upcoming item, or else what its
    constraints allow, so that the episode can go on to its penalty.

    ## Rewards
    0 until the last step. Then, if the placement keeps to memory limits and constraints, by objective:

    | objective | reward |
    | --- | --- |
    | `balance` | min / max of the ranks' kernel times, in [0, 1] |
    | `max_kernel` | price of an even share / kernel time of the slowest rank |
    | `step` | time of a step in which all ranks have an even share / time of the step |

    Else the negative penalty of `env.reward.placement_reward`, below every reward of a placement that keeps to them;
    splitting what may not be split counts as a forbidden place on rank 0. Kernel times are predicted by the problem's
    cost model, or given by `reward_ms`.

    ## Starting State
    No item placed.

    ## Episode End
    Terminates when every item has its place: after N steps, and two more for each split. Never truncates. `info` then
    holds `problem`, the problem of what was placed (the task's own, but for splits), `ranks`, the placement of its
    items, `cost_ms`, each rank's kernel time, `objective_ms`, the slowest rank's kernel time or the step's time, and
    `is_feasible`.

    ## Arguments
    - `problems`: placement problems, all with the same cost model, number of ranks and shared tiers.
    - `objective`: what for, `Objective.BALANCE` by default.
    - `costs`: models of all parts of a step, for `Objective.STEP`.
    - `max_splits`: how often an item may be split, one split within the other; 0, the default, for never.
    - `split_by`: what splits cut. `SplitBy.COLUMNS`, the default, halves columns; items that are less than 8 columns
      wide, or whose halves are not multiples of 4, stay whole. `SplitBy.HOT_ROWS` cuts the hottest rows off whole
      tables, those with half of the lookups, and then the next off the rest, up to 90% of the lookups
      (`env.splits.HOT_SHARES`); what is cut off stays as it is.
    - `reward_ms`: measures a placement's kernel times; None takes the predictions.

    `reset(options={"task": i})` plays problem i instead of a random one.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - Gymnasium's own convention

    def __init__(
        self,
        problems: Sequence[PlacementProblem],
        *,
        objective: Objective = Objective.BALANCE,
        costs: CostModels | None = None,
        max_splits: int = 0,
        split_by: SplitBy = SplitBy.COLUMNS,
        reward_ms: RewardMs | None = None,
    ) -> None:
        self.tasks = tuple(
            PlacementTask.of(problem, objective=objective, costs=costs, max_splits=max_splits, split_by=split_by)
            for problem in problems
        )
        self._batch = PlacementBatch(self.tasks, 1, reward_ms)
        self.observation_space = observation_space(self.tasks[0].num_actions, self.tasks[0].code_width)
        self.action_space = spaces.Discrete(self.tasks[0].num_actions)
        self._begin(0)

    @property
    def task_index(self) -> int:
        """The task that is played."""
        return int(self._batch.task_E[0])

    def _begin(self, task_index: int) -> Observation:
        self._batch.begin(np.array([0]), np.array([task_index]))
        return self._observe()

    def _observe(self) -> Observation:
        return {key: value_E[0] for key, value_E in self._batch.observe().items()}

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Starts an episode; see the class.

        Raises:
            InvalidOptionError: If `options` names a task that is not there.
        """
        super().reset(seed=seed)
        index = (options or {}).get("task")
        if index is None:
            index = self.np_random.integers(len(self.tasks))
        elif not (isinstance(index, int | np.integer) and 0 <= index < len(self.tasks)):
            raise InvalidOptionError(f"must be in [0, {len(self.tasks)}), got {index!r}", field="options.task")
        return self._begin(int(index)), {"task": int(index)}

    def step(self, action: np.int64) -> tuple[Observation, SupportsFloat, bool, bool, dict[str, Any]]:
        """Places the upcoming item, or splits it; see the class."""
        if self._batch.is_done[0]:
            raise gymnasium.error.ResetNeeded("every item has its place; call reset() for the next episode")
        if not self.action_space.contains(action):
            raise InvalidOptionError(f"must be in [0, {self.tasks[0].num_actions}), got {action!r}", field="action")
        finished = self._batch.step(np.array([action]))
        if not len(finished.episodes_D):
            return self._observe(), 0.0, False, False, {}
        info = {
            "problem": finished.problems[0],
            "ranks": finished.ranks[0],
            "cost_ms": finished.cost_ms_DR[0],
            "objective_ms": float(finished.objective_ms_D[0]),
            "is_feasible": bool(finished.is_feasible_D[0]),
        }
        return self._observe(), float(finished.rewards_D[0]), True, False, info
