"""What planners work out for all tables at once is what they would work out for one after the other."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autoshard.core import (
    AccessProfile,
    Constraints,
    DType,
    Feature,
    GradSync,
    ImpliedOrder,
    MemoryLevel,
    MemoryPlacement,
    Optimizer,
    Payload,
    Pooling,
)
from autoshard.evaluation.analytic import AnalyticCostModel, kernel_seconds
from autoshard.evaluation.stages import cheapest_syncs
from autoshard.evaluation.traffic import id_bytes, pair_bytes, sync_bytes
from autoshard.planners.space.layout import Layout, Limits
from autoshard.planners.space.options import ShardingType, enumerate_options, locals_of
from autoshard.planners.space.planner_space import PlannerSpace
from tests import builders as make

BATCH = 64
TOPOLOGY = make.topology(device="a100", latency_s=1e-5)
COSTS = make.costs("a100")


@st.composite
def tables(draw, name="t"):
    num_rows = draw(st.sampled_from([1, 7, 1000, 10**6]))
    pooling = draw(st.sampled_from(list(Pooling)))
    pooling_factor = draw(st.floats(0, 100))
    peak = {"pooling_variance": 9.0, "pooling_p99": 110.0} if pooling is Pooling.SEQUENCE else {}
    return make.table(
        name,
        num_rows,
        draw(st.sampled_from([4, 20, 64])),
        alpha=draw(st.sampled_from([0.0, 1.0, 1.3])),
        features=tuple(
            Feature(name=f"{name}_{index}", pooling_factor=pooling_factor, **peak)
            for index in range(draw(st.integers(1, 2)))
        ),
        dtype=draw(st.sampled_from([DType.FP32, DType.FP16])),
        pooling=pooling,
        optimizer=draw(st.sampled_from(list(Optimizer))),
        row_order=ImpliedOrder.ASSUMED,
    )


@st.composite
def table_sets(draw):
    number = draw(st.integers(1, 4))
    return make.tables(*(draw(tables(f"t{index}")) for index in range(number)), batch_size=BATCH)


@st.composite
def placed_shards(draw):
    """Parts of tables as options hold them, with any gradient synchronisation, some of them behind caches."""
    options = [option for table in draw(table_sets()).tables for option in enumerate_options(table, TOPOLOGY)]
    placed = []
    for part in (part for option in draw(st.lists(st.sampled_from(options), max_size=12)) for part in option.parts):
        ways = [way for way in GradSync if way is not GradSync.NONE]
        one = part.placed(0, TOPOLOGY)
        if len(one.replicas) > 1:
            one = replace(one, grad_sync=draw(st.sampled_from(ways)))
        elif draw(st.booleans()):
            one = replace(one, memory=MemoryPlacement(level=MemoryLevel.DDR, cache_bytes=256))
        placed.append(one)
    return placed


@given(placed=placed_shards())
def test_small_tables(placed):
    assert locals_of(placed, BATCH) == [locals_of([one], BATCH)[0] for one in placed]


@given(placed=placed_shards())
def test_bytes_and_ways_of_gradients(placed):
    one_by_one = [sync_bytes([one], BATCH) for one in placed]
    np.testing.assert_allclose(sync_bytes(placed, BATCH), np.concatenate([np.zeros((0, 2)), *one_by_one]), rtol=1e-12)
    cheapest = [way for one in placed for way in cheapest_syncs([one], BATCH, COSTS.comm, TOPOLOGY)]
    assert cheapest_syncs(placed, BATCH, COSTS.comm, TOPOLOGY) == cheapest


@given(placed=placed_shards(), payload=st.sampled_from([Payload(), Payload(forward=DType.INT8, backward=DType.FP16)]))
def test_bytes_of_exchanges(placed, payload):
    width = id_bytes(one.shard.table for one in placed)
    factors = np.linspace(1, 2, len(placed)).tolist()

    def bytes_of(some, factors):
        return pair_bytes(some, BATCH / 4, payload, id_bytes=width, lookups_factor_N=factors)

    one_by_one = [bytes_of([one], [factor]) for one, factor in zip(placed, factors, strict=True)]
    np.testing.assert_array_equal(bytes_of(placed, factors), np.concatenate([np.zeros((0, 4)), *one_by_one]))


@given(placed=placed_shards(), device=st.sampled_from(["a100", "cpu"]))
def test_kernels(placed, device):
    model = AnalyticCostModel.for_device(device)
    held = locals_of(placed, BATCH)
    one_by_one = np.array([kernel_seconds([local], model.memory)[0] for local in held]).reshape(-1, 2)
    np.testing.assert_allclose(kernel_seconds(held, model.memory), one_by_one, rtol=1e-12)
    codes = np.array([model.encode([local])[0] for local in held])
    np.testing.assert_allclose(model.encode(held), codes.reshape(model.encode(held).shape), rtol=1e-6)


class TestOffers:
    @given(task=table_sets())
    def test_what_shards_add_is_the_same_for_one_and_for_many(self, task):
        space = PlannerSpace(task, TOPOLOGY, COSTS, lambda table: enumerate_options(table, TOPOLOGY))
        options = [option for item in space.items for option in item.options]
        placed = [part.placed(0, TOPOLOGY) for one in options for shard in one.shards for part in shard.parts]
        one_by_one = np.concatenate([space.prices.moved([one]) for one in placed])
        np.testing.assert_allclose(space.prices.moved(placed), one_by_one, rtol=1e-12)

    @given(task=table_sets())
    def test_options_offered_later_are_those_offered_at_once(self, task):
        rare = {ShardingType.ROW_TIERS, ShardingType.GRID}

        def common(table):
            return enumerate_options(table, TOPOLOGY, set(ShardingType) - rare)

        def every(table):
            return enumerate_options(table, TOPOLOGY)

        at_once, later = (PlannerSpace(task, TOPOLOGY, COSTS, options_of) for options_of in (every, common))
        before = [len(item.options) for item in later.items]
        later.offer([0], every)
        later.offer([0], every)  # nothing new
        assert [len(item.options) for item in later.items[1:]] == before[1:]

        def added(space):
            rows_VX = space.kinds.rows_VX
            return {
                tuple(one.parts for one in option.of_tables): rows_VX[[one.kind for one in option.shards]].tolist()
                for option in space.items[0].options
            }

        assert added(later) == added(at_once)


def test_no_shards_at_all():
    assert locals_of([], BATCH) == []
    assert sync_bytes([], BATCH).shape == (0, 2)
    assert kernel_seconds([], COSTS.kernel.memory).shape == (0, 2)


def test_tables_that_are_alike_share_their_options_and_keep_their_names():
    first = make.table("first", 1000, 64, pooling_factor=3.0, access=AccessProfile.uniform(1000))
    again = replace(first, name="again", features=(Feature(name="g", pooling_factor=3.0),))
    longer = replace(first, name="longer", features=(Feature(name="h", pooling_factor=3.0, pooling_p99=100.0),))
    pinned = replace(first, name="pinned", constraints=Constraints(pinned_ranks=(1,)))
    pinned = replace(pinned, features=(Feature(name="i", pooling_factor=3.0),))
    task = make.tables(first, again, longer, pinned, batch_size=BATCH)
    space = PlannerSpace(task, TOPOLOGY, COSTS, lambda table: enumerate_options(table, TOPOLOGY))
    options = [item.options for item in space.items]
    assert options[1] == options[0]
    kinds = [one[0].shards[0].kind for one in options]
    assert kinds[1] == kinds[0] == kinds[3] != kinds[2]
    assert len(options[3]) < len(options[0])
    assert space.number(space.items[1], (enumerate_options(again, TOPOLOGY)[2],)) == 2
    for number, option in enumerate(options[1]):
        chosen = [(0, (0,)), (number, (0,) * len(option.shards)), (0, (0,)), (0, (1,))]
        shards = [one.shard for one in Layout(space, Limits.of(space), chosen).plan().shards]
        assert {shard.table.name for shard in shards} == {"first", "again", "longer", "pinned"}
        held = sum(shard.num_embeddings * shard.embedding_dim for shard in shards if shard.table == again)
        assert held == 1000 * 64
