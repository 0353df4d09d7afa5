"""Reading and writing whole files; a file is never seen half-written."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from autoshard.core.errors import FormatError

#: Bytes of a JSON document, unless a caller says otherwise: a plan for 131,072 ranks takes 50 MB, 856 tables 3 MB.
MAX_DOCUMENT_BYTES = 1 << 26

#: An address, also as `Path` shortens it: `s3:/bucket/plan.json`.
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")

_TEMPORARY = re.compile(r"\.[0-9a-f]{16}\.tmp")


def check_of_this_machine(path: str | Path) -> None:
    """Refuses an address of another machine's file, of which a folder `s3:` would be made here.

    Raises:
        FormatError: If it is one.
    """
    if _ADDRESS.match(str(path)):
        raise FormatError("cannot be written: must be a file of this machine, got an address", source=str(path))


def undecodable(data: bytes) -> str:
    """Why bytes that are no UTF-8 text cannot be read, for a message."""
    return "is compressed by gzip: unpack it first" if data.startswith(b"\x1f\x8b") else "is not UTF-8 text"


def check_writable(path: str | Path) -> Path:
    """The file that a path leads to, if one can be written there as far as can be told before; nothing is made.

    Raises:
        FormatError: If none can.
    """
    check_of_this_machine(path)
    target = Path(os.path.realpath(path))
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # of the path as given: a pipe has no other
            raise FormatError("cannot be written: it is there and is no regular file", source=str(path))
        if target.exists() and not target.is_file():  # fails for a name that is too long
            raise FormatError("cannot be written: it is there and is no regular file", source=str(path))
        above = next(folder for folder in target.parents if folder.exists())
    except OSError as error:
        raise FormatError(f"cannot be written: {reason_of(error)}", source=str(path)) from error
    if not above.is_dir():
        raise FormatError(f"cannot be written: {above} is no folder", source=str(path))
    if not os.access(above, os.W_OK | os.X_OK):
        raise FormatError(f"cannot be written: no permission for {above}", source=str(path))
    return target


def atomic_write(path: str | Path, data: str | bytes) -> None:
    """Writes a file under a temporary name in its own folder, then renames it.

    A reader, and a process that dies on the way, sees either the old file or the new one.

    Args:
        path: Where the file goes; folders that are missing are made, a link is followed.
        data: The whole content; text is written as UTF-8.

    Raises:
        FormatError: If no file can be written there.
    """
    target = check_writable(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _staged(data, target.parent) as temporary:
            if target.exists():
                temporary.chmod(target.stat().st_mode & 0o777)
            temporary.replace(target)
    except OSError as error:
        raise FormatError(f"cannot be written: {reason_of(error)}", source=str(path)) from error


def atomic_create(path: Path, data: bytes, *, staging: Path) -> bool:
    """Makes a file unless there is one: of several processes that try, one makes it, whole.

    Args:
        path: Where the file goes; folders that are missing are made.
        data: The whole content.
        staging: Folder of the temporary file, of the same file system, which has hard links.

    Returns:
        Whether there was none.

    Raises:
        FormatError: If no file can be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(path):
            return False
        with _staged(data, staging) as temporary:
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
        return True
    except OSError as error:
        raise FormatError(f"cannot be written: {reason_of(error)}", source=str(path)) from error


@contextmanager
def _staged(data: str | bytes, folder: Path) -> Iterator[Path]:
    """A temporary file in a folder, on the disk as a whole, which is gone after the block."""
    temporary = folder / f".{secrets.token_hex(8)}.tmp"  # as `_TEMPORARY` knows it
    try:
        with os.fdopen(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666), "wb") as file:
            file.write(data.encode("utf-8") if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


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
        raise FormatError(f"cannot be cleared of temporary files: {reason_of(error)}", source=str(folder)) from error
    return tuple(removed)


def open_file(path: str | Path) -> BinaryIO:
    """Opens a regular file for reading; links are followed. All files of users are opened here.

    Anything else may have no end (`/dev/zero`) or wait for a writer that never comes (a pipe).

    Raises:
        FormatError: If there is no such file, it is no regular file, or it cannot be read.
    """
    try:
        # The first look keeps devices and sockets closed; the second is at what was opened.
        _check_regular(os.stat(path).st_mode, path)
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
        try:
            _check_regular(os.fstat(file.fileno()).st_mode, path)
        except BaseException:
            file.close()
            raise
        return file
    except FormatError:
        raise
    except (OSError, ValueError) as error:  # the latter: of a path with a null character
        raise FormatError(f"cannot be read: {reason_of(error)}", source=str(path)) from error


def files_of(path: Path, is_wanted: Callable[[Path], bool], wanted: str) -> list[Path]:
    """The file that a path names; of a folder, what in it is wanted, in the order of names.

    Args:
        path: A file or a folder.
        is_wanted: Whether a file or folder within the folder is.
        wanted: How the names of those end, for the error.

    Raises:
        FormatError: If the path is not there, or the folder cannot be read or holds none.
    """
    try:
        path.stat()
        if not path.is_dir():
            return [path]
        found = sorted(filter(is_wanted, path.iterdir()))
    except (OSError, ValueError) as error:  # the latter: of a path with a null character
        source = getattr(error, "filename", None) or path
        raise FormatError(f"cannot be read: {reason_of(error)}", source=str(source)) from error
    if not found:
        raise FormatError(f"holds no {wanted} files", source=str(path))
    return found


def read_bytes(path: str | Path, *, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """The whole content of a regular file; its size is checked before it is read.

    Args:
        path: The file.
        max_bytes: Most bytes that it may have.

    Raises:
        FormatError: If there is no such file, it is no regular file or too large, or it cannot be read.
    """
    with open_file(path) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            data = file.read(max_bytes + 1) if size <= max_bytes else b""
        except OSError as error:
            raise FormatError(f"cannot be read: {reason_of(error)}", source=str(path)) from error
    if max(size, len(data)) > max_bytes:  # some files, as those of /proc, do not say how large they are
        got = f", got {size:,}" if size > max_bytes else ""
        raise FormatError(f"must be at most {max_bytes:,} bytes{got}", source=str(path))
    return data


def _check_regular(mode: int, path: str | Path) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        raise FormatError(f"must be a regular file, got {kinds.get(stat.S_IFMT(mode), 'a device')}", source=str(path))


def reason_of(error: OSError | ValueError) -> str:
    """Why a file cannot be read or written, for a message."""
    return ((error.strerror if isinstance(error, OSError) else None) or str(error)).lower()
