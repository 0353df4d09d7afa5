"""Values of JSON objects, each of them checked; every fault is named by its dotted path."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from autoshard.core.accepted import none_of
from autoshard.core.errors import AutoshardError, FormatError, InputError
from autoshard.core.quoting import shortened, shown
from autoshard.formats.documents.json_document import join

#: Upper limit of whole numbers that have no limit of their own: beyond it doubles are no longer exact.
MAX_WHOLE = 2**53
#: Values of a list, and characters of a text, that have no limit of their own.
MAX_ITEMS = 1_000_000
MAX_TEXT = 512

T = TypeVar("T")
ErrorT = TypeVar("ErrorT", bound=InputError)


def at_path(path: str, make: Callable[[], T]) -> T:
    """Calls `make`, and puts `path` before the field that an error of it names.

    Raises:
        InputError: What `make` raised, with the path.
    """
    try:
        return make()
    except InputError as error:
        raise _within(path, error) from None


def _within(path: str, error: ErrorT) -> ErrorT:
    """The error, and all faults of one that has several, with `path` before the field."""
    found = type(error)(error.message, field=join(path, error.field) if error.field else path)
    if isinstance(error, FormatError) and isinstance(found, FormatError):
        found.faults = tuple(_within(path, fault) for fault in error.faults)
    return found


def from_source(source: str, make: Callable[[], T]) -> T:
    """Calls `make`, and names `source` in an error of it that names no source yet.

    Raises:
        AutoshardError: What `make` raised, with the source.
    """
    try:
        return make()
    except AutoshardError as error:
        if error.source is not None:
            raise
        raise error.in_source(source) from None


def check_object(value: object, path: str) -> dict[str, object]:
    """The value, an object.

    Raises:
        FormatError: If it is none.
    """
    if not isinstance(value, dict):
        raise FormatError(f"must be an object, got {shown(value)}", field=path)
    return value


def check_names(
    value: object,
    path: str,
    required: Collection[str],
    optional: Collection[str],
    constants: Mapping[str, str] | None = None,
) -> dict[str, object]:
    """The value, an object with these fields, of which `constants` have these values.

    Raises:
        FormatError: If it is none, or fields are missing or unknown.
    """
    known = check_object(value, path)
    # Before all else: a document of another kind has other fields.
    for name, constant in (constants or {}).items():
        if known.get(name, constant) != constant:
            raise FormatError(f'must be "{constant}", got {shown(known[name])}', field=join(path, name))
    for name in known:
        if name not in required and name not in optional:
            raise FormatError(_unknown(name, [*required, *optional]), field=join(path, shortened(name)))
    for name in required:
        if name not in known:
            raise FormatError("is missing", field=join(path, name))
    return known


def check_flag(value: object, path: str) -> bool:
    """The value, `true` or `false`.

    Raises:
        FormatError: If it is neither.
    """
    if not isinstance(value, bool):
        raise FormatError(f"must be true or false, got {shown(value)}", field=path)
    return value


def any_text(value: object, path: str) -> str:
    """The value, a text of any length.

    Raises:
        FormatError: If it is none.
    """
    if not isinstance(value, str):
        raise FormatError(f"must be a text, got {shown(value)}", field=path)
    return value


def text(value: object, path: str) -> str:
    """The value, a text of 1 to 512 characters.

    Raises:
        FormatError: If it is none.
    """
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT:
        raise FormatError(f"must be a text of 1 to {MAX_TEXT} characters, got {shown(value)}", field=path)
    check_characters(value, path)
    return value


def check_characters(value: str, path: str) -> None:
    """Refuses halves of surrogate pairs, which JSON can escape but which are no characters and cannot be written.

    Raises:
        FormatError: If the text holds one.
    """
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise FormatError(f"must be made of whole characters, got {shown(value)}", field=path)


def check_writable(value: object, path: str) -> None:
    """Refuses what a parser lets through but no file can hold: numbers that are not finite, halves of characters.

    Raises:
        FormatError: If the value is one of them, or holds one; the text names its path.
    """
    if isinstance(value, float):
        number(value, path, minimum=-math.inf)
    elif isinstance(value, str):
        check_characters(value, path)
    elif isinstance(value, dict):
        for name, inner in value.items():
            check_characters(name, path)
            check_writable(inner, join(path, shortened(name)))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            check_writable(inner, f"{path}[{index}]")


def whole(value: object, path: str, *, minimum: int = 0, maximum: int = MAX_WHOLE) -> int:
    """The value, a whole number in [minimum, maximum].

    Raises:
        FormatError: If it is none; `true` is none, and neither is 1.0.
    """
    if type(value) is not int or not minimum <= value <= maximum:
        raise FormatError(f"must be a whole number in [{minimum}, {maximum}], got {shown(value)}", field=path)
    return value


def number(value: object, path: str, *, minimum: float = 0.0, maximum: float = math.inf) -> float:
    """The value, a finite number in [minimum, maximum].

    Raises:
        FormatError: If it is none.
    """
    if type(value) is int:
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
    if type(value) is not float or not math.isfinite(value) or not minimum <= value <= maximum:
        limits = f" in [{minimum:g}, {maximum:g}]" if maximum < math.inf else f" of at least {minimum:g}"
        accepted = "a finite number" + (limits if minimum > -math.inf else "")
        raise FormatError(f"must be {accepted}, got {shown(value)}", field=path)
    return value


def word(value: object, path: str, accepted: Mapping[str, T]) -> T:
    """What one of some words stands for.

    Raises:
        FormatError: If the value is none of them.
    """
    if not isinstance(value, str) or value not in accepted:
        raise FormatError(none_of(accepted, value), field=path)
    return accepted[value]


def items(value: object, path: str, *, minimum: int = 1, maximum: int = MAX_ITEMS) -> list[object]:
    """The value, a list of `minimum` to `maximum` values.

    Raises:
        FormatError: If it is none.
    """
    if not isinstance(value, list):
        raise FormatError(f"must be a list, got {shown(value)}", field=path)
    if not minimum <= len(value) <= maximum:
        accepted = str(minimum) if minimum == maximum else f"{minimum} to {maximum}"
        raise FormatError(f"must hold {accepted} values, got {len(value)}", field=path)
    return value


def _unknown(name: str, accepted: list[str]) -> str:
    close = difflib.get_close_matches(name[:100], accepted, n=1)
    guess = f" (did you mean {close[0]}?)" if close else ""
    return f"is not known{guess}; accepted: {', '.join(accepted) or 'no fields'}"
