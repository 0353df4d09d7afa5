"""Parts of a store: files of samples of one device, written once, whole, and named by time and content."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from autoshard.core.errors import FormatError, SampleStoreError
from autoshard.core.quoting import shortened
from autoshard.formats.digest import digest
from autoshard.formats.files import atomic_write, open_file

#: Characters of what Arrow says that a message has room for; it quotes bytes of damaged files.
_ARROW_ROOM = 200


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


@contextmanager
def open_part(file: Path) -> Iterator[pq.ParquetFile]:
    """A part of a store, opened to be read.

    Raises:
        SampleStoreError: If it cannot be read.
        FormatError: If it is no Parquet file, or damaged.
    """
    try:
        opened = open_file(file)
    except FormatError as error:
        raise SampleStoreError(error.message, source=error.source) from error
    try:
        with opened, pq.ParquetFile(opened) as parquet:
            yield parquet
    except OSError as error:
        raise SampleStoreError(f"cannot be read: {shortened(str(error), _ARROW_ROOM)}", source=str(file)) from error
    except pa.ArrowException as error:
        reason = shortened(str(error), _ARROW_ROOM)
        raise FormatError(f"is no Parquet file, or is damaged: {reason}", source=str(file)) from error


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
