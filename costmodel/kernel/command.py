"""Command `train cost`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoshard import console
from autoshard.commands.arguments import AcceleratorOption, image_option, seed_option
from autoshard.commands.options import command_options
from autoshard.commands.plan import draw
from autoshard.core.choices import Device
from autoshard.table import Table
from costmodel.registry.promotion import publish_version, report_published, status_of
from costmodel.registry.publish_options import PublishOptions
from costmodel.registry.versions import Registry

if TYPE_CHECKING:
    from autoshard.formats.stores.samples import SampleTable
    from autoshard.runtime.processes.learners import Learners
    from costmodel.kernel.card import CostModelCard
    from costmodel.kernel.training import TrainedCostModel
    from costmodel.kernel.updates.progress import CostProgress
    from costmodel.registry.promotion import Published, TrainedVersion

#: Updates between two lines on standard error.
LOG_EVERY = 1000


@command_options()
class TrainCostOptions:
    """What is trained on, and for how long."""

    store: Annotated[Path, typer.Option(help="Folder with samples, made by `autoshard collect`.")]
    device: Annotated[
        str | None, typer.Option(help="Key of the device to train for; may be left out if the store has one only.")
    ] = None
    updates: Annotated[int | None, typer.Option(min=1, help="Number of updates; more take longer.")] = None
    seed: Annotated[int, seed_option("Seed of the weights and of the choice of held-out samples.")] = 0
    accelerator: AcceleratorOption = Device.AUTO
    image: Annotated[
        Path | None,
        image_option("Draw predicted against measured times of the held-out samples, with 90% intervals."),
    ] = None
    tensorboard: Annotated[
        Path | None, typer.Option(help="Folder for TensorBoard's logs of loss and samples per second.")
    ] = None


def train_cost(options: TrainCostOptions, publishing: PublishOptions, as_json: console.JsonOption = False) -> None:
    """Trains the cost model of a device from samples, and makes it the production version unless it is worse.

    A fifth of the samples is kept from training; the model's accuracy and its intervals come from them. There it is
    compared with the production version, or with the shipped one where the registry has none: if its mean relative
    error is higher by more than the standard error of the difference, and by more than 0.1 points, it goes to the
    registry without an alias, and the exit code is 0. --force promotes it anyway, as `autoshard models promote` does.

    Samples of one machine train it. Of a store with samples of several, those of the machine at hand do, or of the one
    that --device names by its full key (`autoshard doctor` prints that of the machine at hand).

    Under torchrun, all its processes train the model together, each on its share of every batch; the first publishes.

    Example:
        autoshard train cost --store samples
        autoshard train cost --store samples --alias candidate
        autoshard train cost --store samples --force
        torchrun --nproc-per-node 4 --no-python autoshard train cost --store samples --accelerator cuda
    """
    from autoshard.formats.stores.samples import SampleTable, devices_in, read_samples
    from costmodel.samples import of_one_machine, stored_key

    # What is wrong with the samples is told before torch is imported, which takes seconds.
    read = read_samples(options.store, stored_key(devices_in(options.store), options.device))
    table = SampleTable(samples=of_one_machine(read.samples, options.device, options.store))

    from autoshard.runtime.processes.learners import joined_learners
    from costmodel.kernel.comparison import kernel_version

    with joined_learners(options.accelerator) as learners:
        trained = _train(table, options, learners)
    if not learners.is_first:
        return
    version = kernel_version(trained)
    published = publish_version(Registry(publishing.registry), version, publishing)
    report_published(published, version.kind, version.name)
    result = _result(version, published)
    console.emit(result, _metrics_table(trained.model.card, published), as_json=as_json, kind="trained-cost")
    if options.image is not None:
        draw({"held-out": _held_out_figure(trained)}, options.image)


def _train(table: SampleTable, options: TrainCostOptions, learners: Learners) -> TrainedCostModel:
    from costmodel.kernel.dataset import CostDataset
    from costmodel.kernel.training import CostTrainingOptions, train_cost_model
    from costmodel.kernel.updates.progress import tensorboard_log

    training = CostTrainingOptions()
    if options.updates is not None:
        training = replace(training, num_updates=options.updates)
    dataset = CostDataset.from_samples(table)
    folder = options.tensorboard if learners.is_first else None
    with (
        console.progress("Training", training.num_updates, is_shown=learners.is_first) as advance,
        tensorboard_log(folder) as write,
    ):

        def report(progress: CostProgress) -> None:
            write(progress)
            if learners.is_first and progress.num_updates % LOG_EVERY == 0:
                console.log(
                    f"update {progress.num_updates}: loss {progress.loss:.4f}, {progress.samples_per_s:,.0f} samples/s "
                    f"on {learners.description}, seed {options.seed}"
                )

        return train_cost_model(
            dataset,
            device=table.samples[0].device,
            options=training,
            seed=options.seed,
            advance=advance,
            learners=learners,
            on_progress=report,
        )


def _result(version: TrainedVersion, published: Published) -> dict[str, Any]:
    of_card = {name: version.card[name] for name in ("metrics", "interval", "coverage", "training")}
    return {"kind": version.kind, "name": version.name, **published.to_json(), **of_card}


def _held_out_figure(trained: TrainedCostModel) -> Any:
    from autoshard.core import Estimate
    from autoshard.report.pictures import held_out_figure
    from costmodel.kernel.comparison import priced

    costs = priced(trained.model, trained.held_out)
    values_3S = (costs.kernel_ms_S.tolist(), costs.low_ms_S.tolist(), costs.high_ms_S.tolist())
    estimates = [Estimate(value=value, low=low, high=high) for value, low, high in zip(*values_3S, strict=True)]
    return held_out_figure(trained.held_out.kernel_ms.tolist(), estimates)


def _metrics_table(card: CostModelCard, published: Published) -> Table:
    metrics = card.metrics
    fewest, most = card.coverage.ranges["num_bags"]
    return accuracy_table(
        card,
        published,
        f"on {metrics.num_samples} held-out samples",
        ("mean absolute error", f"{metrics.mae_ms:.3f} ms"),
        ("mean squared error", f"{metrics.mse_ms2:.3f} ms²"),
        ("Kendall's tau", f"{metrics.kendall_tau:.3f}"),
        *interval_facts(card),
        ("trained on", f"{card.training['num_samples']} samples"),
        ("bags per step", f"{fewest:.0f}" if fewest == most else f"{fewest:.0f} to {most:.0f}"),
        ("kinds of kernels", f"{len(card.coverage.kinds)}"),
    )


def accuracy_table(card: CostModelCard, published: Published, of: str, *rows: tuple[str, str]) -> Table:
    """How well a cost model predicts.

    Args:
        card: Its card.
        published: Where it is published.
        of: Samples that the error is of.
        rows: Facts behind its mean relative error.
    """
    return Table(
        columns=(of, ""),
        rows=(("mean relative error", f"{card.metrics.relative_error:.2%}"), *rows),
        title=f"Cost model of {card.device}, {status_of(published)}",
        is_boxed=True,
    )


def interval_facts(card: CostModelCard) -> Iterator[tuple[str, str]]:
    """How often a cost model's 90% interval holds, and how wide it is; nothing where that is not known."""
    if card.interval.coverage is not None:
        yield "90% interval holds", f"{card.interval.coverage:.1%}"
        yield "its median half width", f"{card.interval.half_width:.1%}"
