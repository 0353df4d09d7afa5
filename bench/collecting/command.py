"""Command `collect`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoshard import console
from autoshard.commands.arguments import check_needed, positive_option, seed_option
from autoshard.core.errors import InvalidOptionError
from autoshard.core.quoting import shown
from bench.collecting.options import GIB, CollectOptions, IfBusy, What, parse_what, parse_where
from bench.collecting.store_lock import CollectorBusyError
from bench.collecting.termination import TERMINATED_EXIT_CODE, Terminated, termination_raised

if TYPE_CHECKING:
    from bench.collecting.outcome import Outcome

DeviceOption = Annotated[str, typer.Option(help="`auto` (a GPU if there is one), `cpu` or `cuda`.")]

_MOST_REASONS = 3
#: Options that other kinds of samples do not use.
_OF_KERNELS = ("--where", "--max-tables", "--rounds", "--memory-gib", "--registry")


def collect(
    context: typer.Context,
    store: Annotated[Path, typer.Option(help="Folder that samples are appended to; made when missing.")],
    device: DeviceOption = "auto",
    seconds: Annotated[float | None, positive_option("Stop after this time, start-up included.")] = None,
    num_samples: Annotated[int | None, typer.Option(min=1, help="Stop after this many samples of each kind.")] = None,
    what: Annotated[str, typer.Option(help="Any of kernels, dense, collectives, separated by commas.")] = "kernels",
    where: Annotated[
        str | None,
        typer.Option(
            help="Strategies that choose the sets of tables, with shares: `random=3,slices=1`. Left out: a mixture."
        ),
    ] = None,
    tables: Annotated[str, typer.Option(help="Tables to measure: a file, or the name of bundled ones.")] = "metasyn",
    scale: Annotated[
        int, typer.Option(min=1, help="Divide rows and batch by this, so that a machine can hold them.")
    ] = 64,
    max_tables: Annotated[int, typer.Option(min=1, help="Largest number of tables in a set.")] = 15,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Runs of each set that count; fewer leave time for more sets. Left out: 9 on a CPU."),
    ] = None,
    memory_gib: Annotated[
        float | None,
        positive_option("Memory of the largest sets. Left out: a quarter of a GPU's, at most 1 GiB on a CPU."),
    ] = None,
    registry: Annotated[
        Path | None,
        typer.Option(help="Folder of trained models: measures sets that they place or are least certain about."),
    ] = None,
    seed: Annotated[
        int | None, seed_option("Seed of the choice of sets. Left out: a new one, so other sets, every time.")
    ] = None,
    retrain: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Train a cost model N times in between, and measure where it is least certain."
        ),
    ] = 0,
    if_busy: Annotated[
        IfBusy, typer.Option(help="When another collector is measuring on the device: `fail` (code 1) or `skip` (0).")
    ] = IfBusy.FAIL,
    nproc: Annotated[int, typer.Option(min=1, help="Processes that run collectives.")] = 4,
    node_size: Annotated[int, typer.Option(min=1, help="Processes of collectives that count as one node.")] = 2,
    ray: Annotated[bool, typer.Option("--ray", help="Measure on all GPUs of a Ray cluster.")] = False,
    ray_address: Annotated[
        str, typer.Option(help="Address of the cluster: `auto`, HOST:PORT, or `local` to start one here.")
    ] = "auto",
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Workers on the cluster. Left out: one per GPU, or per core with --device cpu."),
    ] = None,
    as_json: console.JsonOption = False,
) -> None:
    """Measures kernels of this machine and appends the samples to a store.

    Runs each set of tables as one fused kernel, forward and backward, for --seconds (60 if neither --seconds nor
    --num-samples is given). Sets that the store already has of this device, torch and FBGEMM are skipped and counted.
    With the same --seed and options, a run continues where the last one ended. Several collectors may write to one
    store; on one device of a host, one measures at a time.

    SIGINT and SIGTERM end a run early and keep its samples. Exit codes: 0 done, or skipped (--if-busy skip), 1 device
    busy or missing, or store not writable, 2 bad input, 130 interrupted, 143 terminated.

    Example:
        autoshard collect --store samples --seconds 300
        autoshard collect --store samples --seconds 3600 --retrain 5
    """
    kinds = parse_what(what)
    check_needed(context, "--ray", ray, "--ray-address", "--workers")
    check_needed(context, "--what collectives", What.COLLECTIVES in kinds, "--nproc", "--node-size")
    check_needed(context, "--what kernels", What.KERNELS in kinds, *_OF_KERNELS)
    if seconds is None and num_samples is None:
        seconds = 60.0

    import secrets

    options = CollectOptions(
        store=store,
        device=device,
        what=kinds,
        seconds=seconds,
        num_samples=num_samples,
        tables=tables,
        scale=scale,
        max_tables=max_tables,
        rounds=rounds,
        memory_bytes=None if memory_gib is None else int(memory_gib * GIB),
        where=parse_where(where),
        registry=registry,
        seed=secrets.randbits(32) if seed is None else seed,
        is_resumable=seed is not None,
        nproc=nproc,
        node_size=node_size,
        workers=workers,
        retrain=retrain,
    )
    if ray and retrain:
        raise InvalidOptionError("cannot be used with --ray", field="retrain")
    if ray and options.what != (What.KERNELS,):
        raise InvalidOptionError(f"must be kernels with --ray, got {shown(what)}", field="what")
    _run(options, if_busy, ray_address if ray else None, as_json=as_json)


def _run(options: CollectOptions, if_busy: IfBusy, ray_address: str | None, *, as_json: bool) -> None:
    import time

    total = options.num_samples * len(options.what) if options.num_samples else options.seconds or 0
    outcomes: Sequence[Outcome] = ()
    try:
        with termination_raised(), console.progress("Measuring", total) as bar:

            def advance(count: int, elapsed: float) -> None:
                bar(count if options.num_samples else elapsed)

            if ray_address is None:
                from bench.collecting.run import run_collection

                outcomes = run_collection(options, advance)
            else:
                from bench.collecting.ray_collector import collect_on_ray

                outcomes = collect_on_ray(options, ray_address, advance)
    except Terminated:  # before anything was measured
        raise typer.Exit(TERMINATED_EXIT_CODE) from None
    except CollectorBusyError as error:
        if if_busy is IfBusy.FAIL:
            raise
        console.emit(
            {"store": str(options.store), "is_busy": True, "num_samples": 0}, f"Skipped: {error}", as_json=as_json
        )
        return
    took = time.monotonic() - options.started
    console.emit(_result(options, outcomes, took), _text(options, outcomes, took), as_json=as_json)
    if any(outcome.is_terminated for outcome in outcomes):
        raise typer.Exit(TERMINATED_EXIT_CODE)


def _result(options: CollectOptions, outcomes: Sequence[Outcome], took: float) -> dict[str, object]:
    return {
        "store": str(options.store),
        "device": outcomes[0].device,
        "num_samples": sum(outcome.num_samples for outcome in outcomes),
        "files": [str(file) for outcome in outcomes for file in outcome.files],
        "seconds": round(took, 3),
        "seed": options.seed,
        "is_busy": False,
        "is_terminated": any(outcome.is_terminated for outcome in outcomes),
        "parts": [
            {
                "what": outcome.what.value,
                "device": outcome.device,
                "num_samples": outcome.num_samples,
                "added": dict(outcome.added),
                "skipped": dict(outcome.skipped),
                "failed": dict(outcome.failed),
                "reasons": list(outcome.reasons),
                "num_noisy": outcome.num_noisy,
                "num_measured_again": outcome.num_measured_again,
                "timed_share": outcome.timed_share,
            }
            for outcome in outcomes
        ],
    }


def _text(options: CollectOptions, outcomes: Sequence[Outcome], took: float) -> str:
    number = sum(outcome.num_samples for outcome in outcomes)
    devices = ", ".join(dict.fromkeys(outcome.device for outcome in outcomes))
    ended = " Ended by SIGTERM." if any(outcome.is_terminated for outcome in outcomes) else ""
    lines = [f"Added {number} samples of {devices} to {options.store} in {took:.0f} s ({number / took:.1f}/s).{ended}"]
    for outcome in outcomes:
        lines.append(f"{outcome.what.value}: added {_counted(outcome.added)}; {outcome.num_noisy} noisy")
        if outcome.num_measured_again:
            lines[-1] += f", {outcome.num_measured_again} measured again"
        if outcome.timed_share:
            lines[-1] += f"; {outcome.timed_share:.0%} of the time in timed kernels"
        if outcome.skipped:
            lines.append(f"skipped, measured before: {_counted(outcome.skipped)}")
        if outcome.failed:
            lines.append(f"not measured: {_counted(outcome.failed)}")
            lines += [f"  {reason}" for reason in outcome.reasons[:_MOST_REASONS]]
            more = len(outcome.reasons) - _MOST_REASONS
            lines += [f"  and {more} other reasons"] if more > 0 else []
    return "\n".join(lines)


def _counted(numbers: Mapping[str, int]) -> str:
    counts = Counter(numbers)
    listed = ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))
    return f"{counts.total()} ({listed})" if listed else "0"
