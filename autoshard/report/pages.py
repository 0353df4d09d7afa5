"""HTML reports of plans and comparisons: single files that open without a network."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoshard.core import CostBreakdown, RankCost, ShardingPlan, SyncRows
from autoshard.core.quoting import write_bytes
from autoshard.evaluation.batch_memory import rank_memory
from autoshard.report.caveats import comparison_warnings, plan_warnings
from autoshard.report.comparison import comparison_order, failure_lines, planners_table, ranked
from autoshard.report.rendering import chart_markup, render_page
from autoshard.report.wording import (
    write_columns,
    write_interval,
    write_ms,
    write_overlap,
    write_part,
    write_percent,
    write_ranks,
    write_rows,
)
from autoshard.results.comparison import ComparedPlan, MeasuredPlan
from autoshard.table import Column, Table

#: Shards that a page lists; more would make it large and slow, and `--json` has them all.
_MOST_SHARDS = 1500


def plan_page(
    plan: ShardingPlan,
    measured: MeasuredPlan | None = None,
    *,
    title: str = "Sharding plan",
    measured_notes: Sequence[str] = (),
) -> str:
    """The HTML report of a plan.

    Args:
        plan: The plan; without a prediction the page shows its placement only.
        measured: Kernel times of its ranks, to be shown beside the predicted ones.
        title: Heading of the page.
        measured_notes: Sentences about the measured times, after the warnings of the plan.
    """
    predicted = plan.predicted
    return render_page(
        "plan.html.j2",
        title=title,
        subtitle=_headline(plan),
        warnings=[*plan_warnings(plan), *measured_notes],
        facts=plan_facts(plan, predicted, measured) if predicted else [],
        pictures=_pictures(plan_figures(plan, measured)),
        parts=_captioned_parts(predicted) if predicted and predicted.parts else None,
        ranks=_rank_table(plan, predicted, measured) if predicted and predicted.ranks else None,
        shards=_shard_table(plan),
        provenance=_provenance(plan),
    )


def _headline(plan: ShardingPlan) -> str:
    """The predicted step, what binds it, and the task."""
    if plan.predicted is None:
        return task_line(plan)
    step = plan.predicted.step_ms
    return (
        f"Predicted step {write_ms(step.value)} ms ({write_interval(step)} ms); "
        f"rank {plan.predicted.binding_rank} has the slowest kernel. {task_line(plan)}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture of a plan.

    Attributes:
        name: Its id in a page, and part of its file's name.
        title: Heading.
        caption: Line below it.
        label: Description for readers who do not see it.
        figure: The plotly figure.
    """

    name: str
    title: str
    caption: str
    label: str
    figure: Any


def plan_figures(plan: ShardingPlan, measured: MeasuredPlan | None = None) -> tuple[Picture, ...]:
    """The pictures of a plan, in the order in which its page shows them; without a prediction, those of its placement.

    Args:
        plan: The plan.
        measured: Kernel times of its ranks, to be shown beside the predicted ones.
    """
    from autoshard.report.pictures import (
        MOST_CURVES,
        MOST_FRONTIERS,
        access_figure,
        curved_tables,
        pareto_figure,
        placement_figure,
    )

    found = [*_cost_pictures(plan, plan.predicted, measured)] if plan.predicted is not None else []
    found.append(
        Picture(
            name="map",
            title="Tables by ranks",
            caption="Bytes of a table that a rank holds: darker is more. Tables are ordered by how they are sharded, "
            "and then by rank; dragging enlarges a part and names its tables, a double click shows all.",
            label="Map of tables by ranks; the table of shards has the numbers.",
            figure=placement_figure(plan),
        )
    )
    if (access := access_figure(plan)) is not None:
        found.append(
            Picture(
                name="access",
                title="Access curves",
                caption="Share of the lookups that go to the hottest rows of a table; a diamond is the end of a tier."
                + _left_out(len(curved_tables(plan)), MOST_CURVES, "those of the tables with most lookups"),
                label="Curves of the share of lookups over the share of rows, a curve for each table.",
                figure=access,
            )
        )
    if (pareto := pareto_figure(plan)) is not None:
        found.append(
            Picture(
                name="pareto",
                title="Memory against communication",
                caption="FlexShard's curves of tables: from no row to ever more replicated rows. Diamonds are what the "
                "plan replicates; at circles, memory is as if no row was replicated."
                + _left_out(
                    len(plan.tables.tables), MOST_FRONTIERS, "those of tables with replicated rows, then of the largest"
                ),
                label="Curves of memory over communication as rows are replicated, a curve for each table.",
                figure=pareto,
            )
        )
    return tuple(found)


def _left_out(num_curves: int, most: int, which: str) -> str:
    """Sentence on which curves a picture shows; empty where it shows all."""
    return f" {most} of {num_curves:,} are shown: {which}." if num_curves > most else ""


def _cost_pictures(plan: ShardingPlan, predicted: CostBreakdown, measured: MeasuredPlan | None) -> Iterator[Picture]:
    from autoshard.report.figures import memory_figure, rank_time_figure
    from autoshard.report.pictures import accuracy_figure

    marks = "; diamonds are the kernel times that this machine measured." if measured else "."
    yield Picture(
        name="time",
        title="Time per rank",
        caption=f"Predicted parts of a step, which may overlap in time{marks}",
        label="Bars of each rank's predicted step, by part; the numbers are in the table of ranks.",
        figure=rank_time_figure(predicted, measured),
    )
    if measured is not None:
        yield Picture(
            name="accuracy",
            title="Predicted against measured",
            caption="Kernel times of ranks, forward and backward, with the 90% interval of each prediction.",
            label="Predicted over measured kernel times, a mark for each rank; the table of ranks has the numbers.",
            figure=accuracy_figure(predicted, measured),
        )
    yield Picture(
        name="memory",
        title="Memory per rank",
        caption="Device memory: weights with optimizer state, and what training needs for a batch. The line is what "
        "the rank has.",
        label="Bars of each rank's memory and its capacity; the numbers are in the table of ranks.",
        figure=memory_figure(plan, predicted),
    )


def _pictures(pictures: Sequence[Picture]) -> list[dict[str, object]]:
    return [
        {
            "element": picture.name,
            "title": picture.title,
            "caption": picture.caption,
            "label": picture.label,
            "chart": chart_markup(picture.figure, f"chart-{picture.name}"),
        }
        for picture in pictures
    ]


def run_page(plan: ShardingPlan, executed: Sequence[Any], lines: Sequence[str], *, title: str = "Run of a plan") -> str:
    """The HTML report of a run: what each rank's step was predicted to take, and what it took, part by part.

    Args:
        plan: The plan.
        executed: `RankTiming` by process.
        lines: Sentences about the run, for below the title.
        title: Heading of the page.
    """
    from autoshard.report.figures import RANK_PARTS, executed_figure
    from autoshard.report.images import FigureReport, Section, figure_page

    predicted = [_predicted_of(one, plan) for one in executed]
    kinds = [("predicted", predicted), ("executed", executed)]
    is_folded = any(len(one.plan_ranks) > 1 for one in executed)
    table = Table.of(
        [(index, name, of[index]) for index in range(len(executed)) for name, of in kinds if of[index]],
        [
            ("Rank", lambda row: row[0]),
            ("", lambda row: row[1]),
            *(
                (label.capitalize(), lambda row, attribute=attribute: write_ms(getattr(row[2], attribute)))
                for label, attribute, _ in RANK_PARTS
            ),
        ],
        caption="Milliseconds of a step.",
    )
    section = Section(
        title="Predicted beside executed",
        caption="Parts of each rank's step, which may overlap in time. What was executed holds what a rank waits for "
        "others: a rank with little work of its own has long exchanges."
        + (" Processes that run several ranks of the plan have no prediction." if is_folded else ""),
        figure=executed_figure(predicted, executed),
        tables=(table,),
    )
    return figure_page(FigureReport(title=title, subtitle=" ".join(lines), sections=(section,)))


def _predicted_of(executed: Any, plan: ShardingPlan) -> RankCost | None:
    """What was predicted for a process; None without prices, and for one that runs several ranks of the plan."""
    if plan.predicted is None or not plan.predicted.ranks or len(executed.plan_ranks) > 1:
        return None
    return plan.predicted.ranks[plan.replica_groups.group_rank(executed.plan_ranks[0], plan.topology)]


def comparison_page(rows: Sequence[ComparedPlan], notes: Sequence[str], *, title: str = "Planners compared") -> str:
    """The HTML report of several planners on one task.

    Args:
        rows: One line per planner.
        notes: Sentences below the table.
        title: Heading of the page.
    """
    from autoshard.report.figures import planner_ranks_figure, planners_figure

    planned, highest_ms = _planned(ranked(rows))
    small = []
    for index, row in enumerate(planned):
        kernel_ms = _kernel_ms_per_rank(row)
        chart = chart_markup(planner_ranks_figure(row, highest_ms), f"chart-ranks-{index}")
        label = "Kernel ms of ranks in order: " + ", ".join(write_ms(value) for value in kernel_ms)
        caption = f"slowest {write_ms(max(kernel_ms))} ms, fastest {write_ms(min(kernel_ms))} ms"
        small.append({"planner": row.planner, "chart": chart, "label": label, "caption": caption})
    return render_page(
        "comparison.html.j2",
        title=title,
        subtitle=task_line(planned[0].plan) if planned and planned[0].plan else "",
        warnings=comparison_warnings(rows),
        planners_chart=chart_markup(planners_figure(rows), "chart-planners"),
        planners=replace(planners_table(rows), caption=comparison_order(rows)),
        notes=[*failure_lines(rows), *notes],
        rank_charts=small,
        measured=any(row.measured for row in rows),
    )


def comparison_figures(rows: Sequence[ComparedPlan]) -> dict[str, Any]:
    """The pictures of a comparison by name: that of the planners, and one of the ranks of each plan."""
    from autoshard.report.figures import planner_ranks_figure, planners_figure

    planned, highest_ms = _planned(rows)
    small = {row.planner.replace(", ", "-"): planner_ranks_figure(row, highest_ms) for row in planned}
    return {"planners": planners_figure(rows), **small}


def _planned(rows: Sequence[ComparedPlan]) -> tuple[list[ComparedPlan], float]:
    """Rows with a priced plan, and the longest kernel time of a rank of any."""
    planned = [row for row in rows if row.plan is not None and row.plan.predicted is not None]
    return planned, max((max(_kernel_ms_per_rank(row)) for row in planned), default=0.0)


def task_line(plan: ShardingPlan) -> str:
    """One line about what is planned: `80 tables, 3.20 GiB, batch 1,024, on 8 ranks of cpu`.

    Ranks of a plan over replica groups are those of one group, and the line gives the layout of the groups.
    """
    tables = plan.tables.tables
    return (
        f"{len(tables):,} table{'' if len(tables) == 1 else 's'}, "
        f"{write_bytes(sum(table.storage_bytes for table in tables))} with optimizer state, "
        f"global batch {plan.tables.batch_size:,}, "
        f"on {plan.topology.world_size:,} rank{'' if plan.topology.world_size == 1 else 's'} of {plan.topology.device}"
        + _groups_text(plan)
    )


def _groups_text(plan: ShardingPlan) -> str:
    """`, in 4 groups of 2 ranks across nodes that meet every step`; nothing for one group."""
    groups = plan.replica_groups
    if groups.num_groups == 1:
        return ""
    rows = " in the rows that they touched" if groups.sync_rows is SyncRows.TOUCHED else ""
    every = "every step" if groups.sync_every == 1 else f"every {groups.sync_every:,} steps"
    return (
        f", in {groups.num_groups:,} groups of {plan.group_size:,} rank{'' if plan.group_size == 1 else 's'} "
        f"{groups.layout.replace('_', ' ')} that meet {every}{rows} (shown per rank of one group)"
    )


def _kernel_ms_per_rank(row: ComparedPlan) -> tuple[float, ...]:
    if row.measured is not None:
        return row.measured.kernel_ms_per_rank
    assert row.plan is not None
    return tuple(rank.kernel_ms for rank in row.plan.prices.ranks)


def plan_facts(plan: ShardingPlan, predicted: CostBreakdown, measured: MeasuredPlan | None) -> list[dict[str, str]]:
    """The numbers at the top of a plan's page: label, value and note of each."""
    step = predicted.step_ms
    fullest = max(rank_memory(plan), key=lambda one: one.share)
    binding = f"rank {predicted.binding_rank}; its costliest table is {predicted.binding_shard}"
    facts = [
        ("Predicted step", f"{write_ms(step.value)} ms", f"{write_interval(step)} ms"),
        ("Predicted kernel, slowest rank", f"{write_ms(predicted.max_kernel_ms)} ms", binding),
        ("Predicted balance", write_percent(predicted.balance), "fastest over slowest rank"),
    ]
    if measured is not None:
        facts += [
            ("Measured kernel, slowest rank", f"{write_ms(measured.max_kernel_ms)} ms", "on this machine"),
            ("Measured balance", write_percent(measured.balance), "fastest over slowest rank"),
        ]
    if (bound := predicted.bounds.get("step")) is not None:
        above, kind = bound.above(step.value)
        facts.append(("Gap to the bound", write_percent(above), f"above the {kind} lower bound of the step"))
    facts += [
        ("Floor", f"{write_ms(predicted.floor_kernel_ms)} ms", "the costliest shard alone"),
        ("Fullest rank", write_percent(fullest.share), f"of the memory of rank {fullest.rank}"),
        ("Kernel times from", *_model_texts(predicted.cost_model)),
        *(
            (f"{kind.capitalize()} times from", *_model_texts(name))
            for kind, name in predicted.models.items()
            if kind != "kernel"
        ),
    ]
    return [{"label": label, "value": value, "note": note} for label, value, note in facts]


def _model_texts(name: str) -> tuple[str, str]:
    """A model's name, and its id or remark, which is too long to be written as large: `learned:cpu@id (shipped)`."""
    kind, *remark = re.split(r"@| (?=\()", name, maxsplit=1)
    return kind, "".join(remark)


def part_table(predicted: CostBreakdown) -> Table:
    """Parts of the step at their slowest ranks."""
    return Table.of(
        predicted.parts.items(),
        [
            ("part of the step", lambda one: write_part(one[0], predicted)),
            ("slowest rank ms", lambda one: write_ms(one[1].value)),
            ("90% interval", lambda one: write_interval(one[1])),
        ],
    )


def _captioned_parts(predicted: CostBreakdown) -> Table:
    overlap = f" Overlap: {write_overlap(predicted.overlap)}." if predicted.overlap else ""
    return replace(part_table(predicted), caption=f"Milliseconds of the slowest rank, with 90% intervals.{overlap}")


def _rank_table(plan: ShardingPlan, predicted: CostBreakdown, measured: MeasuredPlan | None) -> Table:
    counts, memory = plan.arrays.counts(plan.group_size).tolist(), rank_memory(plan)
    ranks = predicted.ranks
    measured_ms = (
        []
        if measured is None
        else [
            ("Measured forward", lambda index: write_ms(measured.forward_ms_R[index])),
            ("Measured backward", lambda index: write_ms(measured.backward_ms_R[index])),
            ("Measured kernel", lambda index: write_ms(measured.kernel_ms_per_rank[index])),
        ]
    )
    return Table.of(
        range(len(ranks)),
        [
            ("Rank", lambda index: ranks[index].rank),
            ("Shards", lambda index: counts[index % len(counts)]),
            ("Forward kernel", lambda index: write_ms(ranks[index].forward_kernel_ms)),
            ("Backward kernel", lambda index: write_ms(ranks[index].backward_kernel_ms)),
            ("Kernel", lambda index: write_ms(ranks[index].kernel_ms)),
            *measured_ms,
            ("Exchange", lambda index: write_ms(ranks[index].forward_exchange_ms + ranks[index].backward_exchange_ms)),
            ("Memory", lambda index: write_bytes(memory[index].used_bytes)),
            ("Memory used", lambda index: write_percent(memory[index].share)),
        ],
        caption="Milliseconds per step. The slowest rank is marked.",
        marked=[index for index, cost in enumerate(ranks) if cost.rank == predicted.binding_rank],
    )


def _shard_table(plan: ShardingPlan) -> Table:
    left = len(plan.shards) - _MOST_SHARDS
    more = f" {left:,} more are left out; `autoshard show --json` lists all." if left > 0 else ""
    return Table.of(
        plan.shards[:_MOST_SHARDS],
        [
            ("Table", lambda placed: placed.shard.table.name),
            (Column("Ranks"), write_ranks),
            (Column("Sharding"), lambda placed: placed.tier.value),
            ("Rows of the table", lambda placed: f"{placed.shard.table.num_embeddings:,}"),
            ("Rows held", lambda placed: write_rows(placed.shard)),
            ("Dim", lambda placed: placed.shard.table.embedding_dim),
            ("Columns held", lambda placed: write_columns(placed.shard)),
            ("Lookups per sample", lambda placed: f"{placed.shard.table.pooling_factor:.3g}"),
            ("Memory", lambda placed: write_bytes(placed.shard.storage_bytes)),
        ],
        caption=f"Shards with the ranks that hold them; replicas are set apart by a bar.{more}",
    )


def _provenance(plan: ShardingPlan) -> list[tuple[str, str]]:
    source = plan.provenance
    if source is None:
        return []
    options = ", ".join(f"{key}={value}" for key, value in source.options.items())
    models = ", ".join(f"{key}: {value}" for key, value in source.models.items())
    lines = [
        ("Planner", source.planner),
        ("Options", options or "defaults"),
        ("Seed", str(source.seed)),
        ("Risk", source.risk),
        ("Models", models or "none"),
        ("Version", source.version),
    ]
    return lines
