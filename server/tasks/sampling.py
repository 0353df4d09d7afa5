"""Samples from other machines: checked, then added to the service's or put into quarantine."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from autoshard.api import NoBody, QuarantinedFile, SampleList, SamplesAnswer, StoredSamples
from autoshard.core.errors import AutoshardError, FormatError, InputError, SampleStoreError
from autoshard.core.quoting import shown
from autoshard.formats import atomic_write
from autoshard.formats.stores.collective_samples import COLLECTIVE_SAMPLES
from autoshard.formats.stores.dense_samples import DENSE_SAMPLES
from autoshard.formats.stores.sample_store import SampleStore, damaged_samples
from autoshard.formats.stores.samples import KERNEL_SAMPLES
from server.problems import StorageError
from server.tasks.context import TaskContext
from server.tasks.reply import Reply

_STORES: Final[dict[str, SampleStore[Any]]] = {
    "kernels": KERNEL_SAMPLES,
    "dense": DENSE_SAMPLES,
    "collectives": COLLECTIVE_SAMPLES,
}
#: Most samples of one file, and most bytes that they may take once read.
_MAX_SAMPLES, _MAX_BYTES = 20_000, 128 << 20
#: Files that are kept in quarantine: the latest.
_MAX_QUARANTINED = 64
#: A device is the name of a folder.
_DEVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}")


def answer_samples(_: NoBody, context: TaskContext, content: bytes) -> Reply:
    """Adds a file of samples to the service's, once however often it is sent.

    Raises:
        InputError: If it is none. One that can be read is then in quarantine, to be looked at.
        StorageError: If the disk takes no more.
    """
    settings, file_id = context.settings, hashlib.sha256(content).hexdigest()
    file = settings.quarantine_folder / f"{file_id}.parquet"
    is_kept = False
    try:
        _write(file, content)
        kind, samples = _read(file)
        sender = _sender_file(_STORES[kind].write(settings.samples_folder, samples))
        if not sender.exists():
            _write(sender, json.dumps({"owner": context.actor}).encode())
    except InputError as error:
        is_kept = isinstance(error.__cause__, AutoshardError | None)  # else it is what Arrow could not read
        error = FormatError(error.message, field=error.field, source="body")
        if is_kept:
            _write(file.with_suffix(".json"), json.dumps({"detail": str(error), "owner": context.actor}).encode())
            _forget_oldest(settings.quarantine_folder)
        raise error from None
    except SampleStoreError as error:
        raise StorageError("the samples cannot be written") from error
    finally:
        if not is_kept:
            file.unlink(missing_ok=True)
    answer = SamplesAnswer(id=file_id, kind=kind, device=samples[0].device, num_samples=len(samples))
    return Reply(status=200, body=answer.model_dump_json().encode())


def _write(file: Path, content: bytes) -> None:
    try:
        atomic_write(file, content)
    except FormatError as error:
        raise StorageError("the samples cannot be written") from error


def answer_list_samples(_: NoBody, context: TaskContext) -> Reply:
    """Says what the service has."""
    settings = context.settings
    quarantined = []
    for file in _by_age(settings.quarantine_folder):
        with suppress(FileNotFoundError, ValueError):
            said = {"owner": "", **json.loads(file.read_text())}
            quarantined.append(QuarantinedFile(id=file.stem, **said))
    found = SampleList(samples=list(_counted(settings.samples_folder)), quarantined=quarantined[:_MAX_QUARANTINED])
    return Reply(status=200, body=found.model_dump_json().encode())


def _read(file: Path) -> tuple[str, tuple[Any, ...]]:
    """The samples of a file, all of one device and intact, and what they are of.

    Raises:
        InputError: If it holds none.
    """
    faults = []
    for kind, store in _STORES.items():
        try:
            num_samples, num_bytes = store.size_of(file)
        except InputError as error:
            faults.append(error)
            continue
        if not 1 <= num_samples <= _MAX_SAMPLES or num_bytes > _MAX_BYTES:
            raise FormatError(
                f"must hold 1 to {_MAX_SAMPLES:,} samples of at most {_MAX_BYTES:,} bytes in all, got {num_samples:,} "
                f"of {num_bytes:,} bytes"
            )
        samples = store.read_file(file)
        _check(samples)
        return kind, samples
    raise faults[0]


def _check(samples: tuple[Any, ...]) -> None:
    devices = sorted({sample.device for sample in samples})
    if len(devices) > 1 or not _DEVICE.fullmatch(devices[0]):
        raise FormatError(f"must hold samples of one device, got {', '.join(map(shown, devices[:3]))}", field="device")
    damaged = damaged_samples(samples)
    if damaged:
        raise FormatError(
            f"{len(damaged)} of {len(samples)} samples do not match their id, the first is "
            f"{shown(damaged[0].sample_id)}",
            field="sample_id",
        )


def _counted(folder: Path) -> Iterator[StoredSamples]:
    for kind, store in _STORES.items():
        for device in store.devices(folder):
            files = store.files(folder, device)
            owners = {json.loads(file.read_text())["owner"] for file in map(_sender_file, files) if file.exists()}
            num_samples = sum(store.size_of(file)[0] for file in files)
            yield StoredSamples(kind=kind, device=device, num_samples=num_samples, owners=sorted(owners))


def _sender_file(file: Path) -> Path:
    """Beside a file of samples that was sent: who sent it first."""
    return file.with_suffix(".json")


def _by_age(folder: Path) -> list[Path]:
    """What is said of files in quarantine, the latest first."""
    aged = []
    for file in folder.glob("*.json"):
        with suppress(FileNotFoundError):
            aged.append((file.stat().st_mtime_ns, file))
    return [file for _, file in sorted(aged, reverse=True)]


def _forget_oldest(folder: Path) -> None:
    for file in _by_age(folder)[_MAX_QUARANTINED:]:
        file.unlink(missing_ok=True)
        file.with_suffix(".parquet").unlink(missing_ok=True)
