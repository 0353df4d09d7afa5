"""Fields that say what they mean: every field of a table does, and what has no meaning is an error."""

from dataclasses import dataclass
from typing import Annotated

import pytest

from autoshard.core import EmbeddingTable, Feature
from autoshard.core.accepted import Range
from autoshard.core.declared import Meaning, Role, check_ranges, declared, undecided, values
from autoshard.core.errors import InvalidOptionError


@dataclass(frozen=True, kw_only=True)
class Step:
    height: Annotated[float, Range(at_least=0, at_most=1), Meaning("How high.", Role.PRICE)]


@dataclass(frozen=True, kw_only=True)
class Stairs:
    steps: Annotated[tuple[Step, ...], Meaning("From the ground.", Role.PRICE | Role.MEMORY)]
    width: Annotated[int, Range(at_least=1), Meaning("In steps.", Role.MEMORY)] = 2
    colour: Annotated[str, Meaning("Of paint.")] = "grey"


STAIRS = Stairs(steps=(Step(height=0.5), Step(height=0.25)), width=3)


def test_values_are_those_of_a_role_and_of_the_parts_within():
    assert values(STAIRS, Role.PRICE) == (((0.5,), (0.25,)),)
    assert values(STAIRS, Role.MEMORY) == (((), ()), 3)
    assert values(STAIRS, Role.NONE) == ()


def test_what_is_not_known_and_not_usual_is_undecided():
    assert undecided(STAIRS, ("steps",), Role.MEMORY) == ("width",)
    assert undecided(STAIRS, ("steps", "width"), Role.MEMORY) == ()
    assert undecided(Stairs(steps=()), ("steps",), Role.MEMORY) == ()


def test_numbers_out_of_range_are_named():
    with pytest.raises(InvalidOptionError) as caught:
        check_ranges(Stairs(steps=(), width=0), within="stairs.")
    assert str(caught.value) == "stairs.width: must be at least 1, got 0"


def test_a_field_without_meaning_is_an_error():
    @dataclass
    class Ramp:
        slope: float = 0.0

    with pytest.raises(TypeError, match="the field slope has no Meaning"):
        values(Ramp(), Role.PRICE)


@pytest.mark.parametrize("owner", [EmbeddingTable, Feature])
def test_every_field_of_a_table_says_what_it_means(owner):
    assert all(one.meaning.text for one in declared(owner))
