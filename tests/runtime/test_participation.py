"""Processes that do not mean the same do not start."""

from dataclasses import replace

import pytest
import torch.distributed as dist

from autoshard.core import Pooling
from autoshard.core.errors import InputError
from autoshard.formats import read_plan, write_plan
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.runtime.participation import Participation
from tests import builders as make
from tests.contracts.drawn_layouts import weighted_sums
from tests.ranks import on_ranks

SETTINGS = FusedSettings(learning_rate=0.1)


def agree_on_both(plans):
    """What each of several attempts to agree ends with; plans are paths."""
    rank, said = dist.get_rank(), []
    for plan, settings, batch_size in [
        (plans[0], SETTINGS, 4),
        (plans[0], replace(SETTINGS, learning_rate=0.1 + rank), 4),
        (plans[0], SETTINGS, 4 + rank),
        (plans[rank], SETTINGS, 4),
        (plans[2 * rank], SETTINGS, 4),
        (plans[2], SETTINGS, None),
        (plans[3], SETTINGS, None),
    ]:
        try:
            part = Participation.agree(read_plan(plan), settings, local_batch_size=batch_size)
            said.append(f"agreed on {part.local_batch_size}")
        except InputError as error:
            said.append(str(error))
    return said


def test_processes_that_differ_are_refused_on_both(tmp_path):
    plan = make.table_wise_plan([make.table("a"), make.table("b")], [0, 1])
    moved = replace(plan, shards=make.table_wise_plan(plan.tables.tables, [1, 0]).shards)
    paths = [str(tmp_path / f"{name}.json") for name in ("plan", "moved", "weighted", "uneven")]
    uneven = replace(plan, tables=replace(plan.tables, batch_size=plan.tables.batch_size + 1))
    for path, written in zip(paths, (plan, moved, weighted_sums(plan), uneven), strict=True):
        write_plan(written, path)
    for rank, said in enumerate(on_ranks(agree_on_both, 2, paths)):
        refusals = [
            f"process {1 - rank} has another {what} than process {rank}; all must have one"
            for what in ("settings", "batch size", "plan", "plan")
        ]
        assert said == ["agreed on 4", *refusals, "agreed on 4", "agreed on 5"]


def test_without_a_process_group_one_line_says_how_to_make_one():
    plan = make.table_wise_plan([make.table("a")], [0], world_size=1)
    with pytest.raises(InputError, match=r"^group: there is none: call torch\.distributed\.init_process_group first$"):
        Participation.agree(plan, SETTINGS)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"pooling": Pooling.MEAN},
            "pooling: must be sum or sequence where lookups of any table are weighted, got mean",
        ),
        (
            {"num_embeddings": 2**31 + 1},
            r"num_embeddings: must be at most 2\^31 where lookups of any table are weighted, got 2147483649",
        ),
    ],
)
def test_tables_without_weighted_lookups_are_refused_by_name(change, said):
    first, second = make.table("a"), make.table("b", **change)
    topology = make.topology(1, hbm=1 << 40)
    Participation.agree(make.plan(*make.table_wise([first, second], [0, 0]), topology=topology), SETTINGS)
    shards = make.table_wise([replace(first, weighted=True), second], [0, 0])
    with pytest.raises(InputError, match=rf"^tables\.tables\[1\]\.{said}$"):
        Participation.agree(make.plan(*shards, topology=topology), SETTINGS)


@pytest.mark.usefixtures("one_process")
def test_a_process_outside_the_group_is_refused():
    plan = make.table_wise_plan([make.table("a")], [0], world_size=1)
    with pytest.raises(InputError, match=r"^group: process 0 is not in it"):
        Participation.agree(plan, SETTINGS, group=dist.GroupMember.NON_GROUP_MEMBER)
