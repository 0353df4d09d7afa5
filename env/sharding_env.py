"""The Gymnasium environment: an episode of the game, with choices and what is seen of them padded to one size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from autoshard.core.errors import InvalidOptionError
from autoshard.planners.space.ways import NUM_ITEM, NUM_PRICES, NUM_TASK, NUM_WAY
from env.game import NUM_CONTEXT, NUM_PLACE, Game, GameTask

Observation = dict[str, NDArray[Any]]

#: By which `gymnasium.make` finds the environment.
ENV_ID = "autoshard/Sharding-v0"

ITEM, CONTEXT, CHOICES, IS_PLACE, ACTION_MASK = "item", "context", "choices", "is_place", "action_mask"

_NUM_CHOICE = max(NUM_WAY + NUM_PRICES, NUM_PLACE)
_LARGEST = float(np.finfo(np.float32).max)


class ShardingEnv(gymnasium.Env):
    """Chooses how each item of a task is held, and where.

    ## Description
    An episode is a task drawn at random from those given: tables, or several that must share their ranks, on a
    machine. Items come in falling price. For each, the agent first chooses a sharding option, then, one after the
    other, the site of each of its parts that not all ranks hold. The aim is a short training step, within the memory of
    the ranks and what training needs of it for a batch.

    ## Action Space
    `Discrete(A)`, with A the most options of an item or the number of ranks, whichever is more:

    | phase | action | meaning |
    | --- | --- | --- |
    | option | o | the item takes its option number o |
    | place | s | the part goes to rank s, or to node s, as the option has it |

    ## Observation Space
    A `Dict` of numbers without units:

    | key | shape | meaning |
    | --- | --- | --- |
    | `item` | (NUM_TASK + NUM_ITEM,) | the task and the item that is up, see `autoshard.planners.space.ways` |
    | `context` | (NUM_CONTEXT,) | of each part of the step the slowest rank and the mean, over the task's mean; the
      gradient synchronisation; memory left of the fullest rank and in the mean; shares of the price and of the items
      to come |
    | `choices` | (A, ...) | by choice: of an option its way and its price; of a site the load after it, by how much
      the slowest rank rises, and the memory left |
    | `is_place` | (1,) | 1 where a site is to be chosen, 0 for an option |
    | `action_mask` | (A,) | 1 for what may be chosen |

    An episode that keeps to the mask always ends within memory limits and constraints (see `Game`).

    ## Rewards
    0 until the last step; then the step of the best balanced start (see `planners.hybrid.starts`) over that of the
    layout: 1 for one as short, more for a shorter one.

    ## Starting State
    No item placed.

    ## Episode End
    Terminates when every item has its places; `info` then holds `layout`, `step_ms` and `is_feasible`. An action
    against the mask ends the episode at once, with a reward of 0. Never truncates.

    ## Arguments
    - `tasks`: what is played.

    `reset(options={"task": i})` plays task i instead of a random one.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - Gymnasium's own convention

    def __init__(self, tasks: Sequence[GameTask]) -> None:
        if not tasks:
            raise InvalidOptionError("needs at least one task", field="tasks")
        self.tasks = tuple(tasks)
        self._num_actions = max(max(task.most_options, task.num_ranks) for task in self.tasks)
        self._game: Game | None = None

        def box(*shape: int, low: float = -_LARGEST, high: float = _LARGEST) -> spaces.Box:
            return spaces.Box(low=low, high=high, shape=shape, dtype=np.float32)

        self.observation_space = spaces.Dict(
            {
                ITEM: box(NUM_TASK + NUM_ITEM),
                CONTEXT: box(NUM_CONTEXT),
                CHOICES: box(self._num_actions, _NUM_CHOICE),
                IS_PLACE: box(1, low=0.0, high=1.0),
                ACTION_MASK: spaces.MultiBinary(self._num_actions),
            }
        )
        self.action_space = spaces.Discrete(self._num_actions)

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
        self._game = Game(self.tasks[int(index)], 1)
        return self._observe(self._game), {"task": int(index)}

    def step(self, action: np.int64) -> tuple[Observation, SupportsFloat, bool, bool, dict[str, Any]]:
        """Chooses an option or a site for the item that is up; see the class."""
        game = self._game
        if game is None:
            raise gymnasium.error.ResetNeeded("no episode is played; call reset() for the next one")
        if not self.action_space.contains(action):
            raise InvalidOptionError(f"must be in [0, {self._num_actions}), got {action!r}", field="action")
        is_allowed = bool(action < game.num_choices and game.mask()[0, action])
        if is_allowed:
            game.step(np.array([action], dtype=np.int64))
            if not game.is_done:
                return self._observe(game), 0.0, False, False, {}
        self._game = None
        if not is_allowed:
            return self._observe(game), 0.0, True, False, {"is_feasible": False}
        finished = game.finished()
        info = {"layout": finished.layouts[0], "step_ms": float(finished.step_ms_E[0]), "is_feasible": True}
        return self._observe(game), float(finished.rewards_E[0]), True, False, info

    def action_masks(self) -> NDArray[np.bool_]:
        """What may be chosen now, shape (A,): where MaskablePPO of sb3-contrib looks for it."""
        assert self._game is not None, "no episode is played"
        return np.asarray(self._observe(self._game)[ACTION_MASK].astype(np.bool_))

    def _observe(self, game: Game) -> Observation:
        task = game.task
        item_F = np.zeros(NUM_TASK + NUM_ITEM, dtype=np.float32)
        item_F[:NUM_TASK] = task.features.task_F
        choices_AF = np.zeros((self._num_actions, _NUM_CHOICE), dtype=np.float32)
        mask_A = np.zeros(self._num_actions, dtype=np.int8)
        is_place = np.zeros(1, dtype=np.float32)
        if not game.is_done:
            item_F[NUM_TASK:] = task.features.items_IF[game.item]
            may_A = game.mask()[0]
            mask_A[: len(may_A)] = may_A
            is_place[0] = float(game.part >= 0)
            seen_AF = task.ways_OF[task.options_of(game.item)] if game.part < 0 else game.places()[0]
            choices_AF[: len(seen_AF), : seen_AF.shape[1]] = seen_AF
        return {
            ITEM: item_F,
            CONTEXT: game.context()[0].astype(np.float32),
            CHOICES: choices_AF,
            IS_PLACE: is_place,
            ACTION_MASK: mask_A,
        }


gymnasium.register(id=ENV_ID, entry_point="env.sharding_env:ShardingEnv")
