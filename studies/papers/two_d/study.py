"""The study `two-d`: `python -m studies two-d`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoshard import console
from autoshard.formats.documents.json_document import format_json
from autoshard.formats.files import atomic_write
from autoshard.planners.replica_groups import ReplicaGroupsPlanner
from autoshard.report.images import write_png
from studies.papers.two_d.document import choice_table, document, table1, table2
from studies.papers.two_d.figures import HEIGHT, WIDTH, fig6_figure, fig7_figure
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


def main(
    output_dir: Annotated[Path, typer.Option("--output-dir", "-o", help="Folder for the images and numbers.")] = Path(
        "docs/figures"
    ),
    choose: Annotated[bool, typer.Option(help="Also let the planner choose the groups of CTR.")] = True,
) -> None:
    """Plans and prices 2D's runs, prints its Tables 1 and 2 beside them, and draws its Fig. 6 and 7.

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
    found = {name: [_told(run) for run in of_table] for name, of_table in runs.items()}
    tables = [table1(found["ctr"]), table1(found["exfm"]), table2(found["full"], found["grouped"])]
    if choose:
        plan = ReplicaGroupsPlanner().plan(request_of(CTR_RUNS[0]))
        assert plan.provenance is not None, "this planner says what it tried"
        tables.append(choice_table(f"{CTR_RUNS[0].model.name} on {CTR_RUNS[0].world_size} GPUs", plan.provenance))
    for table in tables:
        typer.echo(f"{table.caption}\n\n{table.to_markdown()}\n")
    (within,) = found["within_nodes"]
    typer.echo(
        f"16 groups laid within nodes: {within.qps:.3g} samples per second, "
        f"{100 * within.factor(found['full'][0]):.1f}%; laid across nodes: {found['grouped'][-1].qps:.3g}."
    )
    for one in (*found["full"], *found["grouped"]):
        if one.out_of_memory:
            typer.echo(f"{one.run.world_size:,} GPUs in {one.run.num_groups} group: {one.out_of_memory}")
    atomic_write(output_dir / "two-d.json", format_json(document(found)))
    figures = {
        "fig6": fig6_figure([found["ctr"], found["exfm"]]),
        "fig7": fig7_figure(found["full"], found["grouped"]),
    }
    for name, figure in figures.items():
        write_png(figure, output_dir / f"two-d-{name}.png", width=WIDTH, height=HEIGHT)
    console.log(f"Wrote {output_dir / 'two-d.json'} and {len(figures)} images beside it.")


def _told(run: Run) -> Outcome:
    found = outcome(run)
    console.log(
        f"{run.model.name}, {run.world_size:,} GPUs in {run.num_groups} groups: "
        + (found.out_of_memory or f"step {found.step_ms:.0f} ms, priced in {found.pricing_s:.2f} s")
    )
    return found
