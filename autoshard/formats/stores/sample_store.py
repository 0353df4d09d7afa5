"""A store of samples: a folder with Parquet files that hold a row per sample, to which files are appended.

A store has a sub-folder per device (`device=cpu`), each with files `part-<time>-<hash>.parquet` that are written once,
appear by rename and are never changed. So any number of writers may add to it at once, and one that is killed leaves at
most a temporary file, which is never read. Samples of dense layers and of collectives lie in folders of their own
beside those of kernels (`dense/device=cpu`).
"""

from __future__ import annotations

import io
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from datetime import UTC
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from autoshard.core.errors import FormatError, InputError, SampleStoreError
from autoshard.core.quoting import shortened, shown
from autoshard.formats.documents.digest import digest
from autoshard.formats.files import atomic_write, open_file, remove_leftovers
from autoshard.formats.stores.measured_samples import MeasuredSample
from autoshard.formats.stores.sample_columns import SharedObjects, records_of, row_of, schema_of

_SCHEMA_KEY = b"autoshard.schema"
#: Bytes of a file. One holds the samples of some seconds, 3,000 samples of kernels take 1 MB.
_MAX_BYTES = 1 << 30
#: Age from which a temporary file is one that a killed writer left: no write takes that long.
_LEFTOVER_SECONDS = 3600.0
#: Characters of what Arrow says that a message has room for; it quotes bytes of damaged files.
_ARROW_ROOM = 200
_IDS = ("sample_id", "set_id")
SampleT = TypeVar("SampleT", bound=MeasuredSample)


class SampleStore(Generic[SampleT]):
    """Reads and writes samples of one kind.

    Args of the constructor:
        record: Class of the samples.
        schema: Name and version of the columns; each file holds it.
        earlier: Versions that are read, too, with the columns that they lack; these have the defaults of their fields.
        folder: Folder of a store that holds the samples; empty for the store itself.
        kind: What errors call the samples, such as `samples of collectives`.
        command: Command that adds some.

    Attributes:
        arrow_schema: Columns of the files that it writes.
    """

    def __init__(
        self,
        record: type[SampleT],
        *,
        schema: str,
        folder: str,
        kind: str,
        command: str,
        earlier: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        self.schema = schema
        self._earlier = earlier
        added = {name for names in earlier.values() for name in names}
        self._added = {item.name: item.default for item in fields(record) if item.name in added}
        self._record = record
        self.arrow_schema = schema_of(record, {_SCHEMA_KEY: schema.encode()})
        self._folder, self._kind, self._command = folder, kind, command

    def content_id(self, sample: SampleT) -> str:
        """Hash of all that a sample says, its ids left out."""
        row = {
            name: value
            for name, value in row_of(sample).items()
            # Samples of earlier versions keep their ids.
            if name not in _IDS and (name not in self._added or value != self._added[name])
        }
        stamp = sample.collected_at.astimezone(UTC).isoformat(timespec="microseconds")
        return digest(row | {"collected_at": stamp})

    def file_content(self, samples: Sequence[SampleT]) -> bytes:
        """A whole Parquet file that holds some samples, which have their ids."""
        content = io.BytesIO()
        table = pa.Table.from_pylist(list(map(row_of, samples)), self.arrow_schema)
        pq.write_table(table, content, compression="zstd")
        return content.getvalue()

    def write(self, store: str | Path, samples: Sequence[SampleT]) -> Path:
        """Appends samples to a store as a new file.

        Args:
            store: The store's folder; made when missing.
            samples: At least one, all of one device; ids are filled in.

        Returns:
            The file, complete: a process killed while writing leaves none.

        Raises:
            SampleStoreError: If the folder cannot be written.
        """
        complete = [sample.identified() for sample in samples]
        (device,) = {sample.device for sample in complete}
        newest = max(sample.collected_at for sample in complete).astimezone(UTC)
        mark = digest([sample.sample_id for sample in complete]).removeprefix("sha256:")[:12]
        file = Path(store, self._folder, f"device={device}", f"part-{newest:%Y%m%dT%H%M%S%f}-{mark}.parquet")
        try:
            atomic_write(file, self.file_content(complete))
        except FormatError as error:
            raise SampleStoreError(error.message, source=error.source) from error
        return file

    def devices(self, store: str | Path) -> tuple[str, ...]:
        """Keys of the devices that a store holds samples of; none for a folder that is not there."""
        return tuple(sorted({file.parent.name.removeprefix("device=") for file in self.files(store)}))

    def read(self, store: str | Path, device: str | None = None) -> tuple[SampleT, ...]:
        """Reads all samples of one device in the order in which they were written, each once.

        Args:
            store: The store's folder.
            device: Key of the device; may be left out when the store holds one only.

        Raises:
            SampleStoreError: If the store holds no samples of the device, or a file cannot be read.
            FormatError: If a file is not a sample file of this version, or holds impossible values.
        """
        return without_copies(self.read_all(store, device))

    def read_all(self, store: str | Path, device: str | None = None) -> tuple[SampleT, ...]:
        """As `read`, copies included: samples that were written twice, as in a copied file."""
        held = self.devices(store)
        if device is None and len(held) > 1:
            raise SampleStoreError(f"holds several devices; name one of: {', '.join(held)}", source=str(store))
        if not held or device not in (None, *held):
            of_device = "" if device is None else f" of device {shown(device)}"
            hint = f"it holds: {', '.join(held)}" if held else f"`{self._command}` adds some"
            raise SampleStoreError(f"holds no {self._kind}{of_device}; {hint}", source=str(store))
        shared: SharedObjects = {}
        key = device or held[0]
        read = tuple(sample for file in self.files(store, key) for sample in self.read_file(file, shared))
        if not read:
            raise SampleStoreError(f"has files of device {shown(key)}, but no samples in them", source=str(store))
        return read

    def read_file(self, file: Path, shared: SharedObjects | None = None) -> tuple[SampleT, ...]:
        """Reads one file of a store.

        Args:
            file: The Parquet file.
            shared: What equal samples of other files have in common, so that it is one object; added to.

        Raises:
            SampleStoreError: If the file cannot be read.
            FormatError: If it is not a sample file of this version, or holds impossible values.
        """
        with _named_in_errors(file):
            table = self._table(file)
            return tuple(records_of(self._record, table, {} if shared is None else shared))

    def size_of(self, file: Path) -> tuple[int, int]:
        """Number of samples of a file, and bytes that they take once read, as its footer says.

        Raises:
            SampleStoreError: If the file cannot be read.
            FormatError: If it is not a sample file of this version.
        """
        with _named_in_errors(file), open_file(file) as opened, pq.ParquetFile(opened) as parquet:
            self._check(parquet.schema_arrow)
            groups = (parquet.metadata.row_group(index) for index in range(parquet.metadata.num_row_groups))
            return parquet.metadata.num_rows, sum(group.total_byte_size for group in groups)

    def read_columns(self, store: str | Path, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """Values of some columns, row by row, of all devices; a missing store has none.

        Raises:
            SampleStoreError: If a file cannot be read.
            FormatError: If a file is not a sample file of this version.
        """
        for file in self.files(store):
            with _named_in_errors(file):
                table = self._table(file, names)
            yield from zip(*(table[name].to_pylist() for name in names), strict=True)

    def remove_leftovers(self, store: str | Path) -> tuple[Path, ...]:
        """Removes the temporary files of writers that were killed an hour ago or more; returns them.

        Raises:
            SampleStoreError: If one cannot be removed.
        """
        try:
            return tuple(
                file
                for folder in sorted(Path(store, self._folder).glob("device=*"))
                for file in remove_leftovers(folder, older_than_s=_LEFTOVER_SECONDS)
            )
        except FormatError as error:
            raise SampleStoreError(error.message, source=error.source) from error

    def files(self, store: str | Path, device: str = "*") -> list[Path]:
        """Files of a store, of one device if it is given, in the order in which they were written."""
        return sorted(Path(store, self._folder).glob(f"device={device}/part-*.parquet"))

    def _table(self, file: Path, names: Sequence[str] | None = None) -> pa.Table:
        try:
            opened = open_file(file)
        except FormatError as error:
            raise SampleStoreError(error.message, source=str(file)) from error
        with opened:
            size = os.fstat(opened.fileno()).st_size
            if size > _MAX_BYTES:
                raise FormatError(f"must be at most {_MAX_BYTES:,} bytes, got {size:,}")
            with pq.ParquetFile(opened) as parquet:
                lacking = self._check(parquet.schema_arrow)
                held = None if names is None else [name for name in names if name not in lacking]
                return self._completed(
                    parquet.read(columns=held), [name for name in lacking if names is None or name in names]
                )

    def _completed(self, table: pa.Table, lacking: Sequence[str]) -> pa.Table:
        """A table with the columns that its version lacks, at their defaults."""
        for name in lacking:
            values = pa.array([self._added[name]] * len(table), self.arrow_schema.field(name).type)
            table = table.append_column(name, values)
        return table

    def _check(self, schema: pa.Schema) -> Sequence[str]:
        """The columns that the file's version lacks."""
        version = (schema.metadata or {}).get(_SCHEMA_KEY, b"none").decode(errors="replace")
        lacking = () if version == self.schema else self._earlier.get(version)
        if lacking is None:
            raise FormatError(
                f"must be {self.schema}, got {shortened(version)}; collect into another folder, or use the version of "
                "autoshard that wrote this one",
                field="schema",
            )
        found = _by_name(schema)
        expected = _by_name(field for field in self.arrow_schema if field.name not in lacking)
        wrong = sorted(name for name in found.keys() | expected.keys() if found[name] != expected[name])
        if wrong:
            raise FormatError("column is missing, there twice or not of this schema", field=shortened(", ".join(wrong)))
        return lacking


def without_copies(samples: Iterable[SampleT]) -> tuple[SampleT, ...]:
    """Samples, each once; of two that have one id and differ, both are kept, for `damaged_samples` to find."""
    once: dict[str, SampleT] = {}
    kept = []
    for sample in samples:
        first = once.setdefault(sample.sample_id, sample)
        if first is sample or first != sample:
            kept.append(sample)
    return tuple(kept)


def damaged_samples(
    samples: Sequence[SampleT], advance: Callable[[float], None] = lambda _: None
) -> tuple[SampleT, ...]:
    """Samples whose content does not match their id; `advance` is told how many more were looked at."""
    found = []
    for sample in samples:
        if sample.identified().sample_id != sample.sample_id:
            found.append(sample)
        advance(1)
    return tuple(found)


@contextmanager
def _named_in_errors(file: Path) -> Iterator[None]:
    """Errors of reading a file name it."""
    try:
        yield
    except (OSError, pa.ArrowException, ValueError, OverflowError) as error:
        if isinstance(error, InputError):
            raise FormatError(error.message, field=error.field, source=str(file)) from error
        if isinstance(error, OSError) and error.errno is not None:  # else Arrow's own: what it read makes no sense
            raise SampleStoreError(f"cannot be read: {shortened(str(error), _ARROW_ROOM)}", source=str(file)) from error
        reason = shortened(str(error), _ARROW_ROOM)
        raise FormatError(f"is no Parquet file, or is damaged: {reason}", source=str(file)) from error


def _by_name(columns: Iterable[pa.Field]) -> defaultdict[str, list[pa.Field]]:
    """Columns of a file by their names, which it may have twice and in any order."""
    named: defaultdict[str, list[pa.Field]] = defaultdict(list)
    for column in columns:
        named[column.name].append(column)
    return named
