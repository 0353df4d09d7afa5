"""Reports for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from autoshard.core import ShardingPlan
from autoshard.core.quoting import write_bytes
from autoshard.core.step import CollectiveTime, Overlap, StepCollective
from autoshard.evaluation.batch_memory import rank_memory
from autoshard.report.comparison import comparison_order, failure_lines, planners_table
from autoshard.report.pages import part_table, task_line
from autoshard.report.wording import write_bounds, write_interval, write_ms, write_overlap, write_percent
from autoshard.results.comparison import ComparedPlan, MeasuredPlan
from autoshard.table import Column, Table

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
    if plan.provenance is not None and (machine := plan.provenance.models.get("kernel_machine")):
        lines.append(f"Kernels as measured on {machine}")
    others = [f"{kind} {name}" for kind, name in predicted.models.items() if kind != "kernel"]
    if others:
        lines.append(f"Models besides that of kernels: {', '.join(others)}")
    parts: list[RenderableType] = [part_table(predicted), ""] if predicted.parts else []
    if predicted.overlap not in (None, Overlap.NONE) and predicted.collectives:
        parts += [collective_table(predicted.collectives), ""]
    left_out = len(predicted.ranks) - _MAX_RANKS
    rest = [f"{left_out:,} ranks with shorter kernels are left out; --json lists all"] if left_out > 0 else []
    return Group(*lines, "", *parts, _rank_table(plan, measured), *rest)


def comparison_table(rows: Sequence[ComparedPlan], notes: Sequence[str]) -> RenderableType:
    """Planners side by side, with sentences below."""
    return Group(planners_table(rows), "", *failure_lines(rows), comparison_order(rows), *notes)


def collective_table(times: Mapping[StepCollective, CollectiveTime]) -> Table:
    """How long collectives take, and how long the step waits for them."""
    return Table.of(
        times.items(),
        [
            ("collective", lambda one: one[0].replace("_", " ")),
            ("serialised ms", lambda one: write_ms(one[1].serialised_ms)),
            ("exposed ms", lambda one: write_ms(one[1].exposed_ms)),
        ],
    )


def _rank_table(plan: ShardingPlan, measured: MeasuredPlan | None) -> Table:
    predicted = plan.prices
    longest = max(predicted.max_kernel_ms, *(measured.kernel_ms_per_rank if measured else (0.0,)), 1e-12)
    counts, memory = plan.arrays.counts(plan.group_size).tolist(), rank_memory(plan)
    longest_first = sorted(range(len(predicted.ranks)), key=lambda index: -predicted.ranks[index].kernel_ms)
    shown = sorted(longest_first[:_MAX_RANKS])

    def bar(index: int) -> Text:
        cost = predicted.ranks[index]
        # A plan written by hand may have ranks that take longer than its slowest.
        forward, both = (round(_BAR_WIDTH * min(1.0, ms / longest)) for ms in (cost.forward_kernel_ms, cost.kernel_ms))
        return Text.assemble(("█" * forward, "blue"), ("▒" * (both - forward), "cyan"))

    def exchange_ms(index: int) -> float:
        return predicted.ranks[index].forward_exchange_ms + predicted.ranks[index].backward_exchange_ms

    rank = "rank" if plan.replica_groups.num_groups == 1 else "rank of one group"
    measured_ms = measured.kernel_ms_per_rank if measured else ()
    return Table.of(
        shown,
        [
            (Column(rank, justify="right"), lambda index: predicted.ranks[index].rank),
            ("shards", lambda index: counts[index % len(counts)]),
            ("kernel ms", lambda index: write_ms(predicted.ranks[index].kernel_ms)),
            *([("measured ms", lambda index: write_ms(measured_ms[index]))] if measured else []),
            ("exchange ms", lambda index: write_ms(exchange_ms(index))),
            ("memory", lambda index: write_bytes(memory[index].used_bytes)),
            ("used", lambda index: write_percent(memory[index].share) if memory[index].capacity_bytes else ""),
            (Column("forward and backward kernel", min_width=_BAR_WIDTH), bar),
        ],
        marked=[place for place, index in enumerate(shown) if predicted.ranks[index].rank == predicted.binding_rank],
    )
