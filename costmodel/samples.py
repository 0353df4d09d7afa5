"""Which samples of a store a model is trained on, those of one machine, and which ones a model has not seen.

Shape suffixes: S samples.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard import console
from autoshard.core.errors import SampleStoreError
from autoshard.core.machine import MeasuredMachine, device_family
from autoshard.formats.stores.measured_samples import MeasuredSample, machine_of
from autoshard.formats.stores.sample_store import SampleT
from autoshard.hardware import is_of_device


def stored_key(held: Collection[str], device: str | None) -> str | None:
    """The key under which a store has samples of a device: its own, else its family's."""
    return device if device is None or device in held else device_family(device)


def of_one_machine(samples: Sequence[SampleT], device: str | None, store: Path) -> tuple[SampleT, ...]:
    """The samples of the machine that a device's key means; a line on standard error counts the others.

    Of a key that names no machine, samples of machines that are alike are all taken, whichever machine is at hand.

    Args:
        samples: At least one, all of one kind of device.
        device: Key of the device, see `is_of_device`; that of the samples if None.
        store: Where they come from.

    Raises:
        SampleStoreError: If none was measured on that machine.
    """
    key = device or samples[0].device
    usual = machine_of(samples)
    if key == device_family(key) and all(one.machine.is_like(usual) for one in samples):
        return tuple(samples)
    kept = tuple(one for one in samples if is_of_device(one.machine, key))
    if not kept:
        keys = ", ".join(sorted({one.machine.key_in(device_family(key)) for one in samples}))
        meant = "the machine at hand" if key == device_family(key) else key
        raise SampleStoreError(
            f"none of its {len(samples):,} samples was measured on {meant}; --device names one of: {keys}",
            source=str(store),
        )
    if others := len(samples) - len(kept):
        console.log(f"{store}: {others:,} of {len(samples):,} samples are left out, which other machines measured")
    return kept


def newest(samples: Sequence[MeasuredSample]) -> str:
    """When the newest of some samples was measured: `samples_until` of cards."""
    return max(stamp(one.collected_at) for one in samples)


def are_unseen(
    samples: Sequence[MeasuredSample], training: Mapping[str, Any], measured_on: MeasuredMachine | None
) -> NDArray[np.bool_]:
    """Which samples a model was not trained on, shape (S,): those of other machines, and those newer than its newest.

    Args:
        samples: Of one machine, at least one.
        training: The model's `training`; where it does not say `samples_until`, the model has seen none.
        measured_on: The model's machine.
    """
    until = training.get("samples_until")
    if not isinstance(until, str) or not (measured_on is None or measured_on.is_like(machine_of(samples))):
        return np.ones(len(samples), dtype=np.bool_)
    return np.array([stamp(one.collected_at) > until for one in samples])


def stamp(time: datetime) -> str:
    """A time as cards have it; later ones sort behind."""
    return time.astimezone(UTC).isoformat(timespec="microseconds")
