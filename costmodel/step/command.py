"""Command `train step`: models of collectives and dense layers, and the calibration of whole steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from autoshard import console
from autoshard.commands.arguments import seed_option
from autoshard.commands.options import Needs, command_options
from autoshard.core.errors import InvalidOptionError, ModelError
from autoshard.core.quoting import shown
from autoshard.table import Column, Table
from costmodel.registry.promotion import publish_version, report_published
from costmodel.registry.publish_options import PublishOptions

if TYPE_CHECKING:
    from autoshard.core import TableSet
    from costmodel.registry.promotion import TrainedVersion
    from costmodel.registry.versions import Registry
    from costmodel.step.calibration import CalibrationRun
    from costmodel.step.collective_model import LearnedCollectives
    from costmodel.step.dense_model import LearnedDense

    FittedT = TypeVar("FittedT", LearnedCollectives, LearnedDense)

#: Plans that a calibration needs runs of; each of `--calibrate` is of a plan of its own.
_FEWEST_RUNS = 4
#: Trials of all runs are drawn before the first one, and a launch holds a request for each repeat.
_MOST_RUNS, _MOST_REPEATS, _MOST_PROCESSES = 10_000, 1_000, 1_024
_CALIBRATING = Needs("--calibrate", lambda options: options.calibrate > 0)
#: Memory of a process for the tables of a calibration run.
_RUN_BYTES = 8 << 30


@command_options()
class TrainStepOptions:
    """What is trained on, and which runs steps are calibrated on."""

    store: Annotated[
        Path | None, typer.Option(help="Folder with samples of collectives and dense layers; none to calibrate only.")
    ] = None
    device: Annotated[
        str | None, typer.Option(help="Key of the device to train for; may be left out if the store has one only.")
    ] = None
    runs: Annotated[
        Path | None,
        typer.Option(
            help="Folder of runs to calibrate steps on, which `autoshard run --append-to` fills.", metavar="DIR"
        ),
    ] = None
    calibrate: Annotated[
        int,
        typer.Option(
            min=0,
            max=_MOST_RUNS,
            help=f"Runs of small plans on this machine to calibrate steps on: 0, or at least {_FEWEST_RUNS}.",
        ),
    ] = 0
    nproc: Annotated[
        int, typer.Option(min=2, max=_MOST_PROCESSES, help="With --calibrate: processes of a run."), _CALIBRATING
    ] = 2
    steps: Annotated[int, typer.Option(min=1, help="With --calibrate: measured steps of a run."), _CALIBRATING] = 20
    repeats: Annotated[
        int,
        typer.Option(
            min=1, max=_MOST_REPEATS, help="With --calibrate: times that each plan runs; the quickest counts."
        ),
        _CALIBRATING,
    ] = 2
    tables: Annotated[str, typer.Option(help="With --calibrate: pool that tasks are drawn from."), _CALIBRATING] = (
        "metasyn"
    )
    scale: Annotated[int, typer.Option(min=1, help="With --calibrate: divide the rows of the pool."), _CALIBRATING] = 64
    seed: Annotated[int, seed_option("With --calibrate: seed of the runs."), _CALIBRATING] = 0

    def __post_init__(self) -> None:
        if 0 < self.calibrate < _FEWEST_RUNS:
            raise InvalidOptionError(
                f"must be 0, or at least {_FEWEST_RUNS}, got {self.calibrate}", field="--calibrate"
            )
        if self.store is None and self.runs is None and not self.calibrate:
            raise InvalidOptionError("needs a store to train from, or runs to calibrate on", field="store")


def train_step(options: TrainStepOptions, publishing: PublishOptions, as_json: console.JsonOption = False) -> None:
    """Trains the models of collectives and of dense layers from samples, and calibrates steps on runs of plans.

    Trains what the store holds samples of (`autoshard collect --kinds dense,collectives`). Calibration comes last and
    uses the production models, those of kernels included, so train these first.

    A model becomes the production version unless it is worse than that: its mean relative error is higher by more than
    the standard error of the difference, and by more than 0.1 points. Samples that
    the production model was not fitted to are priced by fits to others, plans of a calibration's runs likewise. What is
    worse goes to the registry without an alias, and the exit code is 0. Of what the store has too few samples of, the
    fits of the model in use stay.

    Example:
        autoshard train step --store samples --calibrate 20
        autoshard train step --calibrate 20 --force
        autoshard train step --runs runs/
    """
    from autoshard.formats import load_tables
    from costmodel.registry.versions import Registry

    models = Registry(publishing.registry)
    pool = load_tables(options.tables).scaled(options.scale) if options.calibrate else None
    trained: list[dict[str, Any]] = []
    if options.store is not None:
        trained += _train(options.store, options.device, models, publishing)
    if pool is not None or options.runs is not None:
        device = options.device or (str(trained[0]["name"]) if trained else "cpu")
        trained.append(_calibrate(options, pool, device, models, publishing))
    result = {"registry": str(models.root), "models": trained}
    console.emit(result, _table(trained), as_json=as_json, kind="trained-steps")


def _train(store: Path, device: str | None, models: Registry, publishing: PublishOptions) -> list[dict[str, Any]]:
    from autoshard.core.errors import SampleStoreError
    from autoshard.formats.stores.collective_samples import COLLECTIVE_SAMPLES
    from autoshard.formats.stores.dense_samples import DENSE_SAMPLES
    from costmodel.samples import of_one_machine, stored_key
    from costmodel.step.collective_training import train_collective_model
    from costmodel.step.comparison import collective_version, dense_version
    from costmodel.step.dense_training import train_dense_model

    found: list[dict[str, Any]] = []
    has_collectives, has_dense = COLLECTIVE_SAMPLES.devices(store), DENSE_SAMPLES.devices(store)
    if not has_collectives and not has_dense:
        raise SampleStoreError(
            "holds no samples of collectives or dense layers; `autoshard collect --kinds dense,collectives` adds some",
            source=str(store),
        )
    key = stored_key((*has_collectives, *has_dense), device)
    if has_collectives and (key is None or key in has_collectives):
        moved = of_one_machine(COLLECTIVE_SAMPLES.read(store, key), device, store)
        collectives = train_collective_model(moved)
        collectives = replace(collectives, model=_completed(collectives.model, models))
        found.append(_publish(models, collective_version(collectives), publishing))
    if has_dense and (key is None or key in has_dense):
        layers = of_one_machine(DENSE_SAMPLES.read(store, key), device, store)
        dense = train_dense_model(layers)
        dense = replace(dense, model=_completed(dense.model, models))
        found.append(_publish(models, dense_version(dense), publishing))
    if not found:
        held = ", ".join(sorted({*has_collectives, *has_dense}))
        raise SampleStoreError(f"holds no samples of device {shown(device)}; it holds: {held}", source=str(store))
    return found


def _completed(model: FittedT, models: Registry) -> FittedT:
    """A model with the fits of the one in use that it has none of itself, unless that is of another machine."""
    try:
        before = type(model).in_use(models.root, model.card.device)
    except ModelError:  # which publishing says
        return model
    own = model.card.measured_on
    its = None if before is None else before.card.measured_on
    if before is None or not (own is None or its is None or its.is_like(own)):
        return model
    completed = model.completed_by(before)
    if carried := completed.card.training.get("carried_over"):
        listed = ", ".join(carried)
        console.log(f"{model.kind} {model.card.device}: too few samples of {listed}; the fits of {before.name} stay")
    return completed


def _calibrate(
    options: TrainStepOptions, pool: TableSet | None, device: str, models: Registry, publishing: PublishOptions
) -> dict[str, Any]:
    from autoshard.whatif.trials import draw_trials, local_topology, plan_trial
    from costmodel.step.calibration import calibrate_step, recorded_runs, run_calibration
    from costmodel.step.comparison import step_version

    runs: tuple[CalibrationRun, ...] = ()
    if options.runs is not None:
        runs = recorded_runs(options.runs, device, models.root)
        console.log(f"{options.runs} holds {len(runs)} runs of {device} that predictions can be compared with")
    if pool is not None:
        if any(run.is_virtual for run in runs):
            raise InvalidOptionError(
                f"runs plans in real time, and {options.runs} holds runs in virtual time: calibrate on either",
                field="--calibrate",
            )
        trials = draw_trials(options.calibrate, seed=options.seed)
        topology = local_topology(device, options.nproc, _RUN_BYTES)
        with console.progress("Running plans", len(trials)) as advance:
            runs += run_calibration(
                (plan_trial(trial, pool, topology, models.root) for trial in trials),
                [trial.seed for trial in trials],
                registry=models.root,
                steps=options.steps,
                repeats=options.repeats,
                advance=advance,
            )
    return _publish(models, step_version(calibrate_step(runs, device), runs), publishing)


def _publish(models: Registry, version: TrainedVersion, options: PublishOptions) -> dict[str, Any]:

    published = publish_version(models, version, options)
    report_published(published, version.kind, version.name)
    card = version.card
    return {
        "kind": version.kind,
        "name": version.name,
        **published.to_json(),
        "metrics": card["metrics"],
        "training": card["training"],
    }


def _table(trained: list[dict[str, Any]]) -> Table:
    return Table.of(
        trained,
        [
            ("kind", lambda one: one["kind"]),
            (Column("device"), lambda one: one["name"]),
            (Column("version"), lambda one: one["id"] or "not published"),
            (Column("alias"), lambda one: one["alias"] or "none"),
            (Column("held-out"), lambda one: _held_out(one["metrics"])),
        ],
        title="Trained",
        is_boxed=True,
    )


def _held_out(metrics: Mapping[str, float]) -> str:
    within = metrics.get("share_within_15_percent")
    return f"median error {metrics['median_error']:.1%}" + ("" if within is None else f", {within:.0%} within 15%")
