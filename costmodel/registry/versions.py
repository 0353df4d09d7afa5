"""The registry of trained models: folders of weights and a card, addressed by their content.

    ROOT/<kind>/<name>/<id>/weights.safetensors
    ROOT/<kind>/<name>/<id>/card.json
    ROOT/<kind>/<name>/<id>/worse-than-<id>.txt   a comparison in which it was worse, if there was one
    ROOT/<kind>/<name>/production/<number>   the versions that were used by default, the current one last
    ROOT/<kind>/<name>/candidate/<number>    as `production`, of a version that is tried out

A version's id is a digest of its card, and the card holds the digest of the weights, so versions never change
and damage shows when it is loaded. Nothing is unpickled.

Models that come with this package are a registry, too, in its folder `shipped`: models of kernels, collectives, dense
layers and steps, and policies beside the cost models that they were trained on. `find_registry` turns to it where the
user's own has nothing, and an alias of the user's own may name a shipped version.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors
from numpy.typing import NDArray
from safetensors.numpy import load, save

from autoshard.core.errors import AutoshardError, FormatError, ModelError
from autoshard.core.machine import device_family
from autoshard.core.quoting import shown
from autoshard.core.topology import DEVICE_KEY
from autoshard.formats.documents.fields import check_writable
from autoshard.formats.documents.json_document import parse_json
from autoshard.formats.documents.machine_json import MACHINE
from autoshard.formats.files import read_bytes
from autoshard.formats.stores.remote_folders import folder_of
from autoshard.hardware import is_of_device
from costmodel.registry.aliases import PRODUCTION, Action, Alias, AliasLog, is_of_this_host
from costmodel.registry.objects import CARD, MAX_BYTES, VERSION_ID, WEIGHTS, RegistryObjects, model_errors

if TYPE_CHECKING:
    from autoshard.api import AliasChange

__all__ = [
    "PRODUCTION",
    "REGISTRY_VARIABLE",
    "SHIPPED_VARIABLE",
    "Registry",
    "StoredModel",
    "Version",
    "default_registry",
    "find_model",
    "find_registry",
    "models_in_use",
    "shipped_models",
]

REGISTRY_VARIABLE = "AUTOSHARD_REGISTRY"
SHIPPED_VARIABLE = "AUTOSHARD_SHIPPED_MODELS"
_WEIGHTS_DIGEST = "weights_sha256"
_MAX_NOTE_BYTES = 1 << 16

Tensors = Mapping[str, NDArray[Any]]


class AliasChangedError(ModelError):
    """An alias that names another version than the one that was to be replaced."""


def default_registry() -> Path:
    """The folder or address named by AUTOSHARD_REGISTRY, else `~/.local/share/autoshard/registry`."""
    named = os.environ.get(REGISTRY_VARIABLE)
    return folder_of(named) if named else Path.home() / ".local" / "share" / "autoshard" / "registry"


def shipped_models() -> Registry:
    """The models of all kinds that come with this package, or those in the folder named by AUTOSHARD_SHIPPED_MODELS."""
    named = os.environ.get(SHIPPED_VARIABLE)
    return Registry(Path(named) if named else Path(__file__).parents[1] / "shipped")


def models_in_use(root: Path | None = None) -> tuple[tuple[str, str, Registry], ...]:
    """Kind and name of every production model, and the registry that `find_registry` has it from.

    Args:
        root: Folder of the user's registry; the default one if None.

    Raises:
        ModelError: If a card or an alias is damaged.
    """
    listed = [version for models in (Registry(root), shipped_models()) for version in models.list()]
    names = sorted({(version.kind, version.name) for version in listed})
    found = ((kind, name, find_registry(kind, name, root)) for kind, name in names)
    return tuple((kind, name, models) for kind, name, models in found if models is not None)


def find_registry(kind: str, name: str, root: Path | None = None) -> Registry | None:
    """The registry to load a model from: the user's, or that of shipped models if it has no production version.

    Args:
        kind: What the model is for: `cost`, `policy`.
        name: Which one of its kind, such as the device.
        root: Folder of the user's registry; the default one if None.

    Returns:
        None if neither has one.

    Raises:
        ModelError: If an alias is damaged.
    """
    return next(
        (models for models in (Registry(root), shipped_models()) if models.production_id(kind, name) is not None), None
    )


def find_model(kind: str, device: str, root: Path | None = None) -> tuple[Registry, str, str] | None:
    """The registry with the model of a device, its name there (the device, else its family), and its version.

    Args:
        kind: What the model is for: `cost`, `policy`.
        device: Key of the device, such as `cpu` or `cpu:amd-25-17-avx512-1m-l2`.
        root: Folder of the user's registry; the default one if None.

    Raises:
        ModelError: If an alias is damaged.
    """
    for name in dict.fromkeys((device, device_family(device))):
        for models in (Registry(root), shipped_models()):
            version = models.production_id(kind, name, device)
            if version is not None:
                return models, name, version
    return None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredModel:
    """A version as loaded: digests checked, contents not interpreted."""

    id: str
    tensors: dict[str, NDArray[Any]]
    card: dict[str, Any]
    source: str
    """Its folder, for error messages."""
    is_shipped: bool = False

    @property
    def label(self) -> str:
        """What answers name it by: its id, and whether it came with this package."""
        return f"{self.id} (shipped)" if self.is_shipped else self.id


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A version as listed."""

    kind: str
    name: str
    id: str
    aliases: tuple[str, ...]
    published_s: float
    """Seconds since the epoch."""
    card: dict[str, Any]


class Registry:
    """Trained models under one folder, which is made when something is first published.

    Args:
        root: The folder, which may be the copy of a registry on object storage; the default registry when left out.
        author: Who is named in the history of aliases; user and host when left out.
        request: Name of the request that asks for a change of an alias, as for `AliasLog.point`.

    Raises:
        ModelError: If it is on object storage that does not answer, and there is no copy yet.
    """

    def __init__(self, root: Path | None = None, author: str | None = None, request: str = "") -> None:
        self.root = root or default_registry()
        self._author, self._request = author, request
        self._objects = RegistryObjects.of(self.root)
        self._objects.refresh()

    @property
    def place(self) -> str:
        """Where it is: its folder, or the address of which that is a copy."""
        return self._objects.address or str(self.root)

    @property
    def is_shipped(self) -> bool:
        """Whether it is that of the models that come with this package."""
        return self.root.resolve() == shipped_models().root.resolve()

    def publish(
        self, kind: str, name: str, tensors: Tensors, card: Mapping[str, Any], *, alias: str | None = PRODUCTION
    ) -> str:
        """Stores a version and gives it an alias; readers see all of it or nothing.

        Args:
            kind: What the model is for: `cost`, `policy`.
            name: Which one of its kind, such as the device.
            tensors: Weights by name.
            card: JSON object that says what the weights are; its `device`, if it has one, must be `name`.
            alias: What names it from now on; None for nothing.

        Returns:
            The version's id: the same content has the same id, and is stored once.

        Raises:
            ModelError: If a name is not a plain one, the card is not JSON or of another device, or the folder cannot
                be written.
        """
        model = _model(kind, name)
        log = self._log(kind, name, alias) if alias is not None else None
        folder = self.root / model
        _check_device(card, name, str(folder))
        weights = save({key: np.ascontiguousarray(value) for key, value in tensors.items()})
        text = _canonical({**card, _WEIGHTS_DIGEST: hashlib.sha256(weights).hexdigest()})
        files = {WEIGHTS: weights, CARD: text}
        for file, content in files.items():
            if len(content) > MAX_BYTES[file]:
                raise ModelError(f"must be at most {MAX_BYTES[file]:,} bytes, got {len(content):,}", source=str(folder))
        version = _id_of(text)
        for file, content in files.items():
            self._objects.create(f"{model}/{version}/{file}", content)
        if log is not None:
            log.point(version, Action.PUBLISH, self._author)
        return version

    def load(self, kind: str, name: str, version: str = PRODUCTION) -> StoredModel:
        """Loads a version by its id or alias.

        Raises:
            ModelError: If it is missing, damaged, or of another device; the text names the file.
        """
        folder = self.root / _model(kind, name)
        if version == PRODUCTION:
            identity = self.production_id(kind, name)
        else:
            identity = self._log(kind, name, version).current() if version in list(Alias) else version
        if identity is None:
            missing = "has been published" if version == PRODUCTION else f"is the {version}"
            raise ModelError(f"no {kind} model named {name} {missing}", source=str(folder))
        if not VERSION_ID.fullmatch(identity):
            raise ModelError(
                f"a version is {', '.join(Alias)} or 16 hexadecimal digits, got {shown(identity)}", source=str(folder)
            )
        home = self._home(kind, name, identity)
        folder = home.root / kind / name / identity
        card = home._card(folder / CARD)
        _check_device(card, name, str(folder / CARD))
        path = folder / WEIGHTS
        weights = _read(path, MAX_BYTES[WEIGHTS])
        if hashlib.sha256(weights).hexdigest() != card[_WEIGHTS_DIGEST]:
            raise ModelError("damaged: its digest is not the one in the card", source=str(path))
        try:
            tensors = load(weights)
        except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:  # the others: of its dtypes
            raise ModelError(f"not a safetensors file: {error}", source=str(path)) from error
        return StoredModel(id=identity, tensors=tensors, card=card, source=str(folder), is_shipped=home.is_shipped)

    def _home(self, kind: str, name: str, version: str) -> Registry:
        """The registry that holds a version: this one, or that of shipped models."""
        shipped = shipped_models()
        is_here, is_shipped = ((root / kind / name / version / CARD).exists() for root in (self.root, shipped.root))
        return shipped if is_shipped and not is_here else self

    def holds(self, kind: str, name: str, version: str) -> bool:
        """Whether a version by its id can be loaded from here, one that comes with this package included."""
        return (self._home(kind, name, version).root / kind / name / version / CARD).exists()

    def production_id(self, kind: str, name: str, device: str | None = None) -> str | None:
        """Id of the production version for a machine; None if there is none under the name.

        What was measured on one machine, and was made the production version there, does not price for another one that
        shares the registry: for that, it is the last one before that was measured on a machine like it, was made on its
        host, or was promoted by hand. If none was, it is the last of all.

        Args:
            kind: What the model is for.
            name: Which one of its kind, such as the device.
            device: Key of the device that it is for, see `is_of_device`; the name when left out.

        Raises:
            ModelError: If the alias is damaged.
        """
        entries = self._log(kind, name, PRODUCTION).entries()
        for entry in reversed(entries):
            if entry.action != Action.PUBLISH or self._is_for(entry, kind, name, device or name):
                return entry.id
        return entries[-1].id if entries else None

    def _is_for(self, entry: AliasChange, kind: str, name: str, device: str) -> bool:
        """Whether a version that was published is for a device: by where it was made, and what it was measured on."""
        if device == device_family(device) and is_of_this_host(entry):
            return True
        home = self._home(kind, name, entry.id)
        try:
            described = home._card(home.root / kind / name / entry.id / CARD).get("measured_on")
            return described is None or is_of_device(MACHINE.read(described, "measured_on"), device)
        except AutoshardError:  # cannot be read
            return False

    def history(self, kind: str, name: str, alias: str = PRODUCTION) -> tuple[AliasChange, ...]:
        """The versions that an alias has named, the current one last.

        Raises:
            ModelError: If there is no such alias, or it is damaged.
        """
        return self._log(kind, name, alias).entries()

    def promote(
        self,
        kind: str,
        name: str,
        version: str,
        alias: str = PRODUCTION,
        *,
        seen: tuple[AliasChange, ...] | None = None,
    ) -> str:
        """Gives a version an alias, after loading it whole.

        Args:
            kind: What the model is for.
            name: Which one of its kind.
            version: Its id, which may be that of a shipped version, or another alias of it.
            alias: What names it from now on.
            seen: As for `AliasLog.point`.

        Returns:
            The version's id.

        Raises:
            AliasChangedError: If others than the seen entries are there by now.
            ModelError: If it is missing or damaged, or the registry cannot be written; the alias stays as it was.
        """
        log = self._log(kind, name, alias)
        identity = self.load(kind, name, version).id
        if not log.point(identity, Action.PROMOTE, self._author, seen=seen, request=self._request):
            raise _changed(log)
        return identity

    def note_worse(self, kind: str, name: str, version: str, than: str, reason: str) -> None:
        """Notes that a version was worse than another one when it was trained; a note that is there stays.

        Args:
            kind: What the model is for.
            name: Which one of its kind.
            version: Its id.
            than: The other one's id, or `BASELINES` for what needs no training.
            reason: The comparison, in words.

        Raises:
            ModelError: If the registry cannot be written.
        """
        self._objects.create(f"{_model(kind, name)}/{version}/worse-than-{than}.txt", reason.encode())

    def worse_than(self, kind: str, name: str, version: str, than: str) -> str | None:
        """The comparison in which a version was worse, as `note_worse` was told of it; None if there is no such note.

        Raises:
            ModelError: If the note cannot be read.
        """
        path = self.root / _model(kind, name) / version / f"worse-than-{than}.txt"
        return _read(path, _MAX_NOTE_BYTES).decode(errors="replace") if path.exists() else None

    def replace_production(self, kind: str, name: str, version: str, seen: tuple[AliasChange, ...]) -> bool:
        """Makes a version that was published here the production one, if that is still the one it was compared with.

        Args:
            kind: What the model is for.
            name: Which one of its kind.
            version: Its id.
            seen: As for `AliasLog.point`.

        Returns:
            False if the production version was changed since.

        Raises:
            ModelError: If the registry cannot be written.
        """
        return self._log(kind, name, PRODUCTION).point(version, Action.PUBLISH, self._author, seen=seen)

    def roll_back(
        self, kind: str, name: str, alias: str = PRODUCTION, *, seen: tuple[AliasChange, ...] | None = None
    ) -> str:
        """Gives an alias back to the version that had it before, and returns its id.

        Before the first production version, the shipped one was in use, if there is one.

        Args:
            kind: What the model is for.
            name: Which one of its kind.
            alias: What names the version from now on.
            seen: As for `AliasLog.point`.

        Raises:
            AliasChangedError: If others than the seen entries are there by now.
            ModelError: If there is none, or the registry cannot be written.
        """
        shipped, log = shipped_models(), self._log(kind, name, alias)
        first = shipped.production_id(kind, name) if alias == PRODUCTION and not self.is_shipped else None
        identity = log.roll_back(self._author, first=first, seen=seen, request=self._request)
        if identity is None:
            raise _changed(log)
        return identity

    def has_changed(self, kind: str, name: str, alias: str) -> bool:
        """Whether the request that this registry was opened for has changed an alias already.

        Raises:
            ModelError: If there is no such alias.
        """
        return self._log(kind, name, alias).was_changed_by(self._request)

    def pull(self, kind: str, name: str) -> None:
        """Brings the aliases of a model up to date with what other machines have changed until now.

        Raises:
            ModelError: If the registry is on object storage that does not answer.
        """
        for alias in Alias:
            self._objects.pull(f"{_model(kind, name)}/{alias}")

    def list(self) -> tuple[Version, ...]:
        """All versions by kind, name and time; empty if the folder is not there.

        Raises:
            ModelError: If a card or an alias is damaged; the text names the file.
        """
        versions = []
        for folder in sorted(self.root.glob("*/*")):
            cards = [path for path in folder.glob(f"*/{CARD}") if VERSION_ID.fullmatch(path.parent.name)]
            model = f"{folder.parent.name}/{folder.name}"
            logs = {alias: AliasLog(self._objects, model, alias).entries() for alias in Alias} if cards else {}
            for path in cards:
                identity = path.parent.name
                versions.append(
                    Version(
                        kind=folder.parent.name,
                        name=folder.name,
                        id=identity,
                        aliases=tuple(alias for alias, log in logs.items() if log and log[-1].id == identity),
                        published_s=path.stat().st_mtime,
                        card=self._card(path),
                    )
                )
        return tuple(sorted(versions, key=lambda item: (item.kind, item.name, item.published_s, item.id)))

    def _log(self, kind: str, name: str, alias: str) -> AliasLog:
        return AliasLog(self._objects, _model(kind, name), alias)

    def _card(self, path: Path) -> dict[str, Any]:
        text = _read(path, MAX_BYTES[CARD])
        if _id_of(text) != path.parent.name:
            raise ModelError("damaged: its digest is not the name of its folder", source=str(path))
        try:
            card = parse_json(text)
            check_writable(card, "")
        except FormatError as error:
            raise ModelError(str(error), source=str(path)) from error
        if not isinstance(card, dict) or _WEIGHTS_DIGEST not in card:
            raise ModelError(f"needs a field {_WEIGHTS_DIGEST}", source=str(path))
        return card


def _changed(log: AliasLog) -> AliasChangedError:
    return AliasChangedError(
        f"the {log.alias} version was changed meanwhile", source=str(log.objects.folder / log.model)
    )


def _model(kind: str, name: str) -> str:
    """Path of a model's versions and aliases from the root.

    Raises:
        ModelError: If the kind or the name is not a plain one.
    """
    for label, value in (("kind", kind), ("name", name)):
        if not DEVICE_KEY.fullmatch(value):
            raise ModelError(
                "must be letters, digits, '.', '_' or '-', in one part or two with a colon between them, "
                f"got {shown(value)}",
                field=label,
            )
    return f"{kind}/{name}"


def _check_device(card: Mapping[str, Any], name: str, source: str) -> None:
    if card.get("device", name) != name:
        raise ModelError(
            f"was trained for {shown(card['device'])}, not for {shown(name)}", field="device", source=source
        )


def _canonical(card: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(card, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ModelError(f"the card is not JSON: {error}", field="card") from error
    return text.encode()


def _id_of(card_text: bytes) -> str:
    return hashlib.sha256(card_text).hexdigest()[:16]


def _read(path: Path, max_bytes: int) -> bytes:
    with model_errors():
        return read_bytes(path, max_bytes=max_bytes)
