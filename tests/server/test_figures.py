"""A new figure of stored plans takes two places: CONTRIBUTING's lines, put into a copy of the product, are served."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TASK = {"tables": "criteo-kaggle", "topology": "cpu-8", "planner": "cost-greedy"}
#: Files of the recipe, and the lines of the figure before.
PLACES = {"autoshard/api/plans.py": "    step_ms: float", "server/tasks/planning.py": "        step_ms="}
#: What a client with the new field reads.
LISTED = """
import sys
from autoshard.client import Client
with Client(sys.argv[1]) as client:
    print([plan.num_shards for plan in client.list_plans(num_shards=int(sys.argv[2])).plans])
"""


def changed_copy(folder):
    """A copy of the product with the recipe's lines."""
    for package in ("autoshard", "server"):
        shutil.copytree(ROOT / package, folder / package)
    recipe = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Add a figure of stored plans\n")[1]
    added = re.findall(r"```diff\n\+(.*\n)```", recipe.split("\n## ")[0])
    for (file, before), line in zip(PLACES.items(), added, strict=True):
        lines = (folder / file).read_text(encoding="utf-8").splitlines(keepends=True)
        (at,) = (number for number, found in enumerate(lines, start=1) if found.startswith(before))
        (folder / file).write_text("".join([*lines[:at], line, *lines[at:]]), encoding="utf-8")


@pytest.mark.slow
def test_a_new_figure_takes_two_places(own_service, tmp_path, monkeypatch):
    before = own_service("--workers", "1")
    with before.client() as client:
        old = client.post("/v1/plans", json={**TASK, "planner": "random"}).json()["id"]
    assert before.stop() == 0

    changed_copy(tmp_path / "changed")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "changed"))
    service = own_service("--workers", "1")
    with service.client() as client:
        new = client.post("/v1/plans", json=TASK).json()
        num_shards = len(new["plan"]["shards"])
        listed = {plan["id"]: plan["num_shards"] for plan in client.get("/v1/plans").json()["plans"]}
        assert listed == {old: None, new["id"]: num_shards}
        found = client.get("/v1/plans", params={"num_shards": num_shards}).json()["plans"]
        assert [plan["id"] for plan in found] == [new["id"]]
        assert client.get("/v1/plans", params={"num_shards": num_shards + 1}).json()["plans"] == []
        columns = client.get("/v1/catalogue").json()["columns"]["plans"]
        assert {"name": "num_shards", "title": "shards", "kind": "number"} in columns
        document = client.get("/openapi.json").json()
        assert document["components"]["schemas"]["PlanSummary"]["properties"]["num_shards"]["description"]
        assert "num_shards" in [one["name"] for one in document["paths"]["/v1/plans"]["get"]["parameters"]]
    command = [sys.executable, "-c", LISTED, service.url, str(num_shards)]
    answered = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert answered.stdout == f"[{num_shards}]\n"
