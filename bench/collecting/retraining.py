"""Collecting kernels in stretches, with a cost model trained between them that says where to measure next."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from autoshard import console
from autoshard.core.errors import SampleStoreError
from autoshard.plugins import TrainKernelModel
from bench.collecting.options import CollectOptions
from bench.collecting.outcome import Outcome

#: Collects kernels until a time of the monotonic clock.
CollectUntil = Callable[[CollectOptions, float], Outcome]


def collect_and_train(
    options: CollectOptions, device: str, deadline: float, collect: CollectUntil, train: TrainKernelModel
) -> Outcome:
    """Collects in `options.retrain + 1` stretches of equal length and trains after each but the last.

    The models go to a registry inside the store, which strategies such as `uncertain` then ask. A stretch after which
    there are too few samples to train on is followed by the next with the model as it was.

    Args:
        options: What to collect.
        device: Key of the device.
        deadline: When to end, by the monotonic clock.
        collect: Collects one stretch.
        train: Trains the model.
    """
    registry = options.store / f"models-{device}"
    outcomes: list[Outcome] = []
    for left in range(options.retrain, -1, -1):
        asked = replace(options, registry=registry) if registry.is_dir() else options
        outcomes.append(collect(asked, time.monotonic() + (deadline - time.monotonic()) / (left + 1)))
        if outcomes[-1].is_terminated:
            break
        if left:
            _train(options.store, device, registry, train)
    return _joined(outcomes)


def _train(store: Path, device: str, registry: Path, train: TrainKernelModel) -> None:
    try:
        done = train(store, device, registry)
    except SampleStoreError as error:
        console.log(f"No model is trained yet: {error}")
        return
    console.log(f"Trained on {done.num_samples:,} samples: held-out error {done.relative_error:.2%}")


def _joined(outcomes: list[Outcome]) -> Outcome:
    """All stretches as one outcome; shares of the time are averaged, for stretches are equally long."""
    shares = [outcome.timed_share for outcome in outcomes if outcome.timed_share is not None]
    return replace(
        outcomes[-1],
        files=tuple(file for outcome in outcomes for file in outcome.files),
        added=_summed(outcome.added for outcome in outcomes),
        skipped=_summed(outcome.skipped for outcome in outcomes),
        failed=_summed(outcome.failed for outcome in outcomes),
        reasons=tuple(dict.fromkeys(reason for outcome in outcomes for reason in outcome.reasons)),
        num_noisy=sum(outcome.num_noisy for outcome in outcomes),
        num_measured_again=sum(outcome.num_measured_again for outcome in outcomes),
        timed_share=sum(shares) / len(shares) if shares else None,
    )


def _summed(counts: Iterable[Mapping[str, int]]) -> Mapping[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return total
