"""The whole chain: samples, cost model, policy, service, plan, four processes, and the unsharded reference."""

import json
from pathlib import Path

import pytest

from autoshard.cli import main
from autoshard.formats import load_tables, load_topology, read_plan, tables_to_json, topology_to_json
from autoshard.runtime import RunRequest, run_requests

SAMPLES = Path(__file__).parents[1] / "data" / "samples"
#: fp32: the plan and the reference add in another order. Outputs are sums of up to 200 rows, moments are relative.
TOLERANCE = 2e-5
OUTPUT_TOLERANCE = 5e-5


@pytest.mark.slow
def test_plan_of_the_service_trains_like_an_unsharded_model(tmp_path, own_service, capfd):
    def autoshard(*arguments):
        capfd.readouterr()
        assert main([*map(str, arguments), "--json"]) == 0
        return json.loads(capfd.readouterr().out)

    registry = tmp_path / "registry"
    cost = autoshard("train", "cost", "--store", SAMPLES, "--registry", registry, "--updates", 400)
    assert cost["promoted"]
    policy = autoshard(
        *("train", "policy", "--registry", registry, "--updates", 3, "--force", "--device", "cpu"),
        *("--num-tasks", 4, "--search-seconds", 0.1, "--improvements", 0),
    )
    assert policy["promoted"]

    tables = load_tables("metasyn").scaled(64).sample(24, seed=4711)
    body = {
        "tables": tables_to_json(tables),
        "topology": topology_to_json(load_topology("cpu-4")),
        "planner": "policy",
    }
    with own_service("--workers", "1", "--registry", str(registry)).client() as client:
        answer = client.post("/v1/plans", json=body)
    assert answer.status_code == 200, answer.text

    path = tmp_path / "plan.json"
    path.write_text(json.dumps(answer.json()["plan"]), encoding="utf-8")
    plan = read_plan(path)
    assert plan.provenance.planner == "policy"
    assert plan.predicted.cost_model.startswith("learned:cpu@")
    assert {rank for placed in plan.shards for held in placed.replicas for rank in held} == set(range(4))

    (result,) = run_requests([RunRequest(plan_path=str(path), steps=1, verify_steps=4)], 4)
    verification = result.verification
    assert verification.output_error <= OUTPUT_TOLERANCE
    assert verification.weight_error <= TOLERANCE
    assert verification.moment_error <= TOLERANCE
