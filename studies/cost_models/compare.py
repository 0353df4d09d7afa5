"""The study `cost-models`: the learned kernel model beside other methods, on seen and on unseen tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from autoshard import console
from autoshard.formats.stores.samples import devices_in, read_samples
from costmodel.kernel.training import TrainingOptions
from studies.cost_models.evaluation import EvaluationOptions, evaluate_methods
from studies.cost_models.evaluation_report import write_evaluation


def main(
    store: Annotated[Path, typer.Option(help="Folder with samples, made by `autoshard collect`.")],
    output_dir: Annotated[Path, typer.Option("--output-dir", "-o", help="Folder for tables, charts and numbers.")],
    device: Annotated[str | None, typer.Option(help="Key of the device; all of the store if left out.")] = None,
    updates: Annotated[int | None, typer.Option(min=1, help="Updates of every network.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One seed, a tenth of the updates.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="Processes that train.")] = 2,
) -> None:
    """Compares the learned kernel model with other methods.

    These are AutoShard's network, sums of single tables, linear models, boosted trees, TorchRec's performance model and
    the analytic model.

    Example:
        python -m studies cost-models --store docs/data/samples -o cost-report
    """
    for key in devices_in(store) if device is None else (device,):
        options = _options(updates, quick=quick)
        with console.progress(f"Comparing, {key}", 1.0) as advance:
            evaluation = evaluate_methods(read_samples(store, key), replace(options, num_workers=workers), advance)
        with console.working("Drawing"):
            files = write_evaluation(evaluation, output_dir)
        console.log(f"Wrote {', '.join(map(str, files))}.")


def _options(updates: int | None, *, quick: bool) -> EvaluationOptions:
    training = TrainingOptions()
    if updates is not None:
        training = replace(training, num_updates=updates)
    if quick:
        return EvaluationOptions.quick(training)
    options = EvaluationOptions(training=training)
    return options if updates is None else replace(options, paper_updates=updates, ablation_updates=updates)
