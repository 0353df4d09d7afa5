import os
import subprocess
import sys
from collections import Counter

import pytest

from autoshard.cli import main
from autoshard.formats.stores.sample_store import damaged_samples
from autoshard.formats.stores.samples import read_samples

pytest.importorskip("ray")


# In a process of its own: Ray leaves threads, handlers and logs behind in the one that uses it.
ON_RAY = """
import os, signal, sys, threading, time
from pathlib import Path
from autoshard.formats.stores.samples import read_samples
from bench.collecting.options import CollectOptions
from bench.kernels.harness import Settings
from bench.collecting.ray_collector import collect_on_ray
from bench.measuring.timing import RoundSettings

rounds = RoundSettings(num_warmup=0, num_measured=3, num_dropped=1, flush_every_run=False)
settings = Settings(rounds=rounds, max_group_sets=4, max_bytes=2**24, reference_bags=8, max_spread=1e9)
store, kill = Path(sys.argv[1]), sys.argv[2] == "kill"
options = CollectOptions(store=store, device="cpu", workers=2, scale=4096, max_tables=3, strategies="random", seed=3,
                         num_samples=12, ray=True, ray_address="local")
killed = []

def kill_one_worker(count, seconds):
    if not kill or killed:
        return
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name = (folder / "cmdline").read_text()
            parents = ancestors(int(folder.name))
        except OSError:
            continue
        if name.startswith("ray::KernelWorker") and os.getpid() in parents:
            killed.append(int(folder.name))
            os.kill(killed[0], signal.SIGKILL)
            return

def ancestors(pid):
    found = []
    while pid > 1:
        pid = int((Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[1])
        found.append(pid)
    return found

(outcome,) = collect_on_ray(options, kill_one_worker, settings)
assert bool(killed) == kill, killed
assert outcome.num_samples == len(read_samples(store)), outcome
assert outcome.device == "cpu"
print("COLLECTED", outcome.num_samples, sum(outcome.failed.values()))
"""


def run(store, mode):
    command = [sys.executable, "-W", "ignore", "-c", ON_RAY, str(store), mode]
    # Other tests collect on this host meanwhile: locks of its own. Ray's sockets need short paths.
    environment = {**os.environ, "TMPDIR": str(store.parent), "RAY_TMPDIR": "/tmp"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = [line for line in done.stdout.splitlines() if line.startswith("COLLECTED ")]  # Ray prints there too
    num_samples, num_failed = map(int, result.split()[1:])
    return num_samples, num_failed


@pytest.mark.slow
def test_workers_of_a_local_cluster_fill_the_store(tmp_path):
    assert run(tmp_path / "store", "live") == (12, 0)
    held = read_samples(tmp_path / "store")
    assert not damaged_samples(held.samples)
    ids = Counter(sample.set_id for sample in held.samples if sample.source != "repeat")
    assert max(ids.values()) == 1


@pytest.mark.slow
def test_sets_of_a_dead_worker_are_measured_by_its_successor(tmp_path):
    assert run(tmp_path / "store", "kill") == (12, 0)
    assert not damaged_samples(read_samples(tmp_path / "store").samples)


def test_ray_that_is_missing_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["collect", "--store", str(tmp_path), "--ray", "--num-samples", "1"]) == 2
    error = capsys.readouterr().err
    assert error == "error: ray: needs Ray, which is not installed: pip install 'autoshard[ray]'\n"
