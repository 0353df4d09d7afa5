import json
from dataclasses import replace

import pytest

from autoshard.core.errors import InfeasiblePlanError
from autoshard.core.topology import MemoryBytes
from autoshard.formats import load_tables, load_topology
from autoshard.planning import make_costs
from studies.planners import side_by_side
from studies.planners.side_by_side import REFINED, WHOLE, TaskNumbers, compare_task, planner_means
from tests import builders as make


def small_request(seed, hbm_bytes=2**30):
    tables = load_tables("metasyn").scaled(1024).sample(10, seed)
    machine = replace(load_topology("cpu-4"), memory_bytes=MemoryBytes(hbm=hbm_bytes))
    return make.request(tables, machine, costs=make_costs(tables, machine))


@pytest.mark.slow
def test_means_are_over_tasks_and_relative_to_random():
    tasks = [compare_task(small_request(seed), ["random", "lookup-greedy"], device="cpu") for seed in (1, 2)]
    by_name = {row.planner: row for row in planner_means([TaskNumbers.of(task) for task in tasks])}
    slowest = [{row.planner: row.measured.max_kernel_ms for row in task.rows} for task in tasks]
    assert by_name["random"].measured_speedup == 1.0
    expected = sum(times["random"] / times["lookup-greedy"] for times in slowest) / 2
    assert by_name["lookup-greedy"].measured_speedup == pytest.approx(expected)
    assert by_name["lookup-greedy"].measured_max_ms == pytest.approx(sum(t["lookup-greedy"] for t in slowest) / 2)
    assert 0 < by_name["lookup-greedy"].measured_balance <= 1
    ceiling = sum(task.replay.ceiling.balance for task in tasks) / 2
    expected = ceiling - by_name["lookup-greedy"].measured_balance
    assert by_name["lookup-greedy"].below_ceiling == pytest.approx(expected)


def test_a_planner_without_a_plan_ends_the_comparison():
    with pytest.raises(InfeasiblePlanError, match="bytes"):
        compare_task(small_request(1, hbm_bytes=1000), ["random"])


def test_refined_plans_are_replayed_with_the_others():
    request = replace(small_request(1), time_limit_s=0.1)
    task = compare_task(request, ["random", WHOLE], num_refinements=1, device="cpu")
    assert [row.planner for row in task.rows] == ["random", WHOLE, REFINED]
    _, whole, refined = task.rows
    assert refined.plan.shards == whole.plan.shards  # measured once, so nothing was learned
    assert "1 measurement" in refined.plan.provenance.models["refined"]
    assert refined.measured != whole.measured
    assert refined.planning_s > whole.planning_s


def test_auto_may_cut_tables_and_is_replayed_beside_whole_ones():
    request = replace(small_request(3), time_limit_s=0.2)
    task = compare_task(request, ["random", WHOLE, "auto"], device="cpu")
    _, whole, cut = task.rows
    assert all(len(placed.replicas) == 1 == len(placed.replicas[0]) for placed in whole.plan.shards)
    assert cut.plan.provenance.options["objective"] == "step"
    assert cut.plan.predicted.step_ms.value <= whole.plan.predicted.step_ms.value
    assert len(cut.measured.kernel_ms_per_rank) == 4


@pytest.mark.smoke
def test_finished_tasks_are_kept(run_study, tmp_path, monkeypatch, capsys):
    """A second run takes no task again, nor does a longer one; another study's folder is refused."""
    taken = []

    def compare(request, *arguments):
        taken.append(request.tables.tables[0].name)
        return compare_task(request, *arguments)

    monkeypatch.setattr(side_by_side, "compare_task", compare)
    task = ["--planners", "random,lookup-greedy", "--scale", "1024", "--topology", "cpu-4", "--num-tables", "10"]
    options = (*task, "--device", "cpu", "--parts", tmp_path / "parts", "--json")
    documents = []
    for num_tasks in (1, 1, 2):
        assert run_study("side-by-side", *options, "--num-tasks", num_tasks) == 0
        documents.append(json.loads(capsys.readouterr().out))
    assert len(taken) == 2
    assert documents[0] == documents[1]
    assert documents[2]["tasks"][0] == documents[0]["tasks"][0]
    assert run_study("side-by-side", *options, "--num-tables", "11") == 2
    assert "parts whose num_tables is 10, not 11" in capsys.readouterr().err
