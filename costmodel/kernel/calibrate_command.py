"""Command `calibrate`: measures this machine for a minute, and fits the nearest known model of kernels to it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from autoshard import console
from autoshard.commands.arguments import DeviceOption, positive_option, seed_option
from autoshard.commands.options import command_options
from autoshard.core.choices import Device
from autoshard.core.errors import ModelError
from autoshard.plugins import KernelsCollected, KernelsToCollect, find_collector
from autoshard.table import Table
from costmodel.kernel.command import accuracy_table, interval_facts
from costmodel.registry.promotion import publish_version, report_published
from costmodel.registry.publish_options import PublishOptions
from costmodel.registry.versions import Registry

if TYPE_CHECKING:
    from costmodel.kernel.calibration import Calibration, CalibrationOptions
    from costmodel.kernel.dataset import CostDataset
    from costmodel.kernel.learned import LearnedCostModel
    from costmodel.registry.promotion import Published, TrainedVersion

_BUNDLED_TABLES: Final = "metasyn"
#: Divides the rows of the bundled pool, so that a small machine holds them.
_BUNDLED_SCALE: Final = 64
_TERMINATED_EXIT_CODE: Final = 143


@command_options()
class CalibrateOptions:
    """What is measured, and for how long."""

    seconds: Annotated[float, positive_option("Time to measure; the model is fitted afterwards, in some ten more.")] = (
        60.0
    )
    tables: Annotated[
        str,
        typer.Option(help="Tables to measure, with their batch: a file of your own, or the name of bundled ones."),
    ] = _BUNDLED_TABLES
    scale: Annotated[
        int | None,
        typer.Option(min=1, help="Divide rows and batch by this.", show_default="64 for metasyn, 1 for other tables"),
    ] = None
    store: Annotated[
        Path | None,
        typer.Option(
            help="Folder of samples, made when missing; what it holds already is fitted to as well.",
            show_default="`calibration` beside the registry",
        ),
    ] = None
    device: DeviceOption = Device.AUTO
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each set that count.")] = 3
    updates: Annotated[int | None, typer.Option(min=1, help="Number of updates of the fit; more take longer.")] = None
    seed: Annotated[int, seed_option("Seed of the choice of sets. A later run with the same seed goes on.")] = 0

    @property
    def divisor(self) -> int:
        """What rows and batch are divided by."""
        if self.scale is not None:
            return self.scale
        return _BUNDLED_SCALE if self.tables == _BUNDLED_TABLES else 1

    @property
    def fitting(self) -> CalibrationOptions:
        """How the model is fitted."""
        from costmodel.kernel.calibration import CalibrationOptions

        if self.updates is None:
            return CalibrationOptions()
        return CalibrationOptions(least_updates=self.updates, most_updates=self.updates)

    def store_beside(self, registry: Registry) -> Path:
        """Where samples go."""
        return self.store or registry.root.with_name("calibration")


def calibrate(options: CalibrateOptions, publishing: PublishOptions, as_json: console.JsonOption = False) -> None:
    """Fits the cost model of kernels to this machine: measures for --seconds, and starts from the nearest known model.

    The models that come with autoshard and those of the registry are fitted to what was measured: first one factor for
    forward times and one for backward times, then all weights. The sets are a mixture of all that plans need: whole
    tables as planners place them and at random, slices, and every other kind of kernel. The model becomes the
    production version of the device, unless it is worse than the current one: see `autoshard train cost`.

    A later run goes on: it measures other sets, and fits to all samples of the store. SIGTERM and Ctrl-C keep what was
    measured. Steps are calibrated by `autoshard train step --calibrate`, on runs of plans.

    Example:
        autoshard calibrate
        autoshard calibrate --seconds 20 --tables tables.json
        autoshard calibrate --seconds 240 --store samples --registry registry
    """
    models = Registry(publishing.registry)
    store = options.store_beside(models)
    collected = _measure(options, store)
    calibration = fit_store(store, collected.device, models, fitting=options.fitting, seed=options.seed)
    version = calibrated_version(calibration)
    published = publish_version(models, version, publishing)
    report_published(published, version.kind, version.name)
    result = _result(store, collected, version, published)
    console.emit(result, _table(collected, calibration, published), as_json=as_json, kind="calibrated")


def calibrated_version(calibration: Calibration) -> TrainedVersion:
    """A calibrated model; it is compared on its samples, each predicted by a calibration without it."""
    from costmodel.kernel.comparison import kernel_errors
    from costmodel.registry.promotion import TrainedVersion

    def difference(other: LearnedCostModel) -> Any:
        if "calibrated_from" in other.card.training:
            raise ModelError("it was calibrated, too, maybe on the same samples")
        return calibration.errors_S - kernel_errors(other, calibration.dataset)

    return TrainedVersion.by_errors(calibration.model, difference, "samples that each was predicted without")


def known_models(models: Registry, device: str) -> tuple[LearnedCostModel, ...]:
    """The models of kernels that a device's may be calibrated from: the registry's, and those that come with autoshard.

    One that was calibrated itself stands for the model that it was calibrated from, so that samples of the same store
    never count twice; it is left out if no registry holds that one any more.

    Args:
        models: The user's registry.
        device: Key of the device; models of its family are taken.

    Raises:
        ModelError: If there is none, or one is damaged.
    """
    from autoshard.core.machine import device_family
    from costmodel.kernel.learned import LearnedCostModel
    from costmodel.registry.versions import shipped_models

    found: dict[str, LearnedCostModel] = {}
    for registry in (models, shipped_models()):
        for name in sorted({one.name for one in registry.list() if one.kind == LearnedCostModel.kind}):
            if device_family(name) == device_family(device) and registry.production_id(LearnedCostModel.kind, name):
                model = _origin(LearnedCostModel.load(registry, name), registry)
                if model is not None:
                    found.setdefault(model.version_id, model)
    if not found:
        raise ModelError(
            f"no model of {device_family(device)} is known to start from; "
            "`autoshard collect` and `autoshard train cost` make one"
        )
    return tuple(found.values())


def fit_store(store: Path, device: str, models: Registry, *, fitting: CalibrationOptions, seed: int) -> Calibration:
    """Calibrates the nearest known model to the samples of a store.

    Args:
        store: Folder of samples.
        device: Key of the device.
        models: The user's registry.
        fitting: How to fit.
        seed: Of the fit.

    Raises:
        SampleStoreError: If all samples are noisy, or the store cannot be read.
        ModelError: If no model is known to start from.
    """
    from costmodel.kernel.calibration import calibrate as calibrated
    from costmodel.kernel.calibration import nearest_base

    dataset = _samples(store, device)
    base = nearest_base(known_models(models, device), dataset)
    with console.progress(f"Fitting {base.name}", fitting.num_updates(len(dataset))) as advance:
        return calibrated(base, dataset, device=device, options=fitting, seed=seed, advance=advance)


def _origin(model: LearnedCostModel, registry: Registry) -> LearnedCostModel | None:
    """The model that a model was calibrated from, if it was; None if no registry holds it, as after an upgrade."""
    while isinstance(version := model.card.training.get("calibrated_from"), str):
        if not registry.holds(model.kind, model.card.device, version):
            return None
        model = type(model).load(registry, model.card.device, version)
    return model


def _samples(store: Path, device: str) -> CostDataset:
    from autoshard.formats.stores.samples import read_samples
    from costmodel.kernel.dataset import CostDataset

    return CostDataset.from_samples(read_samples(store, device))


def _measure(options: CalibrateOptions, store: Path) -> KernelsCollected:
    asked = KernelsToCollect(
        store=store,
        device=options.device,
        tables=options.tables,
        scale=options.divisor,
        seed=options.seed,
        rounds=options.rounds,
    )
    with console.progress("Measuring", options.seconds) as advance:
        collected = find_collector("calibrate")(asked, options.seconds, advance)
    if collected.is_terminated:
        raise typer.Exit(_TERMINATED_EXIT_CODE)
    return collected


def _result(store: Path, collected: KernelsCollected, version: TrainedVersion, published: Published) -> dict[str, Any]:
    of_card = {name: version.card[name] for name in ("metrics", "interval", "coverage", "training", "measured_on")}
    measured = {"store": str(store), "num_measured": collected.num_samples, "not_measured": list(collected.reasons)}
    return {"kind": version.kind, "name": version.name, **measured, **published.to_json(), **of_card}


def _table(collected: KernelsCollected, calibration: Calibration, published: Published) -> Table:
    card = calibration.model.card
    source = f"{card.training['calibrated_from']}, {card.training['base_machine']}"
    return accuracy_table(
        card,
        published,
        f"on {card.metrics.num_samples} samples, each predicted by a calibration without it",
        ("Kendall's tau", f"{card.metrics.kendall_tau:.3f}"),
        *interval_facts(card),
        ("measured now", f"{collected.num_samples} samples"),
        ("measured on", str(card.measured_on)),
        ("calibrated from", source.strip(", ")),
    )
