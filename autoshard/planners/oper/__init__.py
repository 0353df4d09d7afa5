"""OPER: row groups of balanced lookups and bytes, and copies of the hottest."""

from autoshard.planners.oper.partition import lookup_bytes, row_groups
from autoshard.planners.oper.placement import Method, place
from autoshard.planners.oper.planner import OperOptions, OperPlanner

__all__ = ["Method", "OperOptions", "OperPlanner", "lookup_bytes", "place", "row_groups"]
