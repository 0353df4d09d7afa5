"""What the service's commands print with `--json`: documents with published schemas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from autoshard.formats.documents.document import Document
from autoshard.formats.documents.kinds import TEXT, Field, list_of, one_of, optional, or_null, record
from server.access import Scope

Printed = Document[Mapping[str, Any]]

_KEY: Final = record(
    dict,
    Field("id", TEXT, "Names the key in logs and commands."),
    Field("name", TEXT, "Whom or what it was made for."),
    Field("scopes", list_of(one_of(Scope)), "What it may do."),
    Field("created_at", TEXT, "When it was made, as ISO 8601, UTC."),
    Field("revoked_at", or_null(TEXT), "When it ended; null while it is valid."),
    parts=dict,
)
KEY: Final[Printed] = Document(
    name="key",
    meaning="What `autoshard keys create` and `keys revoke` print with `--json`: the key.",
    make=dict,
    fields=lambda _: (
        Field("key", _KEY, "The key."),
        optional("secret", TEXT, "Secret of a new key; it is not stored and cannot be printed again."),
    ),
    parts=dict,
)
KEYS: Final[Printed] = Document(
    name="keys",
    meaning="What `autoshard keys list --json` prints: the keys of the service, also those that were revoked.",
    make=dict,
    fields=lambda _: (Field("keys", list_of(_KEY, 0), "The keys."),),
    parts=dict,
)
DATABASE: Final[Printed] = Document(
    name="database",
    meaning="What `autoshard db upgrade --json` prints: the state of the service's tables.",
    make=dict,
    fields=lambda _: (
        Field("before", or_null(TEXT), "Revision before; null if there were no tables."),
        Field("after", TEXT, "Revision now."),
    ),
    parts=dict,
)
