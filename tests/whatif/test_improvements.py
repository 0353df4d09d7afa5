"""Single changes that would help are plans of the changed task, and priced as such."""

from dataclasses import replace

import pytest

from autoshard.core import ReplicaGroups
from autoshard.formats import load_topology
from autoshard.planners.explanation import explain
from autoshard.planning import make_plan
from autoshard.results.explanation import EXPLANATION
from autoshard.whatif.improvements import find_improvements
from tests.builders import request, table, tables


def a_plan(topology, planner="neo"):
    of = [table(f"t{index}", 20_000 * (1 + index), 64, pooling_factor=5.0, row_order=None) for index in range(8)]
    task = request(tables(*of, batch_size=65_536), load_topology(topology))
    return make_plan(planner, task), task.costs


@pytest.fixture(scope="module")
def found():
    plan, costs = a_plan("a100-32", "size-greedy")
    explanation = explain(plan, costs)
    return explanation, find_improvements(plan, costs, explanation, budget_s=600)


def test_every_kind_of_change_is_planned_and_the_best_is_first(found):
    explanation, improvements = found
    fields = {one.field for one in improvements if not one.field.startswith("shards.")}
    assert fields == {
        *("plan", "topology.levels.node", "topology.levels.cluster"),
        *("topology.memory_bytes.hbm", "topology.world_size", "tables.batch_size"),
    }
    assert [one.gain for one in improvements] == sorted((one.gain for one in improvements), reverse=True)
    for one in improvements:
        batch_size = 131_072 if one.field == "tables.batch_size" else 65_536
        assert one.samples_per_s == pytest.approx(batch_size / one.step_ms * 1e3)
        assert one.gain == pytest.approx(one.samples_per_s * explanation.step_ms / 65_536 / 1e3 - 1)


def test_one_table_held_otherwise_is_the_best_alternative_of_all(found):
    explanation, improvements = found
    best = min(other.step_ms or float("inf") for one in explanation.tables for other in one.alternatives)
    (split,) = [one for one in improvements if one.field.startswith("shards.")]
    assert split.step_ms == best < explanation.step_ms


def test_links_twice_as_fast_make_no_plan_slower(found):
    by_field = {one.field: one.step_ms for one in found[1]}
    assert by_field["topology.levels.cluster"] <= by_field["plan"] * 1.001


def test_what_cannot_be_planned_is_left_out():
    plan, costs = a_plan("a100-8")  # one level: no topology of twice the ranks can be made of it
    explanation = explain(plan, costs)
    assert "topology.world_size" not in {one.field for one in find_improvements(plan, costs, explanation, budget_s=600)}
    assert {one.field.split(".")[0] for one in find_improvements(plan, costs, explanation, budget_s=-1)} <= {"shards"}
    grouped = replace(plan, replica_groups=ReplicaGroups(num_groups=2))
    assert find_improvements(grouped, costs, explanation, budget_s=600) == ()


def test_the_document_reads_as_it_is_written(found):
    document = EXPLANATION.to_json(found)
    assert document["schema"] == "autoshard.explanation/1"
    assert EXPLANATION.from_json(document)["improvements"] == found[1]
    assert [one["gain"] for one in document["improvements"]] == [one.gain for one in found[1]]
