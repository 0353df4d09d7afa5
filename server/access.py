"""Who may do what: scopes of keys, and who sent a request."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final, TypeVar

from autoshard.api import JobKind, Scope

F = TypeVar("F", bound=Callable[..., Any])


class Door(Enum):
    """Whom a route is open to that needs no scope."""

    ANYBODY = auto()
    ANY_KEY = auto()
    OPERATOR = auto()
    """Keys with the scope `admin` of no team, who see to what all teams use."""


ALL_SCOPES = frozenset(Scope)
#: A team's name, which names a folder, too; empty for none.
TEAM_NAME = re.compile("([a-z0-9][a-z0-9-]{0,63})?")


_DOOR: Final = "autoshard_door"


def opened_to(door: Scope | Door) -> Callable[[F], F]:
    """Declares whom a route's function is open to: nobody without this, and keys of a scope with a scope."""

    def declare(function: F) -> F:
        setattr(function, _DOOR, door)
        return function

    return declare


def door_of(function: object, otherwise: Door | None) -> Scope | Door | None:
    """Whom a route's function is open to, as it declares; without a declaration, as is said here."""
    return getattr(function, _DOOR, otherwise)


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
        team: Whose plans, jobs, schedules, samples and keys it sees and makes; empty for those of no team.
        scopes: What it may do; `admin` holds all others, `plan` holds `read`.
        expires_us: When it has to prove again who it is, in microseconds since 1970; None for a key, which is revoked.
    """

    name: str = ANYBODY
    address: str = ""
    request_id: str = ""
    team: str = ""
    scopes: frozenset[Scope] = ALL_SCOPES
    expires_us: int | None = None

    @property
    def is_operator(self) -> bool:
        """Whether it sees to what all teams use."""
        return self.may(Scope.ADMIN) and not self.team

    @property
    def is_anybody(self) -> bool:
        """Whether it needed no key."""
        return self.name == ANYBODY

    def may(self, scope: Scope) -> bool:
        """Whether it may do what is in this scope."""
        held = {scope, Scope.ADMIN} | ({Scope.PLAN} if scope is Scope.READ else set())
        return not held.isdisjoint(self.scopes)

    def may_read(self, kind: JobKind) -> bool:
        """Whether it may see what jobs of a kind are, say and make."""
        scope = scope_of(kind)
        return self.may(Scope.READ if scope is Scope.PLAN else scope)


COMMAND_LINE = Principal(name="command line")
