"""Placement as a game: many episodes at once, and the Gymnasium environment that plays one.

Importing this package registers `autoshard/Placement-v0` with Gymnasium.
"""

import gymnasium

from env.finished_episodes import FinishedEpisodes
from env.observation import (
    ACTION_MASK,
    CHOICE_CODES,
    CHOICE_COSTS,
    CHOICE_KINDS,
    ITEM_CODE,
    NUM_CHOICE_KINDS,
    NUM_COST_COLUMNS,
    REMAINING,
    ChoiceKind,
    CostColumn,
    Observation,
    observation_space,
)
from env.placement_batch import PlacementBatch
from env.placement_env import PlacementEnv
from env.reward import Objective, balances, kernel_score, placement_reward
from env.splits import SplitBy
from env.task import PlacementTask, RewardMs
from env.vec_env import PlacementVecEnv

ENV_ID = "autoshard/Placement-v0"

gymnasium.register(id=ENV_ID, entry_point="env.placement_env:PlacementEnv")

__all__ = [
    "ACTION_MASK",
    "CHOICE_CODES",
    "CHOICE_COSTS",
    "CHOICE_KINDS",
    "ENV_ID",
    "ITEM_CODE",
    "NUM_CHOICE_KINDS",
    "NUM_COST_COLUMNS",
    "REMAINING",
    "ChoiceKind",
    "CostColumn",
    "FinishedEpisodes",
    "Objective",
    "Observation",
    "PlacementBatch",
    "PlacementEnv",
    "PlacementTask",
    "PlacementVecEnv",
    "RewardMs",
    "SplitBy",
    "balances",
    "kernel_score",
    "observation_space",
    "placement_reward",
]
