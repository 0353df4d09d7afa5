"""The study `two-d`: `python -m studies two-d`."""

from __future__ import annotations

from typing import Annotated

import typer

from autoshard import console
from autoshard.commands.options import command_options
from autoshard.planners.replica_groups import ReplicaGroupsPlanner
from autoshard.table import Table
from studies.frame import OutputOptions, StudyResult
from studies.papers.two_d.document import choice_table, document, fig2_table, memory_table, table1, table2
from studies.papers.two_d.figures import fig2_figure, fig6_figure, fig7_figure
from studies.papers.two_d.results import (
    CTR_RUNS,
    EXFM_RUNS,
    FULL_RUNS,
    GROUPED_RUNS,
    WITHIN_RUN,
    Outcome,
    Run,
    outcome,
    request_of,
)


@command_options()
class TwoDOptions:
    """Options of the study `two-d`."""

    choose: Annotated[bool, typer.Option(help="Also let the planner choose the groups of CTR.")] = True


def main(options: TwoDOptions, output: OutputOptions) -> None:
    """Plans and prices 2D's runs, prints its Tables 1 and 2 beside them, and draws its Fig. 2, 6 and 7.

    Example:
        python -m studies two-d -o docs/figures
    """
    runs = {
        "ctr": CTR_RUNS,
        "exfm": EXFM_RUNS,
        "full": FULL_RUNS,
        "grouped": GROUPED_RUNS,
        "within_nodes": (WITHIN_RUN,),
    }
    found = {name: [_logged(run) for run in of_table] for name, of_table in runs.items()}
    full, grouped, (within,) = found["full"], found["grouped"], found["within_nodes"]
    notes = [
        f"16 groups laid within nodes: {within.qps:.3g} samples per second, {100 * within.factor(full[0]):.1f}%; laid "
        f"across nodes: {grouped[-1].qps:.3g}."
    ]
    notes += [
        f"{one.run.world_size:,} GPUs in {one.run.num_groups} group: {one.out_of_memory}"
        for one in (*full, *grouped)
        if one.out_of_memory
    ]
    tables = (
        table1(found["ctr"]),
        table1(found["exfm"]),
        table2(full, grouped),
        memory_table(full, grouped),
        fig2_table(full),
    )
    output.write(
        StudyResult(
            name="two-d",
            document=document(found),
            tables=(*tables, _choice()) if options.choose else tables,
            notes=tuple(notes),
            images={
                "-fig2": fig2_figure(full),
                "-fig6": fig6_figure([found["ctr"], found["exfm"]]),
                "-fig7": fig7_figure(full, grouped),
            },
        )
    )


def _choice() -> Table:
    plan = ReplicaGroupsPlanner().plan(request_of(CTR_RUNS[0]))
    assert plan.provenance is not None, "this planner names what it tried"
    return choice_table(f"{CTR_RUNS[0].model.name} on {CTR_RUNS[0].world_size} GPUs", plan.provenance)


def _logged(run: Run) -> Outcome:
    found = outcome(run)
    console.log(
        f"{run.model.name}, {run.world_size:,} GPUs in {run.num_groups} groups: "
        + (found.out_of_memory or f"step {found.step_ms:.0f} ms, priced in {found.pricing_s:.2f} s")
    )
    return found
