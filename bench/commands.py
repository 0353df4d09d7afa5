"""Commands `collect`, `samples` and `replay`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from autoshard import console
from autoshard.core.errors import SampleStoreError
from bench.collect_command import DeviceOption, collect

__all__ = ["collect", "replay", "samples"]


def samples(
    store: Annotated[Path, typer.Argument(help="Folder with samples.")],
    as_json: console.JsonOption = False,
) -> None:
    """Shows what a store of samples holds, and checks that nothing in it is damaged.

    Example:
        autoshard samples samples
    """
    from autoshard.formats.samples import devices_in, read_samples
    from bench.store_summary import summarise, summary_table

    devices = devices_in(store)
    if not devices:
        raise SampleStoreError("holds no samples; `autoshard collect` adds some", source=str(store))
    tables = {device: read_samples(store, device) for device in devices}
    for device, table in tables.items():
        with console.progress("Checking samples", len(table)) as advance:
            damaged = table.damaged(advance)
        if damaged:
            raise SampleStoreError(
                f"{len(damaged)} of {len(table)} samples of {device} do not match their id, the first is "
                f"{damaged[0].sample_id}; remove the files that hold them",
                source=str(store),
            )
    summaries = [summarise(table) for table in tables.values()]
    result = {"store": str(store), "devices": [asdict(summary) for summary in summaries]}
    console.emit(result, summary_table(summaries), as_json=as_json)


def replay(
    plan: Annotated[Path, typer.Argument(help="The plan, a JSON file.")],
    device: DeviceOption = "auto",
    as_json: console.JsonOption = False,
) -> None:
    """Measures the embedding kernels of every rank of a plan on this machine.

    The ceiling is what the machine itself allows: the balance of as many ranks that all run the same shards.

    Example:
        autoshard replay plan.json
    """
    from autoshard.formats import read_plan
    from bench.replay import num_replayed, replay_plans
    from bench.replay_report import replay_json, replay_table

    plans = [read_plan(plan)]
    with console.progress("Measuring ranks", num_replayed(plans)) as advance:
        measured = replay_plans(plans, device=device, advance=advance)
    console.emit(replay_json(plans[0], measured), replay_table(plans[0], measured), as_json=as_json)
