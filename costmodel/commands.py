"""Command `train cost`."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoshard import console
from autoshard.commands.arguments import check_needed, positive_option, seed_option
from costmodel.publishing import (
    Alias,
    AliasOption,
    ForceOption,
    PublishOption,
    RegistryOption,
    publish_options,
    report_published,
    status_of,
)

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from costmodel.card import CostModelCard
    from costmodel.promotion import Published, PublishOptions
    from costmodel.training import TrainedCostModel, TrainingOptions


def train_cost(
    context: typer.Context,
    store: Annotated[Path, typer.Option(help="Folder with samples, made by `autoshard collect`.")],
    registry: RegistryOption = None,
    device: Annotated[
        str | None, typer.Option(help="Key of the device to train for; may be left out if the store has one only.")
    ] = None,
    updates: Annotated[int | None, typer.Option(min=1, help="Number of updates; more take longer.")] = None,
    seed: Annotated[int, seed_option("Seed of the weights and of the choice of held-out samples.")] = 0,
    alias: AliasOption = Alias.PRODUCTION,
    publish: PublishOption = True,
    force: ForceOption = False,
    report: Annotated[
        Path | None,
        typer.Option(help="Folder for a comparison with other methods, as tables, charts and numbers; takes minutes."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="With --report: one seed, a tenth of the updates.")] = False,
    workers: Annotated[int, typer.Option(min=1, help="With --report: processes that train.")] = 2,
    active: Annotated[
        bool, typer.Option("--active", help="Collect where the model is least certain and train, in turn.")
    ] = False,
    seconds: Annotated[float | None, positive_option("With --active: time for collecting and training.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="With --active: rounds of collecting and training.")] = 5,
    compare_random: Annotated[
        bool, typer.Option("--compare-random", help="With --active: collect at random as well, into another store.")
    ] = False,
    tables: Annotated[str | None, typer.Option(help="With --active: tables to measure, as `collect` has it.")] = None,
    scale: Annotated[
        int | None, typer.Option(min=1, help="With --active: divide rows and batch, as `collect` does.")
    ] = None,
    as_json: console.JsonOption = False,
) -> None:
    """Trains the cost model of a device from samples, and makes it the production version unless it is worse.

    A fifth of the samples is kept from training; the model's accuracy and its intervals come from them. There it is
    compared with the production version, or with the shipped one where the registry has none: if its mean relative
    error is higher by more than the standard error of the difference, and by more than 0.1 points, it goes to the
    registry without an alias, and the exit code is 0. --force promotes it anyway, as `autoshard models promote` does.

    With --report, every device of the store has its model compared with AutoShard's network, sums of single tables,
    linear models, boosted trees and analytic models, on seen and on unseen tables; add --no-publish for that alone.

    With --active, samples are added to the store where the model is least certain, and models are trained in turn
    until --seconds are over. The rounds are kept in the store, in `active-<device>`, and a later run goes on.

    Example:
        autoshard train cost --store samples
        autoshard train cost --store samples --alias candidate
        autoshard train cost --store samples --force
        autoshard train cost --store samples --report cost-report --no-publish
        autoshard train cost --store samples --active --seconds 3600
    """
    from autoshard.core.errors import InvalidOptionError
    from costmodel.schedules import Shuffled
    from costmodel.training import TrainingOptions

    check_needed(context, "--active", active, "--seconds", "--rounds", "--compare-random", "--tables", "--scale")
    check_needed(context, "--report", report is not None, "--quick", "--workers")
    check_needed(context, "--publish", publish, "--alias")
    publishing = publish_options(publish=publish, alias=alias, force=force)
    if active and seconds is None:
        raise InvalidOptionError("must be given with --active", field="--seconds")
    options = TrainingOptions()
    if updates is not None:
        options = replace(options, schedule=Shuffled(num_updates=updates))
    results: list[dict[str, Any]] = []
    shown: list[RenderableType] = []
    if active:
        collecting = (("--tables", tables), ("--scale", scale))
        arguments = tuple(text for name, value in collecting if value is not None for text in (name, str(value)))
        trained, found = _run_active(store, device, seconds or 0.0, rounds, arguments, compare_random, options, seed)
        published = _publish(trained, registry, publishing)
        results.append({**_result(trained.card, published), **found[0]})
        shown += [found[1], _metrics_table(trained.card, published)]
        devices: tuple[str | None, ...] = (trained.card.device,)
    else:
        devices = _devices(store, device, is_report=report is not None)
        for key in devices:
            trained = _train(store, key, options, seed)
            published = _publish(trained, registry, publishing)
            results.append(_result(trained.card, published))
            shown.append(_metrics_table(trained.card, published))
    if report is not None:
        for key, result in zip(devices, results, strict=True):
            result["report"] = _write_report(store, key, report, options, updates, quick=quick, workers=workers)
            shown.append("\n".join(result["report"]))
    from rich.console import Group

    console.emit(results[0] if len(results) == 1 else {"models": results}, Group(*shown), as_json=as_json)


def _devices(store: Path, device: str | None, *, is_report: bool) -> tuple[str | None, ...]:
    """Devices to train for: the one that is named, or all if there is to be a report."""
    from autoshard.formats.samples import devices_in

    return devices_in(store) or (None,) if is_report and device is None else (device,)


def _train(store: Path, device: str | None, options: TrainingOptions, seed: int) -> TrainedCostModel:
    from autoshard.formats.samples import read_samples
    from costmodel.dataset import CostDataset
    from costmodel.training import train_cost_model

    table = read_samples(store, device)
    dataset = CostDataset.from_samples(table)
    with console.progress("Training", options.schedule.num_updates) as advance:
        return train_cost_model(dataset, device=table.samples[0].device, options=options, seed=seed, advance=advance)


def _publish(trained: TrainedCostModel, registry: Path | None, options: PublishOptions) -> Published:
    from costmodel.comparisons import kernel_version
    from costmodel.promotion import publish_version
    from costmodel.registry import Registry

    version = kernel_version(trained)
    published = publish_version(Registry(registry), version, options)
    report_published(published, version.kind, version.name)
    return published


def _result(card: CostModelCard, published: Published) -> dict[str, Any]:
    from costmodel.learned import COST_KIND

    return {
        "kind": COST_KIND,
        "name": card.device,
        **published.to_json(),
        "metrics": asdict(card.metrics),
        "interval": asdict(card.interval),
        "coverage": card.coverage.to_json(),
        "training": card.training,
    }


def _write_report(
    store: Path,
    device: str | None,
    folder: Path,
    training: TrainingOptions,
    updates: int | None,
    *,
    quick: bool,
    workers: int,
) -> list[str]:
    from autoshard.formats.samples import read_samples
    from costmodel.evaluation import EvaluationOptions, evaluate_methods
    from costmodel.evaluation_report import write_evaluation

    options = EvaluationOptions.quick(training) if quick else EvaluationOptions(training=training)
    if updates is not None and not quick:
        options = replace(options, paper_updates=updates, ablation_updates=updates)
    with console.progress("Comparing", 1.0) as advance:
        evaluation = evaluate_methods(read_samples(store, device), replace(options, num_workers=workers), advance)
    with console.working("Drawing"):
        return [str(file) for file in write_evaluation(evaluation, folder)]


def _run_active(
    store: Path,
    device: str | None,
    seconds: float,
    rounds: int,
    arguments: tuple[str, ...],
    compare_random: bool,
    training: TrainingOptions,
    seed: int,
) -> tuple[TrainedCostModel, tuple[dict[str, Any], Table]]:
    from autoshard.report.images import ImageError, write_report
    from costmodel.active import ActiveOptions, active_folder, run_active_loop
    from costmodel.active_report import active_report, active_result, active_table

    options = ActiveOptions(
        store=store,
        seconds=seconds,
        device=device,
        num_rounds=rounds,
        compare_random=compare_random,
        collect_arguments=arguments,
        training=training,
        seed=seed,
    )
    with console.working("Collecting and training"):
        progress, trained = run_active_loop(options, console.log)
    try:
        write_report(active_report(progress), active_folder(store, progress.device), "curve")
    except ImageError as error:  # the model is what this is for
        console.log(str(error))
    return trained, (active_result(progress), active_table(progress))


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
