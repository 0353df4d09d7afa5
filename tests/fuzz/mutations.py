"""Documents and files with faults: a valid example, one to three changes, each at a drawn place."""

import io
import json
import re
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from hypothesis import strategies as st
from safetensors.numpy import load, save

#: Names with what a terminal, a page or a path could take for more than a name.
TEXTS = (
    "",
    " ",
    "x",
    "1",
    "-1",
    "NaN",
    "a b",
    "../up",
    "\x1b[31mred\x1b[0m",
    "two\nlines",
    "back\rto the start",
    "\x00",
    "\x9b31m",
    "\u202egnp.exe",
    "\u2028",
    "\ufeffmark",
    "\ud800",
    "\U0001f600",
    "名前",
    "١٢",
    "[bold]name[/bold]",
    "<script>alert(1)</script>",
    "{{7*7}}",
    "%s%n",
    "a" * 5000,
)
INTEGERS = (0, 1, -1, 2, 3, 7, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**25, 10**400)
FLOATS = (0.5, -0.0, -0.5, 1.5, 1e-300, 5e-324, 1e15, 3e38, 1e308, float("nan"), float("inf"), -float("inf"))
#: What no JSON library writes: their marks are replaced in the text.
RAW = {
    "@deep list@": "[" * 100_000 + "]" * 100_000,
    "@deep object@": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "@digits@": "9" * 5000,
    "@unclosed@": "[" * 100_000,
}
VALUES = (None, True, False, *INTEGERS, *FLOATS, *TEXTS, *RAW, [], {}, [[]], [None], [0], ["a", "a"], {"a": 1})

#: Numbers that a document may hold, small and large: what they make of it is for planners and reports to bear.
EXTREMES = (0, 1, 2, 5, 1000, 10**6, 2**31, 10**10, 2**40, 10**15, 1e-15, 1e-6, 0.1, 0.99, 1e6, 1e15)

values = st.sampled_from(VALUES)


def places(value, path=()):
    """Paths of all values within a JSON document, itself first."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places(item, (*path, key))


def at(document, path):
    for step in path:
        document = document[step]
    return document


def replaced(document, path, value):
    """The document with another value at a path."""
    if not path:
        return value
    copy = document.copy()
    copy[path[0]] = replaced(document[path[0]], path[1:], value)
    return copy


@st.composite
def changed(draw, document):
    """A JSON document with one change: half of them leave it likely to be accepted, the others may be anything."""
    path = draw(st.sampled_from(list(places(document))[1:] or [()]))
    value = at(document, path)
    changes = _mild_changes(value) + ([] if draw(st.booleans()) else _wild_changes(document))
    return replaced(document, path, draw(st.one_of(changes or _wild_changes(document))))


def _wild_changes(document):
    return [values, st.sampled_from(list(places(document))).map(lambda path: at(document, path))]


def _mild_changes(value):
    kinds = []
    if isinstance(value, bool):
        kinds.append(st.just(not value))
    elif isinstance(value, int | float):
        kinds.append(st.sampled_from(EXTREMES))
        if abs(value) < 1e300:  # beyond, a division may overflow
            near = (value + 1, value - 1, -value, value * 2, value / 2, value * 1000, value // 3, float(value))
            kinds.append(st.sampled_from(near))
    elif isinstance(value, str):
        kinds += [st.sampled_from((value.upper(), value + " ", value[:-1], value + value)), st.sampled_from(TEXTS)]
    elif isinstance(value, list) and value:
        items = st.sampled_from(range(len(value)))
        kinds.append(items.map(lambda index: value[:index] + value[index + 1 :]))
        kinds.append(items.map(lambda index: [*value, value[index]]))
        kinds.append(st.sampled_from((value[::-1], value[:1], value * 50)))
    elif isinstance(value, dict) and value:
        keys = st.sampled_from(list(value))
        kinds.append(keys.map(lambda key: {name: item for name, item in value.items() if name != key}))
        names = st.sampled_from(TEXTS)
        kinds.append(
            st.tuples(keys, names).map(lambda pair: {pair[1] if k == pair[0] else k: v for k, v in value.items()})
        )
        kinds.append(st.tuples(names, values).map(lambda pair: {**value, pair[0]: pair[1]}))
    return kinds


@st.composite
def json_texts(draw, document):
    """A JSON document with faults, as bytes: of its values, and now and then of its text."""
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 3)))):
        document = draw(changed(document))
    is_text = draw(st.sampled_from((False,) * 7 + (True,)))
    return draw(_text_faults(document)) if is_text else to_text(document)


def to_text(document):
    """As UTF-8, with numbers and nesting that JSON allows and Python does not write."""
    text = json.dumps(document)
    for mark, raw in RAW.items():
        text = text.replace(f'"{mark}"', raw)
    return text.encode()


def _text_faults(document):
    text = to_text(document)
    key = next(iter(document)) if isinstance(document, dict) and document else ""
    twice = text.replace(f'"{key}":'.encode(), f'"{key}": 1, "{key}":'.encode(), 1)
    whole = (twice, b"\xef\xbb\xbf" + text, text + b"}", json.dumps(document).encode("utf-16"), b"", b"\xff" * 9)
    return st.one_of(st.sampled_from(whole), spoilt(text))


@st.composite
def spoilt(draw, content):
    """Bytes with some of them flipped, cut off, put in, set to zero or repeated."""
    start = draw(st.integers(0, max(len(content) - 1, 0)))
    size = draw(st.sampled_from((1, 2, 8, 100)))
    kind = draw(st.sampled_from(("cut", "flip", "flip", "fill", "insert", "repeat", "remove")))
    head, middle, tail = content[:start], content[start : start + size], content[start + size :]
    if kind == "flip":
        flip = draw(st.integers(1, 255))
        return head + bytes(byte ^ flip for byte in middle) + tail
    made = {
        "cut": b"",
        "fill": bytes(len(middle)),
        "insert": b"\xff" * size + middle,
        "repeat": middle * 3,
        "remove": b"",
    }
    return head + made[kind] + (b"" if kind == "cut" else tail)


@st.composite
def yaml_texts(draw, document):
    """A YAML document with faults: of its values, or of its text."""
    changed_one = draw(changed(document))
    try:
        text = yaml.safe_dump(changed_one, sort_keys=False, allow_unicode=True).encode()
    except (UnicodeEncodeError, RecursionError):
        return draw(spoilt(yaml.safe_dump(document).encode()))
    return draw(st.one_of(st.just(text), st.just(text), spoilt(text), written_texts(text.decode())))


#: What a text may hold in the place of a word or a number: marks of YAML, CSV, Python and shells among them.
WORDS = (*TEXTS, *map(repr, FLOATS), *(str(number)[:400] for number in INTEGERS))
WORDS += ("&a", "*a", "!!python/object:os.system", "<<: *a", "---", "'", '"', ";", ",", "\\", "$(x)", "[" * 3000, "f()")


@st.composite
def written_texts(draw, text):
    """A text with one or two of its words or numbers replaced, as bytes; now and then with faulty bytes."""
    for _ in range(draw(st.sampled_from((1, 1, 2)))):
        found = draw(st.sampled_from(list(re.finditer(r"[\w.]+|[^\w\s]", text)) or [re.match("", text)]))
        text = text[: found.start()] + draw(st.sampled_from(WORDS)) + text[found.end() :]
    content = text.encode("utf-8", "surrogatepass")
    return draw(st.one_of(st.just(content), st.just(content), st.just(content), spoilt(content)))


@st.composite
def archives(draw, content):
    """A zip archive with faults: of its bytes, or of one member's within a sound archive."""
    if draw(st.booleans()):
        return draw(spoilt(content))
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    name = draw(st.sampled_from(sorted(members)))
    kind = draw(st.sampled_from(("spoil", "spoil", "spoil", "remove", "rename", "grow")))
    if kind == "spoil":
        members[name] = draw(spoilt(members[name]))
    elif kind == "grow":
        members[name] += bytes(1 << 20)
    else:
        held = members.pop(name)
        members |= {} if kind == "remove" else {f"{name}.txt": held}
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", draw(st.sampled_from((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)))) as archive:
        for member, data in members.items():
            archive.writestr(member, data)
    return made.getvalue()


@st.composite
def parquets(draw, content):
    """A Parquet file with faults: of its bytes, its columns, or its values."""
    kind = draw(st.sampled_from(("bytes", "column", "value", "value", "value")))
    if kind == "bytes":
        return draw(spoilt(content))
    table = pq.read_table(io.BytesIO(content))
    made = draw(_other_columns(table) if kind == "column" else _other_values(table))
    buffer = io.BytesIO()
    pq.write_table(made, buffer)
    return buffer.getvalue()


def _other_columns(table):
    def change(index, name):
        field, rows = table.schema.field(index), table.num_rows
        renamed = [name if at == index else old for at, old in enumerate(table.schema.names)]
        return st.sampled_from(
            (
                table.remove_column(index),
                table.append_column(field, table.column(index)),
                table.set_column(index, field.name, pa.array(["x"] * rows, pa.string())),
                table.set_column(index, field.name, pa.nulls(rows)),
                table.set_column(index, field.name, pa.nulls(rows, field.type)),
                table.rename_columns(renamed),
                table.slice(0, 0),
                table.slice(0, 1),
                pa.concat_tables([table] * 3),
                table.replace_schema_metadata(None),
                table.select([]),
            )
        )

    names = st.sampled_from([text for text in TEXTS if "\ud800" not in text])
    return st.tuples(st.sampled_from(range(table.num_columns)), names).flatmap(lambda pair: change(*pair))


@st.composite
def _other_values(draw, table):
    rows = table.to_pylist()
    row = draw(st.integers(0, len(rows) - 1))
    path = draw(st.sampled_from([path for path in places(rows[row]) if path]))
    rows[row] = replaced(
        rows[row], path, draw(st.one_of(_mild_changes(at(rows[row], path)) + _wild_changes(rows[row])))
    )
    for schema in (table.schema, None):
        try:
            return pa.Table.from_pylist(rows, schema)
        except (pa.ArrowException, TypeError, ValueError, OverflowError, UnicodeError):
            continue  # a value that no column of this type holds; then a column of what fits, or none
    return table.slice(0, 0)


@st.composite
def weights(draw, content):
    """A safetensors file with faults: of its bytes, its header, or its tensors."""
    kind = draw(st.sampled_from(("bytes", "header", "tensor", "tensor", "tensor")))
    if kind == "bytes":
        return draw(spoilt(content))
    if kind == "header":
        size = int.from_bytes(content[:8], "little")
        header = draw(json_texts(json.loads(content[8 : 8 + size])))
        return len(header).to_bytes(8, "little") + header + content[8 + size :]
    tensors = load(content)
    name = draw(st.sampled_from(sorted(tensors)))
    tensor = tensors[name]
    fills = st.sampled_from((0.0, 3e38, -3e38, 1e-38, 1e10, float("nan"), float("inf")))
    shapes = (
        tensor[..., :0],
        tensor[..., :1],
        tensor.reshape(-1),
        np.zeros((), tensor.dtype),
        tensor[None],
    )
    types = st.sampled_from((np.int64, np.float16, np.float64, np.bool_, np.uint8))
    other = st.one_of(
        fills.map(lambda fill: np.full_like(tensor, fill)),
        fills.map(lambda fill: np.where(np.arange(tensor.size).reshape(tensor.shape) == 0, fill, tensor)),
        types.map(tensor.astype),
        st.sampled_from(shapes),
        st.none(),
    )
    made = draw(other)
    del tensors[name]
    if made is not None:
        tensors[name] = np.ascontiguousarray(made)
    return save(tensors)


__all__ = ["INTEGERS", "TEXTS", "VALUES", "archives", "json_texts", "parquets", "spoilt", "to_text", "weights"]
