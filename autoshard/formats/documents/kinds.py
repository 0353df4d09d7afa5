"""Kinds of JSON values: a document is declared once, and the declaration reads it, writes it and describes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, is_dataclass
from enum import StrEnum
from types import UnionType
from typing import Annotated, Any, Final, Generic, Literal, TypeVar, get_args, get_origin

from autoshard.core.accepted import Range
from autoshard.core.declared import Size, Written, declared, declared_field
from autoshard.core.quoting import shortened
from autoshard.formats.documents.fields import (
    MAX_ITEMS,
    MAX_TEXT,
    MAX_WHOLE,
    any_text,
    at_path,
    check_flag,
    check_names,
    check_object,
    items,
    number,
    text,
    whole,
    word,
)
from autoshard.formats.documents.json_document import join

Schema = dict[str, Any]
T = TypeVar("T")


def unchanged(value: Any) -> Any:
    """The value."""
    return value


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """What a field holds.

    Attributes:
        schema: Its JSON Schema, or a reference to it.
        read: Makes a value of a parsed JSON value and its path; raises a FormatError that names the path.
        write: Makes the JSON value of a value.
        definition: The schema that `schema` refers to; empty if it refers to none.
    """

    schema: Schema
    read: Callable[[object, str], T]
    write: Callable[[T], object] = unchanged
    definition: Schema = field(default_factory=dict)


def named(document: str, name: str, kind: Kind[T], meaning: str = "") -> Kind[T]:
    """The kind with a schema that others refer to by a document and a name within it; no name is the whole document."""
    address = f"urn:autoshard:{document}:1" + (f"#/$defs/{name}" if name else "")
    return Kind({"$ref": address}, kind.read, kind.write, _described(meaning, kind.schema))


def text_of(pattern: str = "") -> Kind[str]:
    """A text of 1 to 512 characters; the class that it is read into checks the pattern."""
    form = {"pattern": f"^{pattern}$"} if pattern else {}
    return Kind({"type": "string", "minLength": 1, "maxLength": MAX_TEXT, **form}, text)


def whole_number(minimum: int = 0, maximum: int = MAX_WHOLE) -> Kind[int]:
    """A whole number in [minimum, maximum]."""
    schema = {"type": "integer", "minimum": minimum, "maximum": maximum}
    return Kind(schema, lambda value, path: whole(value, path, minimum=minimum, maximum=maximum))


def number_in(minimum: float = 0, maximum: float = math.inf, *, is_open: bool = False) -> Kind[float]:
    """A finite number in [minimum, maximum]; `is_open` if the class that it is read into refuses the minimum."""
    limits = {"exclusiveMinimum" if is_open else "minimum": minimum, "maximum": maximum}
    schema = {"type": "number", **{name: limit for name, limit in limits.items() if math.isfinite(limit)}}
    return Kind(schema, lambda value, path: number(value, path, minimum=minimum, maximum=maximum))


def one_of(words: Iterable[T]) -> Kind[T]:
    """One of some words: of an enumeration, or of a tuple."""
    by_word = {str(member): member for member in words}
    return Kind({"enum": list(by_word)}, lambda value, path: word(value, path, by_word))


def list_of(item: Kind[T], minimum: int = 1, maximum: int = MAX_ITEMS) -> Kind[tuple[T, ...]]:
    """A list of `minimum` to `maximum` values of one kind."""
    read, write = item.read, item.write

    def read_all(value: object, path: str) -> tuple[T, ...]:
        found = items(value, path, minimum=minimum, maximum=maximum)
        return tuple([read(inner, f"{path}[{index}]") for index, inner in enumerate(found)])

    schema = {"type": "array", "items": item.schema, "minItems": minimum, "maxItems": maximum}
    return Kind(schema, read_all, list if write is unchanged else lambda values: [write(value) for value in values])


def tuple_of(*listed: Kind[Any]) -> Kind[tuple[Any, ...]]:
    """A list of as many values as there are kinds, the first value of the first kind and so on."""

    def read(value: object, path: str) -> tuple[Any, ...]:
        found = items(value, path, minimum=len(listed), maximum=len(listed))
        return tuple([kind.read(found[index], f"{path}[{index}]") for index, kind in enumerate(listed)])

    # Not `"items": false`, which says the same: generators of clients take no schema that is a boolean.
    schema = {"type": "array", "prefixItems": [kind.schema for kind in listed]}
    return Kind(schema | {"minItems": len(listed), "maxItems": len(listed)}, read, list)


def or_null(kind: Kind[T]) -> Kind[T | None]:
    """A value of the kind, or null."""
    return Kind(
        {"oneOf": [kind.schema, {"type": "null"}]},
        lambda value, path: None if value is None else kind.read(value, path),
        lambda value: None if value is None else kind.write(value),
    )


def by_name(item: Kind[T]) -> Kind[Mapping[str, T]]:
    """An object whose fields have names of the user's own."""

    def read(value: object, path: str) -> Mapping[str, T]:
        found = check_object(value, path).items()
        return {text(name, path): item.read(inner, join(path, shortened(name))) for name, inner in found}

    schema = {"type": "object", "additionalProperties": item.schema}
    return Kind(schema, read, lambda values: {name: item.write(value) for name, value in values.items()})


TEXT = text_of()
#: A text of the user's or a message: a path, a reason. It may be empty.
ANY_TEXT = Kind({"type": "string"}, any_text)
FLAG = Kind({"type": "boolean"}, check_flag)


def in_context(schema: Schema) -> Kind[Any]:
    """A value that the object around it reads and writes, as that takes more than the value: it is passed on."""
    return Kind(schema, lambda value, _: value)


ANYTHING = in_context({})
#: An object that may hold anything: its schema says so, since some generators take the default for an empty object.
ANY_OBJECT: Kind[Mapping[str, Any]] = Kind({"type": "object", "additionalProperties": True}, check_object, dict)
#: Default of a field that is always written.
_NONE_SUCH: Final = object()


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a record.

    Attributes:
        name: Name in documents, and of the attribute.
        kind: What it holds; a text stands for itself, and is no attribute.
        meaning: What it says, for published schemas.
        is_optional: Whether it may be left out.
        default: Value with which it is not written.
        is_derived: Whether it follows from other fields: it is read for its form alone, and not passed on.
    """

    name: str
    kind: Kind[Any] | str
    meaning: str = ""
    is_optional: bool = False
    default: object = _NONE_SUCH
    is_derived: bool = False


def derived(name: str, kind: Kind[Any], meaning: str = "") -> Field:
    """A field that is written for readers' convenience: it follows from the others, which alone are read."""
    return Field(name, kind, meaning, is_derived=True)


def optional(name: str, kind: Kind[Any], meaning: str = "", default: object = _NONE_SUCH) -> Field:
    """A field that may be left out; `default` is the value with which it is not written."""
    return Field(name, kind, meaning, True, default)


def record(make: Callable[..., T], *listed: Field, parts: Callable[[T], Mapping[str, Any]] | None = None) -> Kind[T]:
    """An object with named fields.

    Args:
        make: Takes the values of fields by name, and returns what they make: a class with such fields, or a function.
            What was left out or is derived is not passed. Fields that its errors name are relative to the object.
        listed: The fields, in the order in which they are written; texts that stand for themselves come first.
        parts: Takes what `make` returned, and returns the values of the fields that are written, in that order; None
            for its attributes.
    """
    constants = {item.name: item.kind for item in listed if isinstance(item.kind, str)}
    kinds = {item.name: item.kind for item in listed if isinstance(item.kind, Kind)}
    required = tuple(item.name for item in listed if not item.is_optional)
    may_have = tuple(item.name for item in listed if item.is_optional)
    is_derived = {item.name for item in listed if item.is_derived}
    readers = [(name, kind.read) for name, kind in kinds.items()]
    writers = [(name, kind.write) for name, kind in kinds.items() if kind.write is not unchanged]
    parts_of = parts or _attributes(listed)

    def read(value: object, path: str) -> T:
        known = check_names(value, path, required, may_have, constants)
        before = f"{path}." if path else ""
        found = {name: read_one(known[name], before + name) for name, read_one in readers if name in known}
        for name in is_derived:
            del found[name]
        return at_path(path, lambda: make(**found))

    def write(value: T) -> dict[str, object]:
        written = {**constants, **parts_of(value)}
        for name, write_one in writers:
            if name in written:
                written[name] = write_one(written[name])
        return written

    return Kind(_object_schema(listed), read, write if constants or writers else parts_of)


def fields_of(
    owner: type, *first: str, known: Mapping[type, Kind[Any]] | None = None, **kinds: Kind[Any]
) -> tuple[Field, ...]:
    """The fields of a record that holds a dataclass, as its annotations declare them.

    Args:
        owner: The dataclass.
        first: Names of fields that are written before all others, in this order.
        known: Kinds of types that have a definition of their own.
        kinds: Kinds of fields by name, where a type does not tell: what a file names is not what Python holds.

    Raises:
        TypeError: If a field has no `Meaning`, or a type that no kind is known for.
    """
    listed = {}
    for one in declared(owner):
        kind = kinds.get(one.name) or kind_of(one.type, one.marks, known)
        if isinstance(one.type, UnionType) and one.default is MISSING:
            kind = or_null(kind)
        is_optional = one.default is not MISSING and one.meaning.written is not Written.REQUIRED
        default = one.default if one.meaning.written is Written.UNLESS_DEFAULT else _NONE_SUCH
        listed[one.name] = Field(one.name, kind, one.meaning.text, is_optional, default if is_optional else _NONE_SUCH)
    return (*(listed.pop(name) for name in first), *listed.values())


def field_kind(owner: type, name: str) -> Kind[Any]:
    """The kind of one declared field of a dataclass."""
    one = declared_field(owner, name)
    return kind_of(one.type, one.marks)


def kind_of(hint: Any, marks: Sequence[object] = (), known: Mapping[type, Kind[Any]] | None = None) -> Kind[Any]:
    """What holds values of a type with some metadata; None is no value of it, but what was left out.

    Raises:
        TypeError: If no kind is known for it.
    """
    if get_origin(hint) is Annotated:
        hint, *marks = get_args(hint)
    size = next((mark for mark in marks if isinstance(mark, Size)), None)
    origin, inner = get_origin(hint), [one for one in get_args(hint) if one is not type(None)]
    if known and hint in known:
        return known[hint]
    if isinstance(hint, UnionType) and len(inner) == 1:
        return kind_of(inner[0], marks, known)
    if origin is tuple:
        limits, marks = size or Size(at_least=1), [mark for mark in marks if mark is not size]
        return list_of(kind_of(inner[0], marks, known), limits.at_least, limits.at_most or MAX_ITEMS)
    if origin is Mapping and inner[0] is str:
        return by_name(kind_of(inner[1], marks, known))
    if origin is Literal:
        return one_of(inner)
    if hint is int or hint is float:
        return _numbers(hint, next((mark for mark in marks if isinstance(mark, Range)), Range(at_least=0)))
    if hint is str:
        return TEXT if size is None else ANY_TEXT
    if hint is bool:
        return FLAG
    if hint is object:
        return ANYTHING
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return one_of(hint)
    if is_dataclass(hint):
        return record(hint, *fields_of(hint, known=known))  # type: ignore[arg-type]
    raise TypeError(f"{hint} has no kind")


def _numbers(hint: type, accepted: Range) -> Kind[Any]:
    lowest = accepted.at_least if accepted.above is None else accepted.above
    if hint is int:
        return whole_number(int(lowest or 0), MAX_WHOLE if accepted.at_most is None else int(accepted.at_most))
    highest = math.inf if accepted.at_most is None else accepted.at_most
    return number_in(lowest or 0, highest, is_open=accepted.above is not None)


def _object_schema(listed: tuple[Field, ...]) -> Schema:
    ordered = sorted(listed, key=lambda item: item.is_optional)
    schemas = [{"const": item.kind} if isinstance(item.kind, str) else item.kind.schema for item in ordered]
    return {
        "type": "object",
        "required": [item.name for item in ordered if not item.is_optional],
        "additionalProperties": False,
        "properties": {
            item.name: _described(item.meaning, schema) for item, schema in zip(ordered, schemas, strict=True)
        },
    }


def _described(meaning: str, schema: Schema) -> Schema:
    return {"description": meaning, **schema} if meaning else schema


def _attributes(listed: tuple[Field, ...]) -> Callable[[Any], Mapping[str, Any]]:
    """Takes an object, and returns its attributes by field, without those that have their default."""
    items = [(item.name, item.default) for item in listed if isinstance(item.kind, Kind)]

    def parts(value: Any) -> dict[str, Any]:
        return {name: part for name, default in items if (part := getattr(value, name)) != default}

    return parts
