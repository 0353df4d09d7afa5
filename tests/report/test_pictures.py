"""Pictures of plans say what the plans say."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.core import AccessProfile, MemoryBytes, Pooling, Tier
from autoshard.formats import load_topology
from autoshard.formats.topology_scaling import scaled_topology
from autoshard.planning import make_plan
from autoshard.report import comparison_warnings, plan_figures, plan_warnings
from autoshard.report.caveats import device_warnings
from autoshard.report.pictures import (
    access_figure,
    accuracy_figure,
    pareto_figure,
    placement_figure,
    predicted_interval,
)
from autoshard.results.comparison import ComparedPlan, MeasuredPlan
from tests import builders as make


def table(index, **fields):
    usual = {"num_embeddings": 50_000 * (1 + index), "embedding_dim": 64, "pooling_factor": 20.0, "alpha": 1.1}
    return make.table(f"t{index}", **{**usual, **fields})


def a_plan(planner, *tables, hbm=None, **options):
    topology = load_topology("a100-8")
    if hbm is not None:
        topology = replace(topology, memory_bytes=MemoryBytes(hbm=hbm))
    return make_plan(planner, make.request(make.tables(*tables, batch_size=65_536), topology, options=options))


@pytest.fixture(scope="module")
def whole():
    return a_plan("cost-greedy", *(table(index) for index in range(16)))


@pytest.fixture(scope="module")
def tiered():
    tables = [table(index, pooling=Pooling.SEQUENCE) for index in range(6)]
    return a_plan("flexshard", *tables)


def test_the_map_has_a_colour_where_a_rank_holds_a_table(whole):
    (heat,) = placement_figure(whole).data
    assert heat.z.shape == (16, 8)
    held = {placed.shard.table.name: placed.replicas[0][0] for placed in whole.shards}
    for label, levels in zip(heat.y, heat.z, strict=True):
        assert np.flatnonzero(levels).tolist() == [held[label.split(":")[0]]]
    sizes = {placed.shard.table.name: placed.shard.storage_bytes for placed in whole.shards}
    by_level = sorted(zip(heat.z.max(axis=1).tolist(), (sizes[name.split(":")[0]] for name in heat.y), strict=True))
    assert [size for _, size in by_level] == sorted(sizes.values())
    assert by_level[-1][0] == 255
    assert by_level[0][0] == 1


@pytest.mark.parametrize(("num_ranks", "step"), [(8, 1), (16, 1), (24, 2), (128, 8)])
def test_the_axis_of_ranks_has_whole_ticks(whole, num_ranks, step):
    topology = scaled_topology(load_topology("a100-32"), num_ranks)
    plan = make_plan("cost-greedy", make.request(whole.tables, topology))
    axis = placement_figure(plan).layout.xaxis
    assert (axis.tick0, axis.dtick) == (0, step)


def test_the_map_of_tables_of_one_size_has_one_colour():
    plan = a_plan(
        "cost-greedy",
        *(table(index, num_embeddings=50_000) for index in range(4)),
    )
    (heat,) = placement_figure(plan).data
    assert set(heat.z.ravel().tolist()) == {0, 255}


def test_tables_whose_names_begin_alike_stay_apart_in_the_map():
    names = [f"{'a' * 70}\u202e{number}" for number in range(3)]
    tables = [make.table(name, 50_000, 64, alpha=1.1) for name in names]
    (heat,) = placement_figure(a_plan("cost-greedy", *tables)).data
    assert sorted(heat.meta) == [f"{'a' * 70}\\u202e{number}" for number in range(3)]
    assert len({label.split(":")[0] for label in heat.y}) == 3


def test_access_curves_are_marked_where_tiers_end(tiered, whole):
    cut = {
        placed.shard.rows.stop
        for placed in tiered.shards
        if placed.tier is not Tier.ROW_WISE and placed.shard.rows.stop < placed.shard.table.num_embeddings
    }
    assert cut, "the planner has cut no table"
    marks = [trace for trace in access_figure(tiered).data if trace.mode == "markers"]
    assert {round(x * _rows(tiered, mark)) for mark in marks for x in mark.x} == cut
    assert all(trace.mode == "lines" for trace in access_figure(whole).data)


def test_captions_count_the_curves_that_are_left_out(tiered, whole):
    captions = {picture.name: picture.caption for plan in (tiered, whole) for picture in plan_figures(plan)}
    assert len(access_figure(whole).data) == 8
    assert "8 of 16 are shown: those of the tables with most lookups" in captions["access"]
    assert "4 of 6 are shown: those of tables with replicated rows" in captions["pareto"]
    assert "are shown" not in next(one.caption for one in plan_figures(tiered) if one.name == "access")


def _rows(plan, mark):
    name = mark.name.split(":")[0]
    return next(one.num_embeddings for one in plan.tables.tables if one.name == name)


def test_tables_without_hot_rows_have_no_curve():
    tables = [table(index, access=AccessProfile.uniform(50_000 * (1 + index))) for index in range(2)]
    assert access_figure(a_plan("cost-greedy", *tables)) is None


def test_flexshards_plans_have_pareto_curves_with_the_rows_that_are_replicated(tiered, whole):
    assert pareto_figure(whole) is None
    traces = pareto_figure(tiered).data
    planned = [trace for trace in traces if trace.name.endswith("as planned")]
    replicated = {f"{placed.shard.rows.stop:,}" for placed in tiered.shards if placed.tier is Tier.DATA_PARALLEL}
    assert {text for trace in planned for text in trace.text} <= {*replicated, "0"}
    neutral = [trace for trace in traces if trace.name.endswith("as if split")]
    assert all(abs(trace.y[0]) < 1e-3 for trace in neutral)


def test_predictions_stand_over_measurements_with_their_intervals(whole):
    predicted = whole.predicted
    measured = MeasuredPlan(forward_ms_R=(1.0,) * 8, backward_ms_R=(2.0,) * 8)
    marks, _ = accuracy_figure(predicted, measured).data
    assert list(marks.x) == [3.0] * 8
    assert list(marks.y) == [rank.kernel_ms for rank in predicted.ranks]
    for rank in predicted.ranks:
        found = predicted_interval(rank, predicted)
        assert found.low < found.value < found.high
    assert [one.name for one in plan_figures(whole, measured)] == ["time", "accuracy", "memory", "map", "access"]


def test_what_was_measured_on_another_device_is_said_to_be(whole):
    assert whole.topology.device == "a100"
    assert device_warnings("a100", whole) == ()
    assert device_warnings("cpu", whole) == ("Measured on cpu, but the plan is for a100.",)
    machine = replace(whole, topology=replace(whole.topology, device="cpu:amd-25-17-avx512"))
    assert device_warnings("cpu", machine) == ()


def test_what_limits_trust_comes_as_warnings(whole):
    assert plan_warnings(whole) == ()
    notes = {"kernel_notes": "2 shards lie outside the range", "machine_notes": "prices are of another machine"}
    noted = replace(whole, provenance=replace(whole.provenance, models={**whole.provenance.models, **notes}))
    assert plan_warnings(noted) == ("2 shards lie outside the range.", "Prices are of another machine.")
    named = replace(noted.provenance, models={"machine_notes": "learned:cpu@0805 (shipped): prices are of a Xeon"})
    assert plan_warnings(replace(whole, provenance=named)) == ("learned:cpu@0805 (shipped): prices are of a Xeon.",)
    needed = max(rank.used_bytes for rank in whole.predicted.ranks)
    tight = replace(whole, topology=replace(whole.topology, memory_bytes=MemoryBytes(hbm=round(needed / 0.95))))
    (warning,) = plan_warnings(tight)
    assert warning.startswith("Close to the memory limit: ")
    assert "uses 95.0%" in warning
    full = replace(whole, topology=replace(whole.topology, memory_bytes=MemoryBytes(hbm=needed - 1)))
    assert "training on a batch does not" in plan_warnings(full)[0]
    rows = [ComparedPlan(planner=name, planning_s=0.1, plan=noted) for name in ("a", "b")]
    assert comparison_warnings(rows) == ("Within noise: a, b.", *plan_warnings(noted))
