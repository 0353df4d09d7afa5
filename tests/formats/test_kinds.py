"""Declared objects: one declaration reads, writes and describes, and errors of what it makes name their place."""

from dataclasses import dataclass, field

import pytest
from jsonschema import Draft202012Validator

from autoshard.core.errors import FormatError, InputError, InvalidOptionError
from autoshard.formats.documents.kinds import (
    FLAG,
    TEXT,
    Field,
    by_name,
    derived,
    in_context,
    list_of,
    named,
    number_in,
    one_of,
    optional,
    or_null,
    record,
    tuple_of,
    whole_number,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    steps: tuple[int, ...]
    kind: str
    height: float = 2.0
    notes: dict[str, str] = field(default_factory=dict)

    def __post_init__(self):
        if sorted(self.steps) != list(self.steps):
            raise InvalidOptionError("must rise", field="steps")


LADDER = record(
    Ladder,
    Field("schema", "ladder/1"),
    Field("steps", list_of(whole_number(1, 9), 1, 3), "From the ground."),
    Field("kind", one_of(("step", "rope"))),
    optional("height", number_in(0, 10), "2 if left out."),
    optional("notes", by_name(TEXT), default={}),
)
LADDERS = record(dict, Field("ladders", list_of(named("shed", "ladder", LADDER, "What is climbed."))))
SMALL = {"schema": "ladder/1", "steps": [1, 2], "kind": "rope"}


def test_what_is_left_out_has_the_default_of_the_class_and_is_written_as_declared():
    ladder = LADDER.read(SMALL, "")
    assert ladder == Ladder(steps=(1, 2), kind="rope")
    assert LADDER.write(ladder) == {**SMALL, "height": 2.0}
    whole = {**SMALL, "height": 3.5, "notes": {"é": "old"}}
    assert LADDER.write(LADDER.read(whole, "")) == whole
    assert list(LADDER.write(ladder)) == ["schema", "steps", "kind", "height"]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"schema": "ladder/2", "x": 1}, 'ladders[0].schema: must be "ladder/1", got "ladder/2"'),
        ({"hight": 1}, "ladders[0].hight: is not known (did you mean height?); accepted: schema, steps, kind, height"),
        ({"steps": []}, "ladders[0].steps: must hold 1 to 3 values, got 0"),
        ({"steps": [1, 10]}, "ladders[0].steps[1]: must be a whole number in [1, 9], got 10"),
        ({"steps": [2, 1]}, "ladders[0].steps: must rise"),
        ({"kind": "stairs"}, 'ladders[0].kind: must be one of step, rope, got "stairs"'),
        ({"height": float("inf")}, "ladders[0].height: must be a finite number in [0, 10], got Infinity"),
        ({"notes": {"a": 1}}, "ladders[0].notes.a: must be a text of 1 to 512 characters, got 1"),
    ],
)
def test_faults_name_their_place_and_what_is_accepted(change, line):
    with pytest.raises(InputError) as caught:
        LADDERS.read({"ladders": [{**SMALL, **change}]}, "")
    assert str(caught.value).startswith(line)


def test_a_missing_field_is_named():
    with pytest.raises(FormatError, match="is missing") as caught:
        LADDERS.read({"ladders": [{"schema": "ladder/1", "kind": "rope"}]}, "shed")
    assert caught.value.field == "shed.ladders[0].steps"


def test_the_schema_says_what_the_reader_accepts():
    Draft202012Validator.check_schema(LADDER.schema)
    validator = Draft202012Validator(LADDER.schema)
    assert validator.is_valid(SMALL)
    for change in ({"steps": []}, {"steps": [10]}, {"kind": "x"}, {"height": 11}, {"x": 1}, {"schema": "x"}):
        assert not validator.is_valid({**SMALL, **change})
    reference = named("shed", "ladder", LADDER, "What is climbed.")
    assert reference.schema == {"$ref": "urn:autoshard:shed:1#/$defs/ladder"}
    assert reference.definition == {"description": "What is climbed.", **LADDER.schema}


def test_a_kind_in_context_is_described_and_passed_on():
    assert in_context(FLAG.schema).schema == FLAG.schema
    assert in_context(FLAG.schema).read("later", "") == "later"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    place: tuple[int, str] | None

    @property
    def height(self):
        return 0 if self.place is None else self.place[0]


RUNG = record(
    Rung,
    Field("place", or_null(tuple_of(whole_number(1, 9), one_of(("left", "right"))))),
    derived("height", whole_number(0, 9)),
)


@pytest.mark.parametrize(
    "document", [{"place": None, "height": 0}, {"place": [3, "left"], "height": 3}], ids=["null", "a pair"]
)
def test_pairs_may_be_null_and_what_is_derived_is_written_only(document):
    rung = RUNG.read(document, "")
    assert rung == RUNG.read({**document, "height": 9}, "")
    assert RUNG.write(rung) == document
    assert Draft202012Validator(RUNG.schema).is_valid(document)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"place": [3]}, "place: must hold 2 values, got 1"),
        ({"place": [3, "middle"]}, 'place[1]: must be one of left, right, got "middle"'),
        ({"place": [0, "left"]}, "place[0]: must be a whole number in [1, 9], got 0"),
        ({"height": None}, "height: must be a whole number in [0, 9], got null"),
    ],
)
def test_faults_of_pairs_and_of_what_is_derived_name_their_place(change, line):
    document = {"place": None, "height": 0, **change}
    assert not Draft202012Validator(RUNG.schema).is_valid(document)
    with pytest.raises(FormatError) as caught:
        RUNG.read(document, "")
    assert str(caught.value) == line
