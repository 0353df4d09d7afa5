"""Where torch.distributed.checkpoint writes and reads files: in blocks that are hashed on their way."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from typing_extensions import override

from autoshard.runtime.checkpoints.blocks import HashedReader, HashedWriter
from autoshard.runtime.checkpoints.manifest import SavedFile


class HashedFiles(FileSystem):
    """Files whose hashes are known when they are written, and checked when they are read.

    Args:
        saved: Files that are read, with their hashes; others are taken as they are.

    Attributes:
        saved: Files that were written, in their order.
        altered: Names of those that were read and have other hashes.
    """

    def __init__(self, saved: Iterable[SavedFile] = ()) -> None:
        self._known = {one.name: one for one in saved}
        self.saved: list[SavedFile] = []
        self.altered: list[str] = []

    @contextmanager
    @override
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """A file that is written, `wb`, or read, `rb`."""
        path = Path(path)
        if mode == "wb":
            with HashedWriter(path) as written:
                yield written
            self.saved.append(SavedFile(name=path.name, num_bytes=path.stat().st_size, sha256=written.sha256))
            return
        known = self._known.get(path.name)
        with HashedReader(path, () if known is None else known.sha256) as read:
            try:
                yield read
            finally:
                if read.is_altered:
                    self.altered.append(path.name)

    @override
    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Renames a file, also where its hashes are."""
        super().rename(path, new_path)
        name, new_name = Path(path).name, Path(new_path).name
        self.saved = [replace(one, name=new_name) if one.name == name else one for one in self.saved]


class HashedFilesWriter(FileSystemWriter):
    """torch's writer of checkpoints.

    Args:
        folder: The folder.

    Attributes:
        files: What it has written.
    """

    def __init__(self, folder: Path) -> None:
        # The state is on the host, and no GPU is needed to copy it; files are on the disk when they are closed.
        super().__init__(folder, overwrite=False, sync_files=False, per_thread_copy_ahead=0)
        self.fs = self.files = HashedFiles()


class HashedFilesReader(FileSystemReader):
    """torch's reader of checkpoints.

    Args:
        folder: The folder.
        saved: Its files, if their hashes are to be checked.

    Attributes:
        files: What it has read.
    """

    def __init__(self, folder: Path, saved: Iterable[SavedFile] = ()) -> None:
        super().__init__(folder)
        self.fs = self.files = HashedFiles(saved)
