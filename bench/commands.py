"""Commands `collect`, `samples` and `replay`; the first two have files of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoshard import console
from autoshard.commands.arguments import DeviceOption
from autoshard.core.choices import Device
from bench.collecting.command import collect
from bench.store.command import samples

__all__ = ["collect", "replay", "samples"]


def replay(
    plan: Annotated[Path, typer.Argument(help="The plan, a JSON file.")],
    device: DeviceOption = Device.AUTO,
    as_json: console.JsonOption = False,
) -> None:
    """Measures the embedding kernels of every rank of a plan on this machine.

    Measures the ceiling, too: the balance of as many ranks with identical work. Differences above it are noise.

    Example:
        autoshard replay plan.json
    """
    from autoshard.formats import read_plan
    from autoshard.report.caveats import device_warnings
    from autoshard.report.replay_json import REPLAY
    from bench.kernels.replay import num_replayed, replay_plans
    from bench.kernels.replay_report import replay_result, replay_table

    plans = [read_plan(plan)]
    with console.progress("Measuring ranks", num_replayed(plans)) as advance:
        measured = replay_plans(plans, device=device, advance=advance)
    found = replay_result(plans[0], measured)
    for warning in device_warnings(found.device, plans[0]):
        console.warn(warning)
    console.emit(REPLAY.to_json(found), replay_table(found), as_json=as_json)
