import subprocess
import sys

import pytest

pytest.importorskip("ray")

# In a process of its own: Ray leaves threads, handlers and logs behind in the one that uses it.
ON_RAY = """
import os, signal, sys
from pathlib import Path
import numpy as np
from autoshard.core.errors import ExecutionError
from autoshard.evaluation.analytic import AnalyticCostModel
from autoshard.formats import load_tables
from policies.rollout.ray_actors import RayActors
from policies.planning.tasks import TaskSplit, TaskKind, sample_problems, task_seeds
from policies.training.trainer import Budget, PolicyTrainer, TrainingOptions
from policies.network.weights import to_arrays

def ancestors(pid):
    found = []
    while pid > 1:
        pid = int((Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[1])
        found.append(pid)
    return found

def kill_one():
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name = (folder / "cmdline").read_text()
            if name.startswith("ray::Player") and os.getpid() in ancestors(int(folder.name)):
                os.kill(int(folder.name), signal.SIGKILL)
                return 1
        except OSError:
            continue
    return 0

def train(launcher, on_evaluated=lambda _: None):
    options = TrainingOptions(num_groups=2, num_rollouts=3, evaluate_every=2, num_actors=2)
    trainer = PolicyTrainer(problems, problems, options=options, launcher=launcher)
    trainer.run(Budget(num_updates=6), on_evaluated=on_evaluated)
    return trainer

if __name__ == "__main__":
    pool = load_tables("metasyn").scaled(64)
    kind = TaskKind(device="cpu", num_tables=6, num_ranks=2)
    problems = sample_problems(pool, AnalyticCostModel.for_device("cpu"), kind, task_seeds(TaskSplit.TRAIN, 4))
    killed = []
    on_ray = train(RayActors("local", 2), lambda evaluation: killed or killed.append(kill_one()))
    assert killed == [1] and on_ray.pool.num_deaths >= 1, (killed, on_ray.pool.num_deaths)
    here = train(None)  # processes of this machine
    assert on_ray.algorithm.lag == here.algorithm.lag
    for name, value in to_arrays(here.network).items():
        assert np.allclose(to_arrays(on_ray.network)[name], value, atol=1e-6), name
    try:
        train(RayActors("auto", 2))
    except ExecutionError as error:
        print("REFUSED", error)
    import ray

    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")

    @ray.remote(num_cpus=1)
    class Busy:
        pass

    busy = Busy.remote()
    try:
        train(RayActors("auto", 2, start_s=20.0))
    except ExecutionError as error:
        print("FULL", error, ray.is_initialized())
    ray.shutdown()
    print("LAG", on_ray.algorithm.lag.mean, on_ray.algorithm.lag.most)
"""


@pytest.mark.slow
def test_actors_of_a_local_cluster_train_like_processes_even_if_one_is_killed(tmp_path):
    script = tmp_path / "learner.py"
    script.write_text(ON_RAY)
    command = [sys.executable, "-W", "ignore", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "LAG 1.5 2" in done.stdout
    assert "REFUSED auto: no Ray cluster can be reached" in done.stdout
    assert "FULL an actor did not start within 20 s: the Ray cluster has no core free for it True" in done.stdout
