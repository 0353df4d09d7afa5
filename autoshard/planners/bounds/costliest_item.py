"""How fast the slowest rank could be at best.

Shape suffixes: N items, H width of a code.
"""

from __future__ import annotations

import numpy as np

from autoshard.planners.space.placement import PlacementProblem


def costliest_item_ms(problem: PlacementProblem) -> float:
    """Price of the costliest item, if no other item makes it cheaper by joining it; else 0, which bounds nothing.

    Learned models do not always grow with what is added to a set. The check is of single items, so for such a model
    the bound is as good as proven, not proven; for one whose prices never fall it holds.
    """
    costliest = int(problem.kernel_ms_N.argmax())
    joined_ms = problem.model.predict_ms(problem.codes_NH[costliest] + np.delete(problem.codes_NH, costliest, axis=0))
    alone_ms = float(problem.kernel_ms_N[costliest])
    return alone_ms if (joined_ms >= alone_ms).all() else 0.0
