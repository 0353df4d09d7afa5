"""Collecting kernels in stretches, with a cost model trained between them that says where to measure next."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from autoshard import console
from autoshard.core.errors import SampleStoreError
from autoshard.plugins import TrainKernelModel
from bench.collecting.collection import CollectedSamples, joined
from bench.collecting.options import CollectOptions
from bench.collecting.termination import Terminated

#: Collects kernels until a time of the monotonic clock.
CollectUntil = Callable[[CollectOptions, float], CollectedSamples]


def collect_and_train(
    options: CollectOptions, device: str, deadline: float, collect: CollectUntil, train: TrainKernelModel
) -> CollectedSamples:
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
    stretch = replace(options, retrain=0)
    stretches: list[CollectedSamples] = []
    try:
        for left in range(options.retrain, -1, -1):
            asked = replace(stretch, registry=registry) if registry.is_dir() else stretch
            stretches.append(collect(asked, time.monotonic() + (deadline - time.monotonic()) / (left + 1)))
            if stretches[-1].is_terminated:
                break
            if left:
                _train(options.store, device, registry, train)
    except Terminated:  # between two stretches
        if not stretches:
            raise
        stretches[-1] = replace(stretches[-1], is_terminated=True)
    return joined(stretches)


def _train(store: Path, device: str, registry: Path, train: TrainKernelModel) -> None:
    try:
        done = train(store, device, registry)
    except SampleStoreError as error:
        console.log(f"No model is trained yet: {error}")
        return
    console.log(f"Trained on {done.num_samples:,} samples: held-out error {done.relative_error:.2%}")
