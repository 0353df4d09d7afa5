"""Neo's 4D parallelism (Mudigere et al., ISCA 2022)."""

from autoshard.planners.neo.cost import CostFunction
from autoshard.planners.neo.planner import NEO_TYPES, NeoOptions, NeoPlanner

__all__ = ["NEO_TYPES", "CostFunction", "NeoOptions", "NeoPlanner"]
