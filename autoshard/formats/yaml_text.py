"""YAML as another notation of JSON documents: plain values, lists and objects, with comments from a JSON Schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from autoshard.core.errors import FormatError
from autoshard.formats.files import undecodable

_MAX_DEPTH = 64
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WHOLE = re.compile(r"[-+]?\d+")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_WORDS: Mapping[str, object] = {"": None, "~": None, "null": None, "true": True, "false": False}


def parse_yaml(text: str | bytes, source: str | None = None) -> object:
    """Parses one YAML document that says what JSON can: numbers, texts, true, false, null, lists and objects.

    Words such as `no` and dates are texts. Tags and references, by which small files can mean huge values, are refused.

    Args:
        text: The document.
        source: File that errors name.

    Raises:
        FormatError: If it is not such YAML, repeats a key within an object, or nests too deep.
    """
    builder = _Builder(source)
    try:
        decoded = text if isinstance(text, str) else text.decode("utf-8-sig")
        for event in yaml.parse(decoded, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            builder.add(event)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "it cannot be read"
        raise FormatError(f"is not YAML: {problem}{where}", source=source) from None
    except UnicodeDecodeError as error:
        raise FormatError(undecodable(error.object), source=source) from None
    if len(builder.documents) != 1:
        raise FormatError(f"must hold one YAML document, got {len(builder.documents)}", source=source)
    return builder.documents[0]


def format_yaml(document: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """A document as YAML, with a comment for each kind of field: at its first place, what the schema says of it.

    Fields that are left out are comments where their object comes first.
    """
    return "\n".join(_Writer(schema).lines(document, schema, "") if document else ["{}"]) + "\n"


class _Builder:
    """Makes values of the parser's events."""

    def __init__(self, source: str | None) -> None:
        self.documents: list[object] = []
        self._source = source
        self._open: list[dict[str, object] | list[object]] = []
        self._keys: list[str | None] = []

    def add(self, event: Any) -> None:
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) or getattr(event, "tag", None):
            raise self._error("has a tag or a reference, write the value in their place", event)
        if isinstance(event, yaml.ScalarEvent):
            if self._wants_key():
                self._set_key(event.value, event)
            else:
                self._put(self._scalar(event))
        elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            if self._wants_key():
                raise self._error("has a key that is no text", event)
            if len(self._open) == _MAX_DEPTH:
                raise self._error("is nested too deep", event)
            self._open.append({} if isinstance(event, yaml.MappingStartEvent) else [])
            self._keys.append(None)
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            self._keys.pop()
            self._put(self._open.pop())

    def _wants_key(self) -> bool:
        return bool(self._open) and isinstance(self._open[-1], dict) and self._keys[-1] is None

    def _set_key(self, key: str, event: Any) -> None:
        if key in self._open[-1]:
            raise self._error(f"has {json.dumps(key)} twice in one object", event)
        self._keys[-1] = key

    def _put(self, value: object) -> None:
        if not self._open:
            self.documents.append(value)
            return
        target = self._open[-1]
        if isinstance(target, list):
            target.append(value)
            return
        key = self._keys[-1]
        assert key is not None
        target[key], self._keys[-1] = value, None

    def _scalar(self, event: Any) -> object:
        text: str = event.value
        if not event.implicit[0]:  # in quotes
            return text
        if text in _WORDS:
            return _WORDS[text]
        try:
            if _WHOLE.fullmatch(text):
                return int(text)
        except ValueError:  # Python refuses whole numbers of thousands of digits
            raise self._error("holds a number with too many digits", event) from None
        return float(text) if _NUMBER.fullmatch(text) else text

    def _error(self, message: str, event: Any) -> FormatError:
        mark = event.start_mark
        return FormatError(f"{message}, at line {mark.line + 1}, column {mark.column + 1}", source=self._source)


class _Writer:
    """Lays a document out, and says of each field once what it means."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._definitions = schema.get("$defs", {})
        self._said: set[int] = set()

    def lines(self, value: Mapping[str, Any], schema: Mapping[str, Any], indent: str) -> Iterator[str]:
        """Lines of an object."""
        known = self._properties(value, schema)
        for key, inner in value.items():
            field = known.get(key, {})
            yield from self._comment(field, indent)
            name = key if _PLAIN_KEY.fullmatch(key) else _quoted(key)
            if isinstance(inner, Mapping) and inner:
                yield f"{indent}{name}:"
                yield from self.lines(inner, self._resolved(field), f"{indent}  ")
            elif isinstance(inner, list | tuple) and inner and all(isinstance(one, Mapping) and one for one in inner):
                yield f"{indent}{name}:"
                yield from self._items(inner, self._resolved(field).get("items", {}), f"{indent}  ")
            else:
                yield f"{indent}{name}: {_flow(inner)}"
        for key in known.keys() - value.keys():
            if id(known[key]) not in self._said:
                self._said.add(id(known[key]))
                yield f"{indent}# {key}: may be left out. {self._meaning(known[key])}".rstrip()

    def _items(self, values: Any, schema: Mapping[str, Any], indent: str) -> Iterator[str]:
        for value in values:
            for number, line in enumerate(self.lines(value, self._resolved(schema), f"{indent}  ")):
                yield f"{indent}-\n{line}" if number == 0 else line

    def _comment(self, field: Mapping[str, Any], indent: str) -> Iterator[str]:
        if field and id(field) not in self._said:
            self._said.add(id(field))
            if meaning := self._meaning(field):
                yield f"{indent}# {meaning}"

    def _meaning(self, field: Mapping[str, Any]) -> str:
        resolved = self._resolved(field)
        text = field.get("description") or resolved.get("description", "")
        choices = resolved.get("enum")
        return f"{text} One of {', '.join(map(str, choices))}.".lstrip() if choices else str(text)

    def _properties(self, value: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """Fields of an object by name; of several kinds of objects, those that the value has."""
        resolved = self._resolved(schema)
        for one in resolved.get("oneOf", ()):
            found: Mapping[str, Any] = self._resolved(one).get("properties", {})
            if all(found.get(key, {}).get("const", inner) == inner and key in found for key, inner in value.items()):
                return found
        properties: Mapping[str, Any] = resolved.get("properties", {})
        return properties

    def _resolved(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        reference = str(schema.get("$ref", ""))
        found: Mapping[str, Any] = self._definitions.get(reference.rpartition("/")[2], schema)
        return found if reference.startswith("#") else schema


def _flow(value: object) -> str:
    """A value on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_quoted(key)}: {_flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return _quoted(value) if isinstance(value, str) else json.dumps(value, allow_nan=False)


def _quoted(text: str) -> str:
    """A text in double quotes; what cannot be seen is written as YAML's escapes, which are not all those of JSON."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
