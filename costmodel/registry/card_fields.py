"""Cards of models: dataclasses whose fields are declared with their kinds, and stored as a JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final, Self

import numpy as np

from autoshard.core.errors import InputError, ModelError
from autoshard.core.machine import MeasuredMachine
from autoshard.core.quoting import shown
from autoshard.formats.documents.kinds import Field, Kind, by_name, number_in, record

#: Largest number of a model's tensors: trained ones have some tens at most, and their products stay finite.
MAX_WEIGHT = 1e4
#: Limits of what a card says of accuracy: milliseconds, shares and factors.
MAX_METRIC = 1e12
#: Upper end of an interval over the prediction.
MAX_BOUND = 1e4

#: What a card says of accuracy, under names of its own.
METRICS: Final = by_name(number_in(-MAX_METRIC, MAX_METRIC))


class ModelCard:
    """All of a model but its tensors, as a JSON object is stored beside them.

    A subclass is a frozen dataclass.

    Attributes:
        schema: Name and version of the card.
        fixed: Fields of the object with the one value that they may have, such as the names of a network's inputs.
        fields: All other fields of the object: those of the dataclass.
        remedy: What to do about a card of another schema or with other fixed values.
        device: Key of the device kind that the model is of.
        measured_on: The machine of its samples; None of cards that do not say.
    """

    schema: ClassVar[str]
    fixed: ClassVar[Mapping[str, object]] = {}
    fields: ClassVar[tuple[Field, ...]]
    remedy: ClassVar[str] = "train it anew"
    device: str
    measured_on: MeasuredMachine | None = None

    def to_json(self) -> dict[str, Any]:
        """As the JSON object."""
        own: Any = self._kind().write(self)
        return {"schema": self.schema, **self.fixed, **own}

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
        common = {"schema", "weights_sha256", *cls.fixed}
        try:
            return cls._kind().read({name: value for name, value in data.items() if name not in common}, "")
        except InputError as error:
            raise ModelError(error.message, field=error.field, source=source) from error

    @classmethod
    def _kind(cls) -> Kind[Self]:
        return record(cls, *cls.fields)


def check_tensor(tensor: np.ndarray[Any, Any], name: str, *, dtype: str = "float32", limit: float = MAX_WEIGHT) -> None:
    """Raises ModelError if a tensor is of another dtype, or holds numbers beyond [-limit, limit] or that are none."""
    if tensor.dtype != np.dtype(dtype):
        raise ModelError(f"must be of dtype {dtype}, got {tensor.dtype}", field=name)
    if not np.isfinite(tensor).all():
        raise ModelError("holds numbers that are not finite", field=name)
    largest = float(np.abs(tensor).max(initial=0.0))
    if largest > limit:
        raise ModelError(f"must hold numbers in [{-limit:g}, {limit:g}], got {largest:g}", field=name)
