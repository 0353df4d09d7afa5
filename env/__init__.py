"""Sharding as a game: the rules for many episodes at once, and the Gymnasium environment that plays one.

Names are imported when they are first asked for: planning with a policy needs the rules, and not Gymnasium. Importing
`ShardingEnv` registers `autoshard/Sharding-v0` with Gymnasium.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from env.game import Finished, Game, GameTask
    from env.sharding_env import ENV_ID, ShardingEnv

_MODULE_OF = {
    **dict.fromkeys(("Finished", "Game", "GameTask"), "game"),
    **dict.fromkeys(("ENV_ID", "ShardingEnv"), "sharding_env"),
}

__all__ = ["ENV_ID", "Finished", "Game", "GameTask", "ShardingEnv"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'env' has no attribute {name!r}")
    return getattr(import_module(f"env.{_MODULE_OF[name]}"), name)
