"""A planner of another package is one file and one line: command line, service and page of planners have it at once."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = Path(sys.executable).with_name("autoshard")
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
    return folder


def printed(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.usefixtures("installed")
def test_commands_have_a_new_planner():
    described = json.loads(printed(PROGRAM, "list", "planners", "--json"))["planners"]
    assert [one["summary"] for one in described if one["name"] == "turns"] == ["Deals tables to ranks in turns."]
    task = (TASK["tables"], "--topology", TASK["topology"])
    plan = json.loads(printed(PROGRAM, "plan", *task, "--planner", "turns", "--json"))
    assert plan["provenance"]["planner"] == "turns"
    compared = json.loads(printed(PROGRAM, "compare", *task, "--planners", "random,turns", "--json"))["planners"]
    assert [one["failure"] for one in compared if one["planner"] == "turns"] == [None]


@pytest.mark.usefixtures("installed")
def test_the_page_of_planners_has_a_new_planner():
    code = "from scripts.reference_pages import planners_page; print(planners_page(['auto', 'turns']))"
    page = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert "| `turns` | Deals tables to ranks in turns. |" in page
    assert "\n## turns\n" in page


@pytest.mark.usefixtures("installed")
def test_the_service_has_a_new_planner(own_service):
    with own_service().client() as client:
        known = {one["name"]: one for one in client.get("/v1/catalogue").json()["planners"]}
        assert known["turns"] == {"name": "turns", "summary": "Deals tables to ranks in turns.", "is_compared": False}
        assert known["auto"]["is_compared"]
        made = client.post("/v1/plans", json={**TASK, "planner": "turns"})
        assert made.status_code == 200
        assert made.json()["plan"]["provenance"]["planner"] == "turns"
