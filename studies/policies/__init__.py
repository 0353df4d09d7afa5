"""The policy measured as AutoShard's paper measures it: `python -m studies policy`.

Each figure is made of parts that are computed once and kept, and of a section that shows them.
"""

from studies.policies.lab import EvaluationSettings, Figure, Lab, Part
from studies.policies.study import FIGURES, choose, policy_result

__all__ = ["FIGURES", "EvaluationSettings", "Figure", "Lab", "Part", "choose", "policy_result"]
