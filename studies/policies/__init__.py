"""The policy measured as AutoShard's paper measures it: `python -m studies policy`.

Each figure is made of parts that are computed once and kept, and of a section that shows them.
"""

from studies.policies.figure import Figure, Part
from studies.policies.figures.catalogue import FIGURES, choose
from studies.policies.lab import Lab
from studies.policies.report import policy_result
from studies.policies.settings import EvaluationSettings

__all__ = ["FIGURES", "EvaluationSettings", "Figure", "Lab", "Part", "choose", "policy_result"]
