"""Commands `collect`, `samples` and `replay`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from autoshard import console
from autoshard.core.errors import InvalidOptionError, SampleStoreError

_Device = Annotated[str, typer.Option(help="`auto` (a GPU if there is one), `cpu` or `cuda`.")]


def collect(
    store: Annotated[Path, typer.Option(help="Folder that samples are appended to; made when missing.")],
    device: _Device = "auto",
    seconds: Annotated[float | None, typer.Option(help="Stop after this time.")] = None,
    num_samples: Annotated[int | None, typer.Option(help="Stop after this many samples.")] = None,
    tables: Annotated[str, typer.Option(help="Tables to measure: a file, or the name of bundled ones.")] = "metasyn",
    scale: Annotated[int, typer.Option(help="Divide rows and batch by this, so that a machine can hold them.")] = 64,
    max_tables: Annotated[int, typer.Option(help="Largest number of tables in a set.")] = 15,
    seed: Annotated[int | None, typer.Option(help="Of the choice of sets; left out: another one every time.")] = None,
    as_json: console.JsonOption = False,
) -> None:
    """Measures embedding kernels of this machine and appends the samples to a store.

    Sets of tables are run as one fused kernel, forward and backward, until time is up (a minute, unless told
    otherwise). Stopping it early keeps what was measured.

    Example:
        autoshard collect --store samples --seconds 300
    """
    for name, value in (("seconds", seconds), ("num_samples", num_samples), ("scale", scale)):
        if value is not None and value <= 0:
            raise InvalidOptionError(f"must be above 0, got {value}", field=name)
    if seed is not None and seed < 0:
        raise InvalidOptionError(f"must be at least 0, got {seed}", field="seed")
    if store.exists() and not store.is_dir():
        raise SampleStoreError("is no folder", source=str(store))
    if seconds is None and num_samples is None:
        seconds = 60.0

    import secrets

    from autoshard.formats import load_tables
    from bench.collector import collect_samples
    from bench.devices import find_device
    from bench.harness import Harness, Settings
    from bench.sampling import choose_sets, table_wise_pool

    target = find_device(device)
    pool = table_wise_pool(load_tables(tables).scaled(scale))
    seed = secrets.randbits(32) if seed is None else seed
    sets = choose_sets(pool, max_tables=max_tables, seed=seed)
    harness = Harness(target, Settings.for_collecting(target))
    with console.progress("Measuring sets", num_samples or seconds or 0) as advance:
        done = collect_samples(
            harness,
            sets,
            store,
            num_samples=num_samples,
            seconds=seconds,
            advance=lambda count, elapsed: advance(count if num_samples else elapsed),
        )
    result = {
        "store": str(store),
        "device": target.key,
        "num_samples": done.num_samples,
        "files": [str(file) for file in done.files],
        "seconds": round(done.seconds, 3),
        "seed": seed,
    }
    rate = done.num_samples / done.seconds
    text = f"Added {done.num_samples} samples of {target.key} to {store} in {done.seconds:.0f} s ({rate:.1f}/s)."
    console.emit(result, text, as_json=as_json)


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
    device: _Device = "auto",
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
