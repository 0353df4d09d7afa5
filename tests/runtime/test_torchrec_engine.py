"""Which plans TorchRec's engine takes, and how it lays them out."""

import re
from dataclasses import replace

import pytest
import torch

from autoshard.core import (
    DType,
    Exchange,
    GradSync,
    Payload,
    PlacedShard,
    Pooling,
    ReplicaGroups,
    RowRange,
    Shard,
    Split,
    Tier,
)
from autoshard.core.errors import InputError, InvalidPlanError
from autoshard.runtime.batch import BatchOfIds
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.runtime.ownership import ownership_of
from autoshard.runtime.torchrec_engine import TorchRecEmbeddings, layouts_of
from tests import builders as make


def part(table, rows=None, columns=None):
    whole = Shard.whole(table)
    return Shard(
        table=table,
        rows=RowRange(start=rows[0], stop=rows[1]) if rows else whole.rows,
        columns=columns or whole.columns,
    )


def split(shard, *replicas, **options):
    tier = Tier.TABLE_ROW_WISE if len(replicas[0]) == 2 else Tier.ROW_WISE
    return PlacedShard(shard=shard, tier=tier, replicas=replicas, split=Split.CYCLIC, **options)


@pytest.fixture
def planned():
    """A plan on 4 ranks in nodes of 2: one table, held by the shards that are made of it, and one that is whole."""

    def make_one(shards_of, **options):
        held, other = make.table("t.x", 41, 16, **options), make.table("u")
        plan = make.table_wise_plan([held, other], [0, 1], world_size=4)
        node, *_ = plan.topology.levels
        levels = (replace(node, size=2), replace(node, name="cluster", size=4))
        shards = (plan.shards[1], *shards_of(held))
        return replace(plan, topology=replace(plan.topology, levels=levels), shards=shards)

    return make_one


def test_rows_are_dealt_in_blocks_whatever_the_plans_split(planned):
    plan = planned(lambda table: [split(part(table), (0, 1, 2, 3))])
    layout, _ = layouts_of(plan, ownership_of(plan, 4), device_type="cpu")
    assert layout.is_summed
    assert [layout.holdings[0].num_rows(process) for process in range(4)] == [11, 11, 11, 8]
    assert layout.node_size is None


def test_the_rows_of_a_node_stay_there(planned):
    plan = planned(lambda table: [split(part(table), (2, 3))])
    layout, whole = layouts_of(plan, ownership_of(plan, 4), device_type="cpu")
    assert layout.node_size == 2
    assert [layout.holdings[0].num_rows(process) for process in range(4)] == [0, 0, 21, 20]
    assert not whole.is_summed
    # With 2 processes, each runs a rank of the node.
    layout, _ = layouts_of(plan, ownership_of(plan, 2), device_type="cpu")
    assert layout.node_size is None
    assert [layout.holdings[0].num_rows(process) for process in range(2)] == [21, 20]


def test_columns_have_a_holding_each(planned):
    shards = [((0, 8), 3), ((8, 16), 1)]
    plan = planned(lambda table: [PlacedShard.table_wise(part(table, None, of), rank) for of, rank in shards])
    layout, _ = layouts_of(plan, ownership_of(plan, 4), device_type="cpu")
    assert [(one.columns, one.owners(0)) for one in layout.holdings] == [((0, 8), (3,)), ((8, 16), (1,))]


REFUSED = {
    "is a sequence table": (lambda table: [PlacedShard.table_wise(part(table), 0)], {"pooling": Pooling.SEQUENCE}),
    "has replicas": (
        lambda table: [
            replace(
                split(part(table), *[(rank,) for rank in range(4)]), tier=Tier.DATA_PARALLEL, grad_sync=GradSync.DENSE
            )
        ],
        {},
    ),
    "sends rows": (lambda table: [split(part(table), (0, 1, 2, 3), exchange=Exchange.ROWS)], {}),
    "has several ranges of rows": (
        lambda table: [PlacedShard.table_wise(part(table, (start, stop)), 0) for start, stop in ((0, 20), (20, 41))],
        {},
    ),
    "has shards of several widths": (
        lambda table: [PlacedShard.table_wise(part(table, None, of), 0) for of in ((0, 4), (4, 16))],
        {},
    ),
    "is cut in both": (
        lambda table: [split(part(table, None, of), (0, 1, 2, 3)) for of in ((0, 8), (8, 16))],
        {},
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_shard_that_torchrec_has_no_layout_for_is_named(planned, reason):
    shards_of, options = REFUSED[reason]
    plan = planned(shards_of, **options)
    with pytest.raises(InvalidPlanError, match=rf'^shards\[1\]: the torchrec engine .*t\.x" {reason}: use the thin'):
        layouts_of(plan, ownership_of(plan, 4), device_type="cpu")


def test_nodes_have_to_be_nodes_of_processes_too(planned):
    plan = planned(lambda table: [split(part(table), (2, 3))])
    with pytest.raises(InvalidPlanError, match=r"^shards\[1\]: .* is split over processes 0, 2 of 3: use the thin"):
        layouts_of(plan, ownership_of(plan, 3), device_type="cpu")


def test_tables_without_rows_in_every_block_are_refused():
    table = make.table("t", 5)
    plan = make.table_wise_plan([table], [0], world_size=4)
    plan = replace(plan, shards=(split(part(table), (0, 1, 2, 3)),))
    with pytest.raises(InvalidPlanError, match=r"^shards\[0\]: .*needs rows in every block; .* has 5 for 4 ranks"):
        layouts_of(plan, ownership_of(plan, 4), device_type="cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"replica_groups": ReplicaGroups(num_groups=2)}, "replica_groups: the torchrec engine has one replica group"),
        ({"payload": Payload(forward=DType.FP16)}, "payload: the torchrec engine sends fp32, not fp16/fp32"),
        (
            {"payload": Payload(forward=DType.FP16, backward=DType.FP16)},
            "payload: the torchrec engine sends fp32, not fp16: use the thin engine",
        ),
    ],
)
def test_what_the_whole_plan_asks_for_is_refused_by_name(change, message):
    plan = replace(make.table_wise_plan([make.table("t")], [0], world_size=2), **change)
    with pytest.raises(InvalidPlanError, match=re.escape(message)):
        layouts_of(plan, ownership_of(plan, 2), device_type="cpu")


@pytest.mark.usefixtures("one_process")
def test_fbgemm_looks_at_ids_and_the_engine_at_those_beyond_32_bits_alone():
    plan = make.table_wise_plan([make.table("t", 10)], [0], world_size=1, batch_size=2)
    embeddings = TorchRecEmbeddings(plan, FusedSettings(learning_rate=0.1))

    def look_up(*ids):
        return embeddings(BatchOfIds(torch.ones(1, 2, dtype=torch.int64), torch.tensor(ids)))

    assert look_up(0, 9).pooled_BC.shape == (2, 16)
    for bad in (2**32 + 5, 5 - 2**32):
        with pytest.raises(InputError, match=rf"^feature 't_f': table 't' has rows 0 to 9, got id {bad}$"):
            look_up(0, bad)
    with pytest.raises(RuntimeError, match="idx < num_rows"):
        look_up(0, 10)
    embeddings.close()
