"""Reports on plans and comparisons: for the terminal, and as HTML files that need no network."""

from autoshard.report.caveats import comparison_warnings, plan_warnings
from autoshard.report.comparison import BASELINE, floor_ms, within_noise
from autoshard.report.pages import Picture, comparison_figures, comparison_page, plan_figures, plan_page, run_page
from autoshard.report.terminal import comparison_table, plan_summary
from autoshard.results.comparison import ComparedPlan, MeasuredPlan, speedups_over

__all__ = [
    "BASELINE",
    "ComparedPlan",
    "MeasuredPlan",
    "Picture",
    "comparison_figures",
    "comparison_page",
    "comparison_table",
    "comparison_warnings",
    "floor_ms",
    "plan_figures",
    "plan_page",
    "plan_summary",
    "plan_warnings",
    "run_page",
    "speedups_over",
    "within_noise",
]
