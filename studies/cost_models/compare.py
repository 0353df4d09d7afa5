"""The study `cost-models`: the learned kernel model beside other methods, on seen and on unseen tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from autoshard import console
from autoshard.commands.options import command_options
from autoshard.formats.stores.samples import devices_in, read_samples
from costmodel.kernel.training import CostTrainingOptions
from studies.cost_models.evaluation import EvaluationOptions, evaluate_methods
from studies.cost_models.evaluation_report import evaluation_result
from studies.cost_models.evidence import plain_sets
from studies.frame import OutputOptions


@command_options()
class CompareOptions:
    """Options of the study `cost-models`."""

    store: Annotated[Path, typer.Option(help="Folder with samples, made by `autoshard collect`.")]
    device: Annotated[str | None, typer.Option(help="Key of the device.", show_default="all of the store")] = None
    updates: Annotated[int | None, typer.Option(min=1, help="Updates of every network.")] = None
    quick: Annotated[bool, typer.Option("--quick", help="One seed, a tenth of the updates.")] = False
    plain: Annotated[
        bool,
        typer.Option(
            "--plain", help="Only sets that AutoShard's features can tell apart: whole tables, one kernel and batch."
        ),
    ] = False
    ablation: Annotated[bool, typer.Option(help="Train without each group of features as well.")] = True
    workers: Annotated[int, typer.Option(min=1, help="Processes that train.")] = 2

    def evaluation(self) -> EvaluationOptions:
        """Amounts of training."""
        training = CostTrainingOptions()
        if self.updates is not None:
            training = replace(training, num_updates=self.updates)
        if self.quick:
            options = EvaluationOptions.quick(training)
        else:
            options = EvaluationOptions(training=training)
            if self.updates is not None:
                options = replace(options, paper_updates=self.updates, ablation_updates=self.updates)
        seeds = options.ablation_seeds if self.ablation else 0
        return replace(options, num_workers=self.workers, ablation_seeds=seeds)


def main(options: CompareOptions, output: OutputOptions) -> None:
    """Compares the learned kernel model with other methods.

    These are AutoShard's network, sums of single tables, linear models, boosted trees, TorchRec's performance model and
    the analytic model.

    Example:
        python -m studies cost-models --store docs/data/samples -o cost-report
    """
    for device in devices_in(options.store) if options.device is None else (options.device,):
        with console.progress(f"Comparing, {device}", 1.0) as advance:
            samples = read_samples(options.store, device)
            if options.plain:
                samples = plain_sets(samples)
            evaluation = evaluate_methods(samples, options.evaluation(), advance)
        result = evaluation_result(evaluation)
        output.write(replace(result, name=f"{result.name}-plain") if options.plain else result)
