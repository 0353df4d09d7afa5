"""Whole evaluations, as small as they can be, on a cost model with weights set by hand."""

import json
from dataclasses import replace

import numpy as np
import pytest

from autoshard.core.errors import InvalidOptionError
from autoshard.formats import write_tables
from autoshard.planning import make_plan
from autoshard.report.images import figure_page
from costmodel import Registry
from studies.policies import FIGURES, EvaluationSettings, Lab, policy_result
from studies.policies.lab import COST_GREEDY, LOOKUP_GREEDY, POLICY, RANDOM, SAMPLED
from studies.policies.study import sections
from tests import builders as make

#: All but training curves of several processes, and those of test_blind_evaluation.
NAMES = ("fig8", "fig9", "table2", "fig11", "fig12-inference", "targets", "steps")


@pytest.fixture(scope="module")
def settings(tmp_path_factory, cost):
    """A pool of 30 tables, and a registry that prices it."""
    root = tmp_path_factory.mktemp("evaluation")
    Registry(root / "registry").publish("cost", "cpu", cost.tensors(), cost.card.to_json())
    rng = np.random.default_rng(0)
    rows = rng.integers(200, 3000, 30).tolist()
    write_tables(make.pool(rng.uniform(1, 10, 30).round(2).tolist(), rows), root / "tables.json")
    return EvaluationSettings(
        tables=str(root / "tables.json"),
        scale=1,
        registry=root / "registry",
        num_seeds=2,
        num_step_seeds=1,
        num_train_tasks=3,
        num_validation_tasks=2,
        num_test_tasks=2,
        num_target_tasks=2,
        num_tables=8,
        num_ranks=2,
        num_updates=2,
        num_samples=4,
        auto_s=0.02,
        search_s=0.05,
        num_random=40,
        step_updates=1,
        transfer=((8, 2), (16, 4)),
        inference=((8, 2), (16, 4)),
        num_timed=1,
    )


@pytest.fixture(scope="module")
def lab(settings, tmp_path_factory):
    lab = Lab(settings, tmp_path_factory.mktemp("output"))
    for name in NAMES:
        FIGURES[name].run(lab)
    return lab


@pytest.fixture(scope="module")
def result(lab):
    return policy_result(lab, "the command")


def test_seeds_and_purposes_have_tasks_of_their_own(lab):
    ranges = [
        *(seeds(seed) for seeds in (lab.train_seeds, lab.test_seeds) for seed in range(5)),
        *(lab.validation_seeds(), lab.target_seeds()),
    ]
    every = [task for tasks in ranges for task in tasks]
    assert len(every) == len(set(every))


@pytest.mark.smoke
def test_numbers_are_those_of_the_planners(lab):
    for seed in range(2):
        task = lab.parts.read(f"fig8/seed-{seed}")["tasks"][1]
        tables = lab.pool.sample(8, lab.test_seeds(seed)[1])
        request = lab.request(tables, lab.topology(2), policies=lab.policy_registry(seed), seed=1)
        for planner in (RANDOM, LOOKUP_GREEDY, COST_GREEDY, POLICY):
            predicted = make_plan(planner, request).predicted
            assert task[planner]["max_ms"] == pytest.approx(predicted.max_kernel_ms)
            assert task[planner]["balance"] == pytest.approx(predicted.balance)
        assert task[SAMPLED]["max_ms"] <= task[POLICY]["max_ms"] * (1 + 1e-9)


def test_ablations_start_from_the_policy_of_fig8(lab):
    whole, known = lab.parts.read("table2/whole-0")["tasks"], lab.parts.read("fig8/seed-0")["tasks"]
    assert [task[POLICY]["max_ms"] for task in whole] == pytest.approx([task[POLICY]["max_ms"] for task in known])
    assert [task[RANDOM] for task in whole] == [task[RANDOM] for task in known]


def test_random_search_gets_better(lab):
    part = lab.parts.read("fig9/seed-0")
    assert part["num_placements"] == [1, 2, 5, 10, 20, 40]
    assert part["balance"] == sorted(part["balance"])
    assert part["max_ms"] == sorted(part["max_ms"], reverse=True)


def test_memory_is_nearly_full_where_it_should_be(lab, settings):
    """Plans with limits cost more or as much, and the limits are as tight as the settings say."""
    loose, tight = (lab.parts.read(f"targets/8-2{end}-0")["tasks"] for end in ("", "-full"))
    assert any(with_limits != without for with_limits, without in zip(tight, loose, strict=True))
    for problem in lab.problems(lab.target_seeds(), memory_fill=settings.memory_share):
        held = problem.bytes_N.sum() / problem.capacity_R.sum()
        assert 0.5 < held <= settings.memory_share


def test_what_the_cost_model_cannot_price_is_skipped_with_a_message(lab, result):
    """It has seen whole tables only, whose owners send sums."""
    assert "the learned cost model has seen" in lab.parts.read("steps/tiers-0")["skipped"]
    assert "Tiers by access frequency: skipped, since" in result.to_markdown()


def test_whole_steps_are_planned_within_memory(lab):
    for task in lab.parts.read("steps/tables-0")["tasks"]:
        assert task[POLICY]["step_ms"] >= task[SAMPLED]["step_ms"] > 0


def test_finished_parts_are_not_computed_again(lab, settings):
    folder = lab.parts.folder
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.json")}
    again = Lab(settings, folder)
    for name in NAMES:
        FIGURES[name].run(again)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.json")} == before


def test_a_missing_part_is_made_anew_and_equal(lab, settings):
    path = lab.parts.folder / "parts/fig11/16-4-1.json"
    before = json.loads(path.read_text())["result"]
    path.unlink()
    again = Lab(settings, lab.parts.folder)
    assert FIGURES["fig11"].section(again) is None
    FIGURES["fig11"].run(again)
    after = json.loads(path.read_text())["result"]
    for task, known in zip(after["tasks"], before["tasks"], strict=True):
        assert {name: one["max_ms"] for name, one in task.items()} == {
            name: one["max_ms"] for name, one in known.items()
        }


def test_the_folder_of_another_evaluation_is_refused(lab, settings):
    with pytest.raises(InvalidOptionError, match="num_updates is 2, not 3"):
        Lab(replace(settings, num_updates=3), lab.parts.folder)


def test_page_numbers_and_tables(lab, result):
    document = json.loads(json.dumps(result.document))
    assert set(document["figures"]) == set(NAMES) == set(sections(lab))
    assert document["figures"]["fig8"]["parts"]["seed-1"] == lab.parts.read("fig8/seed-1")
    page, text = figure_page(result.page), result.to_markdown()
    assert set(result.images) == {f"-{name}" for name in NAMES}
    for figure in document["figures"].values():
        assert f"## {figure['title']}" in text
        for table in figure["tables"]:
            assert table["caption"] in page
            assert all(f"| {' | '.join(line)} |" in text for line in table["lines"])
    assert "- Command: the command" in text


@pytest.mark.slow
def test_replayed_plans_are_shown_beside_the_ceiling(lab, settings):
    """With the micro-benchmark on this machine: one task, all of its plans."""
    replaying = Lab(replace(settings, num_replayed=1), lab.parts.folder)
    FIGURES["fig8"].run(replaying)
    part = replaying.parts.read("fig8/replay-0-0")
    assert len(part["ceiling"]["kernel_ms"]) == 2
    assert 0 < part["ceiling"]["balance"] <= 1
    task = part["tasks"][0]
    assert {RANDOM, COST_GREEDY, POLICY} <= set(task)
    for name, measured in task.items():
        assert measured["max_ms"] == max(measured["kernel_ms"])
        assert part["predicted"][name]["max_ms"] > 0
    section = FIGURES["fig8"].section(replaying)
    assert "ceiling" in section.tables[1].lines[-1][0]


@pytest.mark.slow
def test_what_random_search_found_is_replayed_beside_planners(lab, settings):
    replaying = Lab(replace(settings, num_replayed=1), lab.parts.folder)
    assert FIGURES["fig9"].section(replaying) is None
    FIGURES["fig9"].run(replaying)
    part = replaying.parts.read("fig9/replay-1-0")
    searched = ["random, best of 1", "random, best of 10", "random, best of 40"]
    assert {*searched, RANDOM, COST_GREEDY, POLICY} <= set(part["tasks"][0])
    predicted = [part["predicted"][name]["max_ms"] for name in searched]
    assert predicted == sorted(predicted, reverse=True)
    section = FIGURES["fig9"].section(replaying)
    measured = section.tables[1]
    assert [line[0] for line in measured.lines[1:4]] == searched
    assert "ceiling" in measured.lines[-1][0]
    assert {"best by price, replayed", "policy, replayed"} <= {trace.name for trace in section.figure.data}
    assert "1 of the tasks of each seed" in section.caption


@pytest.mark.slow
def test_plans_of_larger_tasks_are_replayed(lab, settings):
    replaying = Lab(replace(settings, num_replayed=1), lab.parts.folder)
    FIGURES["fig11"].run(replaying)
    part = replaying.parts.read("fig11/replay-16-4-1-0")
    assert len(part["ceiling"]["kernel_ms"]) == 4
    assert all(len(plan["kernel_ms"]) == 4 for plan in part["tasks"][0].values())
    section = FIGURES["fig11"].section(replaying)
    assert [table.caption for table in section.tables] == [
        *("Predicted balance", "Predicted speed-up over random", "Measured balance", "Measured speed-up over random")
    ]
    assert section.tables[2].columns[-1] == "identical ranks (ceiling)"
    assert all(len(line) == len(section.tables[2].columns) for line in section.tables[2].lines)
