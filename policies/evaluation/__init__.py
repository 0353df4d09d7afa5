"""The policy measured as AutoShard's paper measures it: `python -m policies.evaluate`.

Each figure is made of parts that are computed once and kept, and of a section that shows them.
"""

from policies.evaluation.catalogue import FIGURES, choose
from policies.evaluation.figure import Figure, Part
from policies.evaluation.lab import Lab
from policies.evaluation.parts import PartStore
from policies.evaluation.report import write_results
from policies.evaluation.settings import EvaluationSettings

__all__ = ["FIGURES", "EvaluationSettings", "Figure", "Lab", "Part", "PartStore", "choose", "write_results"]
