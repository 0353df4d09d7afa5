"""Keys of the service, whom they belong to, and what was done with them."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import BaseModel, Field

from autoshard.api.plans import MAX_PAGE
from autoshard.api.problems import RequestBody, examples


class Scope(StrEnum):
    """What a key is for."""

    READ = "read"
    """Reading what `plan` makes."""
    PLAN = "plan"
    TRAIN = "train"
    ADMIN = "admin"


#: Names a folder, too.
TeamName = Annotated[
    str,
    Field(pattern="^([a-z0-9][a-z0-9-]{0,63})?$", description="Whose plans, jobs and samples it sees; empty for none."),
]
KeyId = Annotated[str, Field(pattern="^[0-9a-f]{12}$", description="The key's id.")]


class KeySummary(BaseModel):
    """A key, without its secret, which is not stored."""

    id: Annotated[KeyId, Field(title="key")]
    name: str = Field(title="for", description="Whom or what it was made for.")
    scopes: list[Scope] = Field(description="What it may do: `admin` holds the others, `plan` holds `read`.")
    team: TeamName
    created_at: str = Field(title="made, UTC", description="UTC (ISO 8601).")
    revoked_at: str | None = Field(title="ended, UTC", description="When it ended; null if it has not.")


class KeyList(BaseModel):
    """All keys, the oldest first."""

    keys: list[KeySummary]


class KeyMade(BaseModel):
    """A key that was made, this once with its secret."""

    key: KeySummary
    secret: str


class KeyBody(RequestBody):
    """A key that is to be made."""

    model_config = examples({"name": "nightly training", "scopes": ["plan"]})
    max_bytes: ClassVar[int] = 4 << 10

    name: str = Field(min_length=1, max_length=128, description="Whom or what it is for.")
    scopes: list[Annotated[Scope, Field(strict=False)]] = Field(min_length=1, max_length=len(Scope))
    team: TeamName | None = Field(default=None, description="Null for that of who makes it.")


class AuditEntry(BaseModel):
    """Something that was done."""

    done_at: str = Field(title="when, UTC", description="UTC (ISO 8601).")
    action: str = Field(description="Such as `plan.make`.")
    target: str = Field(title="of", description="Id of what it was done to.")
    actor: str = Field(title="by", description="A key, a token's subject, `command line`, a schedule or a job.")
    team: str
    address: str = Field(description="Where the request came from; empty for commands.")
    request_id: str = Field(title="request")
    id: int = Field(title="entry")


class AuditSearch(BaseModel):
    """Which entries of the audit log to list; what is null does not matter."""

    limit: int = Field(default=50, ge=1, le=MAX_PAGE, description="Most entries of a page.")
    before: int | None = Field(default=None, ge=1, le=1 << 62, description="`next` of the page before.")
    actor: Annotated[str, Field(max_length=128, pattern=r"^[^\x00]*$")] | None = None
    action: Annotated[str, Field(max_length=64, pattern=r"^[^\x00]*$")] | None = Field(
        default=None, description="Such as `plan.make`; `plan` for all of plans."
    )
    target: Annotated[str, Field(max_length=512, pattern=r"^[^\x00]*$")] | None = None


class AuditList(BaseModel):
    """One page of the audit log, the latest first."""

    entries: list[AuditEntry]
    next: int | None = Field(description="`before` of the next page; null on the last.")
