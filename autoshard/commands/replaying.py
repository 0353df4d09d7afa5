"""What commands share that measure plans on this machine: how the benchmark is found, and their options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from autoshard.console import log, progress
from autoshard.core.errors import InvalidOptionError

if TYPE_CHECKING:
    from autoshard.core import Costs, ShardingPlan
    from autoshard.core.costs import MsArray
    from autoshard.report import MeasuredPlan

REPLAY_GROUP = "autoshard.replay"

DeviceOption = Annotated[
    str, typer.Option(help="Where ranks are measured: `auto` (a GPU if there is one), `cpu` or `cuda`.")
]
RefineOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Measure all ranks on this machine up to N times, and relieve the slowest in between; 1 only measures.",
    ),
]


class Replay(Protocol):
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
    ) -> Replay:
        """Measures the kernels of every rank; `advance` is told how many ranks are done, the ceiling's included."""
        ...


def find_replay(field: str) -> ReplayPlans:
    """The benchmark that replays plans: the first that a plugin has.

    Args:
        field: The option that asks for it, for the error's text.

    Raises:
        InvalidOptionError: If none is installed.
    """
    from importlib.metadata import entry_points

    found = sorted(entry_points(group=REPLAY_GROUP), key=lambda point: point.name)
    if not found:
        raise InvalidOptionError("nothing that can replay plans is installed", field=field)
    replay_plans: ReplayPlans = found[0].load()
    return replay_plans


def replay(replay_plans: ReplayPlans, plans: Sequence[ShardingPlan], device: str, title: str) -> Replay:
    """Measures plans with a progress bar.

    Args:
        replay_plans: The benchmark.
        plans: At least one.
        device: `auto`, `cpu` or `cuda`.
        title: What the bar says.
    """
    sizes = [plan.group_size for plan in plans]
    with progress(title, sum(sizes) + max(sizes)) as advance:
        return replay_plans(plans, device=device, advance=advance)


def refined(made: ShardingPlan, costs: Costs, num_measurements: int, device: str) -> ShardingPlan:
    """A plan refined by measuring it on this machine; logs what that changed.

    Args:
        made: The plan, its shards on single ranks.
        costs: What it was planned with.
        num_measurements: Most measurements, at least 1.
        device: `auto`, `cpu` or `cuda`.

    Raises:
        InvalidOptionError: If the plan has shards on several ranks, or no benchmark is installed.
        AutoshardError: Those of the benchmark, for tables or devices that it cannot measure.
    """
    import numpy as np

    from autoshard.planning import refine_plan

    replay_plans = find_replay("--replay-refine")
    measured_on: list[str] = []

    def measure(plans: Sequence[ShardingPlan]) -> list[MsArray]:
        title = f"Measurement {len(measured_on) + 1} of {num_measurements}"
        result = replay(replay_plans, plans, device, title)
        measured_on.append(result.device)
        return [np.array(plan.kernel_ms_per_rank) for plan in result.plans]

    plan, said = refine_plan(made, costs, measure, num_measurements=num_measurements)
    log(said)
    if measured_on[0] != made.topology.device:
        log(f"warning: measured on {measured_on[0]}, but the plan is for {made.topology.device}")
    return plan
