"""Reading and writing whole files; a file is never seen half-written."""

from __future__ import annotations

import os
import re
import secrets
import time
from pathlib import Path

from autoshard.core.errors import FormatError

_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.tmp")


def atomic_write(path: str | Path, data: str | bytes) -> None:
    """Writes a file under a temporary name in its own folder, then renames it.

    A reader, and a process that dies on the way, sees either the old file or the new one.

    Args:
        path: Where the file goes; folders that are missing are made, a link is followed.
        data: The whole content; text is written as UTF-8.

    Raises:
        FormatError: If no file can be written there.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise FormatError("cannot be written: it is there and is no regular file", source=str(path))
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")  # as `_TEMPORARY` knows it
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with os.fdopen(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666), "wb") as file:
                file.write(data.encode("utf-8") if isinstance(data, str) else data)
                file.flush()
                os.fsync(file.fileno())
            if target.exists():
                temporary.chmod(target.stat().st_mode & 0o777)
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise FormatError(f"cannot be written: {_reason(error)}", source=str(path)) from error


def remove_leftovers(folder: Path, *, older_than_s: float) -> tuple[Path, ...]:
    """Removes temporary files of `atomic_write` that killed processes left in a folder.

    Args:
        folder: Where to look; not below it.
        older_than_s: Age in seconds, by the file's last change, that no write in progress can have.

    Returns:
        The files removed.

    Raises:
        FormatError: If one cannot be removed.
    """
    removed = []
    try:
        for file in sorted(folder.iterdir()):
            try:
                is_left = _TEMPORARY.fullmatch(file.name) and time.time() - file.lstat().st_mtime > older_than_s
                if is_left:
                    file.unlink()
                    removed.append(file)
            except FileNotFoundError:  # another process was quicker
                continue
    except OSError as error:
        raise FormatError(f"cannot be cleared of temporary files: {_reason(error)}", source=str(folder)) from error
    return tuple(removed)


def read_bytes(path: str | Path) -> bytes:
    """The whole content of a file.

    Raises:
        FormatError: If there is no such file, or it cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise FormatError(f"cannot be read: {_reason(error)}", source=str(path)) from error


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
