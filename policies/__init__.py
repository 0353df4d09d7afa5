"""Sharding policies learned by reinforcement learning, and the planner that uses them.

Names are imported when they are first asked for, since torch takes a second that `autoshard --help` does not have.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from policies.algorithms.ppo import PlacementPPO
    from policies.algorithms.training_options import Budget, PPOSettings, TrainingOptions, VTraceSettings
    from policies.algorithms.vtrace import VTrace
    from policies.choices import Algorithm, Items, RewardSource
    from policies.network.actor_critic import PlacementPolicy
    from policies.network.network import PlacementNetwork
    from policies.planning.decoding import decode
    from policies.planning.planner import PolicyOptions, PolicyPlanner
    from policies.planning.tasks import TaskKind, TaskSplit, sample_problems, task_seeds
    from policies.planning.trained import TrainedPolicy
    from policies.training.run_options import PolicyRunOptions, TaskOptions
    from policies.training.runs import FinishedRun, run_training
    from policies.training.trainer import Evaluation, PolicyTrainer

#: What the registry keeps policies of whole tables under; `Items.policy_kind` has those of other items.
POLICY_KIND = "policy"

_MODULES = {
    "network.actor_critic": ("PlacementPolicy",),
    "choices": ("Algorithm", "Items", "RewardSource"),
    "planning.decoding": ("Placements", "decode"),
    "network.network": ("PlacementNetwork",),
    "planning.planner": ("PolicyOptions", "PolicyPlanner"),
    "algorithms.ppo": ("PlacementPPO",),
    "training.run_options": ("PolicyRunOptions", "TaskOptions"),
    "training.runs": ("FinishedRun", "run_training"),
    "planning.tasks": ("TaskSplit", "TaskKind", "sample_problems", "task_seeds"),
    "planning.trained": ("TrainedPolicy",),
    "training.trainer": ("Evaluation", "PolicyTrainer"),
    "algorithms.training_options": ("Budget", "PPOSettings", "TrainingOptions", "VTraceSettings"),
    "algorithms.vtrace": ("VTrace",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "POLICY_KIND",
    "Algorithm",
    "Budget",
    "Evaluation",
    "FinishedRun",
    "Items",
    "PPOSettings",
    "PlacementNetwork",
    "PlacementPPO",
    "PlacementPolicy",
    "PolicyOptions",
    "PolicyPlanner",
    "PolicyRunOptions",
    "PolicyTrainer",
    "RewardSource",
    "TaskKind",
    "TaskOptions",
    "TaskSplit",
    "TrainedPolicy",
    "TrainingOptions",
    "VTrace",
    "VTraceSettings",
    "decode",
    "run_training",
    "sample_problems",
    "task_seeds",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'policies' has no attribute {name!r}")
    return getattr(import_module(f"policies.{_MODULE_OF[name]}"), name)
