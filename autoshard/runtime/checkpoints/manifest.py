"""What a committed checkpoint says of itself (`autoshard.checkpoint/1`), and which folders are one; without torch.

FOLDER/step-000000001000/manifest.json        written last: without it, a folder is no checkpoint
FOLDER/step-000000001000/plan.json            the plan that it was saved under
FOLDER/step-000000001000/plan.rows-3.parquet  a row order of that plan, where the job has adopted it
FOLDER/step-000000001000/.metadata            of torch.distributed.checkpoint, as the next one
FOLDER/step-000000001000/__0_0.distcp
FOLDER/step-000000001100/rows_0.safetensors   of a delta checkpoint: rows updated since the checkpoint before it
FOLDER/.step-000000002000.writing             one that is being written, or whose writer was killed
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from autoshard.core.accepted import WHOLE_AT_LEAST_0, WHOLE_AT_LEAST_1
from autoshard.core.declared import Meaning, Size
from autoshard.core.errors import FormatError, InputError
from autoshard.formats.documents.document import Document
from autoshard.formats.documents.kinds import fields_of
from autoshard.runtime.checkpoints.blocks import hash_blocks

MANIFEST_NAME, PLAN_NAME = "manifest.json", "plan.json"
#: Where torch.distributed.checkpoint says which file has what.
METADATA_NAME = ".metadata"

_COMMITTED, _LEFT = re.compile(r"step-(\d{12,})"), re.compile(r"\.step-\d{12,}\.(writing|removing)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """A file of a checkpoint."""

    name: Annotated[str, Meaning("Name within the checkpoint's folder.")]
    num_bytes: Annotated[int, WHOLE_AT_LEAST_0, Meaning("Its size.")]
    sha256: Annotated[
        tuple[str, ...],
        Size(),
        Meaning("SHA-256 of each 16 MiB of its content, the last with what is left, in hexadecimal digits."),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTable:
    """A table of a checkpoint, which its plan describes."""

    name: Annotated[str, Meaning("The table.")]
    key: Annotated[str, Meaning("What the names of its tensors begin with: `embeddings.tables.t0`.")]
    tensors: Annotated[
        Mapping[str, Annotated[tuple[int, ...], Size()]],
        Meaning("Shapes of its tensors by the rest of their names: `weights`, `moments`."),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint holds."""

    step: Annotated[int, WHOLE_AT_LEAST_0, Meaning("Step after which it was saved.")]
    base: Annotated[
        int | None,
        WHOLE_AT_LEAST_0,
        Meaning("Step of the checkpoint before, which a delta checkpoint goes upon; null of one that has all rows."),
    ]
    saved_at: Annotated[str, Meaning("When it was, in UTC.")]
    plan_digest: Annotated[str, Meaning("Digest of the plan that it was saved under, which is in `plan.json`.")]
    num_processes: Annotated[int, WHOLE_AT_LEAST_1, Meaning("Processes that saved it.")]
    autoshard_version: Annotated[str, Meaning("autoshard that saved it.")]
    torch_version: Annotated[str, Meaning("torch that saved it.")]
    states: Annotated[tuple[str, ...], Size(), Meaning("Names of what it holds the state of.")]
    tables: Annotated[tuple[SavedTable, ...], Size(), Meaning("Tables among that.")]
    files: Annotated[tuple[SavedFile, ...], Meaning("All files but the manifest.")]
    begun_with: Annotated[
        str | None, Meaning("Digest of the plan that the job was begun with, where it has adopted another since.")
    ] = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.num_bytes for file in self.files)


MANIFEST: Final = Document(
    name="checkpoint",
    meaning="What a checkpoint of a training job holds.",
    make=Manifest,
    fields=lambda _: fields_of(Manifest),
)


def check_told_apart(tables: Iterable[tuple[str, str]]) -> None:
    """Refuses tables of one name where rows are known by the names of their tables: in deltas and exported weights.

    Args:
        tables: Name of each, and what the names of its tensors begin with.

    Raises:
        InputError: If two have one name, which is the field.
    """
    known: dict[str, str] = {}
    for name, key in tables:
        if name in known:
            raise InputError(
                f"is there twice, as {known[name]} and {key}, which deltas and exported weights do not tell apart: "
                "save all rows, or give tables names of their own",
                field=name,
            )
        known[name] = key


def committed_folders(folder: Path) -> list[Path]:
    """Folders of the checkpoints in a folder, by rising step."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), one) for one in folder.iterdir() if (match := _COMMITTED.fullmatch(one.name))]
    return [one for _, one in sorted(found) if (one / MANIFEST_NAME).is_file()]


def committed_name(step: int) -> str:
    """Name of the folder of a step's checkpoint."""
    return f"step-{step:012}"


def writing_folder(folder: Path, step: int) -> Path:
    """Where a step's checkpoint is written before it is committed."""
    return folder / f".{committed_name(step)}.writing"


def commit(written: Path, manifest: Manifest) -> Path:
    """Makes a checkpoint of a folder whose files are all on the disk: it is one from one moment to the next.

    Returns:
        Its folder.

    Raises:
        FormatError: If the manifest cannot be written.
        OSError: If the folder cannot be renamed.
    """
    MANIFEST.write(manifest, written / MANIFEST_NAME)
    _sync_folder(written)
    target = written.parent / committed_name(manifest.step)
    written.rename(target)
    _sync_folder(target.parent)
    return target


def remove(committed: Path) -> None:
    """Removes a checkpoint: it is none any more before the first of its files goes."""
    leaving = committed.parent / f".{committed.name}.removing"
    committed.rename(leaving)
    shutil.rmtree(leaving)


def sweep(folder: Path) -> None:
    """Removes what killed jobs left half written, or half removed, in a folder of checkpoints."""
    for one in folder.iterdir():
        if _LEFT.fullmatch(one.name):
            shutil.rmtree(one)


def saved_file(path: Path) -> SavedFile:
    """Brings a file that was written to the disk, and takes its size and hashes.

    Raises:
        OSError: If it does not get there.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return SavedFile(name=path.name, num_bytes=path.stat().st_size, sha256=hash_blocks(path))


def damaged_files(
    folder: Path, files: Iterable[SavedFile], is_hashed: Callable[[SavedFile], bool] = lambda _: True
) -> list[str]:
    """What is wrong with files of a checkpoint, each named; nothing if all are as they were saved.

    Args:
        folder: The checkpoint.
        files: Those to look at.
        is_hashed: Which of them to read; of others the sizes are looked at.
    """
    told = []
    for file in files:
        path = folder / file.name
        try:
            if (size := path.stat().st_size) != file.num_bytes:
                told.append(f"{file.name}: has {size:,} bytes, {file.num_bytes:,} were saved")
            elif is_hashed(file) and hash_blocks(path) != file.sha256:
                told.append(altered(file.name))
        except FileNotFoundError:
            told.append(f"{file.name}: is missing")
        except OSError as error:
            told.append(f"{file.name}: cannot be read: {error.strerror}")
    return told


def altered(name: str) -> str:
    """What is said of a file that has another content than was saved."""
    return f"{name}: is altered, its hash is another than when it was saved"


def check_files(folder: Path, told: Sequence[str]) -> None:
    """Refuses a checkpoint of which something is wrong.

    Args:
        folder: The checkpoint.
        told: What `damaged_files` found.

    Raises:
        FormatError: If it found something; the text names the files.
    """
    if told:
        raise FormatError("; ".join(told), source=str(folder))


def _sync_folder(folder: Path) -> None:
    """Brings the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
