"""Trainings of several processes that torchrun starts, over gloo on CPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from autoshard.formats import write_tables
from costmodel import Registry
from policies.planning.trained import TrainedPolicy
from tests import builders as make

ROOT = Path(__file__).parents[2]

#: Trains in each process, and prints what its weights are and what it has played.
WORKER = """
import json, sys
from autoshard.runtime.processes.learners import joined_learners
from autoshard.formats import read_tables
from autoshard.planners.space.placement import PlacementProblem
from autoshard.core.choices import Device
from policies import Budget
from policies.algorithms.training_options import TrainingOptions
from policies.network.weights import to_arrays
from policies.training.trainer import PolicyTrainer
from tests import builders as make

pool = read_tables(sys.argv[1]).tables
model, topology = make.costs().kernel, make.topology(2)
problems = [PlacementProblem.table_wise(make.tables(*pool[n:n + 8]), topology, model) for n in range(4)]
with joined_learners(Device.CPU) as learners:
    options = TrainingOptions(num_groups=2, num_rollouts=3)
    trainer = PolicyTrainer(problems, problems, options=options, learners=learners)
    trainer.run(Budget(num_updates=2))
    weights = {name: float(value.sum(dtype="float64")) for name, value in to_arrays(trainer.network).items()}
    actions = trainer.algorithm.trajectories.actions_TE.flatten().tolist()
    # In one piece, for both processes write to one pipe.
    sys.stdout.write(json.dumps({"rank": learners.rank, "weights": weights, "actions": actions}) + "\\n")
    sys.stdout.flush()
"""


@pytest.fixture(scope="module")
def registry(tmp_path_factory, make_cost):
    models, cost = Registry(tmp_path_factory.mktemp("models")), make_cost(num_bags=64)
    models.publish("cost", "cpu", cost.tensors(), cost.card.to_json())
    return models.root


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    path = tmp_path_factory.mktemp("tables") / "tables.json"
    write_tables(make.pool(np.random.default_rng(0).uniform(1, 10, 20).round(2).tolist()), path)
    return path


def torchrun(*command):
    """Output and errors of two processes of a command."""
    launch = ["-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    launch += ["--local-addr=127.0.0.1", "--nproc-per-node=2"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *launch, *map(str, command)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.slow
def test_processes_play_episodes_of_their_own_and_end_with_the_same_weights(tables, tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    printed, _ = torchrun(tmp_path / "worker.py", tables)
    found = {line["rank"]: line for line in map(json.loads, printed.splitlines())}
    assert found.keys() == {0, 1}
    assert found[0]["weights"] == found[1]["weights"]
    assert found[0]["actions"] != found[1]["actions"]


@pytest.mark.slow
def test_the_first_process_saves_and_publishes_and_one_process_goes_on(registry, tables, tmp_path, run):
    arguments = ["train", "policy", "--registry", registry, "--tables", tables, "--scale", 1, "--num-tables", 8]
    arguments += ["--num-ranks", 2, "--num-tasks", 4, "--force", "--json", "--checkpoint", tmp_path / "run"]
    start = tmp_path / "start.py"
    start.write_text("import sys\nfrom autoshard.cli import main\nsys.exit(main(sys.argv[1:]))\n")
    printed, said = torchrun(start, *arguments, "--updates", 2)
    result = json.loads(printed)
    assert result["id"] == Registry(registry).production_id("policy", "cpu")
    assert TrainedPolicy.load(Registry(registry), "cpu").card.training["num_updates"] == 2
    assert said.count("update 2: balance") == 1
    assert "on 2 processes, the first on cpu, seed 0" in said

    assert json.loads(run(*arguments, "--updates", "3")[0])["training"]["num_updates"] == 3
