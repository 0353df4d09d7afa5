"""The error tree: one line, exit codes, and where an error came from."""

import pytest

from autoshard.core import errors


def test_the_text_names_source_field_and_message():
    error = errors.FormatError("must be 1", field="a.b", source="x.json")
    assert str(error) == "x.json: a.b: must be 1"
    assert str(errors.FormatError("must be 1")) == "must be 1"


def test_a_source_is_added_without_losing_the_kind_or_the_field():
    error = errors.InvalidPlanError("must be 1", field="a").in_source("plan.json")
    assert type(error) is errors.InvalidPlanError
    assert (error.message, error.field, error.source) == ("must be 1", "a", "plan.json")


KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.AutoshardError)]


@pytest.mark.parametrize("kind", KINDS)
def test_exit_codes_are_those_that_the_command_line_promises(kind):
    expected = 2 if issubclass(kind, errors.InputError) else 3 if kind is errors.InfeasiblePlanError else 1
    assert kind.exit_code == expected
    assert issubclass(kind, ValueError) == issubclass(kind, errors.InputError)


def test_kinds_are_told_apart():
    assert len({kind.kind for kind in KINDS}) == len(KINDS)


def test_a_message_that_lists_too_much_is_cut():
    error = errors.ModelError("samples must be of one device, got " + ", ".join(["a" * 60] * 100), field="device")
    assert len(str(error)) < 2000
    assert str(error).endswith("…")
