"""One collector per store, device and host: two on one device would spoil each other's latencies.

Ray's workers have no store: of the device, `collect` and they keep each other away by files of the host.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from autoshard.core.errors import DeviceError, SampleStoreError
from autoshard.formats.files import check_of_this_machine

if TYPE_CHECKING:  # this module does without torch
    from bench.measuring.devices import BenchDevice

_FOLDER = "locks"
#: Times that a file is tried that another process may have locked for a moment, to look; and the time between them.
_NUM_LOOKS, _LOOK_S = 10, 0.02


class CollectorBusyError(DeviceError):
    """Another collector measures on the same device into the same store."""


class CollectorLock:
    """A lock that its process holds from `__enter__` to `__exit__`, or until it dies.

    It is the kernel's (`flock`), so a killed holder never blocks the next one; the file stays where it is, since
    removing it would let two processes lock two files of one name.

    Args of the constructor:
        store: The store's folder; made when missing.
        name: What is locked, such as `device_lock_name` gives.
    """

    def __init__(self, store: str | Path, name: str) -> None:
        self.file = Path(store) / _FOLDER / f"{_as_file_name(name)}.lock"
        self._descriptor = -1

    def __enter__(self) -> CollectorLock:
        """Takes the lock.

        Raises:
            CollectorBusyError: If another process holds it.
            SampleStoreError: If the store's file system has no locks, or cannot be written.
        """
        check_of_this_machine(self.file)
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise SampleStoreError(f"cannot be written: {error.strerror}", source=str(self.file)) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 20, 0).decode(errors="replace").strip() or "unknown"
            self._release()
            raise CollectorBusyError(
                f"another collector (process {holder}) is measuring here; wait for it, or pass `--if-busy skip`",
                source=str(self.file),
            ) from None
        except OSError as error:
            self._release()
            raise SampleStoreError(f"cannot be locked: {error.strerror}", source=str(self.file)) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Lets go of the lock."""
        self._release()

    def _release(self) -> None:
        os.close(self._descriptor)
        self._descriptor = -1


class Measuring(StrEnum):
    """Who measures on a device."""

    COLLECT = "collect"
    RAY = "ray"


@contextmanager
def device_claimed(device: BenchDevice, who: Measuring) -> Iterator[None]:
    """Keeps others than one's own kind from a device of this host, whatever their stores, until the process dies.

    Several of one kind share it: collectors of several stores, and Ray's workers on the cores of a host.

    Raises:
        CollectorBusyError: If another kind measures on it.
    """
    with ExitStack() as opened:
        files = {kind: _host_file(f"{device_lock_name(device)}.{kind}", opened) for kind in Measuring}
        fcntl.flock(files[who], fcntl.LOCK_SH)
        for other, descriptor in files.items():
            if other is not who and not _is_free(descriptor):
                raise CollectorBusyError(f"another collector (of {other}) is measuring on {device.key} of this host")
        yield


def _host_file(name: str, opened: ExitStack) -> int:
    """A file of this host that any user may lock."""
    folder = Path(tempfile.gettempdir()) / "autoshard-locks"
    file = folder / f"{_as_file_name(name)}.lock"
    if not file.exists():
        folder.mkdir(exist_ok=True)
        with suppress(PermissionError):  # of another user, who has made it so
            folder.chmod(0o1777)
        file.touch()
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    opened.callback(os.close, descriptor)
    return descriptor


def _is_free(descriptor: int) -> bool:
    for _ in range(_NUM_LOOKS):
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            return True
        time.sleep(_LOOK_S)
    return False


def device_lock_name(device: BenchDevice) -> str:
    """Name of the lock of a device of this host; each GPU has its own, whatever its number is here."""
    unit = ""
    if device.is_cuda:
        import torch

        unit = f"-{torch.cuda.get_device_properties(device.device).uuid}"
    return f"{socket.gethostname()}-{device.key}{unit}"


def _as_file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)
