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
from tests.ranks import on_ranks

SETTINGS = FusedSettings(learning_rate=0.1)


def agree_on_both(plans):
    """What each of several attempts to agree ends with; plans are paths."""
    rank, said = dist.get_rank(), []
    for plan, settings, batch_size, is_weighted in [
        (plans[0], SETTINGS, 4, False),
        (plans[0], replace(SETTINGS, learning_rate=0.1 + rank), 4, False),
        (plans[0], SETTINGS, 4 + rank, False),
        (plans[rank], SETTINGS, 4, False),
        (plans[0], SETTINGS, 4, rank == 1),
        (plans[1], SETTINGS, None, True),
    ]:
        try:
            part = Participation.agree(read_plan(plan), settings, local_batch_size=batch_size, is_weighted=is_weighted)
            said.append(f"agreed on {part.local_batch_size}")
        except InputError as error:
            said.append(str(error))
    return said


def test_processes_that_differ_are_refused_on_both(tmp_path):
    plan = make.table_wise_plan([make.table("a"), make.table("b")], [0, 1])
    moved = replace(plan, shards=make.table_wise_plan(plan.tables.tables, [1, 0]).shards)
    paths = [str(tmp_path / "plan.json"), str(tmp_path / "moved.json")]
    for path, written in zip(paths, (plan, moved), strict=True):
        write_plan(written, path)
    for rank, said in enumerate(on_ranks(agree_on_both, 2, paths)):
        refusals = [
            f"process {1 - rank} has another {what} than process {rank}; all must have one"
            for what in ("settings", "batch size", "plan", "is_weighted")
        ]
        assert said == ["agreed on 4", *refusals, "agreed on 4"]


def test_without_a_process_group_one_line_says_how_to_make_one():
    plan = make.table_wise_plan([make.table("a")], [0], world_size=1)
    with pytest.raises(InputError, match=r"^group: there is none: call torch\.distributed\.init_process_group first$"):
        Participation.agree(plan, SETTINGS)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pooling": Pooling.MEAN}, 'table "b" is averaged: weighted lookups are of sums'),
        ({"num_embeddings": 2**31 + 1}, 'table "b" has 2147483649 rows: weighted lookups are of at most 2\\^31'),
    ],
)
def test_tables_without_weighted_lookups_are_refused_by_name(change, said):
    shards = make.table_wise([make.table("a"), make.table("b", **change)], [0, 0])
    plan = make.plan(*shards, topology=make.topology(1, hbm=1 << 40))
    Participation.agree(plan, SETTINGS)
    with pytest.raises(InputError, match=f"^is_weighted: must be False, since {said}$"):
        Participation.agree(plan, SETTINGS, is_weighted=True)


@pytest.mark.usefixtures("one_process")
def test_a_process_outside_the_group_is_refused():
    plan = make.table_wise_plan([make.table("a")], [0], world_size=1)
    with pytest.raises(InputError, match=r"^group: process 0 is not in it"):
        Participation.agree(plan, SETTINGS, group=dist.GroupMember.NON_GROUP_MEMBER)
