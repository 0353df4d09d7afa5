"""YAML in JSON's place: the same documents, with comments; nothing that JSON cannot say."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.core.errors import FormatError
from autoshard.formats import (
    import_tables,
    load_tables,
    load_topology,
    read_tables,
    read_topology,
    tables_to_json,
    write_tables,
    write_topology,
)
from autoshard.formats.documents.json_document import read_json
from autoshard.formats.yaml_text import format_yaml, parse_yaml

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(TEXTS, VALUES, max_size=4))
def test_any_document_comes_back(document):
    assert parse_yaml(format_yaml(document, {})) == document


def test_tables_and_topologies_come_back_with_a_comment_on_every_field(tmp_path):
    tables, topology = load_tables("metasyn").sample(3, seed=0), load_topology("a100-32")
    write_tables(tables, tmp_path / "tables.yaml")
    write_topology(topology, tmp_path / "topology.yml")
    assert read_tables(tmp_path / "tables.yaml") == tables == import_tables(tmp_path / "tables.yaml")
    assert read_topology(tmp_path / "topology.yml") == topology
    lines = (tmp_path / "tables.yaml").read_text(encoding="utf-8").splitlines()
    for field in ("batch_size", "num_embeddings", "pooling_factor", "optimizer"):
        place = next(number for number, line in enumerate(lines) if line.lstrip().startswith(f"{field}:"))
        assert lines[place - 1].lstrip().startswith("# ")
    assert any(line.lstrip().startswith("# constraints: may be left out.") for line in lines)
    # Each comment once.
    comments = [line for line in lines if line.lstrip().startswith("#")]
    assert len(comments) < 30


def test_a_table_without_schema_is_refused_as_in_json(tmp_path):
    path = tmp_path / "tables.yaml"
    document = tables_to_json(load_tables("metasyn").sample(1, seed=0))
    path.write_text(json.dumps({**document, "batch_size": "many"}))
    with pytest.raises(FormatError, match=r"^.*tables\.yaml: batch_size: "):
        read_tables(path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: no\nb: 2026-11-22\nc: 1_000", {"a": "no", "b": "2026-11-22", "c": "1_000"}),
        ("[1, 1.5, 1e3, .5, true, ~, '1']", [1, 1.5, 1000.0, 0.5, True, None, "1"]),
        ("null: 1\n1: 2", {"null": 1, "1": 2}),
    ],
)
def test_words_are_texts_unless_json_knows_them(text, value):
    assert parse_yaml(text) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &x [1]\nb: *x", "has a tag or a reference, write the value in their place, at line 1, column 4"),
        ("a: !!python/object:os.system x", "has a tag or a reference"),
        ("a: 1\na: 2", 'has "a" twice in one object, at line 2, column 1'),
        ("? [1]\n: 2", "has a key that is no text"),
        ("[" * 100 + "]" * 100, "is nested too deep"),
        ("a: [1", "is not YAML: "),
        ("a: 1\n---\nb: 2", "must hold one YAML document, got 2"),
        ("", "must hold one YAML document, got 0"),
        ("1" * 5000, "holds a number with too many digits"),
        (b"\xff\xfe", "is not "),
    ],
)
def test_what_json_cannot_say_is_refused_in_one_line(text, message, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(FormatError, match=r"^.*a\.yaml: ") as raised:
        read_json(path)
    assert raised.value.message.startswith(message)
    assert "\n" not in str(raised.value)
