"""Where a step would make the host wait for a GPU, counted on CPUs: however many features there are."""

import pytest

from studies.engines import host_waits
from studies.engines.host_waits import counted_steps
from tests.ranks import on_ranks


@pytest.fixture(scope="module")
def counted():
    return host_waits.waits_of([3, 12], 2, lambda plans, num: on_ranks(counted_steps, num, plans)[0])


@pytest.mark.smoke
def test_a_step_waits_once_for_what_comes(counted):
    found = {(one.plan, one.num_features): (one.step_waits, one.prefetch_waits) for one in counted}
    assert len(found) > 10
    assert found == dict.fromkeys(found, (0, 1))


@pytest.mark.smoke
def test_copies_do_not_grow_with_features(counted):
    few, many = ([one.copies for one in counted if one.num_features == number] for number in (3, 12))
    assert few == many


@pytest.mark.slow
@pytest.mark.smoke
def test_waits_are_printed(run_study, capsys):
    assert run_study("host-waits", "--features", "2") == 0
    assert "| sequences | 2 | 0 | 1 |" in capsys.readouterr().out
