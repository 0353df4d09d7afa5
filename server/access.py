"""Who may do what: scopes of keys, and who sent a request."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from autoshard.api import JobKind


class Scope(StrEnum):
    """What a key is for."""

    PLAN = "plan"
    TRAIN = "train"
    ADMIN = "admin"


ALL_SCOPES = frozenset(Scope)


def scope_of(kind: JobKind) -> Scope:
    """Scope of the keys that a kind of jobs needs."""
    return Scope.PLAN if kind in (JobKind.PLAN, JobKind.COMPARE) else Scope.TRAIN


#: Name of all who need no key.
ANYBODY = "anybody"


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Who does something.

    Attributes:
        name: `key ID`, `oidc SUBJECT`, `anybody` where no keys are needed, or `command line`.
        address: Address that the request came from; empty for commands.
        request_id: Id of the request; empty for commands.
        scopes: What it may do; `admin` holds all others.
    """

    name: str = ANYBODY
    address: str = ""
    request_id: str = ""
    scopes: frozenset[Scope] = ALL_SCOPES

    @property
    def is_anybody(self) -> bool:
        """Whether it needed no key."""
        return self.name == ANYBODY

    def may(self, scope: Scope) -> bool:
        """Whether it may do what is in this scope."""
        return scope in self.scopes or Scope.ADMIN in self.scopes


COMMAND_LINE = Principal(name="command line")
