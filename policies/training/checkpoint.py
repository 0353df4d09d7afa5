"""Checkpoints of a training: a JSON file, and the safetensors file that it names.

    FOLDER/checkpoint.json
    FOLDER/tensors-<digest>.safetensors

The JSON file is replaced last and in one step, so a folder always holds a whole checkpoint, or none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
from numpy.typing import NDArray
from safetensors.numpy import load, save

from autoshard.core.errors import FormatError
from autoshard.formats.documents.json_document import read_json
from autoshard.formats.files import atomic_write, read_bytes

CHECKPOINT_SCHEMA = "autoshard.policy-training/1"
_DESCRIPTION = "checkpoint.json"
_MAX_TENSOR_BYTES = 1 << 28


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyCheckpoint:
    """What a training was in the middle of.

    Attributes:
        state: JSON object.
        tensors: Arrays by name.
    """

    state: Mapping[str, Any]
    tensors: Mapping[str, NDArray[Any]]

    def save(self, folder: Path) -> None:
        """Writes it, and removes the one that it replaces.

        Raises:
            FormatError: If the folder cannot be written.
        """
        data = save(dict(self.tensors))
        digest = hashlib.sha256(data).hexdigest()
        name = f"tensors-{digest[:16]}.safetensors"
        document = {"schema": CHECKPOINT_SCHEMA, "tensors": name, "sha256": digest, "state": self.state}
        atomic_write(folder / name, data)
        atomic_write(folder / _DESCRIPTION, json.dumps(document, indent=1, allow_nan=False) + "\n")
        for old in folder.glob("tensors-*.safetensors"):
            if old.name != name:
                old.unlink(missing_ok=True)

    @classmethod
    def load(cls, folder: Path) -> PolicyCheckpoint | None:
        """The folder's checkpoint; None if it has none.

        Raises:
            FormatError: If it cannot be read, is damaged, or of another schema; the text names the file.
        """
        path = folder / _DESCRIPTION
        if not path.exists():
            return None
        document = read_json(path)
        if not isinstance(document, dict) or document.get("schema") != CHECKPOINT_SCHEMA:
            raise FormatError(f"must be {CHECKPOINT_SCHEMA}", field="schema", source=str(path))
        if not isinstance(document.get("state"), dict):
            raise FormatError("must be an object", field="state", source=str(path))
        tensors = folder / Path(str(document.get("tensors"))).name
        data = read_bytes(tensors, max_bytes=_MAX_TENSOR_BYTES)
        if hashlib.sha256(data).hexdigest() != document.get("sha256"):
            raise FormatError(f"damaged: its digest is not the one in {_DESCRIPTION}", source=str(tensors))
        try:
            return cls(state=document["state"], tensors=load(data))
        except safetensors.SafetensorError as error:
            raise FormatError(f"not a safetensors file: {error}", source=str(tensors)) from error
