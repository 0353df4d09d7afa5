"""Mutants are faults of the code as it is: `python -m tests.mutants` says which of them the tests find."""

from tests.mutants import MUTANTS, ROOT


def test_every_mutant_changes_one_place():
    places = {mutant: (ROOT / mutant.path).read_text(encoding="utf-8").count(mutant.before) for mutant in MUTANTS}
    assert [mutant for mutant, count in places.items() if count != 1] == []


def test_there_are_forty():
    assert len(set(MUTANTS)) >= 40
