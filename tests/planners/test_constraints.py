"""Groups that share ranks, ranks that pins allow, and constraints that name what is not there."""

from dataclasses import replace

import pytest

from autoshard.core import Constraints
from autoshard.core.errors import InvalidPlanError
from autoshard.planners.space.constraints import allowed_ranks, check_constraints, colocated
from tests import builders as make


def tables_of(**colocate_with):
    """Tables by name, with the names of those whose ranks each shares."""
    each = colocate_with.items()
    return make.tables(*(make.table(name, constraints=Constraints(colocate_with=others)) for name, others in each))


def test_groups_follow_chains_in_both_directions_and_come_by_their_first_table():
    tables = tables_of(a=(), b=("e",), c=("a",), d=(), e=("f",), f=("f",))
    names = [[table.name for table in group] for group in colocated(tables)]
    assert names == [["a", "c"], ["b", "e", "f"], ["d"]]


def test_pins_leave_their_ranks_and_no_pins_all():
    (table,) = tables_of(a=()).tables
    assert allowed_ranks(table, 4).tolist() == [True] * 4
    pinned = replace(table, constraints=Constraints(pinned_ranks=(3, 1, 3)))
    assert allowed_ranks(pinned, 4).tolist() == [False, True, False, True]


def test_constraints_name_tables_and_ranks_that_are_there():
    topology = make.topology(2)
    with pytest.raises(InvalidPlanError, match=r'^tables\[1\]\.constraints\.colocate_with: names "x", which is no'):
        check_constraints(tables_of(a=(), b=("a", "x")), topology)
    tables = tables_of(a=(), b=())
    pinned = replace(tables.tables[1], constraints=Constraints(pinned_ranks=(0, 2)))
    with pytest.raises(InvalidPlanError, match=r"^tables\[1\]\.constraints\.pinned_ranks: must be in \[0, 2\), got 2"):
        check_constraints(replace(tables, tables=(tables.tables[0], pinned)), topology)
