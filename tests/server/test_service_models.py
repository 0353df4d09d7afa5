"""The service with trained models, from samples to a plan that the policy made."""

from pathlib import Path

import pytest

from autoshard.cli import main
from autoshard.formats import load_tables, plan_from_json, tables_to_json
from autoshard.validator import validate_plan
from costmodel.registry.versions import SHIPPED_VARIABLE, Registry
from policies.network import first_weights
from policies.planning.trained import TrainedPolicy

SAMPLES = Path(__file__).parents[1] / "data" / "samples"


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "registry"
    trained = ("--registry", str(folder), "--seed", "0")
    assert main(["train", "cost", "--store", str(SAMPLES), "--updates", "20", *trained]) == 0
    TrainedPolicy(weights=first_weights(0), training={}).publish(Registry(folder))
    return folder


@pytest.fixture(scope="module")
def task():
    tables = load_tables("metasyn").sample(12, 1).scaled(64)
    return {"tables": tables_to_json(tables), "topology": "cpu-4", "time_limit_s": 0.5}


@pytest.mark.slow
def test_plans_are_made_and_priced_by_trained_models(registry, own_service, task):
    service = own_service("--registry", registry, "--workers", "1")
    with service.client() as client:
        for planner in ("policy", "auto"):
            answer = client.post("/v1/plans", json={**task, "planner": planner})
            assert answer.status_code == 200
            plan = plan_from_json(answer.json()["plan"])
            validate_plan(plan)
            assert plan.predicted.cost_model.startswith("learned:cpu")
            assert plan.provenance.planner == planner
        # One policy serves all devices.
        answer = client.post("/v1/plans", json={**task, "planner": "policy", "topology": "a100-8"})
        assert answer.status_code == 200
        model_id = Registry(registry).production_id("cost", "cpu")
        assert f'autoshard_model{{id="{model_id}",kind="cost",name="cpu"}} 1.0' in client.get("/metrics").text
    assert service.stop() == 0


@pytest.mark.slow
def test_shipped_models_serve_where_no_registry_is_given(registry, own_service, task, monkeypatch):
    monkeypatch.setenv(SHIPPED_VARIABLE, str(registry))
    service = own_service("--workers", "1")
    ids = {kind: Registry(registry).production_id(kind, name) for kind, name in (("cost", "cpu"), ("policy", "any"))}
    with service.client() as client:
        answer = client.post("/v1/plans", json={**task, "planner": "policy"})
        assert answer.status_code == 200
        plan = plan_from_json(answer.json()["plan"])
    assert plan.predicted.cost_model == plan.predicted.models["kernel"] == f"learned:cpu@{ids['cost']} (shipped)"
    assert plan.provenance.models["policy"] == f"policy:any@{ids['policy']} (shipped)"
    assert service.stop() == 0
