"""The study `oper`: `python -m studies oper`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoshard import console
from autoshard.formats.documents.json_document import format_json
from autoshard.formats.files import atomic_write
from autoshard.report.images import write_png
from studies.papers.oper.document import OperResults, results_document, results_tables
from studies.papers.oper.figures import FIG10_HEIGHT, HEIGHT, WIDTH, fig8_figure, fig10_figure
from studies.papers.oper.results import (
    RATIO,
    against_exact,
    costs_by_link,
    exchange_by_memory,
    exchange_by_threshold,
    loads_by_method,
    search_times,
)
from studies.papers.oper.tasks import kaggle, terabyte


def main(
    output_dir: Annotated[Path, typer.Option("--output-dir", "-o", help="Folder for the images and numbers.")] = Path(
        "docs/figures"
    ),
) -> None:
    """Plans OPER's data sets, prints its Tables 2 and 3 beside ours, and draws its Fig. 8 and 10.

    CP-SAT takes a minute or two of it; it needs `pip install 'autoshard[exact]'`.

    Example:
        python -m studies oper -o docs/figures
    """
    # First, while this process has little memory of its own.
    searches = search_times()
    data = {"Criteo Kaggle": kaggle(), "Criteo Terabyte": terabyte()}
    results = OperResults(
        by_memory={name: exchange_by_memory(tables) for name, tables in data.items()},
        by_threshold=exchange_by_threshold(),
        references=tuple(against_exact(ratio) for ratio in (0.0, RATIO)),
        searches=searches,
        by_link=costs_by_link(),
        by_method={name: loads_by_method(tables) for name, tables in data.items()},
    )
    numbers = output_dir / "oper.json"
    atomic_write(numbers, format_json(results_document(results)))
    for table in results_tables(results):
        typer.echo(f"{table.caption}\n\n{table.to_markdown()}\n")
    images = (("fig8", fig8_figure(results.by_link), HEIGHT), ("fig10", fig10_figure(results.by_method), FIG10_HEIGHT))
    for name, figure, height in images:
        write_png(figure, output_dir / f"oper-{name}.png", width=WIDTH, height=height)
    console.log(f"Wrote {numbers} and {len(images)} images beside it.")
