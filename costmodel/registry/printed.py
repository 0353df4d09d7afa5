"""What `autoshard models` and trainings print with `--json`: documents with published schemas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from autoshard.formats.documents.document import Document
from autoshard.formats.documents.kinds import (
    ANY_OBJECT,
    ANY_TEXT,
    FLAG,
    TEXT,
    Field,
    Kind,
    list_of,
    number_in,
    one_of,
    or_null,
    record,
    text_of,
    whole_number,
)
from costmodel.registry.aliases import VERSION_ID, Action, Alias

Printed = Document[Mapping[str, Any]]

_KIND: Final = Field("kind", TEXT, "What the model is for, such as `cost`.")
_NAME: Final = Field("name", TEXT, "Key of the device.")
_ID: Final = text_of(VERSION_ID.pattern)
_COMPARISON: Final = record(
    dict,
    Field("against", ANY_TEXT, "The version or planner that it is compared with."),
    Field("measure", ANY_TEXT, "What is compared, the lower the better."),
    Field("difference", number_in(-math.inf), "Mean of how much higher the new version's measure is, as a share."),
    Field("tolerance", number_in(), "Difference up to which it counts as not worse."),
    Field("num_pairs", whole_number(), "Samples or tasks."),
    Field("of", ANY_TEXT, "What these are."),
    Field("unit", ANY_TEXT, "Unit of difference and tolerance, times 100."),
    Field("worse", FLAG, "Whether the difference is above the tolerance."),
    parts=dict,
)
_CHANGES: Final = list_of(
    record(
        dict,
        Field("action", one_of(Action), "How the alias came to name the version."),
        Field("id", _ID, "The version that it named from then on."),
        Field("at", TEXT, "When, as ISO 8601, UTC."),
        Field("by", ANY_TEXT, "User and host."),
        parts=dict,
    ),
    0,
)
_PUBLISHED: Final = (
    _KIND,
    _NAME,
    Field("id", or_null(_ID), "Version in the registry; null if it was not published."),
    Field("alias", or_null(one_of(Alias)), "Alias that names it; null for none."),
    Field("promoted", FLAG, "Whether it is the production version."),
    Field("registry", or_null(ANY_TEXT), "Folder of the registry; null if it was not published."),
    Field("comparisons", list_of(_COMPARISON, 0), "What it was compared with."),
    Field("notes", list_of(ANY_TEXT, 0), "Why it was not compared with the production version."),
)
_LISTED: Final = (
    _KIND,
    _NAME,
    Field("id", _ID, "Version."),
    Field("production", FLAG, "Whether it is the production version."),
    Field("aliases", list_of(one_of(Alias), 0), "Its aliases."),
    Field("shipped", FLAG, "Whether it came with autoshard."),
    Field("used", FLAG, "Whether plans are priced with it, unless another version is asked for."),
    Field("published_at", TEXT, "When it was published, as ISO 8601, UTC."),
    Field("card", ANY_OBJECT, "Its card; see the page on model cards."),
)
_REGISTRY: Final = Field("registry", ANY_TEXT, "Folder of the registry.")


def trained_model(*fields: Field) -> Kind[Mapping[str, Any]]:
    """A model that was trained: what became of it, and some fields of its card."""
    return record(dict, *_PUBLISHED, *fields, parts=dict)


def trained_document(name: str, meaning: str, *fields: Field) -> Printed:
    """What a training of one model prints: what became of the model, and more fields."""
    return Document(name=name, meaning=meaning, make=dict, fields=lambda _: (*_PUBLISHED, *fields), parts=dict)


MODELS: Final[Printed] = Document(
    name="models",
    meaning="What `autoshard models --json` prints: the versions of a registry and those that came with autoshard.",
    make=dict,
    fields=lambda _: (
        _REGISTRY,
        Field("models", list_of(record(dict, *_LISTED, parts=dict), 0), "The versions."),
    ),
    parts=dict,
)
MODEL: Final[Printed] = Document(
    name="model",
    meaning="What `autoshard models show --json` prints: one version.",
    make=dict,
    fields=lambda _: (
        *_LISTED,
        _REGISTRY,
        Field(
            "history",
            record(
                dict,
                *(Field(alias, _CHANGES, f"Those of `{alias}`, the latest last.") for alias in Alias),
                parts=dict,
            ),
            "Changes of the aliases of its kind and device.",
        ),
    ),
    parts=dict,
)
MODEL_ALIAS: Final[Printed] = Document(
    name="model-alias",
    meaning="What `autoshard models promote` and `roll-back` print with `--json`: an alias that names another version.",
    make=dict,
    fields=lambda _: (
        _KIND,
        _NAME,
        Field("alias", one_of(Alias), "The alias."),
        Field("id", _ID, "The version that it names now."),
        Field("history", _CHANGES, "All its changes, the latest last."),
    ),
    parts=dict,
)
