"""Every block of commands or Python in README.md and docs is executed by some test, or named here with the reason."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from autoshard.formats import read_plan, read_tables
from costmodel.registry.versions import SHIPPED_VARIABLE

ROOT = Path(__file__).parent.parent
#: Pages whose blocks this file or another one executes, all but those in `NOT_EXECUTED`.
EXECUTED = {
    "README.md": "tests/test_examples.py",
    "docs/quick-start.md": "tests/test_examples.py",
    "docs/how-to/use-in-a-trainer.md": "tests/test_examples.py",
    "docs/how-to/plan-over-rest.md": "tests/server",
    "docs/how-to/plan-your-own-tables.md": "tests/test_doc_blocks.py",
    "docs/how-to/import-configurations.md": "tests/formats/test_dlrm_command.py",
    "docs/how-to/use-with-torchrec.md": "tests/test_doc_blocks.py",
    "docs/tour.md": "tests/test_doc_blocks.py",
    "docs/reference/python.md": "tests/test_doc_blocks.py",
    "docs/reference/environment.md": "tests/test_doc_blocks.py",
    "docs/reference/access-profiles.md": "tests/test_doc_blocks.py",
    "docs/reference/planners/flexshard.md": "tests/test_doc_blocks.py",
    "docs/reference/planners/neo.md": "tests/test_doc_blocks.py",
    "docs/reference/planners/oper.md": "tests/test_doc_blocks.py",
    "docs/reference/planners/replica-groups.md": "tests/test_doc_blocks.py",
}
#: Other pages, and what their blocks need.
NOT_EXECUTED = {
    "docs/how-to/collect-on-a-schedule.md": "a Ray cluster; tests/bench/test_ray_collector.py starts one",
    "docs/how-to/docker.md": "Docker",
    "docs/how-to/measure-a-gpu.md": "a GPU, on a machine without network; tests/studies/gpu runs the study on a CPU",
    "docs/how-to/run-jobs.md": "minutes of measuring and training; tests/server/test_jobs.py makes such jobs shortened",
    "docs/how-to/test-cluster.md": "network namespaces; tests/studies/test_cluster.py makes them where it may",
    "docs/reference/simulation.md": "many minutes; tests/simulation sweeps smaller clusters",
    "docs/training.md": "minutes of training; tests/runtime and tests/cli run the same commands shortened",
    "docs/virtual-time.md": "a process for each rank; tests/runtime/test_virtual_time.py executes plans so",
    "docs/how-to/train.md": "minutes of measuring; tests/costmodel and tests/policies run the same commands shortened",
}
_BLOCK = re.compile(r"^ *```(sh|console|python)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def blocks(page, language):
    """Blocks of a page, without the indentation of lists."""
    found = _BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    return [textwrap.dedent(text).strip() for kind, text in found if kind == language]


def test_every_block_is_executed_or_named():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    # Pages of results show what was run, with the machines; their command lines are parsed by test_docs.py.
    names = {str(page.relative_to(ROOT)) for page in pages if _BLOCK.search(page.read_text(encoding="utf-8"))}
    names = {name for name in names if not name.startswith("docs/results/")}
    assert names == EXECUTED.keys() | NOT_EXECUTED.keys()
    assert all((ROOT / place).exists() for place in EXECUTED.values())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A copy of the examples to run in, and the models that come with this package, as a user has them."""
    monkeypatch.delenv(SHIPPED_VARIABLE)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_lines(text):
    """Runs the command lines of a block as a shell would, each in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": f"{Path.cwd()}:{ROOT}", "OMP_NUM_THREADS": "1"}
    programs = {
        "autoshard": [sys.executable, "-c", "import sys; from autoshard.cli import main; sys.exit(main())"],
        "torchrun": [sys.executable, "-m", "torch.distributed.run"],
        "python": [sys.executable],
    }
    for line in text.replace("\\\n", " ").splitlines():
        program, *arguments = shlex.split(line, comments=True)
        command = [*programs[program], *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)
        assert done.returncode == 0, f"{line}: {done.stderr}"


def execute(text):
    """Runs Python in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": f"{Path.cwd()}:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", text]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, f"{text}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_the_first_screen_of_the_readme():
    lines = blocks("README.md", "sh")[0].splitlines()
    assert lines[0].startswith("make install ")
    run_lines("\n".join(line for line in lines if line.startswith("autoshard ")))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", sorted(page for page in EXECUTED if "/planners/" in page))
@pytest.mark.usefixtures("folder")
def test_commands_of_planners(page):
    run_lines("autoshard import metasyn --num-tables 12 --seed 1 --scale 64 -o tables.json")
    for block in blocks(page, "sh"):
        run_lines(block)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tour(folder):
    for block in blocks("docs/tour.md", "sh"):
        run_lines(block)
    assert (folder / "plan.html").stat().st_size > 10_000
    # Traffic was recorded between the two plans.
    planned, recorded = read_plan("plan.json").tables, read_tables("recorded.json")
    assert recorded["item"].access.coverage(2000) > 2 * planned["item"].access.coverage(2000)
    assert (folder / "plan.pt").exists()


@pytest.mark.slow
def test_counts_of_ones_own_become_a_plan_that_runs(folder):
    (folder / "counts").mkdir()
    for name in ("user", "item"):
        counts = np.random.default_rng(0).zipf(1.5, 5000).clip(max=10_000)
        pq.write_table(pa.table({"count": counts}), folder / "counts" / f"{name}.parquet")
    (imported,) = blocks("docs/reference/access-profiles.md", "sh")
    run_lines(imported)
    (folder / "my_tables.csv").write_text("Table Name,#Rows,Dim\nuser,10000,16\nitem,2000,16\n")
    listed = {"name": ["user"], "size": [10_000], "dim": [16], "owner": ["somebody"]}
    pq.write_table(pa.table(listed), folder / "my_tables.parquet")
    lists, first, *others = blocks("docs/how-to/plan-your-own-tables.md", "sh")
    run_lines(lists)
    run_lines(first)
    tables = json.loads((folder / "tables.json").read_text())
    (folder / "tables.json").write_text(json.dumps(tables | {"batch_size": 256}))
    for block in others:
        run_lines(block)
    framed, trainer = blocks("docs/how-to/plan-your-own-tables.md", "python")
    assert execute(f"{framed}\nprint(len(tables.tables))").strip().endswith("2")
    # At the batch of the page, FlexShard's rule cuts both tables by access rank.
    run_lines(first)
    run_lines("autoshard plan tables.json --topology cpu-4 --planner flexshard --set rule=paper -o plan.json")
    orders = trainer.splitlines()[0]
    imports = "import torch\nfrom autoshard.formats import read_plan\nfrom autoshard.formats.row_orders import *\n"
    names = execute(f"{imports}plan = read_plan('plan.json')\n{orders}\nprint(sorted(orders))")
    assert names.strip() == "['item', 'user']"


#: What stands around the Python of the page on TorchRec: a group of one process, a model, a batch.
_BEFORE = """
import tempfile, torch, torch.distributed as dist
import autoshard.torchrec
from autoshard.whatif.trials import local_topology
from examples.torchrec_model import batch as draw, make
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/meet", rank=0, world_size=1)
topology, sharders, constraints = local_topology("cpu", 1, 1 << 30), get_default_sharders(), {}
dense, features, clicks = draw(0)


class Trained(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dlrm = make()

    def forward(self, batch):
        return self.dlrm(dense, features).sum()


model, batch = Trained(), None
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_doors_to_torchrec(folder):
    page = "docs/how-to/use-with-torchrec.md"
    record, planner, shard = blocks(page, "python")
    recorded = record.replace("...  # some thousand steps", "model(batch)")
    assert recorded != record
    execute(f"{_BEFORE}{recorded}\n{planner}\nmodel(batch).backward()")
    planned = (
        "plan = autoshard.torchrec.Planner(topology=topology, batch_size=256, timeout_seconds=1.0)\nplan.plan(model)\n"
    )
    step = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nplan = plan.chosen\n"
    execute(f"{_BEFORE}{planned}{step}{shard}")
    (folder / "my_model.py").write_text("from examples.torchrec_model import make\n")
    first, *others = blocks(page, "sh")
    run_lines(first)
    run_lines("autoshard plan tables.json --topology a100-8 --planner size-greedy -o plan.json")
    for block in others:
        run_lines(block.replace("timeout_s=60", "timeout_s=20"))


def test_the_environment_is_made_as_its_page_says():
    (block,) = blocks("docs/reference/environment.md", "python")
    made = {}
    exec(compile(block, "environment.md", "exec"), made)
    assert made["observation"] in made["env"].observation_space


@pytest.mark.usefixtures("folder")
def test_errors_of_the_page_on_python(capsys):
    (block,) = blocks("docs/reference/python.md", "python")
    exec(compile(block, "python.md", "exec"), {})
    assert capsys.readouterr().out.startswith("missing.json: cannot be read")


@pytest.mark.parametrize("name", [path.name for path in sorted((ROOT / "examples").glob("*.ipynb"))])
@pytest.mark.slow
def test_notebooks_run(name, folder):
    cells = json.loads((folder / "examples" / name).read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 4
    assert all(cell["outputs"] == [] for cell in cells if cell["cell_type"] == "code"), "kept without outputs"
    printed = execute("\n\n".join(code))
    assert len(printed.splitlines()) >= len(code)
