"""Clusters that contests are executed on in virtual time, and what their results say."""

from dataclasses import replace

import pytest

from autoshard.formats.torchrec.sharding import TorchRecType
from autoshard.planners.planner import parse_options
from autoshard.planners.torchrec_planner import TorchRecOptions
from autoshard.runtime import Engine
from studies.planners.step_runs import StepRun
from studies.runtime.slow_links.contests import TORCHREC_WHOLE, ContestResult, EntryRun
from studies.runtime.virtual_contests import (
    AGAIN,
    ALL_TYPES,
    ALL_TYPES_WHOLE,
    CLUSTERS,
    LONG,
    SHORT,
    TORCHREC_BEST,
    ClusterKind,
    Gain,
    Order,
    Repeats,
    entries,
    gains,
)


@pytest.mark.smoke
@pytest.mark.parametrize("cluster", CLUSTERS, ids=lambda one: one.label)
def test_links_are_to_each_other_as_in_the_cluster_that_they_stand_for(cluster):
    topology = cluster.topology()
    assert topology.world_size == cluster.num_ranks
    assert topology.local_world_size == cluster.ranks_per_node
    if topology.num_nodes > 1:
        inside, across = (level.all_to_all.bytes_per_s for level in topology.levels)
        assert across / inside == pytest.approx(cluster.gbit_per_s / 8 / 300)


def test_clusters_are_named_by_their_nodes():
    assert ClusterKind(num_ranks=16, ranks_per_node=8, gbit_per_s=25).label == "2 x 8 at 25 Gbit/s"
    assert ClusterKind(num_ranks=8, ranks_per_node=8).label == "1 x 8"


def test_searches_of_other_lengths_are_asked_for():
    found = {entry.label: entry for entry in entries(with_limits=True)}
    assert (found[SHORT].time_limit_s, found["auto"].time_limit_s, found[LONG].time_limit_s) == (0.1, 1.0, 10.0)
    assert found[TORCHREC_WHOLE].engine is Engine.TORCHREC
    assert replace(found[AGAIN], label="auto") == found["auto"]
    assert SHORT not in {entry.label for entry in entries(with_limits=False)}


@pytest.mark.smoke
def test_torchrecs_planner_may_cut_tables_whichever_engine_executes_them():
    found = {entry.label: entry for entry in entries(with_limits=False)}
    assert not found["torchrec"].options
    assert found[ALL_TYPES].options == {"sharding_types": "all"}
    offered = parse_options(TorchRecOptions, found[ALL_TYPES_WHOLE].options).names
    assert set(offered) == set(TorchRecType) - {TorchRecType.DATA_PARALLEL}
    assert (found[ALL_TYPES].engine, found[ALL_TYPES_WHOLE].engine) == (Engine.THIN, Engine.TORCHREC)


def contest(**steps_ms):
    runs = [
        EntryRun(
            label=label,
            step=StepRun(
                trial={}, predicted_ms=1.0, low_ms=1.0, high_ms=1.0, measured_ms=ms, spread=0.0, parts={}, models={}
            ),
        )
        for label, ms in steps_ms.items()
    ]
    return ContestResult(name="0", group="uniform", num_tables=1, batch_size=1, entries=tuple(runs))


@pytest.mark.smoke
def test_gains_are_over_auto_where_both_ran():
    cut = {ALL_TYPES: 10.5}
    found = gains([contest(auto=10.0, torchrec=12.0, **cut), contest(auto=10.0, torchrec=11.0), contest(auto=10.0)])
    assert set(found) == {"torchrec", ALL_TYPES, TORCHREC_BEST}
    assert (found[ALL_TYPES].num_tasks, found[ALL_TYPES].median) == (1, pytest.approx(0.05))
    assert (found[TORCHREC_BEST].num_tasks, found[TORCHREC_BEST].median) == (2, pytest.approx(0.075))
    assert found["torchrec"].num_tasks == 2
    assert found["torchrec"].median == pytest.approx(0.15)
    assert found["torchrec"].low == pytest.approx(0.1)
    assert found["torchrec"].high == pytest.approx(0.2)
    assert str(Gain(num_tasks=1, median=0.1, low=-0.05, high=0.2)) == "+10.0% (-5.0% to +20.0%)"


def run(label, predicted_ms, measured_ms):
    (entry,) = contest(**{label: measured_ms}).entries
    return replace(entry, step=replace(entry.step, predicted_ms=predicted_ms))


@pytest.mark.smoke
def test_the_order_is_that_of_pairs_which_differ_when_executed():
    # auto and policy differ by 1%; of the other pairs one is in the other order.
    runs = (
        run("auto", 9.0, 10.0),
        run("policy", 8.0, 10.1),
        run("cost-greedy", 12.0, 11.0),
        run("torchrec", 10.0, 12.0),
    )
    other_engine = replace(run("theirs", 1.0, 99.0), engine=Engine.TORCHREC)
    task = replace(contest(), entries=(*runs, other_engine))
    assert Order.of([task]) == Order(num_pairs=5, tau=pytest.approx(3 / 5))
    assert Order.of([task], "torchrec") == Order(num_pairs=3, tau=pytest.approx(1 / 3))
    assert str(Order.of([])) == "0.00 of 0"


@pytest.mark.smoke
def test_what_two_executions_agree_on_is_drawn_from_how_far_apart_one_plan_is():
    # One plan takes 10 and 11 ms: plans of 10 and 30 ms keep their order, those of 30.1 and 30 ms do not.
    one_plan = (run("auto", 9.0, 10.0), run(AGAIN, 9.0, 11.0))
    clear = replace(contest(), entries=(*one_plan, run("torchrec", 20.0, 30.0)))
    found = Repeats.of([[clear]])
    assert (found.num_pairs, found.median, found.share_apart) == (1, pytest.approx(0.1), 1.0)
    assert found.tau_in_task == 1.0
    assert {entry.label for again in found.contests for entry in again.entries} == {"auto", "torchrec"}
    level = replace(clear, entries=(*clear.entries, run("policy", 21.0, 30.1)))
    assert Repeats.of([[level]]).tau_in_task < 0.9
    # Of plans that are level now and then the longer one is the shorter one in the first execution, by up to a tenth.
    assert found.near == 1.0
    assert Repeats.of([[replace(clear, entries=(*one_plan, run("torchrec", 20.0, 10.1)))]]).near < 1.0
    # Clusters whose steps are steadier do not get the distances of others.
    steady = replace(level, entries=(run("auto", 9.0, 10.0), run(AGAIN, 9.0, 10.0), *level.entries[2:]))
    both = Repeats.of([[steady], [level]])
    of_steady = both.contests[: len(both.contests) // 2]
    assert both.num_pairs == 2
    assert Repeats(num_pairs=1, median=0.0, share_apart=0.0, contests=of_steady).tau_in_task == 1.0
    assert both.tau_in_task < 1.0
    assert Repeats.of([[replace(contest(), entries=clear.entries[1:])]]) is None
