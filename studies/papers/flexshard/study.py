"""The study `flexshard`: `python -m studies flexshard`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoshard import console
from autoshard.formats.documents.json_document import format_json
from autoshard.formats.files import atomic_write
from autoshard.report.images import write_png
from studies.papers.flexshard.document import results_document, results_tables
from studies.papers.flexshard.figures import (
    HEIGHT,
    WIDTH,
    fig1_figure,
    fig3_figure,
    fig5_figure,
    fig6_figure,
    fig7_figure,
)
from studies.papers.flexshard.results import fig1_costs, fig3_costs, fig5_frontier, fitted_machine, model_results


def main(
    output_dir: Annotated[Path, typer.Option("--output-dir", "-o", help="Folder for the images and numbers.")] = Path(
        "docs/figures"
    ),
) -> None:
    """Plans FlexShard's four models, prints its Tables 5 and 6 beside them, and draws its Fig. 1, 3, 5, 6 and 7.

    Example:
        python -m studies flexshard -o docs/figures
    """
    machine = fitted_machine()
    results = model_results()
    frontier, histories, replicas = fig5_frontier(machine), fig1_costs(machine), fig3_costs(machine)
    numbers = output_dir / "flexshard.json"
    atomic_write(numbers, format_json(results_document(machine, results, frontier, histories, replicas)))
    for table in results_tables(results, frontier):
        typer.echo(f"{table.caption}\n\n{table.to_markdown()}\n")
    figures = {
        "fig1": fig1_figure(histories),
        "fig3": fig3_figure(replicas),
        "fig5": fig5_figure(frontier),
        "fig6": fig6_figure(results),
        "fig7": fig7_figure(results),
    }
    for name, figure in figures.items():
        write_png(figure, output_dir / f"flexshard-{name}.png", width=WIDTH, height=HEIGHT)
    console.log(f"Wrote {numbers} and {len(figures)} images beside it.")
