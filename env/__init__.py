"""Placement as a game: the Gymnasium environment, and its twin that plays many episodes at once.

Importing this package registers `autoshard/TablePlacement-v0` with Gymnasium.
"""

import gymnasium

from env.observation import (
    ACTION_MASK,
    ITEM_CODE,
    NUM_COST_COLUMNS,
    RANK_CODES,
    RANK_COSTS,
    REMAINING,
    Observation,
    observation_space,
)
from env.placement_batch import FinishedEpisodes, PlacementBatch
from env.reward import placement_reward
from env.table_placement import TablePlacementEnv
from env.task import PlacementTask, RewardMs
from env.vec_env import PlacementVecEnv

ENV_ID = "autoshard/TablePlacement-v0"

gymnasium.register(id=ENV_ID, entry_point="env.table_placement:TablePlacementEnv")

__all__ = [
    "ACTION_MASK",
    "ENV_ID",
    "ITEM_CODE",
    "NUM_COST_COLUMNS",
    "RANK_CODES",
    "RANK_COSTS",
    "REMAINING",
    "FinishedEpisodes",
    "Observation",
    "PlacementBatch",
    "PlacementTask",
    "PlacementVecEnv",
    "RewardMs",
    "TablePlacementEnv",
    "observation_space",
    "placement_reward",
]
