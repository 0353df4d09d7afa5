"""Neo's 4D parallelism (Mudigere et al., ISCA 2022)."""

from autoshard.planners.neo.caches import with_grown_caches
from autoshard.planners.neo.cost import CostFunction, PartCost
from autoshard.planners.neo.planner import NeoOptions, NeoPlanner

__all__ = ["CostFunction", "NeoOptions", "NeoPlanner", "PartCost", "with_grown_caches"]
