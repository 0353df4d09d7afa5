"""Folders on object storage, named by an address, and the folders of this machine that hold their copies."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Final

from autoshard.core.errors import FormatError, InvalidOptionError
from autoshard.core.quoting import shown
from autoshard.formats.files import atomic_write, read_bytes

CACHE_VARIABLE = "XDG_CACHE_HOME"
#: Kinds of object storage that create an object only if there is none of its name, whoever else tries.
PROTOCOLS: Final = ("s3", "gs", "gcs", "az", "abfs", "abfss", "memory")
_ADDRESS = ".address"
_FORM = re.compile(rf"(?:{'|'.join(PROTOCOLS)})://[^\s\x00-\x1f?#]+")


def folder_of(name: str) -> Path:
    """A folder of this machine: one that is named by its path, or the one that holds the copy of an address.

    Args:
        name: A path, or an address such as `s3://bucket/models`. The copy is under $XDG_CACHE_HOME or `~/.cache`.

    Raises:
        InvalidOptionError: If it is an address of something else.
        FormatError: If the folder of the copy cannot be written.
    """
    if "://" not in name:
        return Path(name)
    address = name.rstrip("/")
    if not _FORM.fullmatch(address):
        shapes = ", ".join(f"{protocol}://" for protocol in PROTOCOLS[:4])
        raise InvalidOptionError(f"must be a folder, or an address that begins with {shapes}; got {shown(name)}")
    caches = Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache")
    folder = caches / "autoshard" / "remote" / hashlib.sha256(address.encode()).hexdigest()[:16]
    if address_of(folder) != address:
        atomic_write(folder / _ADDRESS, address + "\n")
    return folder


def address_of(folder: Path) -> str | None:
    """The address that a folder holds the copy of; None if it is a folder of its own.

    Raises:
        FormatError: If the file that says so cannot be read.
    """
    file = folder / _ADDRESS
    try:
        return read_bytes(file, max_bytes=1 << 16).decode().strip() if os.path.lexists(file) else None
    except UnicodeDecodeError as error:
        raise FormatError("must be the text of an address", source=str(file)) from error
