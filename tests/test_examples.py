"""The examples run as they stand: code blocks of README.md and of docs, and the first one of `plan --help`."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType

import pytest

from autoshard.cli import main
from autoshard.core import Tier
from autoshard.evaluation import evaluate
from autoshard.formats import read_plan, read_tables, read_topology
from autoshard.validator import validate_plan
from costmodel.registry.versions import SHIPPED_VARIABLE
from studies.frame import OutputOptions
from tests import builders as make

ROOT = Path(__file__).parent.parent
#: Each file, and the part of it whose blocks run by themselves.
PAGES = {"README.md": r"## Your own tables\n(.*?)\n## ", "docs/quick-start.md": r"(.*)"}


def blocks(language):
    """Code blocks of all pages, those over REST left out, which tests/server tries.

    Those that start processes are slow, and come with the page's blocks before them.
    """
    for page, part in PAGES.items():
        text = re.search(part, (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)[1]
        before = ""
        for number, block in enumerate(re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)):
            if "curl" in block or "autoshard serve" in block:
                continue
            if "autoshard run" in block:
                yield pytest.param(before + block, id=f"{page} {number}", marks=pytest.mark.slow)
            else:
                yield pytest.param(block, id=f"{page} {number}")
            before += block


@pytest.fixture
def contributed(monkeypatch):
    """Makes a module of the code block of CONTRIBUTING.md that defines a name."""

    def make_one(name):
        text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
        blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        (block,) = [block for block in blocks if re.search(rf"^(?:class|def) {name}\b", block, re.MULTILINE)]
        module = ModuleType(f"contributed_{name}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(block, name, "exec"), module.__dict__)
        return module

    return make_one


def test_the_planner_and_the_cost_model_of_contributing(contributed):
    tables, topology = read_tables("examples/tables.json"), read_topology("examples/topology.json")
    costs = make.costs(kernel=contributed("BytesModel").load(None, "toy"))
    planner = contributed("TurnsPlanner").TurnsPlanner()
    plan = planner.plan(make.request(tables, topology, costs=costs))
    validate_plan(plan)
    assert Counter(placed.replicas[0][0] for placed in plan.shards) == dict.fromkeys(range(4), 2)
    assert evaluate(plan, costs).cost_model == "bytes:toy"


def test_the_sample_kind_of_contributing(contributed):
    module = contributed("CopySample")
    made_by = dict.fromkeys(("device_name", "torch_version", "autoshard_version", "git_commit"), "x")
    measured = {"num_threads": 1, "num_bytes": 4096, "copy_ms": 0.5, "num_rounds": 3, "source": "random"}
    sample = module.CopySample(collected_at=datetime.now(UTC), device="cpu", **made_by, **measured)
    module.COPY_SAMPLES.write("samples", [sample])
    assert module.COPY_SAMPLES.read("samples") == (sample.identified(),)


def test_the_study_of_contributing(contributed, capfd):
    module = contributed("HelloOptions")
    module.main(module.HelloOptions(greeting="Hi"), OutputOptions())
    assert capfd.readouterr().out.startswith("Hi, there are ")


def how_to():
    """Code blocks of the page on trainers: a plan, a run, the example."""
    text = (ROOT / "docs/how-to/use-in-a-trainer.md").read_text(encoding="utf-8")
    return [block.strip() for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)]


@pytest.mark.slow
def test_the_trainer_trains(capfd):
    plan, _, trainer = how_to()
    assert run_lines([plan], capfd) == {}
    assert {placed.tier for placed in read_plan("plan.json").shards} > {Tier.TABLE_WISE}
    program, *arguments = shlex.split(trainer)
    assert program == "torchrun"
    command = [sys.executable, "-m", "torch.distributed.run", *arguments, "--steps", "3"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    steps = re.findall(r"^step (\d): loss 0\.\d{4}, [\d,]+ samples/s$", done.stdout, re.MULTILINE)
    assert steps == ["0", "1", "2"], done.stderr


@pytest.mark.slow
def test_the_plan_of_the_trainer_runs(capfd):
    plan, run, _ = how_to()
    assert run_lines([plan, run], capfd) == {}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A copy of the examples to run in, and the models that come with this package, as a user has them."""
    monkeypatch.delenv(SHIPPED_VARIABLE)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)


def run_lines(lines, capfd):
    """Runs command lines; returns those that fail or warn, each with what it wrote to standard error."""
    failed = {}
    for line in lines:
        program, *arguments = shlex.split(line)
        assert program == "autoshard"
        capfd.readouterr()
        code = main(arguments)
        err = capfd.readouterr().err
        # The shipped models are of one machine, and say so on others.
        warnings = [line for line in err.splitlines() if "warning" in line and ": prices are of " not in line]
        if code != 0 or warnings:
            failed[line] = err
    return failed


@pytest.mark.parametrize("block", list(blocks("sh")))
def test_commands(block, capfd):
    assert run_lines(block.splitlines(), capfd) == {}


@pytest.mark.parametrize("block", list(blocks("python")))
def test_python(block, capsys):
    exec(compile(block, "example", "exec"), {})
    assert capsys.readouterr().out.startswith("step ")
    assert read_plan("plan.json").predicted.cost_model.startswith("learned:cpu")


def test_the_first_example_of_plan_is_inside_the_range_of_the_model_that_comes_with_autoshard(run, capfd):
    example = run("plan", "--help")[0].split("Example:\n")[1].split("\n\n")[0]
    lines = [" ".join(line.split()) for line in example.replace("\\\n", " ").splitlines()]
    assert lines[-1].startswith("autoshard plan ")
    run_lines(lines, capfd)
    assert read_plan("plan.json").predicted.cost_model.startswith("learned:cpu")


def test_the_files_are_a_task_of_varied_tables():
    tables, topology = read_tables("examples/tables.json"), read_topology("examples/topology.json")
    assert 6 <= len(tables.tables) <= 10
    assert topology.world_size == 4
    kinds = set(re.findall(r'"kind": "(\w+)"', Path("examples/tables.json").read_text(encoding="utf-8")))
    assert kinds == {"uniform", "zipf", "curve", "reuse_bins"}
