"""The objects of a registry: files that are made once and never change, in a folder or on object storage.

    <kind>/<name>/<id>/weights.safetensors
    <kind>/<name>/<id>/card.json             made last: a version without one is not complete
    <kind>/<name>/<id>/worse-than-<id>.txt   a comparison in which it was worse; also `worse-than-baselines.txt`
    <kind>/<name>/production/00000003        all lines of the alias's history after its third change

Of those who make the same object at the same time one is first, and the others find it there: so aliases are changed
without locks. Of object storage each machine keeps a copy, a folder of the same form, which may lack objects and is
never wrong. Models are read from the copy, so that what is there is served while the storage does not answer.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoshard.core.choices import Alias
from autoshard.core.errors import FormatError, ModelError
from autoshard.core.quoting import shortened
from autoshard.core.topology import DEVICE_KEY
from autoshard.formats.files import atomic_create, remove_leftovers
from autoshard.formats.stores.remote_folders import address_of

VERSION_ID = re.compile(r"[0-9a-f]{16}")
WEIGHTS, CARD = "weights.safetensors", "card.json"
#: Objects are no larger; cards and weights that come with this package have 0.6 MB at most.
MAX_BYTES = {CARD: 1 << 22, WEIGHTS: 1 << 27}
_MAX_HISTORY_BYTES = 1 << 26
#: A comparison in which a version was worse than another one, or than what needs no training.
BASELINES = "baselines"
WORSE_THAN = re.compile(rf"worse-than-([0-9a-f]{{16}}|{BASELINES})\.txt")
#: Age in seconds from which a copy is looked after before models are read from it.
MAX_AGE_S = 10.0
#: An alias's changes are counted in the names of its histories.
NUMBER = re.compile(r"[0-9]{8}")
_STAMP, _TRIED = ".pulled", ".tried"
#: Age from which what a writer left under a temporary name is a killed one's: no write takes that long.
_LEFTOVER_S = 3600.0


@dataclass(frozen=True, slots=True)
class RegistryObjects:
    """The objects in a folder, which may be the copy of those on object storage.

    Attributes:
        folder: The folder.
        address: Of which it is the copy, such as `s3://bucket/models`; credentials are where that storage's own tools
            look for them. None if the folder is all there is.
    """

    folder: Path
    address: str | None = None

    @classmethod
    def of(cls, folder: Path) -> RegistryObjects:
        """Those of a folder, which says itself what it is the copy of.

        Raises:
            ModelError: If the folder cannot be read.
        """
        with model_errors():
            return cls(folder, address_of(folder))

    def create(self, name: str, data: bytes) -> bool:
        """Makes an object, unless there is one of that name; the copy has it afterwards, too.

        Args:
            name: Path from the registry's root.
            data: All of it.

        Returns:
            Whether there was none.

        Raises:
            ModelError: If the folder cannot be written, or the storage does not take it.
        """
        if self.address is not None and not self._create_remotely(name, data):
            self.pull(name)
            return False
        path = self.folder / name
        with model_errors():
            is_new = atomic_create(path, data, staging=path.parents[1])
            remove_leftovers(path.parents[1], older_than_s=_LEFTOVER_S)
        return is_new or self.address is not None  # those who follow the storage may have copied it meanwhile

    @property
    def age_s(self) -> float | None:
        """Seconds since the copy was brought up to date; None if it never was, or the folder is no copy."""
        return None if self.address is None else self._since_s(_STAMP)

    def _since_s(self, stamp: str) -> float | None:
        try:
            return max(time.time() - (self.folder / stamp).stat().st_mtime, 0.0)
        except FileNotFoundError:
            return None

    def refresh(self) -> None:
        """Brings a copy up to date if nobody tried for `MAX_AGE_S`; what fails is logged, and the copy used as it is.

        Requests look here, too: while the storage does not answer, one of them waits for it every `MAX_AGE_S`.

        Raises:
            ModelError: If there is no copy yet, and the storage does not answer.
        """
        if self.address is None:
            return
        age_s, tried_s = self.age_s, self._since_s(_TRIED)
        if age_s is not None and tried_s is not None and tried_s < MAX_AGE_S:
            return
        try:
            self.pull()
        except ModelError as error:
            if age_s is None:
                raise
            import structlog

            structlog.get_logger().warning(
                "the registry does not answer; its copy is used", reason=str(error), age_s=round(age_s)
            )

    def pull(self, below: str = "") -> int:
        """Copies what the copy lacks: complete versions, and each alias's latest history.

        Args:
            below: Name of an object or a folder; all if empty.

        Returns:
            How many versions and histories were copied; 0 if the folder is no copy.

        Raises:
            ModelError: If the storage does not answer, or the copy cannot be written.
        """
        if self.address is None:
            return 0
        with self._storage() as (storage, root):
            if not below:
                (self.folder / _TRIED).touch()
            storage.invalidate_cache()
            found = storage.find(f"{root}/{below}".rstrip("/"), detail=True)
            sizes = {name[len(root) + 1 :]: int(item["size"] or 0) for name, item in found.items()}
            missing = [name for name in _wanted(sizes) if not (self.folder / name).exists()]
            for name in missing:
                self._copy(storage, root, name, sizes[name])
            if not below:
                (self.folder / _STAMP).touch()
            return sum(not name.endswith((WEIGHTS, ".txt")) for name in missing)

    def _copy(self, storage: Any, root: str, name: str, size: int) -> None:
        file = name.rpartition("/")[2]
        if size > (limit := MAX_BYTES.get(file, _MAX_HISTORY_BYTES)):
            raise ModelError(f"must be at most {limit:,} bytes, got {size:,}", source=f"{self.address}/{name}")
        path = self.folder / name
        atomic_create(path, storage.cat_file(f"{root}/{name}"), staging=path.parents[1])
        if file == CARD:
            published_s = storage.modified(f"{root}/{name}").timestamp()
            os.utime(path, (published_s, published_s))

    def _create_remotely(self, name: str, data: bytes) -> bool:
        with self._storage() as (storage, root):
            try:
                storage.pipe_file(f"{root}/{name}", data, mode="create")
            except FileExistsError:
                return False
            except OSError as error:
                if "PreconditionFailed" in str(error) or "pre-condition" in str(error).lower():
                    return False
                raise
            return True

    @contextmanager
    def _storage(self) -> Iterator[tuple[Any, str]]:
        """The storage, and the name of the address there; what fails is a ModelError: every storage has its own."""
        try:
            import fsspec

            storage, root = fsspec.core.url_to_fs(self.address)
            yield storage, root.rstrip("/")
        except ModelError:
            raise
        except FormatError as error:
            raise ModelError(error.message, source=error.source) from error
        except ImportError as error:
            raise ModelError(f"needs a package: {shortened(str(error), 120)}", source=self.address) from error
        except Exception as error:
            reason = shortened(str(error) or type(error).__name__, 200).splitlines()[0]
            raise ModelError(f"does not answer as it should: {reason}", source=self.address) from error


def _wanted(names: Iterable[str]) -> list[str]:
    """Objects that a copy needs: all of versions, and the latest history of each alias, in the order they were made in.

    Args:
        names: Paths from the registry's root of all objects, which may be others' too.
    """
    steps: dict[str, dict[str, str]] = {WEIGHTS: {}, CARD: {}, "": {}}
    for name in sorted(names):
        folder, _, file = name.rpartition("/")
        *model, holder = folder.split("/")
        if len(model) != 2 or not all(DEVICE_KEY.fullmatch(part) for part in model):
            continue
        if VERSION_ID.fullmatch(holder) and file in MAX_BYTES:
            steps[file][name] = name
        elif VERSION_ID.fullmatch(holder) and WORSE_THAN.fullmatch(file):
            steps[""][name] = name
        elif holder in list(Alias) and NUMBER.fullmatch(file):
            steps[""][folder] = name
    return [name for step in steps.values() for name in step.values()]


@contextmanager
def model_errors() -> Iterator[None]:
    """Says faults of files as ModelError."""
    try:
        yield
    except FormatError as error:
        raise ModelError(error.message, source=error.source) from error
