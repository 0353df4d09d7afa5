"""Reports on plans and comparisons: for the terminal, and as HTML files that need no network."""

from autoshard.evaluation.measured import ComparedPlan, MeasuredPlan, speedups_over
from autoshard.report.comparison import BASELINE, floor_ms, within_noise
from autoshard.report.pages import comparison_page, plan_page
from autoshard.report.terminal import comparison_table, plan_summary

__all__ = [
    "BASELINE",
    "ComparedPlan",
    "MeasuredPlan",
    "comparison_page",
    "comparison_table",
    "floor_ms",
    "plan_page",
    "plan_summary",
    "speedups_over",
    "within_noise",
]
