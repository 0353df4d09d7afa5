"""Memory of a process that steps give back and take again."""

import gc
import os
import subprocess
import sys
import weakref

import pytest
import torch

from autoshard.formats import write_plan
from autoshard.runtime import RunRequest
from autoshard.runtime.processes.heap import KEPT_BYTES
from tests import builders as make
from tests.ranks import on_ranks

NUM_KEPT = 4
#: Takes 20 MiB and gives them back before a block that stays, which is too large for what was free before; then how
#: many pages the next 24 MiB take anew, on systems with huge pages, too.
TAKES = """
import ctypes, resource, sys
from autoshard.runtime.processes.heap import make_heap_ready
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
PR_SET_THP_DISABLE = 41
libc.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
free, stays = libc.malloc(20 << 20), libc.malloc(2 << 20)
libc.free(free)
make_heap_ready(int(sys.argv[1]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
ctypes.memset(libc.malloc(24 << 20), 1, 24 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="faults of pages are Linux's")
def test_takes_no_page_anew_once_it_is_ready():
    environment = os.environ | {name: str(num_bytes) for name, num_bytes in KEPT_BYTES.items()}

    def pages(most_bytes):
        command = [sys.executable, "-c", TAKES, str(most_bytes)]
        return int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)

    assert pages(1 << 30) < 100 < 1000 < pages(1 << 20)


def losses_of_steps(request):
    """What a process reports of its losses when it keeps few, those of all its steps, and how many are alive."""
    from autoshard.runtime.processes import session
    from autoshard.runtime.training import step

    every, alive, made = [], [], step.StepOutcome

    def outcome(loss, *rest):
        every.append(loss.item())
        alive.append(weakref.ref(loss))
        return made(loss, *rest)

    session._MAX_MEASURED, step.StepOutcome = NUM_KEPT, outcome
    reported = []

    def on_step(*_):
        gc.collect()
        reported.append(sum(one() is not None for one in alive))

    (result,) = session.Session([request], torch.device("cpu"), on_step).run_all()
    return (result.first_loss, result.last_loss), every, max(reported)


@pytest.mark.parametrize("steps", [4, 9])
def test_losses_of_the_last_steps_are_kept_and_not_the_memory_between_activations(tmp_path, steps):
    plan = make.table_wise_plan([make.table("a", 50)], [0], world_size=1, batch_size=8)
    write_plan(plan, tmp_path / "plan.json")
    request = RunRequest(plan_path=str(tmp_path / "plan.json"), steps=steps, warmup_steps=1, device="cpu")
    ((reported, every, most_alive),) = on_ranks(losses_of_steps, 1, request)
    measured = every[1:][-NUM_KEPT:]
    assert len(every) == steps + 1
    assert reported == pytest.approx((measured[0], measured[-1]))
    assert most_alive <= 2  # this step's and the one before


def peak_of_steps(request, ready_bytes):
    """The largest memory that a run of one process reports, when so much is made ready."""
    from autoshard.runtime.processes import session

    kept = []
    session.make_heap_ready = lambda _most_bytes: kept.append(torch.ones(ready_bytes // 4))
    (result,) = session.Session([request], torch.device("cpu"), lambda *_: None).run_all()
    return result.ranks[0].memory_bytes


def test_memory_that_was_made_ready_is_in_no_peak(tmp_path):
    plan = make.table_wise_plan([make.table("a", 50)], [0], world_size=1, batch_size=8)
    write_plan(plan, tmp_path / "plan.json")
    request = RunRequest(plan_path=str(tmp_path / "plan.json"), steps=3, warmup_steps=1, device="cpu")
    (little,), (much,) = (on_ranks(peak_of_steps, 1, request, ready_bytes) for ready_bytes in (1 << 20, 200 << 20))
    assert much < little + (64 << 20)
