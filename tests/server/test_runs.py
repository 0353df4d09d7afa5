"""Runs of plans that training jobs report, and new plans for what has drifted."""

import json
from pathlib import Path

import pytest

import costmodel
from autoshard.api import RunAnswer, RunBody
from autoshard.client import Client, PlanTask, Replan
from autoshard.core.errors import InputError
from autoshard.evaluation import evaluate
from autoshard.evaluation.drift import held_of
from autoshard.formats import plan_to_json
from autoshard.planning import plan_costs
from costmodel.registry.versions import SHIPPED_VARIABLE
from server.settings import ServerSettings
from server.storage.database import Database
from server.storage.location import parsed_url
from server.storage.schema import PLANS, RUNS
from server.storage.upgrading import upgrade
from server.tasks.context import TaskContext
from server.tasks.running import answer_run, with_pooling

TASK = PlanTask(tables="criteo-kaggle", topology="cpu-8", planner="cost-greedy")


@pytest.fixture
def served(service):
    with Client(service.url) as client:
        yield client


def test_a_run_within_the_interval_is_no_drift(served, client):
    made = served.plan(TASK)
    predicted = made.plan.predicted.step_ms
    run = served.report_run(made.id, [predicted.low, predicted.value, predicted.high])
    assert (run.measured_ms, run.predicted_ms) == (predicted.value, predicted.value)
    assert (run.is_outside, run.drifted_ms, run.is_drifted) == (False, None, False)
    slower = served.report_run(made.id, [2 * predicted.high])
    assert slower.is_outside
    assert slower.is_drifted
    listed = client.get(f"/v1/plans/{made.id}/runs").json()["runs"]
    assert [one["is_drifted"] for one in listed[:2]] == [True, False]
    assert 'autoshard_measured_over_predicted_count{is_drifted="true"}' in client.get("/metrics").text


def test_other_mean_ids_are_priced_and_planned_for(served):
    made = served.plan(TASK)
    features = {feature.name: feature.pooling_factor for table in made.plan.tables.tables for feature in table.features}
    name = max(features, key=features.get)
    step_ms = made.plan.predicted.step_ms.value
    same = served.report_run(made.id, [step_ms], pooling_factors=features)
    assert same.drifted_ms == pytest.approx(step_ms, rel=1e-9)
    assert (same.features, same.is_drifted) == ([], False)
    other = served.report_run(made.id, [step_ms], pooling_factors={name: 50 * features[name]})
    [drift] = other.features
    assert (drift.feature, drift.planned, drift.measured) == (name, features[name], 50 * features[name])
    assert other.drifted_ms > 1.05 * step_ms
    assert other.is_drifted
    replanned = served.replan(made.id, Replan(pooling_factors={name: 50 * features[name]}))
    read = {feature.name: feature for table in replanned.plan.tables.tables for feature in table.features}
    assert read[name].pooling_factor == 50 * features[name]
    assert replanned.plan.predicted.step_ms.value <= other.drifted_ms * (1 + 1e-9)


@pytest.mark.parametrize("overlap", [None, "pipelined"])
def test_a_step_as_predicted_is_no_drift_whatever_it_was_priced_for(served, overlap):
    made = served.plan(task_with(risk="high"))
    made = made if overlap is None else served.evaluate(made.plan, overlap=overlap)
    step_ms = made.plan.predicted.step_ms.value
    run = served.report_run(made.id, [step_ms], pooling_factors=pooling_factors(made.plan))
    assert run.drifted_ms == pytest.approx(step_ms, rel=1e-9)
    assert not run.is_drifted


def task_with(**changes):
    return PlanTask(tables="criteo-kaggle", topology="cpu-8", planner="size-greedy", **changes)


def pooling_factors(plan, scale=1.0):
    return {one.name: scale * one.pooling_factor for table in plan.tables.tables for one in table.features}


def test_a_plan_that_another_model_priced_has_drifted_by_its_ids_alone(served, tmp_path, monkeypatch):
    made = served.plan(task_with())
    assert made.plan.predicted.cost_model == "analytic:cpu"
    predicted = made.plan.predicted.step_ms
    stored = json.dumps({"plan": plan_to_json(made.plan)}).encode()
    monkeypatch.setenv(SHIPPED_VARIABLE, str(Path(costmodel.__file__).parent / "shipped"))
    context = TaskContext(settings=ServerSettings(registry=tmp_path / "none"), allow_s=lambda _: None)
    now = evaluate(made.plan, plan_costs(made.plan, tmp_path / "none")).step_ms.value
    assert abs(now / predicted.value - 1) > 0.05  # else this test shows nothing

    def reported(scale):
        body = RunBody(steps_ms=[predicted.value], pooling_factors=pooling_factors(made.plan, scale))
        return RunAnswer.model_validate_json(answer_run(body, context, stored).body)

    assert reported(1.0).drifted_ms == pytest.approx(predicted.value, rel=1e-9)
    assert not reported(1.0).is_drifted
    more = held_of(made.plan, with_pooling(made.plan.tables, pooling_factors(made.plan, 30.0)))
    longer = evaluate(more, plan_costs(more, tmp_path / "none")).step_ms.value / now
    assert longer > 1.05
    assert reported(30.0).drifted_ms == pytest.approx(longer * predicted.value, rel=1e-9)
    assert reported(30.0).is_drifted


def test_a_report_that_makes_no_sense_is_refused(served, client):
    made = served.plan(TASK)
    with pytest.raises(InputError, match="of no feature of the plan's tables"):
        served.report_run(made.id, [1.0], pooling_factors={"nobody": 1.0})
    for body in ({}, {"steps_ms": []}, {"steps_ms": [0]}, {"steps_ms": [1], "pooling_factors": {"t0": -1}}):
        assert client.post(f"/v1/plans/{made.id}/runs", json=body).status_code == 400, body
    missing = f"sha256:{'0' * 64}"
    assert client.post(f"/v1/plans/{missing}/runs", json={"steps_ms": [1]}).status_code == 404
    assert client.get(f"/v1/plans/{missing}/runs").status_code == 404


def test_runs_are_deleted_with_their_plan(tmp_path):
    database = Database(parsed_url(f"sqlite:///{tmp_path}/service.sqlite"))
    upgrade(database)
    plan = {"id": "p", "created_us": 0, "search_text": "", "planner": "x", "device": "cpu"}
    run = {"plan_id": "p", "reported_us": 0, "measured_ms": 1.0, "predicted_ms": 1.0, "is_drifted": False}
    with database.writing() as connection:
        connection.execute(PLANS.insert().values(**plan, num_tables=1, num_ranks=1, step_ms=1.0))
        connection.execute(RUNS.insert().values(**run))
        connection.execute(PLANS.delete())
        assert connection.execute(RUNS.select()).all() == []
    database.close()
