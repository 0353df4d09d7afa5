"""Command `collect`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import typer

from autoshard import console
from bench.collecting.options import CollectOptions, IfBusy
from bench.collecting.store_lock import CollectorBusyError
from bench.collecting.termination import TERMINATED_EXIT_CODE, Terminated, termination_raised

if TYPE_CHECKING:
    from bench.collecting.collection import CollectedSamples

_MOST_REASONS = 3
_KIND = "collected"


def collect(options: CollectOptions, as_json: console.JsonOption = False) -> None:
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
    try:
        parts = _measured(options)
    except Terminated:  # before anything was measured
        raise typer.Exit(TERMINATED_EXIT_CODE) from None
    except CollectorBusyError as error:
        if options.if_busy is IfBusy.FAIL:
            raise
        result = {"store": str(options.store), "is_busy": True, "num_samples": 0}
        console.emit(result, f"Skipped: {error}", as_json=as_json, kind=_KIND)
        return
    took = time.monotonic() - options.started
    console.emit(_result(options, parts, took), _text(options, parts, took), as_json=as_json, kind=_KIND)
    if any(part.is_terminated for part in parts):
        raise typer.Exit(TERMINATED_EXIT_CODE)


def _measured(options: CollectOptions) -> Sequence[CollectedSamples]:
    total = options.num_samples * len(options.sample_kinds) if options.num_samples else options.limit_s or 0
    with termination_raised(), console.progress("Measuring", total) as bar:

        def advance(count: int, elapsed: float) -> None:
            bar(count if options.num_samples else elapsed)

        if options.ray:
            from bench.collecting.ray_collector import collect_on_ray

            return collect_on_ray(options, advance)
        from bench.collecting.run import run_collection

        return run_collection(options, advance)


def _result(options: CollectOptions, parts: Sequence[CollectedSamples], took: float) -> dict[str, object]:
    return {
        "store": str(options.store),
        "device": parts[0].device,
        "num_samples": sum(part.num_samples for part in parts),
        "files": [str(file) for part in parts for file in part.files],
        "seconds": round(took, 3),
        "seed": options.set_seed,
        "is_busy": False,
        "is_terminated": any(part.is_terminated for part in parts),
        "parts": [part.to_json() for part in parts],
    }


def _text(options: CollectOptions, parts: Sequence[CollectedSamples], took: float) -> str:
    number = sum(part.num_samples for part in parts)
    devices = ", ".join(dict.fromkeys(part.device for part in parts))
    ended = " Ended by SIGTERM." if any(part.is_terminated for part in parts) else ""
    lines = [f"Added {number} samples of {devices} to {options.store} in {took:.0f} s ({number / took:.1f}/s).{ended}"]
    for part in parts:
        lines.append(f"{part.kind.value}: added {_counted(part.added)}; {part.num_noisy} noisy")
        if part.num_measured_again:
            lines[-1] += f", {part.num_measured_again} measured again"
        if part.timed_share:
            lines[-1] += f"; {part.timed_share:.0%} of the time in timed kernels"
        if part.skipped:
            lines.append(f"skipped, measured before: {_counted(part.skipped)}")
        if part.failed:
            lines.append(f"not measured: {_counted(part.failed)}")
            lines += [f"  {reason}" for reason in part.reasons[:_MOST_REASONS]]
            more = len(part.reasons) - _MOST_REASONS
            lines += [f"  and {more} other reasons"] if more > 0 else []
    return "\n".join(lines)


def _counted(numbers: Mapping[str, int]) -> str:
    counts = Counter(numbers)
    listed = ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))
    return f"{counts.total()} ({listed})" if listed else "0"
