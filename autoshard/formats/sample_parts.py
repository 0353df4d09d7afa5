"""Parts of a store: files of samples of one device, written once, whole, and named by time and content."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol, TypeVar

from autoshard.core.errors import FormatError, SampleStoreError
from autoshard.formats.digest import digest
from autoshard.formats.files import atomic_write


class StoredSample(Protocol):
    """A sample of any kind, its id filled in."""

    @property
    def sample_id(self) -> str:
        """Hash of all else."""
        ...

    @property
    def device(self) -> str:
        """Key of the kind of device."""
        ...

    @property
    def collected_at(self) -> datetime:
        """When the measurement ended."""
        ...

    def identified(self) -> StoredSample:
        """The same sample with the id of its content."""
        ...


_Stored = TypeVar("_Stored", bound=StoredSample)


def damaged_samples(
    samples: Sequence[_Stored], advance: Callable[[float], None] = lambda _: None
) -> tuple[_Stored, ...]:
    """Samples whose content does not match their id; `advance` is told how many more were looked at."""
    found = []
    for sample in samples:
        if sample.identified().sample_id != sample.sample_id:
            found.append(sample)
        advance(1)
    return tuple(found)


def write_part(folder: Path, samples: Sequence[StoredSample], content: bytes) -> Path:
    """Writes a part of a store.

    Args:
        folder: The store's folder for samples of this kind; made when missing.
        samples: What the part holds: at least one, all of one device.
        content: The file's content.

    Returns:
        The file, complete: a process killed while writing leaves none.

    Raises:
        SampleStoreError: If the folder cannot be written.
    """
    (device,) = {sample.device for sample in samples}
    newest = max(sample.collected_at for sample in samples).astimezone(UTC)
    mark = digest([sample.sample_id for sample in samples]).removeprefix("sha256:")[:12]
    file = folder / f"device={device}" / f"part-{newest:%Y%m%dT%H%M%S%f}-{mark}.parquet"
    try:
        atomic_write(file, content)
    except FormatError as error:
        raise SampleStoreError(error.message, source=error.source) from error
    return file
