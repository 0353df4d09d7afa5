"""Where a step would make the host wait for a GPU, counted on CPUs: however many features there are."""

import pytest

from studies.engines import host_waits
from studies.engines.host_waits import counted_steps
from tests.ranks import on_ranks

#: Waits of the thread that trains, and of that which distributes the next batch.
MOST_WAITS = {
    "table-wise": (0, 2),
    "row-wise": (0, 3),
    "means": (0, 2),
    "sequences": (0, 2),
    # Holders of the same rows are told which a batch hits, and put together which all do.
    "tiers": (0, 5),
    "tiers of sequences": (0, 5),
    "rows exchanged once": (0, 4),
}


@pytest.fixture(scope="module")
def counted():
    return host_waits.waits_of([3, 12], 2, lambda plans, num: on_ranks(counted_steps, num, plans)[0])


@pytest.mark.smoke
@pytest.mark.parametrize("plan", MOST_WAITS)
def test_a_step_waits_no_more_often_than_it_did(counted, plan):
    found = [(one.step_waits, one.prefetch_waits) for one in counted if one.plan == plan]
    assert found == [MOST_WAITS[plan]] * 2


@pytest.mark.smoke
def test_copies_do_not_grow_with_features(counted):
    few, many = ([one.copies for one in counted if one.num_features == number] for number in (3, 12))
    assert few == many


@pytest.mark.slow
@pytest.mark.smoke
def test_waits_are_printed(run_study, capsys):
    assert run_study("host-waits", "--features", "2") == 0
    assert "| sequences | 2 | 0 | 2 |" in capsys.readouterr().out
