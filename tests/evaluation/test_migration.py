"""What ranks send each other between two plans: against rows counted one by one."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.core import GradSync, GroupLayout, Optimizer, ReplicaGroups, RowRange, RowsBy, Shard, Split, Tier
from autoshard.core.access.orders import ranks_in
from autoshard.evaluation import AlphaBetaComm, evaluate
from autoshard.evaluation.migration import migration, renumbered
from autoshard.validator import validate_plan
from tests import builders as make

NUM_ROWS, DIM = 24, 4
#: 4 columns in fp32 and a moment.
ROW_BYTES = 20
TABLE_BYTES = NUM_ROWS * ROW_BYTES
ALL = np.arange(NUM_ROWS)
ORDER, ROTATED = np.array([7, 3, 20, 0, 11, 5]), np.array([20, 0, 11, 5, 9, 13])


def part(start, stop, *ranks, by=RowsBy.ACCESS_RANK, **fields):
    """Rows of the table, split over these ranks."""
    shard = Shard(table=make.table("t", NUM_ROWS, DIM), rows=RowRange(start=start, stop=stop, by=by), columns=(0, DIM))
    tier = Tier.ROW_WISE if len(ranks) > 1 else Tier.TABLE_WISE
    return make.placed(shard, tier, (ranks,), **fields)


def copies(start, stop, num_ranks=4):
    shard = part(start, stop, 0).shard
    return make.placed(shard, Tier.DATA_PARALLEL, make.each(num_ranks))


def plan(*shards, topology=None, **fields):
    return make.plan(*shards, topology=topology or make.topology(2, 4, bytes_per_s=1e6), **fields)


def held_rows(one, order):
    """Ids of the rows that each rank has."""
    ranks_N = ranks_in(order, ALL)
    held = {rank: set() for rank in range(one.topology.world_size)}
    for placed in one.shards:
        rows = placed.shard.rows
        numbers = ALL if rows.by is RowsBy.INDEX else ranks_N
        for replica in placed.replicas:
            for row, number in zip(ALL.tolist(), numbers.tolist(), strict=True):
                if rows.start <= number < rows.stop:
                    place = number - rows.start
                    block = -(-rows.num_rows // len(replica))
                    owner = place // block if placed.split is Split.BLOCK else place % len(replica)
                    held[replica[owner]].add(row)
    return held


def received(before, after, order_before, order_after):
    """Bytes that ranks receive, row by row."""
    old, new = held_rows(before, order_before), held_rows(after, order_after)
    return sum(len(new[rank] - old[rank]) for rank in new) * ROW_BYTES


HOT = (copies(0, 4), part(4, 24, 0, 1, 2, 3, split=Split.CYCLIC))
CASES = {
    "a table moves": ((part(0, 24, 0),), (part(0, 24, 3),)),
    "more hot rows": (HOT, (copies(0, 8), part(8, 24, 0, 1, 2, 3, split=Split.CYCLIC))),
    "the cold rows are dealt anew": (HOT, (copies(0, 6), part(6, 24, 0, 1, 2, 3, split=Split.CYCLIC))),
    "rows by id become hot ones": ((part(0, 24, 0, 1, 2, 3, by=RowsBy.INDEX),), (copies(0, 4), part(4, 24, 1))),
    "hot rows come back": (HOT, (part(0, 24, 2, by=RowsBy.INDEX),)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_ranks_receive_what_they_lack_of_one_order(name):
    before, after = (plan(*shards) for shards in CASES[name])
    orders = {"t": ORDER}
    found = migration(before, after, orders, orders)
    assert found.num_bytes == pytest.approx(received(before, after, ORDER, ORDER), rel=0.1)


@pytest.mark.parametrize("name", ["a table moves", "hot rows come back"])
def test_whole_tables_do_not_care_for_orders(name):
    before, after = (plan(*shards) for shards in CASES[name])
    found = migration(before, after, {"t": ORDER}, {"t": ROTATED})
    assert found.num_bytes == pytest.approx(received(before, after, ORDER, ROTATED))


def test_hot_rows_that_changed_move_though_the_layout_stays():
    """Two of four hot rows are new: three ranks of four lack each, but for the one that holds it."""
    before = plan(copies(0, 4), part(4, 24, 0))
    found = migration(before, before, {"t": ORDER}, {"t": ROTATED})
    assert found.num_bytes == received(before, before, ORDER, ROTATED) == (2 * 3 + 2 * 0) * ROW_BYTES
    assert migration(before, before, {"t": ORDER}, {"t": ORDER}).num_bytes == 0


def test_rows_come_over_the_nearest_links():
    """Rank 1 has the copy of its node's rank 0, not that of the other node."""
    shard = part(0, 24, 0).shard
    before = plan(make.placed(shard, Tier.REPLICATED, ((0,), (2,)), fetch=(0, 0, 1, 1)))
    found = migration(before, plan(part(0, 24, 1))).links_of["t"]
    assert found.arriving_LR.tolist() == [[0, 480, 0, 0], [0, 0, 0, 0]]
    assert found.leaving_LR.tolist() == [[480, 0, 0, 0], [0, 0, 0, 0]]


def test_time_is_that_of_the_slowest_rank():
    """480 bytes over a link of 1 MB/s within the node; the table has 24 rows of 20 bytes."""
    before, after = plan(part(0, 24, 0)), plan(part(0, 24, 1))
    found = migration(before, after)
    assert found.ms(after, AlphaBetaComm()) == pytest.approx(0.48)
    assert migration(after, after).ms(after, AlphaBetaComm()) == 0


def test_each_group_of_ranks_receives_its_own():
    groups = ReplicaGroups(num_groups=2)
    before, after = (plan(part(0, 24, rank), replica_groups=groups) for rank in (0, 1))
    assert migration(before, after).num_bytes == 2 * 480


@pytest.mark.parametrize("layout", [GroupLayout.ACROSS_NODES, GroupLayout.WITHIN_NODES])
def test_other_groups_are_other_ranks(layout):
    one, two = (plan(part(0, 24, 0), replica_groups=ReplicaGroups(num_groups=n, layout=layout)) for n in (1, 2))
    other = {GroupLayout.ACROSS_NODES: 1, GroupLayout.WITHIN_NODES: 2}[layout]
    assert migration(one, two).links_of["t"].arriving_LR.sum(axis=0).tolist() == [
        480 * (rank == other) for rank in range(4)
    ]
    within, across = (
        plan(part(0, 24, 0), replica_groups=ReplicaGroups(num_groups=2, layout=each)) for each in GroupLayout
    )
    assert migration(within, across).num_bytes == 480


def test_other_optimizers_have_other_bytes():
    table = replace(make.table("t", NUM_ROWS, DIM), optimizer=Optimizer.ADAM)
    before, after = (plan(make.placed(table, replicas=((rank,),))) for rank in (0, 3))
    assert migration(before, after).bytes_of == {"t": 24 * (16 + 32)}


class TestRenumbered:
    """Ranks that are alike take the places where most stays."""

    TABLES = tuple(make.table(f"t{number}", NUM_ROWS * 2**number, DIM) for number in range(4))

    def whole(self, *ranks, topology=None):
        return plan(*make.table_wise(self.TABLES, ranks), topology=topology)

    def ranks(self, one):
        return [placed.replicas[0][0] for placed in one.shards]

    def test_a_plan_with_other_numbers_moves_nothing(self):
        before, after = self.whole(0, 1, 2, 3), self.whole(3, 2, 0, 1)
        found = renumbered(before, after, {}, {})
        assert self.ranks(found) == [0, 1, 2, 3]
        assert migration(before, found).num_bytes == 0

    def test_ranks_of_a_node_stay_together(self):
        """Tables 0 and 2 share a node after, and so do 1 and 3: 0 and 3 stay, with more rows than 1 and 2."""
        before, after = self.whole(0, 1, 2, 3), self.whole(3, 1, 2, 0)
        found = renumbered(before, after, {}, {})
        assert self.ranks(found) == [0, 2, 1, 3]
        assert migration(before, found).num_bytes == (2 + 4) * TABLE_BYTES

    @pytest.mark.parametrize("seed", range(6))
    def test_prices_stay_and_no_more_moves(self, seed):
        rng = np.random.default_rng(seed)
        before, after = (self.whole(*rng.integers(0, 4, 4).tolist()) for _ in range(2))
        found = renumbered(before, after, {}, {})
        validate_plan(found)
        assert evaluate(found, make.costs()).step_ms == evaluate(after, make.costs()).step_ms
        assert migration(before, found).num_bytes <= migration(before, after).num_bytes

    def test_copies_and_what_reads_them_go_along(self):
        shard = part(0, 24, 0).shard
        copied = make.placed(shard, Tier.REPLICATED, ((3,), (0,)), fetch=(1, 1, 0, 0), grad_sync=GradSync.ALL_GATHER)
        before = plan(part(0, 24, 2))
        found = renumbered(before, plan(copied), {}, {})
        validate_plan(found)
        (moved,) = found.shards
        assert any(2 in replica for replica in moved.replicas)
        assert all(moved.replicas[moved.fetch[rank]][0] // 2 == rank // 2 for rank in range(4))

    def test_ranks_that_differ_stay(self):
        uneven = make.uneven(1 << 40, 1 << 30, 1 << 40, 1 << 40)
        before, after = (self.whole(*ranks, topology=uneven) for ranks in ((0, 1, 2, 3), (3, 2, 1, 0)))
        assert renumbered(before, after, {}, {}) is after
