"""Command `calibrate`: measures this machine for a minute, and fits the nearest known model of kernels to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import numpy as np
import typer

from autoshard import console
from autoshard.commands.arguments import DeviceOption, positive_option, seed_option
from autoshard.commands.options import command_options
from autoshard.core.choices import Device
from autoshard.core.errors import InvalidOptionError, ModelError, SampleStoreError
from autoshard.core.machine import device_family
from autoshard.plugins import KernelsCollected, KernelsToCollect, find_collector
from autoshard.table import Table
from costmodel.kernel.command import accuracy_table, interval_facts
from costmodel.registry.promotion import publish_version, report_published
from costmodel.registry.publish_options import PublishOptions
from costmodel.registry.versions import Registry

if TYPE_CHECKING:
    from autoshard.core import TableSet
    from costmodel.kernel.calibration import Calibration, CalibrationOptions
    from costmodel.kernel.card import CostModelCard
    from costmodel.kernel.dataset import CostDataset
    from costmodel.kernel.learned import LearnedCostModel
    from costmodel.registry.promotion import Published, TrainedVersion

_BUNDLED_TABLES: Final = "metasyn"
#: Divides the rows of the bundled pool, so that a small machine holds them.
_BUNDLED_SCALE: Final = 64
_TERMINATED_EXIT_CODE: Final = 143
#: Time to measure, for a calibration and for a refresh.
_CALIBRATING_S, _REFRESHING_S = 60.0, 5.0
#: Milliseconds that a set may take by the known model that prices it highest, so that a minute holds some hundreds: of
#: longer ones, rows and batch are divided.
_MOST_SET_MS: Final = 60.0
#: Tables of such a set: half as many as the largest have.
_TABLES_OF_SET: Final = 7.5
#: Fewest samples that a model is scaled by; a very busy machine measures no more in five seconds. Intervals are wider
#: by how little so few tell.
_FEWEST_REFRESHING: Final = 3


@command_options()
class CalibrateOptions:
    """What is measured, and for how long."""

    seconds: Annotated[
        float | None,
        positive_option(
            "Time to measure; the model is fitted afterwards, in some ten more.",
            show_default=f"{_CALIBRATING_S:g}, with --refresh {_REFRESHING_S:g}",
        ),
    ] = None
    refresh: Annotated[
        bool,
        typer.Option(
            "--refresh",
            help="Only scale the model in use, which is of this machine, to the speed that it has now: before a plan "
            "whose prices must be true.",
        ),
    ] = False
    tables: Annotated[
        str,
        typer.Option(help="Tables to measure, with their batch: a file of your own, or the name of bundled ones."),
    ] = _BUNDLED_TABLES
    scale: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Divide rows and batch by this.",
            show_default="64 for metasyn; of other tables on a CPU a power of two, so that a minute holds enough sets",
        ),
    ] = None
    store: Annotated[
        Path | None,
        typer.Option(
            help="Folder of samples, made when missing; what it holds already is fitted to as well.",
            show_default="`calibration` beside the registry",
        ),
    ] = None
    device: DeviceOption = Device.AUTO
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each set that count.")] = 2
    updates: Annotated[int | None, typer.Option(min=1, help="Number of updates of the fit; more take longer.")] = None
    seed: Annotated[int, seed_option("Seed of the choice of sets. A later run with the same seed goes on.")] = 0

    def __post_init__(self) -> None:
        if self.refresh and self.updates is not None:
            raise InvalidOptionError("does nothing with --refresh, which scales and does not fit", field="--updates")

    @property
    def measured_s(self) -> float:
        """Time to measure."""
        return self.seconds or (_REFRESHING_S if self.refresh else _CALIBRATING_S)

    @property
    def fitting(self) -> CalibrationOptions:
        """How the model is fitted."""
        from costmodel.kernel.calibration import CalibrationOptions

        return CalibrationOptions.of_updates(self.updates)

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

    A machine that others use is slower in one hour than in another, which intervals allow for. --refresh measures for
    five seconds, and scales the model in use to what the machine's kernels take now.

    Example:
        autoshard calibrate
        autoshard calibrate --refresh
        autoshard calibrate --seconds 20 --tables tables.json
        autoshard calibrate --seconds 240 --store samples --registry registry
    """
    models = Registry(publishing.registry)
    store = options.store_beside(models)
    divisor = options.scale or _usual_scale(options, models)
    started = datetime.now(UTC)
    collected = _measure(options, store, divisor)
    if options.refresh:
        model, version = refresh_in_use(store, collected.device, models, since=started)
    else:
        calibration = fit_store(store, collected.device, models, fitting=options.fitting, seed=options.seed)
        model, version = calibration.model, calibrated_version(calibration)
    published = publish_version(models, version, publishing)
    report_published(published, version.kind, version.name)
    result = _result(store, collected, version, published)
    console.emit(result, _table(collected, model.card, published), as_json=as_json, kind="calibrated")


def calibrated_version(calibration: Calibration) -> TrainedVersion:
    """A calibrated model, compared on samples that the other one was not trained on.

    Each is predicted by a calibration without it.
    """
    from costmodel.kernel.comparison import kernel_errors, unseen_by
    from costmodel.registry.promotion import TrainedVersion

    def difference(other: LearnedCostModel) -> Any:
        if "calibrated_from" in other.card.training:
            raise ModelError("it was calibrated, too, maybe on the same samples")
        unseen = calibration.priced.take(unseen_by(other, calibration.priced.dataset))
        return unseen.errors_S - kernel_errors(other, unseen.dataset)

    return TrainedVersion.by_errors(calibration.model, difference, "samples that each was predicted without")


def known_models(models: Registry, device: str) -> tuple[LearnedCostModel, ...]:
    """The models of kernels that a device's may be calibrated from: the registry's, and those that come with autoshard.

    All that were ever in production count, since one name has models of several machines. One that was calibrated
    itself stands for the model that it was calibrated from, so that samples of the same store never count twice; it is
    left out if no registry holds that one any more.

    Args:
        models: The user's registry.
        device: Key of the device; models of its family are taken.

    Raises:
        ModelError: If there is none, or one is damaged.
    """
    from costmodel.kernel.learned import LearnedCostModel
    from costmodel.registry.versions import shipped_models

    kind = LearnedCostModel.kind
    found: dict[str, LearnedCostModel] = {}
    for registry in (models, shipped_models()):
        for name in sorted({one.name for one in registry.list() if one.kind == kind}):
            if device_family(name) != device_family(device):
                continue
            for version in dict.fromkeys(change.id for change in registry.history(kind, name)):
                model = _origin(name, version, registry)
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


def _origin(name: str, version: str | None, registry: Registry) -> LearnedCostModel | None:
    """A version, or what it was calibrated from at first; None if no registry holds that, as after an upgrade."""
    from costmodel.kernel.learned import LearnedCostModel

    model = None
    while isinstance(version, str):
        if not registry.holds(LearnedCostModel.kind, name, version):
            return None
        model = LearnedCostModel.load(registry, name, version)
        name, version = model.card.device, model.card.training.get("calibrated_from")
    return model


def refresh_in_use(
    store: Path, device: str, models: Registry, *, since: datetime
) -> tuple[LearnedCostModel, TrainedVersion]:
    """Scales the model in use to what was measured since a time; it is compared on these samples.

    Each is predicted by a model that was scaled to the others.

    Args:
        store: Folder of samples.
        device: Key of the device.
        models: The user's registry.
        since: When measuring began.

    Raises:
        SampleStoreError: If too few samples are steady, or the store cannot be read.
        ModelError: If the model in use is not of this machine.
    """
    from autoshard.hardware import is_of_device, this_processor
    from costmodel.kernel.calibration import refreshed, scaled_to
    from costmodel.kernel.comparison import kernel_errors
    from costmodel.kernel.learned import LearnedCostModel
    from costmodel.kernel.metrics import PricedSamples
    from costmodel.registry.promotion import TrainedVersion

    in_use = LearnedCostModel.in_use(models.root, device)
    if in_use is None or in_use.measured_on is None or not is_of_device(in_use.measured_on, device):
        of = "there is none" if in_use is None else f"{in_use.name} is of {in_use.measured_on or 'an unknown machine'}"
        raise ModelError(f"--refresh scales a model of {this_processor()}, and {of}: run `autoshard calibrate` first")
    now = _samples(store, device, since)
    if len(now) < _FEWEST_REFRESHING:
        raise SampleStoreError(
            f"only {len(now)} steady samples were measured, {_FEWEST_REFRESHING} are needed: give more --seconds",
            source=str(store),
        )
    model = refreshed(in_use, now)
    scaled = [scaled_to(in_use, now.take(np.delete(np.arange(len(now)), one))) for one in range(len(now))]
    left_out = [PricedSamples.of(by.predictor, now.take(np.array([one]))) for one, by in enumerate(scaled)]
    errors_S = np.concatenate([one.errors_S for one in left_out])
    version = TrainedVersion.by_errors(model, lambda other: errors_S - kernel_errors(other, now), "samples of now")
    return model, version


def _samples(store: Path, device: str, since: datetime | None = None) -> CostDataset:
    """Samples of machines like the one at hand, all or those that were measured since a time."""
    from autoshard.formats.stores.samples import read_samples
    from autoshard.hardware import is_of_device
    from costmodel.kernel.dataset import CostDataset

    table = read_samples(store, device)
    kept = tuple(
        one
        for one in table.samples
        if is_of_device(one.machine, device) and (since is None or one.collected_at >= since)
    )
    if not kept:
        raise SampleStoreError(f"none of its {len(table)} samples was measured now on this machine", source=str(store))
    return CostDataset.from_samples(replace(table, samples=kept))


def _usual_scale(options: CalibrateOptions, models: Registry) -> int:
    """What rows and batch are divided by: as little as leaves a minute room for enough sets."""
    from autoshard.formats import load_tables
    from autoshard.hardware import CPU
    from autoshard.runtime.processes.devices import choose_device

    if options.tables == _BUNDLED_TABLES:
        return _BUNDLED_SCALE
    tables = load_tables(options.tables)
    if choose_device({options.device}, "--device").type == "cuda":
        return 1
    scale = scale_for(tables, known_models(models, CPU))
    if scale > 1:
        console.log(
            f"Rows and batch are divided by {scale}, so that enough sets are measured; --scale 1 divides nothing"
        )
    return scale


def scale_for(tables: TableSet, known: Sequence[LearnedCostModel]) -> int:
    """The smallest power of two by which rows and batch are to be divided, so that sets take `_MOST_SET_MS` at most.

    Args:
        tables: The tables.
        known: Models of kernels, at least one.
    """
    from autoshard.core import PlacedShard, Shard, local_shard

    scale = 1
    while True:
        scaled = tables.scaled(scale)
        whole = [PlacedShard.table_wise(Shard.whole(table), 0) for table in scaled.tables]
        shards = [local_shard(placed, group_batch_size=scaled.batch_size) for placed in whole]
        nearest = [model.with_nearest_kernels() for model in known]
        table_ms = max(float(model.predict_ms(model.encode(shards)).mean()) for model in nearest)
        if table_ms * _TABLES_OF_SET <= _MOST_SET_MS or scaled.batch_size == 1:
            return scale
        scale *= 2


def _measure(options: CalibrateOptions, store: Path, scale: int) -> KernelsCollected:
    asked = KernelsToCollect(
        store=store,
        device=options.device,
        tables=options.tables,
        scale=scale,
        seed=options.seed,
        rounds=options.rounds,
    )
    with console.progress("Measuring", options.measured_s) as advance:
        collected = find_collector("calibrate")(asked, options.measured_s, advance)
    if collected.is_terminated:
        raise typer.Exit(_TERMINATED_EXIT_CODE)
    return collected


def _result(store: Path, collected: KernelsCollected, version: TrainedVersion, published: Published) -> dict[str, Any]:
    of_card = {name: version.card[name] for name in ("metrics", "interval", "coverage", "training", "measured_on")}
    measured = {"store": str(store), "num_measured": collected.num_samples, "not_measured": list(collected.reasons)}
    return {"kind": version.kind, "name": version.name, **measured, **published.to_json(), **of_card}


def _table(collected: KernelsCollected, card: CostModelCard, published: Published) -> Table:
    machine, training = card.measured_on, card.training
    source = f"{training.get('calibrated_from', '')}, {training.get('base_machine', '')}".strip(", ")
    factor = training.get("refreshed_by")
    facts = (
        ("measured on", str(machine)),
        ("in topologies", "" if machine is None else machine.key_in(device_family(card.device))),
        ("memory of one thread", f"{machine.memory_bytes_per_s / 1e9:.1f} GB/s" if machine else ""),
        ("calibrated from", source),
        ("takes now", "" if factor is None else f"{factor:.3f} times what {training['refreshed_from']} said"),
    )
    return accuracy_table(
        card,
        published,
        f"on {card.metrics.num_samples} samples, each predicted by a calibration without it",
        ("Kendall's tau", f"{card.metrics.kendall_tau:.3f}"),
        *interval_facts(card),
        ("measured now", f"{collected.num_samples} samples"),
        *((name, value) for name, value in facts if value),
    )
