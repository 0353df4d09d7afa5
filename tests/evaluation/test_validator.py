"""The validator: accepts every exact tiling, and names the shard that breaks a rule."""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autoshard.core import (
    Collective,
    Constraints,
    DType,
    Exchange,
    GradSync,
    GroupLayout,
    MemoryBytes,
    MemoryLevel,
    MemoryPlacement,
    Optimizer,
    Payload,
    Pooling,
    ReplicaGroups,
    RowOrder,
    RowRange,
    RowsBy,
    Shard,
    Split,
    Tier,
)
from autoshard.core.errors import InvalidPlanError
from autoshard.core.quoting import write_bytes
from autoshard.validator import validate_plan
from tests import builders
from tests.builders import placed, table, tables, topology

WORLD, NODE = 8, 4
ALL, EACH = (tuple(range(WORLD)),), tuple((rank,) for rank in range(WORLD))
EACH_NODE = ((0, 1, 2, 3), (4, 5, 6, 7))


#: On eight ranks in two nodes.
plan = partial(builders.plan, topology=topology(NODE, WORLD, hbm=10**9))


def part(of, start=0, stop=None, columns=None, by=RowsBy.INDEX):
    rows = RowRange(start=start, stop=of.num_embeddings if stop is None else stop, by=by)
    return Shard(table=of, rows=rows, columns=columns or (0, of.embedding_dim))


def fault_of(plan, **options):
    """What the validator says of a plan; None of a valid one."""
    fault = None
    try:
        validate_plan(plan, **options)
    except InvalidPlanError as error:
        fault = str(error)
    assert "\n" not in (fault or "")
    return fault


@st.composite
def tilings(draw, of, min_cuts=0):
    """Shards of a table, made by cutting rectangles in two, rows or columns, time and again."""
    rectangles = [(0, of.num_embeddings, 0, of.embedding_dim)]
    for _ in range(draw(st.integers(min_cuts, 25))):
        top, bottom, left, right = rectangles.pop(draw(st.integers(0, len(rectangles) - 1)))
        if draw(st.booleans()) and bottom - top > 1:
            cut = draw(st.integers(top + 1, bottom - 1))
            rectangles += [(top, cut, left, right), (cut, bottom, left, right)]
        elif right - left > 1:
            cut = draw(st.integers(left + 1, right - 1))
            rectangles += [(top, bottom, left, cut), (top, bottom, cut, right)]
        else:
            rectangles.append((top, bottom, left, right))
    shards = [
        placed(part(of, top, bottom, (left, right)), replicas=((draw(st.integers(0, WORLD - 1)),),))
        for top, bottom, left, right in rectangles
    ]
    return draw(st.permutations(shards))


class TestTiling:
    @given(shards=tilings(table()))
    def test_every_tiling_is_accepted(self, shards):
        assert fault_of(plan(*shards)) is None

    @given(shards=tilings(table(), min_cuts=1), data=st.data())
    def test_a_tiling_without_one_of_its_shards_is_refused(self, shards, data):
        gone = shards.pop(data.draw(st.integers(0, len(shards) - 1)))
        fault = fault_of(plan(*shards, tables=tables(gone.shard.table)))
        assert fault.startswith("shards: table 't0': no shard holds columns [")

    @given(shards=tilings(table()), data=st.data())
    def test_a_tiling_with_a_shard_twice_names_both(self, shards, data):
        index = data.draw(st.integers(0, len(shards) - 1))
        fault = fault_of(plan(*shards, shards[index]))
        assert fault.startswith(f"shards[{len(shards)}].columns: ")
        assert f"are in shards[{index}] too" in fault

    @given(shards=tilings(table()), data=st.data())
    def test_a_tiling_with_a_changed_edge_is_refused(self, shards, data):
        index = data.draw(st.integers(0, len(shards) - 1))
        rows = shards[index].shard.rows
        stop = data.draw(st.integers(rows.start + 1, 1000))
        assume(stop != rows.stop)
        shards[index] = replace(shards[index], shard=replace(shards[index].shard, rows=replace(rows, stop=stop)))
        assert "t0" in fault_of(plan(*shards))

    def test_tables_that_are_cut_alike_are_all_looked_at(self):
        one, other, third = table("one"), table("other"), table("third")
        halves = [[placed(part(of, 0, 400)), placed(part(of, 400))] for of in (one, other)]
        assert fault_of(plan(*halves[0], *halves[1])) is None
        cut = [*halves[0], *halves[1], placed(part(third, 0, 400)), placed(part(third, 300))]
        assert "shards[5].columns: table 'third': columns [0, 16) of rows [300, 400) are in shards[4] too" in (
            fault_of(plan(*cut)) or ""
        )

    def test_a_table_without_shards_is_named(self):
        lonely = table("lonely")
        fault = fault_of(plan(placed(part(table())), tables=tables(table(), lonely)))
        assert fault == "shards: table 'lonely': no shard holds columns [0, 16) of rows [0, 1000)"

    def test_rows_are_cut_one_way(self):
        of = table()
        shards = [placed(part(of, 0, 500)), placed(part(of, 500, 1000, by=RowsBy.ACCESS_RANK))]
        assert fault_of(plan(*shards)) == "shards[1].rows: table 't0' is cut by access_rank and by index; use one"

    def test_another_table_by_the_same_name_is_not_the_plans(self):
        assert fault_of(plan(placed(part(table())), tables=tables(table(embedding_dim=8)))).startswith(
            "shards[0].table: 't0'"
        )

    def test_thousands_of_shards_of_one_table(self):
        of = table(num_embeddings=70_000, embedding_dim=70)
        shards = [
            placed(part(of, row * 1000, row * 1000 + 1000, (column, column + 1)), replicas=((column % WORLD,),))
            for row in range(70)
            for column in range(70)
        ]
        assert fault_of(plan(*shards)) is None
        broken = [*shards[:2345], *shards[2346:]]
        assert fault_of(plan(*broken)).endswith("no shard holds columns [35, 36) of rows [33000, 34000)")


class TestTiers:
    @pytest.mark.parametrize(
        ("tier", "replicas"),
        [
            (Tier.TABLE_WISE, ((5,),)),
            (Tier.ROW_WISE, ALL),
            (Tier.ROW_WISE, (tuple(reversed(range(WORLD))),)),
            (Tier.TABLE_ROW_WISE, (EACH_NODE[1],)),
            (Tier.DATA_PARALLEL, EACH),
            (Tier.FLEX, EACH_NODE),
            (Tier.REPLICATED, ((2,), (5,))),
        ],
    )
    def test_a_label_fits_its_replicas_and_no_other(self, tier, replicas):
        assert fault_of(plan(placed(part(table()), tier, replicas))) is None
        for other in Tier:
            if other is tier or (tier is Tier.DATA_PARALLEL and other is Tier.REPLICATED):
                continue  # replicas on all ranks are replicas on some
            fault = fault_of(plan(placed(part(table()), other, replicas)))
            assert fault.startswith(f"shards[0].replicas: tier {other} means ")

    def test_ranks_that_fit_one_label_do_not_fit_another(self):
        right = placed(table("one"), Tier.TABLE_WISE, ((3,),))
        wrong = placed(table("other"), Tier.ROW_WISE, right.replicas)
        assert fault_of(plan(right, replace(right, shard=Shard.whole(table("third"))))) is None
        assert "shards[1].replicas: tier row_wise means" in (fault_of(plan(right, wrong)) or "")

    def test_on_one_rank_all_that_is_on_all_ranks_is_the_same(self):
        alone = topology(1)
        for tier in (Tier.TABLE_WISE, Tier.ROW_WISE, Tier.TABLE_ROW_WISE, Tier.DATA_PARALLEL, Tier.FLEX):
            assert fault_of(plan(placed(part(table()), tier, ((0,),)), topology=alone)) is None

    @pytest.mark.parametrize(
        ("tier", "replicas", "fault"),
        [
            (Tier.TABLE_WISE, ((8,),), "must be ranks in [0, 8), got 8"),
            (Tier.TABLE_WISE, ((-1,),), "must be ranks in [0, 8), got -1"),
            (Tier.TABLE_WISE, (), "needs one or more replicas of one or more ranks"),
            (Tier.TABLE_WISE, ((),), "needs one or more replicas of one or more ranks"),
            (Tier.ROW_WISE, ((0, 1, 2, 3, 4, 5, 6, 6),), "must be different ranks, got 6 twice"),
            (Tier.REPLICATED, ((1,), (1,)), "must be different ranks, got 1 twice"),
            (Tier.FLEX, ((0, 1, 2, 3), (4, 5, 6)), "must be replicas of one size, got 3 and 4 ranks"),
            (Tier.FLEX, ((0, 1, 2, 4), (3, 5, 6, 7)), "tier flex means one replica over each of 2 nodes, got [[0, 1,"),
            (Tier.TABLE_ROW_WISE, ((2, 3, 4, 5),), "tier table_row_wise means one replica over the ranks of one node"),
        ],
    )
    def test_ranks_that_cannot_be(self, tier, replicas, fault):
        assert fault_of(plan(placed(part(table()), tier, replicas))).startswith(f"shards[0].replicas: {fault}")

    @pytest.mark.parametrize(
        ("tier", "replicas", "fetch", "fault"),
        [
            (Tier.REPLICATED, ((2,), (5,)), (0, 0, 0, 0, 1, 1, 1, 1), None),
            (Tier.REPLICATED, ((2,), (5,)), (0, 0, 0, 0, 1, 1, 1, 2), "must be replicas in [0, 2), got 2"),
            (Tier.REPLICATED, ((2,), (5,)), (0, 1), "must name a replica for each of 8 ranks, got 2"),
            (Tier.DATA_PARALLEL, EACH, tuple(range(8)), None),
            (
                Tier.DATA_PARALLEL,
                EACH,
                (1, *range(1, 8)),
                "rank 0 must read its own replica in tier data_parallel, got 1",
            ),
        ],
    )
    def test_what_each_rank_reads(self, tier, replicas, fetch, fault):
        checked = plan(placed(part(table()), tier, replicas, fetch=fetch))
        if fault is None:
            assert fault_of(checked) is None
        else:
            assert fault_of(checked) == f"shards[0].fetch: {fault}"


class TestGroups:
    def test_ranks_are_numbered_within_the_group(self):
        half = tuple(range(4))
        groups = ReplicaGroups(num_groups=2)
        assert fault_of(plan(placed(part(table()), Tier.ROW_WISE, (half,)), replica_groups=groups)) is None
        assert "must be ranks in [0, 4), got 4" in fault_of(
            plan(placed(part(table()), replicas=((4,),)), replica_groups=groups)
        )
        assert "must divide the 8 ranks" in fault_of(
            plan(placed(part(table())), replica_groups=ReplicaGroups(num_groups=3))
        )

    @pytest.mark.parametrize(
        ("layout", "nodes"),
        [(GroupLayout.ACROSS_NODES, ((0, 1), (2, 3))), (GroupLayout.WITHIN_NODES, ((0, 1, 2, 3),))],
    )
    def test_nodes_are_those_that_a_group_reaches(self, layout, nodes):
        groups = ReplicaGroups(num_groups=2, layout=layout)
        assert fault_of(plan(placed(part(table()), Tier.FLEX, nodes), replica_groups=groups)) is None
        fault = fault_of(plan(placed(part(table()), Tier.FLEX, ((0, 2), (1, 3))), replica_groups=groups))
        assert f"over each of {len(nodes)} nodes" in fault

    def test_the_smallest_rank_of_all_groups_sets_the_limit(self):
        of = table()
        small = topology(NODE, WORLD, hbm=10**9, overrides=((6, MemoryBytes(hbm=of.storage_bytes - 1)),))
        for layout, tight in ((GroupLayout.ACROSS_NODES, 3), (GroupLayout.WITHIN_NODES, 2)):
            groups = ReplicaGroups(num_groups=2, layout=layout)
            for rank in range(4):
                checked = plan(placed(part(of), replicas=((rank,),)), topology=small, replica_groups=groups)
                if rank == tight:
                    assert f"rank {rank} would hold" in fault_of(checked)
                else:
                    assert fault_of(checked) is None


class TestTravel:
    def test_rows_by_access_rank_are_not_dealt_in_blocks(self):
        ranked = part(table(), by=RowsBy.ACCESS_RANK)
        fault = fault_of(plan(placed(ranked, Tier.ROW_WISE, ALL, split=Split.BLOCK)))
        assert fault.startswith("shards[0].split: rows in falling access frequency over several ranks must be split")
        for split in (Split.CYCLIC, Split.HASH):
            assert fault_of(plan(placed(ranked, Tier.ROW_WISE, ALL, split=split))) is None
        assert fault_of(plan(placed(ranked, Tier.DATA_PARALLEL, EACH, split=Split.BLOCK))) is None
        assert fault_of(plan(placed(part(table()), Tier.ROW_WISE, ALL, split=Split.BLOCK))) is None

    @pytest.mark.parametrize(
        ("pooling", "changes", "fault"),
        [
            (Pooling.SEQUENCE, {"exchange": Exchange.PARTIAL_SUMS}, "exchange: must be rows for a sequence table"),
            (Pooling.MEAN, {"exchange": Exchange.ROWS, "deduplicate": True}, None),
            (Pooling.SUM, {"deduplicate": True}, "deduplicate: must be false unless rows are exchanged"),
            (Pooling.SUM, {"grad_sync": GradSync.SPARSE}, "grad_sync: must be none for one replica, got sparse"),
        ],
    )
    def test_exchange_and_gradients_fit_the_pooling(self, pooling, changes, fault):
        checked = plan(placed(part(table(pooling=pooling)), **changes))
        if fault is None:
            assert fault_of(checked) is None
        else:
            assert fault_of(checked).startswith(f"shards[0].{fault}")

    @pytest.mark.parametrize(
        ("tier", "replicas", "changes", "payload", "fault"),
        [
            (Tier.ROW_WISE, ALL, {}, Payload(), None),
            (Tier.ROW_WISE, ALL, {}, Payload(forward=DType.FP16, backward=DType.BF16), None),
            (
                Tier.ROW_WISE,
                ALL,
                {"exchange": Exchange.ROWS},
                Payload(),
                "exchange rows; only partial_sums can be added up on the way",
            ),
            (
                Tier.TABLE_ROW_WISE,
                ((0, 1, 2, 3),),
                {},
                Payload(),
                "replicas [[0, 1, 2, 3]]; sums must come from one replica over all 8 ranks",
            ),
            (
                Tier.FLEX,
                EACH_NODE,
                {"grad_sync": GradSync.SPARSE},
                Payload(),
                "replicas [[0, 1, 2, 3], [4, 5, 6, 7]]; sums must come from one replica over all 8 ranks",
            ),
            *(
                (
                    Tier.ROW_WISE,
                    ALL,
                    {},
                    Payload(**{way: DType.INT8}),
                    "an int8 payload; sums are added up in the payload's format, so fp32, fp16 or bf16 is accepted",
                )
                for way in ("forward", "backward")
            ),
        ],
    )
    def test_only_sums_of_all_ranks_are_added_up_on_the_way(self, tier, replicas, changes, payload, fault):
        summed = placed(part(table()), tier, replicas, collective=Collective.REDUCE_SCATTER, **changes)
        found = fault_of(replace(plan(summed), payload=payload))
        if fault is None:
            assert found is None
        else:
            assert found == f"shards[0].collective: must be all_to_all, got reduce_scatter with {fault}"

    def test_replicas_must_meet(self):
        fault = fault_of(plan(placed(part(table()), Tier.FLEX, EACH_NODE, grad_sync=GradSync.NONE)))
        assert fault == "shards[0].grad_sync: must be dense, sparse or all_gather for 2 replicas, got none"


class TestConstraints:
    def test_pinned_ranks_hold_all_of_the_table(self):
        pinned = table(constraints=Constraints(pinned_ranks=(2, 3)))
        halves = [part(pinned, 0, 500), part(pinned, 500, 1000)]
        assert (
            fault_of(plan(*(placed(half, replicas=((rank,),)) for half, rank in zip(halves, (2, 3), strict=True))))
            is None
        )
        fault = fault_of(plan(placed(halves[0], replicas=((2,),)), placed(halves[1], replicas=((4,),))))
        assert fault == "shards[1].replicas: table 't0' is pinned to ranks 2, 3, got 4"

    def test_forbidden_tiers(self):
        picky = table(constraints=Constraints(forbidden_tiers=(Tier.ROW_WISE, Tier.FLEX)))
        assert fault_of(plan(placed(part(picky)))) is None
        assert (
            fault_of(plan(placed(part(picky), Tier.ROW_WISE, ALL)))
            == "shards[0].tier: table 't0' forbids tier row_wise"
        )

    def test_tables_that_belong_together_are_on_the_same_ranks(self):
        first, second = table("a", constraints=Constraints(colocate_with=("b",))), table("b")
        assert fault_of(plan(placed(part(first), replicas=((3,),)), placed(part(second), replicas=((3,),)))) is None
        fault = fault_of(plan(placed(part(second), replicas=((2,),)), placed(part(first), replicas=((3,),))))
        assert fault == "shards[1].replicas: table 'a' must be on the ranks of table 'b'"

    def test_a_companion_that_is_not_there(self):
        alone = table(constraints=Constraints(colocate_with=("nobody",)))
        fault = fault_of(plan(placed(part(alone))))
        assert fault == "tables.tables[0].constraints.colocate_with: names 'nobody', which is no table"


class TestRowOrders:
    ORDER = RowOrder(file="o.parquet", digest="sha256:" + "0" * 64, num_ordered=100)

    def shards(self):
        of = table(row_order=None)
        return (
            placed(part(of, 0, 100, by=RowsBy.ACCESS_RANK), Tier.DATA_PARALLEL, EACH),
            placed(part(of, 100, 1000, by=RowsBy.ACCESS_RANK)),
        )

    def test_execution_needs_them_and_pricing_does_not(self):
        assert fault_of(plan(*self.shards())) is None
        assert fault_of(plan(*self.shards(), row_orders={"t0": self.ORDER}), to_execute=True) is None
        fault = fault_of(plan(*self.shards()), to_execute=True)
        assert fault == "shards[0].rows: is cut by access rank, so execution needs row_orders of table 't0'"

    def test_whole_tables_need_none(self):
        assert fault_of(plan(placed(part(table(), by=RowsBy.ACCESS_RANK))), to_execute=True) is None

    @pytest.mark.parametrize(("name", "num_ordered"), [("t0", 1001), ("t0", 0), ("t1", 1)])
    def test_they_are_of_a_table_and_no_longer_than_it(self, name, num_ordered):
        orders = {name: replace(self.ORDER, num_ordered=num_ordered)}
        assert fault_of(plan(*self.shards(), row_orders=orders)).startswith(f"row_orders.{name}: must order 1 to ")


class TestMemory:
    @given(
        optimizer=st.sampled_from(Optimizer),
        num_rows=st.integers(1, 5000),
        layout=st.sampled_from(
            [(Tier.TABLE_WISE, ((3,),)), (Tier.ROW_WISE, ALL), (Tier.DATA_PARALLEL, EACH), (Tier.FLEX, EACH_NODE)]
        ),
        columns=st.integers(1, 15),
    )
    def test_the_limit_is_the_byte_that_the_plan_counts(self, optimizer, num_rows, layout, columns):
        tier, replicas = layout
        of = table(num_embeddings=num_rows, optimizer=optimizer)
        shards = [placed(part(of, columns=bounds), tier, replicas) for bounds in ((0, columns), (columns, 16))]
        held = plan(*shards).local_shards()[3]
        needed = sum(local.memory_bytes for local in held)
        assert fault_of(plan(*shards, topology=topology(NODE, WORLD, hbm=needed))) is None
        fault = fault_of(plan(*shards, topology=topology(NODE, WORLD, hbm=needed - 1)))
        assert f"would hold {write_bytes(needed)} of hbm, 1 B more than its {write_bytes(needed - 1)};" in fault
        assert fault.startswith("shards[0].memory" if columns >= 8 else "shards[1].memory")

    def test_levels_have_limits_of_their_own_and_caches_count_as_hbm(self):
        of = table()
        lower = MemoryPlacement(level=MemoryLevel.DDR, cache_bytes=500)
        # With the cache's index and 7 slots, and a moment for each row.
        shard, hbm = placed(part(of), memory=lower), 500 + 7 * 20 + (4 + 4) * of.num_embeddings
        assert fault_of(plan(shard, topology=topology(NODE, WORLD, hbm=hbm, ddr=of.weight_bytes))) is None
        assert "of ddr, 1 B more" in fault_of(
            plan(shard, topology=topology(NODE, WORLD, hbm=hbm, ddr=of.weight_bytes - 1))
        )
        less = topology(NODE, WORLD, hbm=hbm - 1, ddr=of.weight_bytes)
        assert "of hbm, 1 B more" in fault_of(plan(shard, topology=less))

    def test_absurd_sizes_do_not_wrap_around(self):
        huge = [
            table(f"t{index}", num_embeddings=2**40, embedding_dim=2**16, optimizer=Optimizer.ADAM)
            for index in range(5)
        ]
        machine = topology(NODE, WORLD, hbm=2**60)
        assert "PiB more" in fault_of(plan(*(placed(part(of)) for of in huge), topology=machine))
