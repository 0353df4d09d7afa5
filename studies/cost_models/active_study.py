"""The study `active`: sets chosen where the cost model is least certain, beside sets chosen at random."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoshard import console
from autoshard.report.images import ImageError, write_report
from costmodel.kernel.training import TrainingOptions
from studies.cost_models.active import ActiveOptions, active_folder, run_active_loop
from studies.cost_models.active_report import active_report, active_result, active_table


def main(
    store: Annotated[Path, typer.Option(help="Folder of samples; made when missing.")],
    seconds: Annotated[float, typer.Option(help="Time for all, training included.")] = 3600.0,
    device: Annotated[str | None, typer.Option(help="Key of the device. [default: that of this machine]")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of collecting and training.")] = 5,
    tables: Annotated[str, typer.Option(help="Tables to measure: a file, or the name of bundled ones.")] = "metasyn",
    scale: Annotated[int, typer.Option(min=1, help="Divides rows and batch.")] = 64,
    updates: Annotated[int | None, typer.Option(min=1, help="Updates of each training.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of held-out sets and of training.")] = 0,
    as_json: console.JsonOption = False,
) -> None:
    """Compares sets chosen where the cost model is least certain with sets chosen at random.

    Each way of choosing has a store of its own, and is measured and trained on in turn until time is up. The rounds
    are kept beside the samples, and a later run goes on.

    Example:
        python -m studies active --store samples --seconds 3600
    """
    training = TrainingOptions() if updates is None else TrainingOptions(num_updates=updates)
    options = ActiveOptions(
        store=store,
        seconds=seconds,
        device=device,
        num_rounds=rounds,
        compare_random=True,
        tables=tables,
        scale=scale,
        training=training,
        seed=seed,
    )
    with console.working("Collecting and training"):
        progress, _ = run_active_loop(options, console.log)
    try:
        write_report(active_report(progress), active_folder(store, progress.device), "curve")
    except ImageError as error:  # the numbers are there
        console.log(str(error))
    console.emit(active_result(progress), active_table(progress), as_json=as_json)
