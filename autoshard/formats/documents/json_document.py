"""JSON texts: parsed, with the faults that Python's parser lets through turned into errors, and laid out to be read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from autoshard.core.collector import collector_paused
from autoshard.core.errors import FormatError
from autoshard.formats.files import read_bytes, undecodable

_LINE_LENGTH = 140
#: Lists of no more values are encoded as often as they are there.
_FEW_VALUES = 8
# Made once: `json.dumps` makes one for each value.
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


#: Endings of the files that hold YAML.
YAML_SUFFIXES = (".yaml", ".yml")
#: Objects and lists within each other; the deepest of this project's documents have 9.
_MAX_DEPTH = 64
#: What nests, and what is written as a list. Tuples: a union would be made anew for each of a million numbers.
_NESTED, _LISTS = (dict, list), (list, tuple)
#: Bytes of memory that a document may take, by the estimate of `_memory_bytes`.
_MAX_MEMORY_BYTES = 640 << 20


class _RepeatedKey(dict[str, object]):
    """An object that held a key twice; kept apart so that its place in the document can be named."""

    key = ""


def parse_json(text: str | bytes, source: str | None = None) -> object:
    """Parses one JSON document.

    Args:
        text: The document; bytes are UTF-8, with a mark of that or without.
        source: File or request part that errors name.

    Raises:
        FormatError: If the text is not JSON, repeats a key within an object, nests too deep, or holds so many values
            that they would take more than 640 MiB of memory.
    """
    needed = _memory_bytes(text)
    if needed > _MAX_MEMORY_BYTES:
        raise FormatError(
            f"holds too many values: they would take about {needed >> 20:,} MiB of memory, at most "
            f"{_MAX_MEMORY_BYTES >> 20} MiB are allowed",
            source=source,
        )
    repeated: list[_RepeatedKey] = []

    def collect(pairs: list[tuple[str, object]]) -> dict[str, object]:
        values = dict(pairs)
        if len(values) == len(pairs) or repeated:
            return values
        seen: set[str] = set()
        marked = _RepeatedKey(values)
        for key, _ in pairs:
            if key in seen:
                marked.key = key
            seen.add(key)
        repeated.append(marked)
        return marked

    try:
        # Python would take UTF-16 and UTF-32, too.
        decoded = text if isinstance(text, str) else text.decode("utf-8-sig")
        del text  # where nobody else has the bytes, they need not be there beside the values
        with collector_paused():
            document = json.loads(decoded, object_pairs_hook=collect)
    except json.JSONDecodeError as error:
        raise FormatError(
            f"is not JSON: {error.msg.lower()} at line {error.lineno}, column {error.colno}", source=source
        ) from None
    except UnicodeDecodeError as error:
        raise FormatError(undecodable(error.object), source=source) from None
    except RecursionError:
        raise FormatError("is nested too deep", source=source) from None
    except ValueError:  # Python refuses whole numbers of thousands of digits
        raise FormatError("holds a number with too many digits", source=source) from None
    if _is_deep(document):
        raise FormatError("is nested too deep", source=source)
    if repeated:
        path = next(_paths_of(document, repeated[0], ""))
        raise FormatError("is there twice in one object", field=join(path, repeated[0].key), source=source)
    return document


def read_json(path: str | Path) -> object:
    """Parses a JSON file, or one that says the same in YAML (`.yaml`, `.yml`).

    Raises:
        FormatError: If the file cannot be read or is not JSON, or not YAML.
    """
    if Path(path).suffix not in YAML_SUFFIXES:
        return parse_json(read_bytes(path), source=str(path))
    from autoshard.formats.yaml_text import parse_yaml

    # Once more as JSON: one set of limits for both.
    return parse_json(json.dumps(parse_yaml(read_bytes(path), source=str(path))), source=str(path))


def format_json(document: object) -> str:
    """A document as text: short values on one line, lists of objects with a line or more for each.

    Raises:
        ValueError: If a number is not finite.
    """
    return _lay_out(document, "\n", {}) + "\n"


def join(path: str, name: str) -> str:
    """Dotted path of a field within the object at `path`."""
    return f"{path}.{name}" if path else name


def _lay_out(value: object, line_break: str, known: dict[int, str]) -> str:
    """A value as text; `known` has the lists that are in the document more than once, as objects."""
    if type(value) is int or (type(value) is float and math.isfinite(value)):
        return repr(value)  # as below, and quicker: plans for many ranks are millions of numbers
    deeper = line_break + " "
    if isinstance(value, dict):
        parts = [f"{_name(name)}: {_lay_out(inner, deeper, known)}" for name, inner in value.items()]
        opening, closing = "{}"
    elif isinstance(value, _LISTS) and any(issubclass(kind, dict) for kind in set(map(type, value))):
        parts = [_lay_out(inner, deeper, known) for inner in value]
        opening, closing = "[]"
    elif type(value) is list and len(value) > _FEW_VALUES:
        if id(value) not in known:
            known[id(value)] = _encode(value)
        return known[id(value)]
    else:
        return _encode(value)
    if sum(map(len, parts)) <= _LINE_LENGTH and not any("\n" in part for part in parts):
        return opening + ", ".join(parts) + closing
    return opening + deeper + ("," + deeper).join(parts) + line_break + closing


# The same few names, of thousands of objects.
@lru_cache(maxsize=1024)
def _name(name: str) -> str:
    return json.dumps(name)


def _memory_bytes(text: str | bytes) -> int:
    """About what a document's values take, from above: lists, objects, their fields, and all else by its commas."""

    def count(mark: str) -> int:
        return text.count(mark) if isinstance(text, str) else text.count(mark.encode())

    return 100 * (count("{") + count("[")) + 200 * count(":") + 40 * count(",")


def _is_deep(document: object) -> bool:
    """Whether a document nests deeper than `_MAX_DEPTH`: recursion over it would then be unsafe."""
    level = [document] if isinstance(document, _NESTED) else []
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for value in level
            for inner in (value.values() if isinstance(value, dict) else value)
            if isinstance(inner, _NESTED)
        ]
    return bool(level)


def _paths_of(value: object, wanted: object, path: str) -> Iterator[str]:
    if value is wanted:
        yield path
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _paths_of(inner, wanted, join(path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _paths_of(inner, wanted, f"{path}[{index}]")
