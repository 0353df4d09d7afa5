"""The study `cost-models`: the learned kernel model beside other methods, on seen and on unseen tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from autoshard import console
from autoshard.commands.options import command_options
from autoshard.formats.stores.samples import devices_in, read_samples
from costmodel.kernel.training import TrainingOptions
from studies.cost_models.evaluation import EvaluationOptions, evaluate_methods
from studies.cost_models.evaluation_report import evaluation_result
from studies.frame import OutputOptions


@command_options()
class CompareOptions:
    """Options of the study `cost-models`."""

    store: Annotated[Path, typer.Option(help="Folder with samples, made by `autoshard collect`.")]
    device: Annotated[str | None, typer.Option(help="Key of the device.", show_default="all of the store")] = None
    updates: Annotated[int | None, typer.Option(min=1, help="Updates of every network.")] = None
    quick: Annotated[bool, typer.Option("--quick", help="One seed, a tenth of the updates.")] = False
    workers: Annotated[int, typer.Option(min=1, help="Processes that train.")] = 2

    def evaluation(self) -> EvaluationOptions:
        """Amounts of training."""
        training = TrainingOptions()
        if self.updates is not None:
            training = replace(training, num_updates=self.updates)
        if self.quick:
            return replace(EvaluationOptions.quick(training), num_workers=self.workers)
        options = EvaluationOptions(training=training, num_workers=self.workers)
        if self.updates is None:
            return options
        return replace(options, paper_updates=self.updates, ablation_updates=self.updates)


def main(options: CompareOptions, output: OutputOptions) -> None:
    """Compares the learned kernel model with other methods.

    These are AutoShard's network, sums of single tables, linear models, boosted trees, TorchRec's performance model and
    the analytic model.

    Example:
        python -m studies cost-models --store docs/data/samples -o cost-report
    """
    for device in devices_in(options.store) if options.device is None else (options.device,):
        with console.progress(f"Comparing, {device}", 1.0) as advance:
            evaluation = evaluate_methods(read_samples(options.store, device), options.evaluation(), advance)
        output.write(evaluation_result(evaluation))
