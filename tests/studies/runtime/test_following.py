"""Counted accesses against what was drawn, and jobs whose plan follows their data."""

import json

import pytest

from autoshard.core import RowsBy
from autoshard.core.errors import DeviceError, InvalidOptionError
from studies.cluster.network import ClusterSpec, check_support
from studies.runtime.access_counts import AccessCountOptions, accuracy
from studies.runtime.following import FollowingOptions, FollowingRun, planned, speedup


@pytest.mark.smoke
def test_counts_are_compared_with_what_was_drawn():
    options = AccessCountOptions(rows=200_000, num_tables=2, batches=10)
    found = accuracy(1.4, options)
    assert found.num_hits == 1_000_000
    assert found.group_error < 0.05
    assert found.curve_error < 0.01
    assert found.rows_right <= 1
    assert found.known_share > 0.9
    assert found.hits_for_right > 100
    # Few rows are a twentieth of what a table has at most.
    assert accuracy(0.5, options).known_share < found.known_share


@pytest.mark.smoke
def test_an_exponent_that_is_no_number_is_refused():
    with pytest.raises(InvalidOptionError, match=r"^--alphas: each must be a number of at least 0"):
        AccessCountOptions(alphas="1.05,steep")


@pytest.mark.smoke
@pytest.mark.slow
def test_plans_over_slow_links_hold_hot_rows_on_every_node():
    spec = ClusterSpec(num_nodes=2, ranks_per_node=2, bits_per_s=2e8)
    plan = planned(FollowingOptions(rows=50_000, num_tables=2), spec)
    assert plan.topology == spec.topology()
    assert any(placed.shard.rows.by is RowsBy.ACCESS_RANK for placed in plan.shards)


@pytest.mark.smoke
def test_runs_are_compared_with_those_of_the_same_data():
    speeds = {(True, False): [100, 120, 90], (True, True): [200, 150, 260], (False, False): [9], (False, True): [8]}
    runs = [
        FollowingRun(drifts=drifts, follows=follows, samples_per_s=speed, step_ms=1.0, changes=())
        for (drifts, follows), of_kind in speeds.items()
        for speed in of_kind
    ]
    assert speedup(runs, drifts=True) == 2.0
    assert speedup(runs, drifts=False) == 8 / 9


def test_jobs_are_trained_on_the_cluster(run_study, tmp_path):
    try:
        check_support()
    except DeviceError as error:
        pytest.skip(str(error))
    options = ("--rows", 20_000, "--num-tables", 1, "--steps", 20, "--drift-every", 10, "--replan-every", 5)
    assert run_study("following", *options, "--rounds", 1, "-o", tmp_path) == 0
    document = json.loads((tmp_path / "following.json").read_text(encoding="utf-8"))
    assert [(run["drifts"], run["follows"]) for run in document["runs"]] == [
        (True, False), (True, True), (False, False), (False, True)
    ]  # fmt: skip
    assert set(document["following_over_fixed"]) == {"drifting", "still"}
