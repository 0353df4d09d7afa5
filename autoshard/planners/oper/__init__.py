"""OPER: row groups of balanced lookups and bytes, and copies of the hottest."""

from autoshard.planners.oper.balance import Method
from autoshard.planners.oper.cost_matrix import exchange_ms, fetch_matrix_ms, held_bytes, lookup_ms
from autoshard.planners.oper.partition import equal_row_ranges, lookup_bytes, row_groups
from autoshard.planners.oper.planner import OperOptions, OperPlanner
from autoshard.planners.oper.replication import duplication_frequency

__all__ = [
    "Method",
    "OperOptions",
    "OperPlanner",
    "duplication_frequency",
    "equal_row_ranges",
    "exchange_ms",
    "fetch_matrix_ms",
    "held_bytes",
    "lookup_bytes",
    "lookup_ms",
    "row_groups",
]
