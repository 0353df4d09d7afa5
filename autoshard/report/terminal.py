"""Reports for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoshard.core import CostBreakdown, ShardingPlan
from autoshard.core.step import CollectiveTime, Overlap, StepCollective
from autoshard.report.comparison import comparison_columns, comparison_lines, comparison_order
from autoshard.report.pages import task_line
from autoshard.report.wording import (
    write_bounds,
    write_bytes,
    write_interval,
    write_ms,
    write_overlap,
    write_part,
    write_percent,
)
from autoshard.results.comparison import ComparedPlan, MeasuredPlan

_BAR_WIDTH = 30
#: Ranks that a table lists: those with the longest kernels. A thousand lines take seconds to lay out.
_MAX_RANKS = 256


def plan_summary(plan: ShardingPlan, measured: MeasuredPlan | None = None) -> RenderableType:
    """Costs of a plan: its step by part, and a bar per rank.

    Args:
        plan: The plan.
        measured: Kernel times of its ranks, to be shown beside the predicted ones.
    """
    predicted = plan.predicted
    lines = [task_line(plan)]
    if predicted is None:
        return Group(*lines, "No prediction: `autoshard evaluate` prices the plan.")
    step = predicted.step_ms
    lines += [
        f"Predicted step {write_ms(step.value)} ms ({write_interval(step)}), priced by {predicted.cost_model}",
        f"Slowest kernel {write_ms(predicted.max_kernel_ms)} ms on rank {predicted.binding_rank}, whose costliest "
        f"table is {predicted.binding_shard}; floor {write_ms(predicted.floor_kernel_ms)} ms (the costliest shard); "
        f"balance {write_percent(predicted.balance)}",
        *write_bounds(predicted),
    ]
    if measured is not None:
        lines.append(
            f"Measured slowest kernel {write_ms(measured.max_kernel_ms)} ms, balance {write_percent(measured.balance)}"
        )
    if predicted.overlap is not None:
        lines.append(f"Overlap: {write_overlap(predicted.overlap)}")
    others = [f"{kind} {name}" for kind, name in predicted.models.items() if kind != "kernel"]
    if others:
        lines.append(f"Models besides that of kernels: {', '.join(others)}")
    parts: list[RenderableType] = [_part_table(predicted), ""] if predicted.parts else []
    if predicted.overlap not in (None, Overlap.NONE) and predicted.collectives:
        parts += [collective_table(predicted.collectives), ""]
    left_out = len(predicted.ranks) - _MAX_RANKS
    rest = [f"{left_out:,} ranks with shorter kernels are left out; --json lists all"] if left_out > 0 else []
    return Group(*lines, "", *parts, _rank_table(plan, measured), *rest)


def comparison_table(rows: Sequence[ComparedPlan], notes: Sequence[str]) -> RenderableType:
    """Planners side by side, with sentences below."""
    first, *others = comparison_columns(rows)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first)
    for column in others:
        table.add_column(column, justify="right", overflow="fold")
    failures = []
    for line in comparison_lines(rows):
        style = "bold" if line.is_best else ""
        table.add_row(line.planner, *(line.cells or ["no plan"]), style=style)
        if line.failure is not None:
            failures.append(f"{line.planner}: {line.failure}")
    return Group(table, "", *failures, comparison_order(rows), *notes)


def collective_table(times: Mapping[StepCollective, CollectiveTime]) -> RenderableType:
    """How long collectives take, and how long the step waits for them."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("collective")
    for column in ("serialised ms", "exposed ms"):
        table.add_column(column, justify="right")
    for collective, time in times.items():
        table.add_row(collective.replace("_", " "), write_ms(time.serialised_ms), write_ms(time.exposed_ms))
    return table


def _part_table(predicted: CostBreakdown) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("part of the step")
    for column in ("slowest rank ms", "90% interval"):
        table.add_column(column, justify="right")
    for part, estimate in predicted.parts.items():
        table.add_row(write_part(part, predicted), write_ms(estimate.value), write_interval(estimate))
    return table


def _rank_table(plan: ShardingPlan, measured: MeasuredPlan | None) -> Table:
    assert plan.predicted is not None
    rank = "rank" if plan.replica_groups.num_groups == 1 else "rank of one group"
    columns = [rank, "shards", "kernel ms", *(["measured ms"] if measured else []), "exchange ms", "memory", "used"]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right")
    table.add_column("forward and backward kernel", min_width=_BAR_WIDTH, no_wrap=True)
    longest = max(plan.predicted.max_kernel_ms, *(measured.kernel_ms_per_rank if measured else (0.0,)), 1e-12)
    held, topology = plan.local_shards(), plan.of_one_group().topology
    by_kernel = sorted(enumerate(plan.predicted.ranks), key=lambda one: -one[1].kernel_ms)
    for index, cost in sorted(by_kernel[:_MAX_RANKS], key=lambda one: one[0]):
        used = cost.used_bytes
        capacity = topology.memory_of(cost.rank).hbm
        # A plan written by hand may have ranks that take longer than its slowest.
        forward, both = (round(_BAR_WIDTH * min(1.0, ms / longest)) for ms in (cost.forward_kernel_ms, cost.kernel_ms))
        table.add_row(
            str(cost.rank),
            str(len(held[index % len(held)])),
            write_ms(cost.kernel_ms),
            *([write_ms(measured.kernel_ms_per_rank[index])] if measured else []),
            write_ms(cost.forward_exchange_ms + cost.backward_exchange_ms),
            write_bytes(used),
            write_percent(used / capacity) if capacity else "",
            Text.assemble(("█" * forward, "blue"), ("▒" * (both - forward), "cyan")),
            style="bold" if cost.rank == plan.predicted.binding_rank else "",
        )
    return table
