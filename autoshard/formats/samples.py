"""A store of benchmark samples: one row of Parquet per measured set of shards, files appended to a folder.

A store is a folder with one sub-folder per device (`device=cpu`), each holding files `part-<time>-<hash>.parquet`
that are written once, appear by rename and are never changed. So any number of writers may add to it at once, and one
that is killed leaves at most a temporary file, which is never read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from autoshard.core.errors import SampleStoreError
from autoshard.core.quoting import shown
from autoshard.formats.files import remove_leftovers
from autoshard.formats.measured import MeasuredShard, Sample, SampleTable, set_id_of
from autoshard.formats.sample_columns import SCHEMA_VERSION, ShardCache, parquet_bytes, read_columns, read_sample_file
from autoshard.formats.sample_parts import write_part

__all__ = [
    "SCHEMA_VERSION",
    "MeasuredSet",
    "MeasuredShard",
    "Sample",
    "SampleTable",
    "devices_in",
    "measured_sets",
    "read_sample_file",
    "read_samples",
    "remove_leftovers_in",
    "set_id_of",
    "write_samples",
]

#: Age from which a temporary file is one that a killed writer left: no write takes that long.
_LEFTOVER_SECONDS = 3600.0


class MeasuredSet(NamedTuple):
    """What decides whether a set was measured before; a tuple, for there may be a hundred thousand."""

    set_id: str
    """Hash of the set and the kind of device, see `set_id_of`."""
    device_name: str
    """Full name of the processor."""
    torch_version: str
    fbgemm_version: str


_SET_COLUMNS = MeasuredSet._fields


def write_samples(store: str | Path, samples: Sequence[Sample]) -> Path:
    """Appends samples of one device to a store as a new file.

    Args:
        store: The store's folder; made when missing.
        samples: At least one; ids are filled in.

    Returns:
        The file, complete: a process killed while writing leaves none.

    Raises:
        SampleStoreError: If the folder cannot be written.
    """
    complete = [sample.identified() for sample in samples]
    return write_part(Path(store), complete, parquet_bytes(complete))


def devices_in(store: str | Path) -> tuple[str, ...]:
    """Keys of the devices that a store holds samples of.

    Raises:
        SampleStoreError: If there is no such folder.
    """
    if not Path(store).is_dir():
        raise SampleStoreError("is no folder; `autoshard collect --store` makes one", source=str(store))
    return tuple(sorted({file.parent.name.removeprefix("device=") for file in _files(store, "*")}))


def read_samples(store: str | Path, device: str | None = None) -> SampleTable:
    """Reads all samples of one device; one that was written twice, as in a copied file, counts once.

    Args:
        store: The store's folder.
        device: Key of the device; may be left out when the store holds one only.

    Raises:
        SampleStoreError: If the store is missing, holds no samples of the device, or a file cannot be read.
        FormatError: If a file is not a sample file of this version, or holds impossible values.
    """
    found = devices_in(store)
    if device is None:
        if len(found) > 1:
            raise SampleStoreError(f"holds several devices; name one of: {', '.join(found)}", source=str(store))
        device = found[0] if found else "*"
    if device not in found:
        held = f"; it holds: {', '.join(found)}" if found else ""
        raise SampleStoreError(f"holds no samples of device {shown(device)}{held}", source=str(store))
    rebuilt: ShardCache = {}
    once: dict[str, Sample] = {}
    kept: list[Sample] = []
    num_duplicates = 0
    for sample in (sample for file in _files(store, device) for sample in read_sample_file(file, rebuilt)):
        if once.setdefault(sample.sample_id, sample) is sample or once[sample.sample_id] != sample:
            kept.append(sample)  # two that share an id and differ are for `damaged` to find
        else:
            num_duplicates += 1
    if not kept:
        raise SampleStoreError(f"has files of device {shown(device)}, but no samples in them", source=str(store))
    return SampleTable(samples=tuple(kept), num_duplicates=num_duplicates)


def measured_sets(store: str | Path) -> Mapping[MeasuredSet, int]:
    """How many times each set of shards was measured; reads no more than four columns of each file.

    Args:
        store: The store's folder; a missing one holds nothing.

    Raises:
        SampleStoreError: If a file cannot be read.
        FormatError: If a file is not a sample file of this version.
    """
    counts: Counter[MeasuredSet] = Counter()
    for file in _files(store, "*"):
        table = read_columns(file, _SET_COLUMNS)
        counts.update(map(MeasuredSet._make, zip(*(table[name].to_pylist() for name in _SET_COLUMNS), strict=True)))
    return counts


def remove_leftovers_in(store: str | Path) -> tuple[Path, ...]:
    """Removes the temporary files of writers that were killed an hour ago or more; returns them."""
    return tuple(
        file
        for folder in sorted(Path(store).glob("device=*"))
        for file in remove_leftovers(folder, older_than_s=_LEFTOVER_SECONDS)
    )


def _files(store: str | Path, device: str) -> Iterable[Path]:
    return sorted(Path(store).glob(f"device={device}/part-*.parquet"))
