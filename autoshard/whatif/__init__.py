"""Planning again with something changed: what makes a task feasible, what makes it faster, other clusters."""

from autoshard.whatif.improvements import find_improvements, trials_budget_s
from autoshard.whatif.remedies import Remedy, Shortage, find_remedies, find_shortage
from autoshard.whatif.spread import sample_steps
from autoshard.whatif.sweep import Simulator, sweep_points

__all__ = [
    "Remedy",
    "Shortage",
    "Simulator",
    "find_improvements",
    "find_remedies",
    "find_shortage",
    "sample_steps",
    "sweep_points",
    "trials_budget_s",
]
