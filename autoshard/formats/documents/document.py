"""Files of one JSON object each: declared once, read, written and published as a JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from autoshard.core.collector import collector_paused
from autoshard.formats.documents.fields import from_source
from autoshard.formats.documents.json_document import YAML_SUFFIXES, format_json, read_json
from autoshard.formats.documents.kinds import Field, Kind, Schema, named, record
from autoshard.formats.files import atomic_write

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Document(Generic[T]):
    """A kind of file.

    Attributes:
        name: First part of the file's name: `tables` of `tables.json`.
        meaning: What it holds.
        make: Takes the values of fields by name, and returns what they make.
        fields: Takes the folder of the file, None for an object that comes from no file, and returns the fields.
        parts: As of `record`.
        definitions: Kinds that its schema refers to by name.
        check: Refuses what a file cannot hold, by an InputError; called after reading and before writing.
    """

    name: str
    meaning: str
    make: Callable[..., T]
    fields: Callable[[Path | None], Sequence[Field]]
    parts: Callable[[T], Mapping[str, Any]] | None = None
    definitions: Sequence[Kind[Any]] = ()
    check: Callable[[T], None] = lambda _: None

    @property
    def schema_name(self) -> str:
        """What the field `schema` of such a file says: `autoshard.tables/1`."""
        return f"autoshard.{self.name}/1"

    def read(self, path: str | Path) -> T:
        """Reads a file.

        Raises:
            InputError: If it cannot be read, or does not hold such an object; the text names file and field.
        """
        return self.of_file(read_json(path), path)

    def of_file(self, document: object, path: str | Path) -> T:
        """Reads the object of a file that has been parsed; errors name the file.

        Raises:
            InputError: If it is no such object; the text names file and field.
        """

        def make() -> T:
            value = self.from_json(document, folder=Path(path).parent)
            self.check(value)
            return value

        return from_source(str(path), make)

    def write(self, value: T, path: str | Path) -> None:
        """Writes a file that reads back as an equal value: JSON, or YAML with comments if the name ends so.

        Raises:
            InputError: If the value is refused, or the file cannot be written; nothing is written then.
        """
        self.check(value)
        if Path(path).suffix not in YAML_SUFFIXES:
            atomic_write(path, format_json(self.to_json(value)))
            return
        from autoshard.formats.yaml_text import format_yaml

        atomic_write(path, format_yaml(self.to_json(value), self.json_schema()))

    def from_json(self, document: object, path: str = "", *, folder: Path | None = None) -> T:
        """Reads the object of a file.

        Args:
            document: The parsed JSON.
            path: Dotted path of the object, if it is part of another.
            folder: Where Parquet files that it names lie.

        Raises:
            InputError: If it does not follow the schema; the text names the field.
        """
        with collector_paused():
            return self.kind(folder).read(document, path)

    def to_json(self, value: T) -> dict[str, Any]:
        """The object of a file.

        Raises:
            InputError: If no file can hold the value.
        """
        with collector_paused():
            return cast(dict[str, Any], self._record(None).write(value))

    def kind(self, folder: Path | None = None) -> Kind[T]:
        """The object as a part of another document."""
        return named(self.name, "", self._record(folder))

    def json_schema(self) -> Schema:
        """The published JSON Schema (draft 2020-12)."""
        address = self.kind().schema["$ref"]
        schema = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": address,
            "title": f"autoshard {self.name}.json",
            "description": self.meaning,
            **self._record(None).schema,
            "$defs": {one.schema["$ref"].rpartition("/")[2]: one.definition for one in self.definitions},
        }
        # Within the document its own definitions need no address.
        return cast(Schema, json.loads(json.dumps(schema).replace(f'"{address}#', '"#')))

    def _record(self, folder: Path | None) -> Kind[T]:
        name = Field("schema", self.schema_name, "Names the format and its version.")
        return record(self.make, name, *self.fields(folder), parts=self.parts)
