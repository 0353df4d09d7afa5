"""A planner of another package is one file and one line: command line, service and page of planners have it at once."""

import json
import re
import sys
from pathlib import Path

import pytest

from scripts.reference_pages import planners_page

ROOT = Path(__file__).parents[2]
TASK = {"tables": "criteo-kaggle", "topology": "cpu-4"}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The planner that CONTRIBUTING.md shows, as pip leaves it: its file, and the metadata beside it."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (module,) = [one for one in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "class TurnsPlanner" in one]
    (line,) = re.findall(r'^turns = "(.*)"$', text, re.MULTILINE)
    folder = tmp_path / "installed"
    about = folder / "my_planner-0.1.dist-info"
    about.mkdir(parents=True)
    (folder / "my_planner.py").write_text(module)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-planner\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text(f"[autoshard.planners]\nturns = {line}\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(folder)
    yield
    sys.modules.pop("my_planner", None)


@pytest.mark.usefixtures("installed")
def test_commands_have_a_new_planner(run):
    def printed(*command):
        return json.loads(run(*command, "--json")[0])

    described = printed("list", "planners")["planners"]
    assert [one["summary"] for one in described if one["name"] == "turns"] == ["Deals tables to ranks in turns."]
    task = (TASK["tables"], "--topology", TASK["topology"])
    plan = printed("plan", *task, "--planner", "turns")
    assert plan["provenance"]["planner"] == "turns"
    compared = printed("compare", *task, "--planners", "random,turns")["planners"]
    assert [one["failure"] for one in compared if one["planner"] == "turns"] == [None]


@pytest.mark.usefixtures("installed")
def test_the_page_of_planners_has_a_new_planner():
    page = planners_page(["auto", "turns"])
    assert "| `turns` | Deals tables to ranks in turns. |" in page
    assert "\n## turns\n" in page


@pytest.mark.usefixtures("installed")
def test_the_service_has_a_new_planner(own_service):
    with own_service("--workers", "1").client() as client:
        known = {one["name"]: one for one in client.get("/v1/catalogue").json()["planners"]}
        turns = {"name": "turns", "summary": "Deals tables to ranks in turns.", "options": []}
        assert known["turns"] == {**turns, "takes_start": False, "is_compared": False}
        assert "sharding_types" in known["auto"]["options"]
        assert known["auto"]["is_compared"]
        assert [name for name, one in known.items() if one["takes_start"]] == ["auto"]
        made = client.post("/v1/plans", json={**TASK, "planner": "turns"})
        assert made.status_code == 200
        assert made.json()["plan"]["provenance"]["planner"] == "turns"
