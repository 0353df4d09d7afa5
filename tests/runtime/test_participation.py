"""Processes that do not mean the same do not start."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from autoshard.core.errors import InputError
from autoshard.formats import write_plan
from autoshard.runtime.participation import Participation
from tests import builders as make

SCRIPT = """
import sys
import torch.distributed as dist
from autoshard.core.errors import InputError
from autoshard.formats import read_plan
from autoshard.runtime.participation import Participation

rank, store, *plans = int(sys.argv[1]), *sys.argv[2:]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
for plan, settings, batch_size in [
    (plans[0], "the same", 4),
    (plans[0], f"learning rate {rank}", 4),
    (plans[0], "the same", 4 + rank),
    (plans[rank], "the same", 4),
    (plans[1], "the same", None),
]:
    try:
        part = Participation.agree(read_plan(plan), settings, local_batch_size=batch_size)
        print("agreed on", part.local_batch_size, flush=True)
    except InputError as error:
        print(error, flush=True)
# With its groups, gloo's threads end here. At the interpreter's exit they may fall over what it has already dropped.
del part
dist.destroy_process_group()
"""


def test_processes_that_differ_are_refused_on_both(tmp_path):
    plan = make.table_wise_plan([make.table("a"), make.table("b")], [0, 1])
    moved = replace(plan, shards=make.table_wise_plan(plan.tables.tables, [1, 0]).shards)
    paths = [str(tmp_path / "plan.json"), str(tmp_path / "moved.json")]
    for path, written in zip(paths, (plan, moved), strict=True):
        write_plan(written, path)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(tmp_path / "store"), *paths],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120)[0].splitlines() for process in processes]
    for rank, lines in enumerate(said):
        refusal = f"process {1 - rank} has another plan, batch size or settings than process {rank}"
        assert processes[rank].returncode == 0
        assert lines == ["agreed on 4", refusal, refusal, refusal, "agreed on 4"]


def test_without_a_process_group_one_line_says_how_to_make_one():
    plan = make.table_wise_plan([make.table("a")], [0], world_size=1)
    with pytest.raises(InputError, match=r"^group: there is none: call torch\.distributed\.init_process_group first$"):
        Participation.agree(plan, "settings")


@pytest.mark.usefixtures("one_process")
def test_a_process_outside_the_group_is_refused():
    plan = make.table_wise_plan([make.table("a")], [0], world_size=1)
    with pytest.raises(InputError, match=r"^group: process 0 is not in it"):
        Participation.agree(plan, "settings", group=dist.GroupMember.NON_GROUP_MEMBER)
