"""Options of commands that measure plans on this machine, and replays with a progress bar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from autoshard.console import log, progress, warn
from autoshard.core.machine import device_family
from autoshard.plugins import ReplayPlans, ReplayProtocol, find_replay

if TYPE_CHECKING:
    from autoshard.core import CostModels, ShardingPlan
    from autoshard.core.costs import MsArray

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


def replay(replay_plans: ReplayPlans, plans: Sequence[ShardingPlan], device: str, title: str) -> ReplayProtocol:
    """Measures plans with a progress bar.

    Args:
        replay_plans: The benchmark.
        plans: At least one.
        device: `auto`, `cpu` or `cuda`.
        title: Title of the bar.
    """
    sizes = [plan.group_size for plan in plans]
    with progress(title, sum(sizes) + max(sizes)) as advance:
        return replay_plans(plans, device=device, advance=advance)


def refined(plan: ShardingPlan, costs: CostModels, num_measurements: int, device: str) -> ShardingPlan:
    """A plan refined by measuring it on this machine; logs what that changed.

    Args:
        plan: The plan, its shards on single ranks.
        costs: Models that it was planned with.
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

    plan, status = refine_plan(plan, costs, measure, num_measurements=num_measurements)
    log(status)
    if measured_on[0] != device_family(plan.topology.device):
        warn(f"measured on {measured_on[0]}, but the plan is for {plan.topology.device}")
    return plan
