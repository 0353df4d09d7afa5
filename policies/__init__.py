"""Sharding policies learned by reinforcement learning, and the planner that uses them.

Names are imported when they are first asked for, since torch takes a second that `autoshard --help` does not have.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from policies.actor_critic import PlacementPolicy
    from policies.choices import Algorithm, Items, RewardSource
    from policies.decoding import Placements, decode
    from policies.network import PlacementNetwork
    from policies.planner import PolicyOptions, PolicyPlanner
    from policies.ppo import PlacementPPO
    from policies.run_options import RunOptions, TaskOptions
    from policies.runs import FinishedRun, run_training
    from policies.tasks import Split, TaskKind, sample_problems, task_seeds
    from policies.trained import PolicyCostModel, TrainedPolicy
    from policies.training import Evaluation, PolicyTrainer
    from policies.training_options import Budget, PPOSettings, TrainingOptions, VTraceSettings
    from policies.vtrace import VTrace

#: What the registry keeps policies of whole tables under; `Items.policy_kind` has those of other items.
POLICY_KIND = "policy"

_MODULES = {
    "actor_critic": ("PlacementPolicy",),
    "choices": ("Algorithm", "Items", "RewardSource"),
    "decoding": ("Placements", "decode"),
    "network": ("PlacementNetwork",),
    "planner": ("PolicyOptions", "PolicyPlanner"),
    "ppo": ("PlacementPPO",),
    "run_options": ("RunOptions", "TaskOptions"),
    "runs": ("FinishedRun", "run_training"),
    "tasks": ("Split", "TaskKind", "sample_problems", "task_seeds"),
    "trained": ("PolicyCostModel", "TrainedPolicy"),
    "training": ("Evaluation", "PolicyTrainer"),
    "training_options": ("Budget", "PPOSettings", "TrainingOptions", "VTraceSettings"),
    "vtrace": ("VTrace",),
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
    "Placements",
    "PolicyCostModel",
    "PolicyOptions",
    "PolicyPlanner",
    "PolicyTrainer",
    "RewardSource",
    "RunOptions",
    "Split",
    "TaskKind",
    "TaskOptions",
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
