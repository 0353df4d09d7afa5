"""Command `train cost`."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoshard import console

if TYPE_CHECKING:
    from rich.table import Table

    from costmodel.card import CostModelCard

_Registry = Annotated[
    Path | None,
    typer.Option(help="Folder of trained models. [default: $AUTOSHARD_REGISTRY or ~/.local/share/autoshard/registry]"),
]


def train_cost(
    store: Annotated[Path, typer.Option(help="Folder with samples, made by `autoshard collect`.")],
    registry: _Registry = None,
    device: Annotated[
        str | None, typer.Option(help="Key of the device to train for; may be left out if the store has one only.")
    ] = None,
    updates: Annotated[int | None, typer.Option(min=1, help="Number of updates; more take longer.")] = None,
    seed: Annotated[int, typer.Option(help="Of the weights and of which samples are held out.")] = 0,
    as_json: console.JsonOption = False,
) -> None:
    """Trains the cost model of a device from samples and makes it the one that plans are priced with.

    A fifth of the samples is kept from training; the model's accuracy and its intervals come from them.

    Example:
        autoshard train cost --store samples
    """
    from autoshard.core.errors import InvalidOptionError
    from autoshard.formats.samples import read_samples
    from costmodel.dataset import CostDataset
    from costmodel.learned import COST_KIND
    from costmodel.registry import Registry
    from costmodel.schedules import Shuffled
    from costmodel.training import TrainingOptions, train_cost_model

    if seed < 0:
        raise InvalidOptionError(f"must be at least 0, got {seed}", field="seed")
    options = TrainingOptions()
    if updates is not None:
        options = replace(options, schedule=Shuffled(num_updates=updates))
    table = read_samples(store, device)
    dataset = CostDataset.from_samples(table)
    device = table.samples[0].device
    with console.progress("Training", options.schedule.num_updates) as advance:
        trained = train_cost_model(dataset, device=device, options=options, seed=seed, advance=advance)
    models_ = Registry(registry)
    version = models_.publish(COST_KIND, device, trained.weights, trained.card.to_json())
    result = {
        "kind": COST_KIND,
        "name": device,
        "id": version,
        "registry": str(models_.root),
        "metrics": asdict(trained.card.metrics),
        "interval": asdict(trained.card.interval),
        "coverage": trained.card.coverage.to_json(),
        "training": trained.card.training,
    }
    console.emit(result, _metrics_table(trained.card, version), as_json=as_json)


def _metrics_table(card: CostModelCard, version: str) -> Table:
    from rich.table import Table

    metrics = card.metrics
    table = Table(title=f"Cost model of {card.device}, version {version}", title_justify="left")
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
