"""JSON texts: what the parser refuses, how documents are laid out, and their digests."""

import gzip
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.core.errors import FormatError
from autoshard.formats import canonical_json, digest, format_json, parse_json, read_json

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,}', "is not JSON: .* at line 1, column 9"),
        ("", "is not JSON"),
        (b'{"a": "\xff"}', "is not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "is not UTF-8"),
        (gzip.compress(b'{"a": 1}', mtime=0), "is compressed by gzip: unpack it first"),
        ('{"a": 1}'.encode("utf-32-le"), "is not JSON"),
        ("[" * 100_000, "nested too deep"),
        ("[" * 65 + "]" * 65, "nested too deep"),
        ('{"a":' * 300 + '{"b":1,"b":2}' + "}" * 300, "nested too deep"),
        ("[" + "{}," * 10_000_000, "too many values: they would take about 1,3.. MiB of memory"),
        (b"[" + b'{"":0},' * 3_000_000, "too many values"),
        ("1" * 10_000, "too many digits"),
    ],
)
def test_what_is_no_json_is_refused_in_one_line(text, message):
    with pytest.raises(FormatError, match=message) as caught:
        parse_json(text, source="x.json")
    assert str(caught.value).startswith("x.json: ")
    assert "\n" not in str(caught.value)


def test_a_mark_of_the_encoding_is_no_part_of_the_document():
    assert parse_json(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}


def test_documents_nest_to_a_limit():
    assert parse_json("[" * 64 + "]" * 64)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('{"a": 1, "a": 1}', "a"),
        ('{"tables": [{"b": 1}, {"b": {"c": 1, "d": 2, "c": 3}}]}', "tables[1].b.c"),
    ],
)
def test_a_key_that_is_there_twice_is_named_by_its_path(text, field):
    with pytest.raises(FormatError, match="there twice") as caught:
        parse_json(text)
    assert caught.value.field == field


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(FormatError, match="cannot be read: no such file or directory") as caught:
        read_json(tmp_path / "none.json")
    assert str(tmp_path / "none.json") in str(caught.value)


@given(value=values)
def test_a_document_is_read_as_it_was_written(value):
    assert parse_json(format_json(value)) == value
    assert parse_json(canonical_json(value)) == value


def test_lists_of_objects_get_a_line_each_and_curves_one():
    knots = [[rank, rank / 100] for rank in range(101)]
    text = format_json({"schema": "x", "tables": [{"name": f"t{index}", "knots": knots} for index in range(3)]})
    lines = text.splitlines()
    assert sum("knots" in line for line in lines) == 3
    assert len(lines) < 20
    assert json.loads(text)["tables"][2]["knots"] == knots


@pytest.mark.parametrize("write", [format_json, canonical_json, digest])
def test_numbers_that_json_has_not_are_never_written(write):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write({"a": [math.nan]})


def test_a_digest_is_of_the_value_not_of_the_text():
    assert digest({"b": 3.0, "a": [1]}) == digest({"a": [1.0], "b": 3})
    assert digest({"a": 1}) != digest({"a": 2})
    assert digest([]) != digest({})
    # sha256sum of the two characters {}
    assert digest({}) == "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
