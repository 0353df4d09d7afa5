"""Cards of models, read field by field: what is missing, unknown, of another kind or out of range is named."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import numpy as np

from autoshard.core.errors import FormatError, InputError, ModelError
from autoshard.core.quoting import shown
from autoshard.formats.documents.fields import Fields, number

CardT = TypeVar("CardT")

#: Largest number of a model's tensors: trained ones have some tens at most, and their products stay finite.
MAX_WEIGHT = 1e4
#: Limits of what a card says of accuracy: milliseconds, shares and factors.
MAX_METRIC = 1e12
#: Upper end of an interval over the prediction.
MAX_BOUND = 1e4


def read_card(
    data: Mapping[str, Any],
    source: str,
    *,
    schema: str,
    required: Collection[str],
    optional: Collection[str] = (),
    read: Callable[[Fields], CardT],
    fixed: Mapping[str, object],
    remedy: str = "train it anew",
) -> CardT:
    """Reads a card, of which every field is checked.

    Args:
        data: The card as parsed.
        source: Where it comes from, for error messages.
        schema: What its field `schema` must be.
        required: Names of its other fields; the digest of the weights may be there too.
        optional: Names of fields that may be there.
        read: Makes the card of its fields.
        fixed: Fields with the one value that they may have, such as the names of a network's inputs.
        remedy: What to do about a card of another schema or with other fixed values.

    Raises:
        ModelError: If it is of another schema, or a field cannot be used; the text names source and field.
    """
    if data.get("schema") != schema:
        raise ModelError(f"must be {schema}, got {shown(data.get('schema'))}; {remedy}", field="schema", source=source)
    for name, value in fixed.items():
        if data.get(name) != value:
            raise ModelError(f"was trained on other features; {remedy}", field=name, source=source)
    try:
        names = ("schema", *fixed, *required)
        return read(Fields(dict(data), "", required=names, optional=("weights_sha256", *optional)))
    except InputError as error:
        raise ModelError(error.message, field=error.field, source=source) from error


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


def metrics(fields: Fields, name: str = "metrics") -> dict[str, float]:
    """An object of numbers, under names of its own.

    Raises:
        FormatError: If one is none.
    """
    path = fields.at(name)
    return {
        key: number(value, f"{path}.{key}", minimum=-MAX_METRIC, maximum=MAX_METRIC)
        for key, value in fields.mapping(name).items()
    }


def optional_number(fields: Fields, name: str, *, maximum: float) -> float | None:
    """A number in [0, maximum], or null.

    Raises:
        FormatError: If it is neither.
    """
    return None if fields[name] is None else fields.number(name, maximum=maximum)


def check_tensor(
    tensor: np.ndarray[Any, Any], name: str, source: str | None, *, dtype: str = "float32", limit: float = MAX_WEIGHT
) -> None:
    """Raises ModelError if a tensor is of another dtype, or holds numbers beyond [-limit, limit] or that are none."""
    if tensor.dtype != np.dtype(dtype):
        raise ModelError(f"must be of dtype {dtype}, got {tensor.dtype}", field=name, source=source)
    if not np.isfinite(tensor).all():
        raise ModelError("holds numbers that are not finite", field=name, source=source)
    largest = float(np.abs(tensor).max(initial=0.0))
    if largest > limit:
        raise ModelError(f"must hold numbers in [{-limit:g}, {limit:g}], got {largest:g}", field=name, source=source)


def not_within(low: float, high: float, path: str) -> FormatError:
    """The error for the ends of an interval that are not in order."""
    return FormatError(f"must rise, got {low:g} to {high:g}", field=path)
