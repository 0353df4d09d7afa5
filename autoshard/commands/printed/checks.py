"""What is installed (`autoshard.doctor/1`): what `autoshard doctor --json` prints."""

from __future__ import annotations

from typing import Any, Final

from autoshard.formats.documents.document import Document
from autoshard.formats.documents.kinds import (
    ANY_TEXT,
    TEXT,
    Field,
    list_of,
    optional,
    or_null,
    record,
    whole_number,
)

_PACKAGE: Final = record(
    dict,
    Field("name", TEXT, "Name of the package, or of those of which one is enough."),
    Field("version", or_null(TEXT), "Installed version; null where it is missing."),
    Field("needed_by", ANY_TEXT, "What needs it."),
    Field("install", ANY_TEXT, "How to install it."),
    parts=dict,
)
_DEVICE: Final = record(
    dict,
    Field("key", TEXT, "Key of the device, such as cpu."),
    Field("name", ANY_TEXT, "Full name."),
    Field("cores", or_null(whole_number()), "Cores that this process may use; null for a GPU."),
    Field("memory_bytes", whole_number(), "Its memory."),
    parts=dict,
)
_MODEL: Final = "Name of the model; null where nothing was trained."
_MODELS: Final = record(
    dict,
    Field("device", TEXT, "Key of the device."),
    optional("kernel", or_null(TEXT), f"Kernels. {_MODEL}"),
    optional("communication", or_null(TEXT), f"Collectives. {_MODEL}"),
    optional("dense", or_null(TEXT), f"Dense layers. {_MODEL}"),
    optional("step", or_null(TEXT), f"Steps. {_MODEL}"),
    optional("error", ANY_TEXT, "Why models cannot be read, instead of them."),
    parts=dict,
)
DOCTOR: Final[Document[dict[str, Any]]] = Document(
    name="doctor",
    meaning="What `autoshard doctor --json` prints: what is installed, and what is missing.",
    make=dict,
    fields=lambda _: (
        Field("autoshard", TEXT, "Version of autoshard."),
        Field("python", TEXT, "Version of Python."),
        Field("platform", ANY_TEXT, "System."),
        Field("packages", list_of(_PACKAGE), "Packages, there or missing."),
        Field("devices", list_of(_DEVICE), "The processor, then the GPUs."),
        Field("models", list_of(_MODELS), "What prices each kind of device."),
        Field("missing", list_of(ANY_TEXT, 0), "What is missing or does not fit together, a sentence each."),
    ),
    parts=dict,
)
