"""What other packages add to autoshard, by entry points: cost models, models of steps, replays, trainers, collectors.

Planners and commands are entry points, too; see `planners.registry` and `cli`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from autoshard.core import CostModel, ShardingPlan
from autoshard.core.choices import Device
from autoshard.core.costs import StepModels
from autoshard.core.errors import InvalidOptionError
from autoshard.entry_points import installed
from autoshard.results.comparison import MeasuredPlan

COST_MODEL_GROUP = "autoshard.cost_models"

#: What an entry point of `COST_MODEL_GROUP` is: registry folder (None for the default) and device in, a model out, or
#: None if it has none for the device. What the model does not cover, it refuses or notes when it prices.
LoadCostModel: TypeAlias = Callable[[Path | None, str], CostModel | None]

STEP_MODEL_GROUP = "autoshard.step_models"

#: What an entry point of `STEP_MODEL_GROUP` is: registry folder (None for the default) and device in, models of
#: collectives, dense layers and steps out, as far as it has them.
LoadStepModels: TypeAlias = Callable[[Path | None, str], StepModels]

REPLAY_GROUP = "autoshard.replay"

TRAINER_GROUP = "autoshard.trainers"

COLLECTOR_GROUP = "autoshard.collectors"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRound:
    """A cost model that was trained while samples were collected.

    Attributes:
        num_samples: Samples that it was trained on.
        relative_error: Mean relative error on samples that were kept from training.
    """

    num_samples: int
    relative_error: float


#: What an entry point of `TRAINER_GROUP` is: store of samples, device and registry folder in; it trains a kernel model
#: of the device and makes it the production version of that registry.
TrainKernelModel: TypeAlias = Callable[[Path, str, Path], TrainingRound]


class ReplayProtocol(Protocol):
    """Plans as one machine ran them; `ceiling` are ranks that all ran the same."""

    @property
    def device(self) -> str:
        """Key of the device, as topologies name it."""
        ...

    @property
    def device_name(self) -> str:
        """Full name of the processor."""
        ...

    @property
    def plans(self) -> tuple[MeasuredPlan, ...]:
        """Measured times, in the order of the plans."""
        ...

    @property
    def ceiling(self) -> MeasuredPlan:
        """What identical ranks measured: their balance is the best that the machine can tell from perfect."""
        ...


class ReplayPlans(Protocol):
    """What an entry point of `REPLAY_GROUP` is."""

    def __call__(
        self, plans: Sequence[ShardingPlan], *, device: str = "auto", advance: Callable[[float], None]
    ) -> ReplayProtocol:
        """Measures the kernels of every rank; `advance` is told how many ranks are done, the ceiling's included."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsToCollect:
    """What a collector of kernels measures, and where samples go.

    Attributes:
        store: Folder of samples; made when missing.
        device: Where to measure.
        tables: A file with tables, or the name of bundled ones.
        scale: Rows and batch are divided by this.
        seed: Of the choice of sets; a later run with the same fields goes on where this one ended.
        rounds: Runs of each set that count.
    """

    store: Path
    device: Device
    tables: str
    scale: int
    seed: int
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsCollected:
    """What a collector of kernels added.

    Attributes:
        device: Key of the device.
        num_samples: Samples added.
        reasons: Why other sets could not be measured, each reason once.
        is_terminated: Whether SIGTERM ended it.
    """

    device: str
    num_samples: int
    reasons: tuple[str, ...]
    is_terminated: bool


#: What an entry point of `COLLECTOR_GROUP` is: it measures for some seconds, and tells how many more have passed.
CollectKernels: TypeAlias = Callable[[KernelsToCollect, float, Callable[[float], None]], KernelsCollected]


def find_collector(field: str) -> CollectKernels:
    """What measures kernels: the first that a plugin has.

    Args:
        field: The option or command that asks for it, for the error's text.

    Raises:
        InvalidOptionError: If none is installed.
    """
    collect: CollectKernels = _first(COLLECTOR_GROUP, "measure kernels", field)
    return collect


def find_replay(field: str) -> ReplayPlans:
    """The benchmark that replays plans: the first that a plugin has.

    Args:
        field: The option that asks for it, for the error's text.

    Raises:
        InvalidOptionError: If none is installed.
    """
    replay_plans: ReplayPlans = _first(REPLAY_GROUP, "replay plans", field)
    return replay_plans


def find_trainer(field: str) -> TrainKernelModel:
    """What trains kernel models: the first that a plugin has.

    Args:
        field: The option that asks for it, for the error's text.

    Raises:
        InvalidOptionError: If none is installed.
    """
    train: TrainKernelModel = _first(TRAINER_GROUP, "train cost models", field)
    return train


def kernel_model_loaders() -> tuple[LoadCostModel, ...]:
    """What loads cost models of kernels, by name of the plugin."""
    return tuple(point.load() for point in installed(COST_MODEL_GROUP))


def step_models(device: str, registry: Path | None = None) -> StepModels:
    """Models of collectives, dense layers and steps: of each the first that a plugin has for the device.

    Raises:
        ModelError: If a model is there but damaged.
    """
    found = StepModels()
    for point in installed(STEP_MODEL_GROUP):
        load: LoadStepModels = point.load()
        more = load(registry, device)
        found = StepModels(comm=found.comm or more.comm, dense=found.dense or more.dense, step=found.step or more.step)
    return found


def _first(group: str, job: str, field: str) -> Any:
    found = installed(group)
    if not found:
        raise InvalidOptionError(f"nothing that can {job} is installed", field=field)
    return found[0].load()
