"""Accepted numbers, names and lists of names, and the words in which all others are refused."""

import math
from dataclasses import dataclass

import pytest

from autoshard.core.accepted import (
    ABOVE_0,
    AT_LEAST_1,
    FINITE_ABOVE_0,
    FINITE_AT_LEAST_0,
    SHARE,
    WHOLE_AT_LEAST_1,
    Range,
    check_choice,
    listed,
)
from autoshard.core.errors import InvalidOptionError, InvalidTableError


@pytest.mark.parametrize(
    ("accepted", "good", "bad", "message"),
    [
        (AT_LEAST_1, [1, 7, math.inf], [0, -1, math.nan], "must be at least 1, got {}"),
        (ABOVE_0, [0.1, math.inf], [0, -0.5, math.nan], "must be above 0, got {}"),
        (SHARE, [0.1, 1], [0, 1.5, math.nan], "must be in (0, 1], got {}"),
        (Range(at_least=0, below=1), [0, 0.5], [1, -1], "must be in [0, 1), got {}"),
        (Range(above=0, below=1), [0.5], [0, 1], "must be in (0, 1), got {}"),
        (Range(at_least=0.5, at_most=1e18), [0.5, 1e18], [0.1, 2e18], "must be in [0.5, 1e+18], got {}"),
        (FINITE_AT_LEAST_0, [0, 2.5], [-1, math.inf, math.nan], "must be a number of at least 0, got {}"),
        (FINITE_ABOVE_0, [2.5], [0, math.inf], "must be a number above 0, got {}"),
        (WHOLE_AT_LEAST_1, [1, 10**400], [0, 1.0, True], "must be a whole number of at least 1, got {}"),
    ],
)
def test_numbers_within_the_range_are_accepted_and_others_refused_with_it(accepted, good, bad, message):
    for value in good:
        accepted.check(value, "it")
    for value in bad:
        with pytest.raises(InvalidOptionError) as caught:
            accepted.check(value, "it")
        assert str(caught.value) == f"it: {message.format(value)}"


def test_huge_whole_numbers_are_shown_by_their_size():
    with pytest.raises(InvalidOptionError, match="got a number of 1329 bits"):
        Range(at_most=9, at_least=0).check(10**400, "it")


def test_fields_are_named_and_those_left_out_are_accepted():
    @dataclass
    class Options:
        few: int = 1
        none: int | None = None
        many: int = 0

    AT_LEAST_1.check_fields(Options(), "few", "none")
    with pytest.raises(InvalidTableError, match=r"^options\.many: must be at least 1, got 0$"):
        AT_LEAST_1.check_fields(Options(), "few", "none", "many", within="options.", error=InvalidTableError)


def test_choices_are_listed_where_another_is_refused():
    check_choice("a", ("a", "b"), "it")
    with pytest.raises(InvalidOptionError, match=r'^it: must be one of a, b, got "c"$'):
        check_choice("c", iter(("a", "b")), "it")


def test_names_are_between_commas():
    assert listed(" a,b , c") == ("a", "b", "c")
    assert listed("") == ("",)
