"""Single changes that would make a plan's training faster, each priced by planning with it."""

from autoshard.improvements.changes import Improvement, find_improvements, trials_budget_s
from autoshard.improvements.explanation_json import EXPLANATION

__all__ = ["EXPLANATION", "Improvement", "find_improvements", "trials_budget_s"]
