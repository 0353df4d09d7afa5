"""Which samples of a store a model is trained on: those of one machine."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TypeVar

from autoshard import console
from autoshard.core.errors import SampleStoreError
from autoshard.core.machine import device_family
from autoshard.formats.stores.samples import MachineSample, machine_of
from autoshard.hardware import is_of_device

SampleT = TypeVar("SampleT", bound=MachineSample)


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
