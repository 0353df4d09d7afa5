"""Reproduces AutoShard's figures for the sharding policy: `python -m studies policy`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from autoshard import console

_FIGURES_HELP = (
    "Names with commas between them: fig8, fig9, table2, fig10, fig11, fig12-training, fig12-inference, targets, "
    "steps. [default: all]"
)


def main(
    output: Annotated[Path, typer.Option(help="Folder for finished parts, checkpoints and trained policies.")],
    figures: Annotated[str | None, typer.Option(help=_FIGURES_HELP)] = None,
    registry: Annotated[Path | None, typer.Option(help="Folder of trained models.")] = None,
    store: Annotated[
        Path | None, typer.Option(help="Folder of samples, for cost models without some features in table2.")
    ] = None,
    device: Annotated[str, typer.Option(help="Key of the device whose models price.")] = "cpu",
    tables: Annotated[str, typer.Option(help="Pool that tasks are drawn from.")] = "metasyn",
    scale: Annotated[int, typer.Option(help="Divides rows and batch of the pool.")] = 64,
    seeds: Annotated[int, typer.Option(help="Trainings, each with tasks of its own.")] = 5,
    updates: Annotated[int | None, typer.Option(help="Updates of each policy.")] = None,
    step_seeds: Annotated[int, typer.Option(help="As --seeds, of steps.")] = 2,
    step_updates: Annotated[int | None, typer.Option(help="As --updates, of steps.")] = None,
    auto_s: Annotated[float | None, typer.Option(help="Seconds that `auto` may search.")] = None,
    search_s: Annotated[float | None, typer.Option(help="Seconds of the search for best known plans.")] = None,
    replay: Annotated[int, typer.Option(help="Tasks of each seed of fig8 whose plans are measured here.")] = 0,
    measured_updates: Annotated[
        int, typer.Option(help="Updates of one more curve of fig12-training, whose rewards are measured here.")
    ] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Small tasks and short trainings: for a first look.")] = False,
    pages: Annotated[Path | None, typer.Option(help="Folder for page and images. [default: that of --output]")] = None,
    markdown: Annotated[Path | None, typer.Option(help="File of tables. [default: results.md in --pages]")] = None,
    images: Annotated[bool, typer.Option(help="Draw the images, which takes a browser.")] = True,
) -> None:
    """Trains and compares policies as AutoShard's paper does, and writes figures and tables.

    Parts that are finished are kept in --output: a run that was stopped goes on, and a later one adds figures. Two
    processes may work on different figures of one folder at the same time, once it has fig8.

    Example:
        python -m studies policy --registry registry --output evaluation --replay 10 --markdown docs/results/policy.md
    """
    from dataclasses import replace

    from studies.policies import EvaluationSettings, Lab, choose, write_results

    chosen = choose(figures)
    settings = EvaluationSettings(
        tables=tables,
        scale=scale,
        device=device,
        registry=registry,
        store=store,
        num_seeds=seeds,
        num_step_seeds=step_seeds,
        num_replayed=replay,
        measured_updates=measured_updates,
    )
    settings = settings.quick() if quick else settings
    named: dict[str, Any] = {
        "num_updates": updates,
        "step_updates": step_updates,
        "auto_s": auto_s,
        "search_s": search_s,
    }
    settings = replace(settings, **{name: value for name, value in named.items() if value is not None})
    lab = Lab(settings, output)

    def on_part(name: str) -> None:
        console.log(f"{name} is finished")
        advance(1)

    with console.progress("Parts", sum(len(figure.parts(settings)) for figure in chosen)) as advance:
        for figure in chosen:
            figure.run(lab, on_part)
    folder = pages or output
    command = shlex.join(["python", "-m", "studies", "policy", *sys.argv[1:]])
    files = write_results(lab, folder, markdown or folder / "results.md", command, images=images)
    console.log(f"Wrote {', '.join(map(str, files))}.")
