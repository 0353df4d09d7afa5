"""The collector of kernels as a plugin (`autoshard.collectors`)."""

from __future__ import annotations

from collections.abc import Callable

from autoshard.plugins import KernelsCollected, KernelsToCollect
from bench.collecting.options import CollectOptions
from bench.collecting.run import run_collection
from bench.collecting.termination import termination_raised


def collect_kernels(
    asked: KernelsToCollect, seconds: float, advance: Callable[[float], None] = lambda _: None
) -> KernelsCollected:
    """Measures sets of shards for some seconds, and appends them to a store; SIGTERM ends it early.

    Args:
        asked: What to measure.
        seconds: Time to use.
        advance: Receives the seconds since the last call.

    Raises:
        DeviceError: If the device is missing, another collector is measuring on it, or nothing can be measured.
        SampleStoreError: If the store cannot be read or written.
    """
    options = CollectOptions(
        store=asked.store,
        device=asked.device,
        seed=asked.seed,
        seconds=seconds,
        tables=asked.tables,
        scale=asked.scale,
        rounds=asked.rounds,
        is_calibrating=True,
    )
    with termination_raised():
        (part,) = run_collection(options, lambda _, elapsed: advance(elapsed))
    return KernelsCollected(
        device=part.device,
        num_samples=part.num_samples,
        reasons=part.reasons,
        is_terminated=part.is_terminated,
    )
