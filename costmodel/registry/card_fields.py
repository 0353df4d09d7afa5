"""Cards of models: dataclasses whose fields are those of a JSON object, each read by its type.

Metadata of `Annotated` say what a type does not: the `Range` of a number, or the function that reads the field.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import fields as fields_of
from dataclasses import is_dataclass
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Self, TypeVar, get_args, get_origin, get_type_hints

import numpy as np

from autoshard.core.accepted import Range
from autoshard.core.errors import FormatError, InputError, ModelError
from autoshard.core.quoting import shown
from autoshard.formats.documents.fields import Fields, number

_T = TypeVar("_T")

#: Largest number of a model's tensors: trained ones have some tens at most, and their products stay finite.
MAX_WEIGHT = 1e4
#: Limits of what a card says of accuracy: milliseconds, shares and factors.
MAX_METRIC = 1e12
#: Upper end of an interval over the prediction.
MAX_BOUND = 1e4

#: What a card says of accuracy: milliseconds, shares and factors.
Metric = Annotated[float, Range(at_least=0.0, at_most=MAX_METRIC)]


class ModelCard:
    """All of a model but its tensors, as a JSON object is stored beside them.

    A subclass is a frozen dataclass with one field for each field of the object. Names of fields may end in the shape
    of their numbers (`mean_F`), which the object leaves out.

    Attributes:
        schema: Name and version of the card.
        fixed: Fields of the object with the one value that they may have, such as the names of a network's inputs.
        optional: Names of fields that may be left out.
        remedy: What to do about a card of another schema or with other fixed values.
        device: Key of the device kind that the model is of.
    """

    schema: ClassVar[str]
    fixed: ClassVar[Mapping[str, object]] = {}
    optional: ClassVar[Collection[str]] = ()
    remedy: ClassVar[str] = "train it anew"
    device: str

    def to_json(self) -> dict[str, Any]:
        """As the JSON object."""
        document: dict[str, Any] = json_value({"schema": self.schema, **self.fixed, **json_value(self)})
        return document

    @classmethod
    def from_json(cls, data: Mapping[str, Any], source: str) -> Self:
        """Reads what `to_json` wrote; the digest of the weights may be there too.

        Args:
            data: The object as parsed.
            source: Where it comes from, for error messages.

        Raises:
            ModelError: If it is of another schema or has other fixed values, or a field cannot be used; the text names
                source and field.
        """
        if data.get("schema") != cls.schema:
            got = shown(data.get("schema"))
            raise ModelError(f"must be {cls.schema}, got {got}; {cls.remedy}", field="schema", source=source)
        for name, value in cls.fixed.items():
            if data.get(name) != value:
                raise ModelError(f"was trained on other features; {cls.remedy}", field=name, source=source)
        own = [name for name in _names(cls) if name not in cls.optional]
        try:
            names = ("schema", *cls.fixed, *own)
            return read_fields(cls, Fields(dict(data), "", required=names, optional=("weights_sha256", *cls.optional)))
        except InputError as error:
            raise ModelError(error.message, field=error.field, source=source) from error


def json_value(value: Any) -> Any:
    """A value as JSON has it: dataclasses as objects, tuples as lists, members of enumerations as words."""
    if is_dataclass(value):
        return {_name(item.name): json_value(getattr(value, item.name)) for item in fields_of(value)}
    if isinstance(value, Mapping):
        return {name: json_value(inner) for name, inner in value.items()}
    if isinstance(value, tuple | list):
        return [json_value(inner) for inner in value]
    return str(value) if isinstance(value, StrEnum) else value


def read_fields(kind: type[_T], fields: Fields) -> _T:
    """The dataclass of an object's fields.

    Raises:
        FormatError: If one cannot be used.
    """
    hints = get_type_hints(kind, include_extras=True)
    found = {item.name: _value(fields, _name(item.name), hints[item.name]) for item in fields_of(kind)}  # type: ignore[arg-type]
    return kind(**found)


def _value(fields: Fields, name: str, hint: Any) -> Any:
    kind, mark = get_args(hint)[:2] if get_origin(hint) is Annotated else (hint, None)
    if callable(mark):
        return mark(fields, name)
    limits = {} if mark is None else {"minimum": mark.at_least, "maximum": mark.at_most}
    if kind == float | None:
        return None if fields[name] is None else fields.number(name, **limits)
    if kind is float:
        return fields.number(name, **limits)
    if kind is int:
        return fields.whole(name, **limits)
    if kind is str:
        return fields.text(name)
    if isinstance(kind, type) and is_dataclass(kind):
        return read_fields(kind, fields.fields(name, required=_names(kind)))
    if get_origin(kind) is dict:
        return metrics(fields, name) if get_args(kind)[1] is float else fields.mapping(name)
    return fields.choice(name, kind, next(iter(kind)))


def _names(kind: type) -> tuple[str, ...]:
    return tuple(_name(item.name) for item in fields_of(kind))


def _name(field: str) -> str:
    return re.sub(r"_[A-Z]\w*$", "", field)


def numbers(
    fields: Fields, name: str, *, length: int, minimum: float = -MAX_METRIC, maximum: float = MAX_METRIC
) -> tuple[float, ...]:
    """A list of so many numbers in [minimum, maximum].

    Raises:
        FormatError: If it is none.
    """
    path = fields.at(name)
    return tuple(
        number(value, f"{path}[{index}]", minimum=minimum, maximum=maximum)
        for index, value in enumerate(fields.items(name, minimum=length, maximum=length))
    )


def metrics(fields: Fields, name: str) -> dict[str, float]:
    """An object of numbers, under names of its own.

    Raises:
        FormatError: If one is none.
    """
    path = fields.at(name)
    return {
        key: number(value, f"{path}.{key}", minimum=-MAX_METRIC, maximum=MAX_METRIC)
        for key, value in fields.mapping(name).items()
    }


def check_tensor(tensor: np.ndarray[Any, Any], name: str, *, dtype: str = "float32", limit: float = MAX_WEIGHT) -> None:
    """Raises ModelError if a tensor is of another dtype, or holds numbers beyond [-limit, limit] or that are none."""
    if tensor.dtype != np.dtype(dtype):
        raise ModelError(f"must be of dtype {dtype}, got {tensor.dtype}", field=name)
    if not np.isfinite(tensor).all():
        raise ModelError("holds numbers that are not finite", field=name)
    largest = float(np.abs(tensor).max(initial=0.0))
    if largest > limit:
        raise ModelError(f"must hold numbers in [{-limit:g}, {limit:g}], got {largest:g}", field=name)


def not_within(low: float, high: float, path: str) -> FormatError:
    """The error for the ends of an interval that are not in order."""
    return FormatError(f"must rise, got {low:g} to {high:g}", field=path)
