"""The sharding policy: its network, its training, and the planner that uses it.

Names are imported when they are first asked for, since torch takes a second that `autoshard --help` does not have.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from policies.network import PolicyNetwork
    from policies.planning.planner import PolicyOptions, PolicyPlanner
    from policies.planning.playing import Played, play
    from policies.planning.trained import POLICY_KIND, TrainedPolicy
    from policies.training.drawn_tasks import TaskKind, TaskSplit, game_task, task_seeds
    from policies.training.labels import Label, searched
    from policies.training.learner import Learner
    from policies.training.run_options import PolicyRunOptions
    from policies.training.runs import PolicyTraining

_MODULES = {
    "network": ("PolicyNetwork",),
    "planning.planner": ("PolicyOptions", "PolicyPlanner"),
    "planning.playing": ("Played", "play"),
    "planning.trained": ("POLICY_KIND", "TrainedPolicy"),
    "training.drawn_tasks": ("TaskKind", "TaskSplit", "game_task", "task_seeds"),
    "training.labels": ("Label", "searched"),
    "training.learner": ("Learner",),
    "training.run_options": ("PolicyRunOptions",),
    "training.runs": ("PolicyTraining",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "POLICY_KIND",
    "Label",
    "Learner",
    "Played",
    "PolicyNetwork",
    "PolicyOptions",
    "PolicyPlanner",
    "PolicyRunOptions",
    "PolicyTraining",
    "TaskKind",
    "TaskSplit",
    "TrainedPolicy",
    "game_task",
    "play",
    "searched",
    "task_seeds",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'policies' has no attribute {name!r}")
    return getattr(import_module(f"policies.{_MODULE_OF[name]}"), name)
