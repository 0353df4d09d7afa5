"""Training of the cost model by several processes, over gloo on CPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Writes sums of the weights that a training ends with. Nothing is left out of sets, for that is drawn by process.
WORKER = """
import json, sys
from pathlib import Path
from autoshard.formats.stores.samples import read_samples
from autoshard.runtime.processes.learners import joined_learners
from autoshard.core.choices import Device
from costmodel.kernel.dataset import CostDataset
from costmodel.kernel.training import CostTrainingOptions, train_cost_model

dataset = CostDataset.from_samples(read_samples(Path(sys.argv[1]), "cpu"))
options = CostTrainingOptions(num_updates=8, batch_size=65, least_share=0.0)
with joined_learners(Device.CPU) as learners:
    trained = train_cost_model(dataset, device="cpu", options=options, learners=learners)
    sums = {name: float(abs(value).sum(dtype="float64")) for name, value in trained.model.tensors().items()}
    Path(sys.argv[2], f"sums.{learners.rank}.json").write_text(json.dumps(sums))
"""


def run(folder, store, *launch):
    folder.mkdir()
    (folder / "worker.py").write_text(WORKER)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *launch, str(folder / "worker.py"), str(store), str(folder)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return {int(file.suffixes[0][1:]): json.loads(file.read_text()) for file in folder.glob("sums.*.json")}


@pytest.mark.slow
def test_two_processes_learn_what_one_does(store, tmp_path):
    """Batches of 65 samples do not part evenly, so each process's mean has a weight of its own."""
    alone = run(tmp_path / "alone", store)
    torchrun = ["-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    together = run(tmp_path / "together", store, *torchrun, "--local-addr=127.0.0.1", "--nproc-per-node=2")
    assert together.keys() == {0, 1}
    assert together[0] == together[1]
    assert together[0] == pytest.approx(alone[0], rel=1e-3)
