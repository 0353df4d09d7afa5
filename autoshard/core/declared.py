"""Fields that are declared once: what they mean, what is accepted of them, how files have them, what depends on them.

A field says it in the metadata of `Annotated`: a `Range`, and a `Meaning`. Files, their schemas, REST, lists of tables
and all that compares tables are made of that, so that a new field cannot be missed anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum, Flag, auto
from functools import cache, cached_property
from operator import attrgetter
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from autoshard.core.accepted import Range
from autoshard.core.errors import InputError, InvalidOptionError

T = TypeVar("T")


class Role(Flag):
    """What depends on a field of a table, of its features, or of what runs them."""

    NONE = 0
    """Nothing but what is done with the field itself."""
    PRICE = auto()
    """What a step takes: tables with equal ones are priced once."""
    MEMORY = auto()
    """What ranks hold: with another value, nothing of it can stay."""
    KERNEL = auto()
    """Which kernel serves it: tables with equal ones may share one."""
    IDENTITY = auto()
    """What processes that execute a plan have to agree on."""


class Written(Enum):
    """When a file has a field that has a default."""

    UNLESS_DEFAULT = auto()
    ALWAYS = auto()
    """It may be left out of files, but is written."""
    REQUIRED = auto()
    """It may not be left out: the default is for Python alone."""


@dataclass(frozen=True, slots=True)
class Size:
    """How many characters a text of a file may have, or values a list; without it, a text has 1 to 512.

    Attributes:
        at_least: The fewest.
        at_most: The most; None for any number that a file may hold.
    """

    at_least: int = 0
    at_most: int | None = None


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a field says.

    Attributes:
        text: A sentence, for published schemas and the reference.
        roles: What depends on it.
        written: When files have it, if it has a default.
    """

    text: str
    roles: Role = Role.NONE
    written: Written = Written.UNLESS_DEFAULT


@dataclass(frozen=True)
class DeclaredField:
    """A field of a dataclass as its annotation declares it.

    Attributes:
        name: Its name.
        type: Its type, without metadata.
        marks: The metadata.
        default: Its default; `dataclasses.MISSING` without one.
    """

    name: str
    type: Any
    marks: tuple[Any, ...]
    default: Any

    def mark(self, kind: type[T]) -> T | None:
        """The metadata of a kind, if there is any."""
        return next((mark for mark in self.marks if isinstance(mark, kind)), None)

    @cached_property
    def range(self) -> Range | None:
        """What is accepted of it."""
        return self.mark(Range)

    @cached_property
    def meaning(self) -> Meaning:
        """What it says.

        Raises:
            TypeError: If its annotation does not tell.
        """
        meaning = self.mark(Meaning)
        if meaning is None:
            raise TypeError(f"the field {self.name} has no Meaning in its annotation")
        return meaning

    @cached_property
    def has_parts(self) -> bool:
        """Whether it holds a tuple of objects with declared fields of their own."""
        return get_origin(self.type) is tuple and is_dataclass(get_args(self.type)[0])


@cache
def declared(owner: Any) -> tuple[DeclaredField, ...]:
    """The fields of a dataclass that its constructor takes."""
    hints = get_type_hints(owner, include_extras=True)
    found = []
    for one in fields(owner):
        if one.init:
            kind, *marks = get_args(hints[one.name]) if get_origin(hints[one.name]) is Annotated else [hints[one.name]]
            default = one.default if one.default_factory is MISSING else one.default_factory()
            found.append(DeclaredField(name=one.name, type=kind, marks=tuple(marks), default=default))
    return tuple(found)


def declared_field(owner: type, name: str) -> DeclaredField:
    """One of the fields of a dataclass."""
    return next(one for one in declared(owner) if one.name == name)


def check_ranges(owner: Any, error: type[InputError] = InvalidOptionError, within: str = "") -> None:
    """Refuses numbers outside of the ranges that their fields declare; None, for what was left out, is accepted.

    Raises:
        InputError: Of the given type, naming the field, with `within` before its name.
    """
    for name, accepted in _ranges(owner.__class__):
        accepted.check(getattr(owner, name), f"{within}{name}", error)


@cache
def _ranges(owner: Any) -> tuple[tuple[str, Range], ...]:
    """The fields of a class that declare a range; large lists of tables are checked field by field."""
    return tuple((one.name, one.range) for one in declared(owner) if one.range is not None)


@cache
def _with_roles(owner: Any, roles: Role) -> tuple[DeclaredField, ...]:
    """The fields of a class that have any of the roles; searches ask for them for every shard."""
    return tuple(one for one in declared(owner) if one.meaning.roles & roles)


@cache
def _reader(owner: Any, roles: Role) -> tuple[Callable[[Any], tuple[Any, ...]], tuple[int, ...]]:
    """What reads the fields of a class that have any of the roles, and which of them hold parts."""
    listed = _with_roles(owner, roles)
    names = [one.name for one in listed]
    # Of one name, `attrgetter` gives no tuple; of none, there is no such thing.
    read = attrgetter(*names) if len(names) > 1 else lambda value: tuple(getattr(value, name) for name in names)
    return read, tuple(index for index, one in enumerate(listed) if one.has_parts)


def values(owner: Any, roles: Role) -> tuple[Any, ...]:
    """Values of the fields that have any of the roles, and of the parts within them, in the order of the fields."""
    read, with_parts = _reader(owner.__class__, roles)
    if not with_parts:
        return read(owner)
    found = list(read(owner))
    for index in with_parts:
        found[index] = tuple([values(part, roles) for part in found[index]])
    return tuple(found)


def undecided(owner: Any, known: Collection[str], roles: Role, *, of: type | None = None) -> tuple[str, ...]:
    """Names of fields that have any of the roles and another value than their default, and are not known.

    Args:
        owner: The object.
        known: Names of fields that the caller knows what to do with.
        roles: What the caller cares for.
        of: A base class of the object's, whose fields alone are looked at; None for all.
    """
    unknown = _unknown(of or owner.__class__, tuple(known), roles)
    return tuple([one.name for one in unknown if getattr(owner, one.name) != one.default])


@cache
def _unknown(owner: Any, known: tuple[str, ...], roles: Role) -> tuple[DeclaredField, ...]:
    """The fields of a class that have any of the roles, but some; often there are none."""
    return tuple(one for one in _with_roles(owner, roles) if one.name not in known)
