"""Commands `train cost` and `models`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoshard import console

if TYPE_CHECKING:
    from rich.table import Table

    from costmodel.card import CostModelCard
    from costmodel.registry import Version

_Registry = Annotated[
    Path | None,
    typer.Option(help="Folder of trained models. [default: $AUTOSHARD_REGISTRY or ~/.local/share/autoshard/registry]"),
]


class Recipe(StrEnum):
    """How to train."""

    DEFAULT = "default"
    PAPER = "paper"


def train_cost(
    store: Annotated[Path, typer.Option(help="Folder with samples, made by `autoshard collect`.")],
    registry: _Registry = None,
    device: Annotated[
        str | None, typer.Option(help="Key of the device to train for; may be left out if the store has one only.")
    ] = None,
    num_bags: Annotated[
        int | None, typer.Option(help="Batch size of the samples to use; may be left out if all have the same.")
    ] = None,
    recipe: Annotated[Recipe, typer.Option(help="`paper` trains as AutoShard does, for comparison.")] = Recipe.DEFAULT,
    updates: Annotated[
        int | None, typer.Option(help="Number of updates of the default recipe; more take longer.")
    ] = None,
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
    from costmodel.training import PAPER_OPTIONS, TrainingOptions, train_cost_model

    if seed < 0:
        raise InvalidOptionError(f"must be at least 0, got {seed}", field="seed")
    if updates is not None and recipe is Recipe.PAPER:
        raise InvalidOptionError("goes with the default recipe only", field="updates")
    options = PAPER_OPTIONS if recipe is Recipe.PAPER else TrainingOptions()
    if updates is not None:
        options = replace(options, schedule=Shuffled(num_updates=updates))
    table = read_samples(store, device)
    dataset = CostDataset.from_samples(table, num_bags)
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
        "num_bags": trained.card.coverage.num_bags,
        "training": trained.card.training,
    }
    console.emit(result, _metrics_table(trained.card, version), as_json=as_json)


def models(registry: _Registry = None, as_json: console.JsonOption = False) -> None:
    """Lists the trained models of a registry; a star marks the version in use.

    Example:
        autoshard models
    """
    from costmodel.registry import Registry

    store = Registry(registry)
    versions = store.list()
    result = {
        "registry": str(store.root),
        "models": [
            {
                "kind": item.kind,
                "name": item.name,
                "id": item.id,
                "production": item.is_production,
                "published_at": _published(item),
                "card": item.card,
            }
            for item in versions
        ],
    }
    rendered = _models_table(versions) if versions else f"No models in {store.root}; `autoshard train` makes some."
    console.emit(result, rendered, as_json=as_json)


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
    table.add_row("90% interval, relative", f"{metrics.low_ratio - 1:+.1%} to {metrics.high_ratio - 1:+.1%}")
    table.add_row("trained on", f"{card.training['num_samples']} samples")
    table.add_row("batch size covered", f"{card.coverage.num_bags}")
    return table


def _models_table(versions: Sequence[Version]) -> Table:
    from rich.table import Table

    table = Table()
    for heading in ("", "kind", "name", "version", "published", "about"):
        table.add_column(heading)
    for item in versions:
        star = "*" if item.is_production else ""
        table.add_row(star, item.kind, item.name, item.id, _published(item), _about(item))
    return table


def _about(item: Version) -> str:
    """What a card says about accuracy; models of other kinds have other cards."""
    error = item.card.get("metrics", {}).get("relative_error")
    return "" if error is None else f"held-out error {error:.2%}"


def _published(item: Version) -> str:
    return datetime.fromtimestamp(item.published_s, UTC).isoformat(timespec="seconds")
