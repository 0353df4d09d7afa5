"""Batches of any size up to the agreed one, empty ones too, on plans of every layout: equal to the reference."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

#: fp32 sums in another order.
TOLERANCE = 2e-5


@pytest.mark.parametrize(
    ("num_processes", "world_size", "node_size", "num_groups", "num_plans"),
    [
        (2, 2, 1, 1, 6),
        *(
            pytest.param(*of, marks=pytest.mark.slow)
            for of in ((2, 2, 1, 1, 24), (2, 2, 1, 2, 10), (4, 4, 2, 1, 30), (4, 2, 2, 2, 10), (3, 6, 3, 1, 10))
        ),
    ],
)
def test_batches_of_several_sizes_equal_the_unsharded_reference(
    tmp_path, num_processes, world_size, node_size, num_groups, num_plans
):
    output = tmp_path / "errors.json"
    arguments = list(map(str, (tmp_path / "rendezvous", output, world_size, node_size, num_groups, num_plans)))
    command = [sys.executable, "-W", "ignore", "-m", "tests.contracts.uneven_worker"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(num_processes), *arguments],
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for rank in range(num_processes)
    ]
    said = [process.communicate(timeout=600)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * num_processes, "\n".join(said)
    errors = json.loads(output.read_text(encoding="utf-8"))
    assert len(errors) == num_plans
    assert max(errors) <= TOLERANCE, errors
