"""The registry of trained models: folders of weights and a card, addressed by their content.

    ROOT/<kind>/<name>/<id>/weights.safetensors
    ROOT/<kind>/<name>/<id>/card.json
    ROOT/<kind>/<name>/production            text file: the id that is used by default

A version's id is a digest of its card, and the card holds the digest of the weights, so versions never change
and damage shows when it is loaded. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from numpy.typing import NDArray
from safetensors.numpy import load, save

from autoshard.core.errors import ModelError

REGISTRY_VARIABLE = "AUTOSHARD_REGISTRY"
PRODUCTION = "production"
_WEIGHTS, _CARD = "weights.safetensors", "card.json"
_WEIGHTS_DIGEST = "weights_sha256"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_ID = re.compile(r"[0-9a-f]{16}")

Tensors = Mapping[str, NDArray[Any]]


def default_registry() -> Path:
    """The folder named by AUTOSHARD_REGISTRY, else `~/.local/share/autoshard/registry`."""
    named = os.environ.get(REGISTRY_VARIABLE)
    return Path(named) if named else Path.home() / ".local" / "share" / "autoshard" / "registry"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredModel:
    """A version as loaded: digests checked, contents not interpreted."""

    id: str
    tensors: dict[str, NDArray[Any]]
    card: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A version as listed."""

    kind: str
    name: str
    id: str
    is_production: bool
    published_s: float
    """Seconds since the epoch."""
    card: dict[str, Any]


class Registry:
    """Trained models under one folder, which is made when something is first published.

    Args:
        root: The folder; the default registry when left out.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or default_registry()

    def publish(self, kind: str, name: str, tensors: Tensors, card: Mapping[str, Any]) -> str:
        """Stores a version and makes it the production version; readers see all of it or nothing.

        Args:
            kind: What the model is for: `cost`, `policy`.
            name: Which one of its kind, such as the device.
            tensors: Weights by name.
            card: JSON object that says what the weights are.

        Returns:
            The version's id: the same content has the same id, and is stored once.

        Raises:
            ModelError: If a name is not a plain one, the card is not JSON, or the folder cannot be written.
        """
        folder = self._folder(kind, name)
        weights = save({key: np.ascontiguousarray(value) for key, value in tensors.items()})
        text = _canonical({**card, _WEIGHTS_DIGEST: hashlib.sha256(weights).hexdigest()})
        version = _id_of(text)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            staging = Path(tempfile.mkdtemp(prefix=".publish-", dir=folder))
            try:
                (staging / _WEIGHTS).write_bytes(weights)
                (staging / _CARD).write_bytes(text)
                staging.chmod(0o755)
                if not (folder / version).exists():
                    staging.rename(folder / version)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
            alias = folder / f".{PRODUCTION}-{version}-{os.getpid()}"
            alias.write_text(version + "\n", encoding="utf-8")
            alias.replace(folder / PRODUCTION)
        except OSError as error:
            raise ModelError(f"cannot publish a model: {error.strerror}", source=str(folder)) from error
        return version

    def load(self, kind: str, name: str, version: str = PRODUCTION) -> StoredModel:
        """Loads a version by its id, or the production version.

        Raises:
            ModelError: If it is missing or damaged; the text names the file.
        """
        folder = self._folder(kind, name)
        identity = self.production_id(kind, name) if version == PRODUCTION else version
        if identity is None:
            raise ModelError(f"no {kind} model named {name} has been published", source=str(folder))
        if not _ID.fullmatch(identity):
            raise ModelError(
                f"a version is {PRODUCTION} or 16 hexadecimal digits, got {identity!r}", source=str(folder)
            )
        card = self._card(folder / identity / _CARD)
        path = folder / identity / _WEIGHTS
        weights = _read(path)
        if hashlib.sha256(weights).hexdigest() != card[_WEIGHTS_DIGEST]:
            raise ModelError("damaged: its digest is not the one in the card", source=str(path))
        try:
            tensors = load(weights)
        except safetensors.SafetensorError as error:
            raise ModelError(f"not a safetensors file: {error}", source=str(path)) from error
        return StoredModel(id=identity, tensors=tensors, card=card)

    def production_id(self, kind: str, name: str) -> str | None:
        """Id of the production version; None if nothing was published under the name."""
        path = self._folder(kind, name) / PRODUCTION
        if not path.exists():
            return None
        return _read(path).decode("utf-8", errors="replace").strip()

    def list(self) -> tuple[Version, ...]:
        """All versions by kind, name and time; empty if the folder is not there.

        Raises:
            ModelError: If a card is damaged; the text names the file.
        """
        versions = []
        for path in self.root.glob(f"*/*/*/{_CARD}"):
            identity, name, kind = (path.parents[level].name for level in range(3))
            if not _ID.fullmatch(identity):
                continue
            versions.append(
                Version(
                    kind=kind,
                    name=name,
                    id=identity,
                    is_production=self.production_id(kind, name) == identity,
                    published_s=path.stat().st_mtime,
                    card=self._card(path),
                )
            )
        return tuple(sorted(versions, key=lambda item: (item.kind, item.name, item.published_s, item.id)))

    def _folder(self, kind: str, name: str) -> Path:
        for label, value in (("kind", kind), ("name", name)):
            if not _NAME.fullmatch(value):
                raise ModelError(f"must be letters, digits, '.', '_' or '-', got {value!r}", field=label)
        return self.root / kind / name

    def _card(self, path: Path) -> dict[str, Any]:
        text = _read(path)
        if _id_of(text) != path.parent.name:
            raise ModelError("damaged: its digest is not the name of its folder", source=str(path))
        try:
            card = json.loads(text)
        except ValueError as error:
            raise ModelError(f"not JSON: {error}", source=str(path)) from error
        if not isinstance(card, dict) or _WEIGHTS_DIGEST not in card:
            raise ModelError(f"needs a field {_WEIGHTS_DIGEST}", source=str(path))
        return card


def _canonical(card: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(card, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ModelError(f"the card is not JSON: {error}", field="card") from error
    return text.encode()


def _id_of(card_text: bytes) -> str:
    return hashlib.sha256(card_text).hexdigest()[:16]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror}", source=str(path)) from error
