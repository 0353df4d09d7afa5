"""Command `train cost`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoshard import console
from autoshard.commands.arguments import seed_option
from autoshard.commands.options import command_options
from costmodel.registry.promotion import publish_version, report_published, status_of
from costmodel.registry.publish_options import PublishOptions

if TYPE_CHECKING:
    from rich.table import Table

    from costmodel.kernel.card import CostModelCard
    from costmodel.kernel.training import TrainedCostModel
    from costmodel.registry.promotion import Published


@command_options()
class TrainCostOptions:
    """What is trained on, and for how long."""

    store: Annotated[Path, typer.Option(help="Folder with samples, made by `autoshard collect`.")]
    device: Annotated[
        str | None, typer.Option(help="Key of the device to train for; may be left out if the store has one only.")
    ] = None
    updates: Annotated[int | None, typer.Option(min=1, help="Number of updates; more take longer.")] = None
    seed: Annotated[int, seed_option("Seed of the weights and of the choice of held-out samples.")] = 0


def train_cost(options: TrainCostOptions, publishing: PublishOptions, as_json: console.JsonOption = False) -> None:
    """Trains the cost model of a device from samples, and makes it the production version unless it is worse.

    A fifth of the samples is kept from training; the model's accuracy and its intervals come from them. There it is
    compared with the production version, or with the shipped one where the registry has none: if its mean relative
    error is higher by more than the standard error of the difference, and by more than 0.1 points, it goes to the
    registry without an alias, and the exit code is 0. --force promotes it anyway, as `autoshard models promote` does.

    Example:
        autoshard train cost --store samples
        autoshard train cost --store samples --alias candidate
        autoshard train cost --store samples --force
    """
    trained = _train(options)
    published = _publish(trained, publishing)
    console.emit(_result(trained.card, published), _metrics_table(trained.card, published), as_json=as_json)


def _train(options: TrainCostOptions) -> TrainedCostModel:
    from autoshard.formats.stores.samples import read_samples
    from costmodel.kernel.dataset import CostDataset
    from costmodel.kernel.training import TrainingOptions, train_cost_model

    training = TrainingOptions()
    if options.updates is not None:
        training = replace(training, num_updates=options.updates)
    table = read_samples(options.store, options.device)
    dataset = CostDataset.from_samples(table)
    with console.progress("Training", training.num_updates) as advance:
        return train_cost_model(
            dataset, device=table.samples[0].device, options=training, seed=options.seed, advance=advance
        )


def _publish(trained: TrainedCostModel, options: PublishOptions) -> Published:
    from costmodel.kernel.comparison import kernel_version
    from costmodel.registry.versions import Registry

    version = kernel_version(trained)
    published = publish_version(Registry(options.registry), version, options)
    report_published(published, version.kind, version.name)
    return published


def _result(card: CostModelCard, published: Published) -> dict[str, Any]:
    from costmodel.kernel.learned import LearnedCostModel

    return {
        "kind": LearnedCostModel.kind,
        "name": card.device,
        **published.to_json(),
        **{name: card.to_json()[name] for name in ("metrics", "interval", "coverage", "training")},
    }


def _metrics_table(card: CostModelCard, published: Published) -> Table:
    from rich.table import Table

    metrics = card.metrics
    table = Table(title=f"Cost model of {card.device}, {status_of(published)}", title_justify="left")
    table.add_column(f"on {metrics.num_samples} held-out samples")
    table.add_column("", justify="right")
    table.add_row("mean relative error", f"{metrics.relative_error:.2%}")
    table.add_row("mean absolute error", f"{metrics.mae_ms:.3f} ms")
    table.add_row("mean squared error", f"{metrics.mse_ms2:.3f} ms²")
    table.add_row("Kendall's tau", f"{metrics.kendall_tau:.3f}")
    if card.interval.coverage is not None:
        table.add_row("90% interval holds", f"{card.interval.coverage:.1%}")
        table.add_row("its median half width", f"{card.interval.half_width:.1%}")
    table.add_row("trained on", f"{card.training['num_samples']} samples")
    fewest, most = card.coverage.ranges["num_bags"]
    table.add_row("bags per step", f"{fewest:.0f}" if fewest == most else f"{fewest:.0f} to {most:.0f}")
    table.add_row("kinds of kernels", f"{len(card.coverage.kinds)}")
    return table
