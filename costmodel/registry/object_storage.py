"""A registry on object storage, of which each machine keeps a copy.

    ADDRESS/<kind>/<name>/<id>/weights.safetensors
    ADDRESS/<kind>/<name>/<id>/card.json             stored last: a version without one is not complete
    ADDRESS/<kind>/<name>/production/00000003        all lines of the alias's file after its third change

No object is ever changed or stored twice, so copies never go stale but in what they lack, and of those who change an
alias at the same time one is first: the others find the number taken, and look again. Models are read from the copy,
so that what is there is served while the storage does not answer.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import structlog

from autoshard.core.errors import FormatError, ModelError
from autoshard.core.quoting import shortened
from autoshard.core.topology import DEVICE_KEY
from autoshard.formats.files import atomic_write
from autoshard.formats.stores.remote_folders import address_of
from costmodel.registry.aliases import VERSION_ID, Alias, AliasFile
from costmodel.registry.version_folders import CARD, MAX_BYTES, WEIGHTS, store_version

_log = structlog.get_logger()

#: Age in seconds from which a copy is looked after before models are read from it.
MAX_AGE_S = 10.0
_NUMBER = re.compile(r"[0-9]{8}")
_STAMP, _TRIED = ".pulled", ".tried"


@dataclass(frozen=True, slots=True)
class ObjectStorage:
    """The objects under an address, and the folder with their copy.

    Attributes:
        address: Such as `s3://bucket/models`; credentials are where that storage's own tools look for them.
        folder: The copy: a registry as on disk.
    """

    address: str
    folder: Path

    @classmethod
    def of(cls, folder: Path) -> ObjectStorage | None:
        """That which a folder holds the copy of; None if it is a registry of its own.

        Raises:
            ModelError: If the folder cannot be read.
        """
        try:
            address = address_of(folder)
        except FormatError as error:
            raise ModelError(error.message, source=error.source) from error
        return None if address is None else cls(address, folder)

    @property
    def age_s(self) -> float | None:
        """Seconds since the copy was brought up to date; None if it never was."""
        return self._since_s(_STAMP)

    def _since_s(self, stamp: str) -> float | None:
        try:
            return max(time.time() - (self.folder / stamp).stat().st_mtime, 0.0)
        except FileNotFoundError:
            return None

    def refresh(self, max_age_s: float = MAX_AGE_S) -> None:
        """Brings the copy up to date if nobody tried for so long; what fails is logged, and the copy used as it is.

        Requests look here, too: while the storage does not answer, one of them waits for it every `max_age_s`.

        Raises:
            ModelError: If there is no copy yet, and the storage does not answer.
        """
        age_s, tried_s = self.age_s, self._since_s(_TRIED)
        if age_s is not None and tried_s is not None and tried_s < max_age_s:
            return
        try:
            self.pull()
        except ModelError as error:
            if age_s is None:
                raise
            _log.warning("the registry does not answer; its copy is used", reason=str(error), age_s=round(age_s))

    def pull(self) -> int:
        """Copies what the copy lacks.

        Returns:
            How many versions and aliases changed.

        Raises:
            ModelError: If the storage does not answer, or the copy cannot be written.
        """
        with self._failures():
            (self.folder / _TRIED).touch()
            files, root = self._files()
            sizes = {name[len(root) :].lstrip("/"): size for name, size in files.items()}
            changes: dict[AliasFile, int] = {}
            num_changed = 0
            for name in sizes:
                kind, model, holder, file = (name.split("/") + [""] * 4)[:4]
                if name.count("/") != 3 or not (DEVICE_KEY.fullmatch(kind) and DEVICE_KEY.fullmatch(model)):
                    continue
                folder = self.folder / kind / model
                if file == CARD and VERSION_ID.fullmatch(holder) and not (folder / holder).exists():
                    self._copy_version(f"{kind}/{model}", holder, sizes)
                    num_changed += 1
                elif holder in list(Alias) and _NUMBER.fullmatch(file):
                    alias = AliasFile(folder, holder)
                    changes[alias] = max(changes.get(alias, 0), int(file))
            num_changed += sum(self._copy_alias(alias, number) for alias, number in changes.items())
            (self.folder / _STAMP).touch()
            return num_changed

    def pull_alias(self, file: AliasFile) -> int:
        """Copies an alias's file, and returns how often it was changed.

        Raises:
            ModelError: As `pull`.
        """
        with self._failures():
            files, _ = self._files(self._relative(file))
            number = max((int(name[-8:]) for name in files if _NUMBER.fullmatch(name.rpartition("/")[2])), default=0)
            if number:
                self._copy_alias(file, number)
            return number

    def add_version(self, kind: str, name: str, version: str, files: Mapping[str, bytes]) -> None:
        """Stores a version, the same again if it is there.

        Raises:
            ModelError: If the storage does not take it.
        """
        with self._failures():
            for file in (WEIGHTS, CARD):
                self._create(f"{kind}/{name}/{version}/{file}", files[file])

    def add_alias(self, file: AliasFile, number: int, lines: str) -> bool:
        """Stores an alias's file as it is after a change.

        Args:
            file: The alias's file.
            number: Of the change, 1 for the first.
            lines: All of the file.

        Returns:
            False if there is a change of that number already.

        Raises:
            ModelError: If the storage does not take it.
        """
        with self._failures():
            return self._create(f"{self._relative(file)}/{number:08}", lines.encode())

    def _copy_version(self, model: str, version: str, sizes: Mapping[str, int]) -> None:
        names = {file: f"{model}/{version}/{file}" for file in (WEIGHTS, CARD)}
        for file, name in names.items():
            if sizes.get(name, 0) > MAX_BYTES[file]:
                source = f"{self.address}/{name}"
                raise ModelError(f"must be at most {MAX_BYTES[file]:,} bytes, got {sizes[name]:,}", source=source)
        store_version(self.folder / model, version, {file: self._read(name) for file, name in names.items()})
        published_s = self._changed_s(names[CARD])
        os.utime(self.folder / model / version / CARD, (published_s, published_s))

    def _copy_alias(self, file: AliasFile, number: int) -> bool:
        """Copies an alias's file after a change; every change adds a line, so that their number tells the latest."""
        if file.num_lines() == number:
            return False
        lines = self._read(f"{self._relative(file)}/{number:08}")
        if file.path.is_file() and file.path.read_bytes() == lines:  # one that was damaged begins with fewer lines
            return False
        atomic_write(file.path, lines)
        return True

    def _relative(self, file: AliasFile) -> str:
        return file.path.relative_to(self.folder).as_posix()

    def _files(self, below: str = "") -> tuple[dict[str, int], str]:
        """Sizes of all objects by their names in the storage, and the name of the address there."""
        storage, root = self._open()
        storage.invalidate_cache()
        found = storage.find(f"{root}/{below}" if below else root, detail=True)
        return {name: int(item["size"] or 0) for name, item in found.items()}, root

    def _read(self, name: str) -> bytes:
        storage, root = self._open()
        data: bytes = storage.cat_file(f"{root}/{name}")
        return data

    def _changed_s(self, name: str) -> float:
        storage, root = self._open()
        return float(storage.modified(f"{root}/{name}").timestamp())

    def _create(self, name: str, data: bytes) -> bool:
        """Stores an object if there is none of that name; returns whether there was none."""
        storage, root = self._open()
        try:
            storage.pipe_file(f"{root}/{name}", data, mode="create")
        except FileExistsError:
            return False
        except OSError as error:
            if "PreconditionFailed" in str(error) or "pre-condition" in str(error).lower():
                return False
            raise
        return True

    def _open(self) -> tuple[Any, str]:
        storage, root = fsspec.core.url_to_fs(self.address)
        return storage, root.rstrip("/")

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Says what fails as a ModelError: every storage has exceptions of its own."""
        try:
            yield
        except ModelError:
            raise
        except ImportError as error:
            raise ModelError(f"needs a package: {shortened(str(error), 120)}", source=self.address) from error
        except FormatError as error:
            raise ModelError(error.message, source=error.source) from error
        except Exception as error:
            reason = shortened(str(error) or type(error).__name__, 200).splitlines()[0]
            raise ModelError(f"does not answer as it should: {reason}", source=self.address) from error
