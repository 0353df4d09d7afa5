"""Plans as TorchRec's plans and back: lossless, changed by name, or refused by name."""

import pickle
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
from torchrec.modules.embedding_configs import DataType

from autoshard.core import (
    Collective,
    DType,
    Exchange,
    Feature,
    GradSync,
    MemoryLevel,
    MemoryPlacement,
    Payload,
    PlacedShard,
    Pooling,
    ReplicaGroups,
    RowRange,
    Shard,
    Split,
    Tier,
)
from autoshard.core.errors import InvalidPlanError
from autoshard.formats.torchrec import (
    NotInTorchRecError,
    Place,
    TorchRecType,
    as_executed,
    changes,
    from_torchrec,
    parameter_constraints,
    refusals,
    to_torchrec,
)
from autoshard.formats.torchrec.configs import meta_module
from autoshard.validator import validate_plan
from tests import builders as make
from tests.builders import table

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, on torchrec's own import


def machine(num_nodes, node_size):
    return make.topology(node_size, num_nodes * node_size, device="a100", ddr=1 << 40, ssd=1 << 40)


def over(table, ranks, tier, columns=None, **fields):
    shard = replace(Shard.whole(table), columns=columns or (0, table.embedding_dim))
    return make.placed(shard, tier, (tuple(ranks),), **fields)


@st.composite
def plans(draw):
    """Plans of any tables, their shards held in ways that TorchRec has words for, and in some that it has not."""
    topology = machine(draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4])))
    shards = []
    for index in range(draw(st.integers(1, 5))):
        one = table(
            f"t{index}",
            draw(st.integers(1, 300)),
            4 * draw(st.sampled_from([1, 2, 3, 4, 8])),
            pooling=draw(st.sampled_from(list(Pooling))),
        )
        shards += draw(held(one, topology))
    return make.plan(*draw(st.permutations(shards)), topology=topology)


@st.composite
def held(draw, table, topology):
    world, node = topology.world_size, topology.local_world_size
    kind = draw(st.sampled_from([*TorchRecType, "flex", "rows"]))
    memory = draw(memories(table))
    split = {"split": draw(st.sampled_from(list(Split))), "memory": memory}
    nodes = [tuple(range(first, first + node)) for first in range(0, world, node)]
    num_parts = draw(st.sampled_from([n for n in (1, 2, 4) if table.embedding_dim % (4 * n) == 0]))
    width = table.embedding_dim // num_parts
    parts = [(first, first + width) for first in range(0, table.embedding_dim, width)]
    if kind == TorchRecType.DATA_PARALLEL and world > 1:
        sync = draw(st.sampled_from([GradSync.DENSE, GradSync.SPARSE]))
        return [make.placed(table, Tier.DATA_PARALLEL, make.each(world), grad_sync=sync)]
    if kind == TorchRecType.ROW_WISE and world > 1:
        is_summed = table.pooling is not Pooling.SEQUENCE
        if is_summed and draw(st.booleans()):
            rows = {"exchange": Exchange.ROWS, "deduplicate": draw(st.booleans())}
            return [over(table, range(world), Tier.ROW_WISE, **rows, **split)]
        ways = list(Collective) if is_summed else [Collective.ALL_TO_ALL]
        return [over(table, range(world), Tier.ROW_WISE, collective=draw(st.sampled_from(ways)), **split)]
    if kind == TorchRecType.TABLE_ROW_WISE and 1 < node < world:
        return [over(table, draw(st.sampled_from(nodes)), Tier.TABLE_ROW_WISE, **split)]
    if kind == TorchRecType.GRID_SHARD and 1 < node < world:
        return [over(table, draw(st.sampled_from(nodes)), Tier.TABLE_ROW_WISE, part, **split) for part in parts]
    if kind == "flex" and 1 < node < world:
        whole = over(table, range(world), Tier.FLEX, **split)
        return [replace(whole, replicas=tuple(nodes), grad_sync=GradSync.SPARSE)]
    if kind == "rows" and table.num_embeddings > 1:
        whole, cut = Shard.whole(table), draw(st.integers(1, table.num_embeddings - 1))
        ranges = [RowRange(start=0, stop=cut), RowRange(start=cut, stop=table.num_embeddings)]
        return [PlacedShard.table_wise(replace(whole, rows=rows), draw(st.integers(0, world - 1))) for rows in ranges]
    ranks = [draw(st.integers(0, world - 1)) for _ in parts]
    return [over(table, [rank], Tier.TABLE_WISE, part, memory=memory) for part, rank in zip(parts, ranks, strict=True)]


@st.composite
def memories(draw, table):
    level = draw(st.sampled_from([MemoryLevel.HBM, MemoryLevel.HBM, MemoryLevel.DDR, MemoryLevel.SSD]))
    if level is not MemoryLevel.DDR or draw(st.booleans()):
        return MemoryPlacement(level=level)
    return MemoryPlacement(
        level=level,
        cache_bytes=draw(st.integers(1, table.weight_bytes)),
        policy=draw(st.sampled_from(["lru", "lfu"])),
        cache_dtype=draw(st.sampled_from([None, *DType])),
    )


def check_round_trip(plan):
    """TorchRec's plan of a plan says the plan as it is carried out; what cannot be said is refused by name."""
    validate_plan(plan)
    found = refusals(plan)
    if found:
        with pytest.raises(NotInTorchRecError):
            to_torchrec(plan)
        for error in found:
            assert error.field.startswith("shards[")
            assert error.reason
        return
    executed = as_executed(plan)
    exported = to_torchrec(plan)
    assert from_torchrec(pickle.loads(pickle.dumps(exported)), plan.tables, plan.topology) == executed
    validate_plan(executed)
    assert as_executed(executed) == executed
    assert to_torchrec(executed) == exported
    # Nothing but what is named has changed.
    named = {change.field.partition(".")[2] for change in changes(plan)}
    assert named <= {"split", "collective", "exchange", "deduplicate", "grad_sync"}
    ours = {(one.shard.table.name, one.shard.columns): one for one in plan.shards}
    if not named:
        assert {(one.shard.table.name, one.shard.columns): one for one in executed.shards} == ours


@given(plans())
@settings(max_examples=100)
def test_round_trips(plan):
    check_round_trip(plan)


@pytest.mark.slow
@given(plans())
@settings(max_examples=10_000)
def test_many_round_trips(plan):
    check_round_trip(plan)


def test_exported_entries_are_those_of_torchrecs_own_constructors():
    tables = [table("a"), table("b"), table("c")]
    plan = make.plan(
        make.placed(tables[0], replicas=((2,),)),
        over(tables[1], range(4), Tier.ROW_WISE),
        *(over(tables[2], [rank], Tier.TABLE_WISE, (8 * part, 8 * part + 8)) for part, rank in enumerate([3, 1])),
        topology=machine(1, 4),
    )
    module, *_ = meta_module(tables)
    for parameter in module.parameters():
        parameter._in_backward_optimizers = [None]  # the kernel is fused
    theirs = construct_module_sharding_plan(
        module,
        {"a": table_wise(rank=2), "b": row_wise(), "c": column_wise(ranks=[3, 1])},
        sharder=EmbeddingBagCollectionSharder(),
        local_size=4,
        world_size=4,
        device_type="cuda",
    )
    assert to_torchrec(plan).plan == {"embedding_bag_collection": theirs}


def test_what_torchrec_does_otherwise_is_named():
    one = table("t")
    plan = make.plan(over(one, [1, 0], Tier.ROW_WISE, split=Split.CYCLIC), topology=machine(1, 2))
    assert [(change.field, change.planned, change.executed) for change in changes(plan)] == [
        ("shards[0].replicas", ((1, 0),), ((0, 1),)),
        ("shards[0].split", Split.CYCLIC, Split.BLOCK),
        ("shards[0].collective", Collective.ALL_TO_ALL, Collective.REDUCE_SCATTER),
    ]


def test_whole_plans_that_torchrec_cannot_say_are_refused_by_name():
    plan = make.plan(make.on(0, "t"), topology=machine(1, 2))
    for field, change in (
        ("replica_groups", {"replica_groups": ReplicaGroups(num_groups=2)}),
        ("payload", {"payload": Payload(forward=DType.BF16)}),
        ("payload", {"payload": Payload(forward=DType.INT8, backward=DType.INT8)}),
    ):
        with pytest.raises(NotInTorchRecError, match=f"^{field}: TorchRec "):
            to_torchrec(replace(plan, **change))


@pytest.mark.parametrize(
    ("payload", "output_dtype"), [("fp32", None), ("fp16", DataType.FP16), ("bf16", DataType.BF16)]
)
def test_one_number_format_on_the_wire_is_the_output_format_of_all_tables(payload, output_dtype):
    shards = make.on(0, "a"), make.on(1, "b"), make.placed(table("c"), Tier.DATA_PARALLEL, make.each(2))
    plan = replace(make.plan(*shards, topology=machine(1, 2)), payload=Payload.parse(payload, "payload"))
    assert refusals(plan) == ()
    exported = to_torchrec(plan)
    (module,) = exported.plan.values()
    assert [one.output_dtype for one in module.values()] == [output_dtype] * 3
    assert [one.output_dtype for one in parameter_constraints(plan).values()] == [output_dtype] * 3
    back = from_torchrec(exported, plan.tables, plan.topology)
    assert (back, back.payload) == (as_executed(plan), plan.payload)


def entry_of(plan):
    exported = to_torchrec(plan)
    (module,) = exported.plan.values()
    return exported, module, module["t"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda entry: setattr(entry, "sharding_type", "by_magic"),
            r"\.t\.sharding_type: TorchRec plans are read with",
        ),
        (lambda entry: setattr(entry, "compute_kernel", "key_value"), r"\.t\.compute_kernel: TorchRec plans are read"),
        (lambda entry: setattr(entry, "compute_kernel", "dense"), r"\.t\.compute_kernel: TorchRec must train the"),
        (lambda entry: setattr(entry, "ranks", [0, 9]), r"\.t\.ranks: must be ranks in \[0, 2\), got 9"),
        (lambda entry: setattr(entry, "ranks", [0]), r"\.t\.ranks: must have a rank for each of its shards"),
        (
            lambda entry: entry.sharding_spec.shards[0].shard_sizes.__setitem__(0, 21),
            r"\.t\.sharding_spec: TorchRec routes ids by equal blocks of rows, 20 each",
        ),
        (
            lambda entry: entry.sharding_spec.shards[0].shard_sizes.__setitem__(1, 12),
            r"\.t\.sharding_spec: TorchRec must hold columns \[0, 16\) once",
        ),
    ],
)
def test_entries_that_plans_cannot_say_are_refused_by_name(change, message):
    plan = make.plan(over(table("t", 40), [0, 1], Tier.ROW_WISE), topology=machine(1, 2))
    exported, _, entry = entry_of(plan)
    change(entry)
    with pytest.raises(InvalidPlanError, match=f"^embedding_bag_collection{message}"):
        from_torchrec(exported, plan.tables, plan.topology)


def test_tables_that_are_missing_or_unknown_are_named():
    plan = make.plan(make.on(0, "t"), topology=machine(1, 2))
    exported, module, entry = entry_of(plan)
    module["other"] = entry
    with pytest.raises(InvalidPlanError, match=r"^embedding_bag_collection\.other: is none of the tables"):
        from_torchrec(exported, plan.tables, plan.topology)
    del module["other"], module["t"]
    with pytest.raises(InvalidPlanError, match=r'^t: has no table "t"'):
        from_torchrec(exported, plan.tables, plan.topology)


TOWERS = {"user.t": Place("user", "t"), "item.t": Place("item", "t")}


def towers(*ranks, features=("id@user.t", "id@item.t"), **fields):
    """A plan of two modules' tables of one name, each on a rank."""
    shards = [
        make.on(rank, name, features=(Feature(name=feature, pooling_factor=1.0),), **fields)
        for rank, name, feature in zip(ranks, TOWERS, features, strict=True)
    ]
    return make.plan(*shards, topology=machine(1, 2))


@pytest.mark.parametrize("places", [TOWERS, None])
def test_tables_of_one_name_in_two_modules_go_to_torchrec_and_back(places):
    plan = towers(0, 1)
    assert from_torchrec(to_torchrec(plan, places), plan.tables, plan.topology) == as_executed(plan)


def test_names_that_stand_for_two_tables_are_refused():
    exported = to_torchrec(towers(0, 1), TOWERS)
    plan = make.plan(make.on(0, "t"), topology=machine(1, 2))
    with pytest.raises(
        InvalidPlanError, match=r'^has two tables "t", in "user" and "item"; give them the names user\.t'
    ):
        from_torchrec(exported, plan.tables, plan.topology)


@pytest.mark.parametrize("make_of", [to_torchrec, parameter_constraints, refusals])
def test_places_that_lack_a_table_are_refused(make_of):
    with pytest.raises(InvalidPlanError, match=r"^tables\.item\.t: is no table of the model"):
        make_of(towers(0, 1), {"user.t": TOWERS["user.t"]})


@pytest.mark.parametrize("places", [TOWERS, None])
def test_constraints_are_by_the_names_that_tables_have_in_their_modules(places):
    [(name, one)] = parameter_constraints(towers(0, 1), places).items()
    assert (name, one.sharding_types, one.feature_names) == ("t", ["table_wise"], ["id"])
    [one] = parameter_constraints(towers(0, 1, features=("uid", "iid")), places).values()
    assert one.feature_names is None
    whole, split = table("user.t"), over(table("item.t"), [0, 1], Tier.ROW_WISE)
    plan = make.plan(make.placed(whole), split, topology=machine(1, 2))
    with pytest.raises(
        NotInTorchRecError, match=r'^tables\.item\.t: TorchRec has the same .* those of "t" would differ'
    ):
        parameter_constraints(plan, places)


def test_constraints_of_means_are_checked_module_by_module():
    split = over(table("a", pooling=Pooling.MEAN), [0, 1], Tier.ROW_WISE)
    plan = make.plan(split, make.on(0, "b"), topology=machine(1, 2))
    apart = {"a": Place("user", "a"), "b": Place("item", "b")}
    assert {name: one.sharding_types for name, one in parameter_constraints(plan, apart).items()} == {
        "a": ["row_wise"],
        "b": ["table_wise"],
    }
    with pytest.raises(NotInTorchRecError, match="splits means by rows only where"):
        parameter_constraints(plan)


@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "row_bytes"),
    [
        (DType.FP16, DType.FP32, 64 * 4),
        (DType.FP32, DType.FP16, 64 * 2),
        (DType.FP16, None, 64 * 2),
        (DType.FP32, DType.INT8, 64 + 8),  # a scale and an offset of fp32
    ],
)
def test_load_factors_count_rows_in_the_number_format_of_the_cache(dtype, cache_dtype, row_bytes):
    one = table("t", 1_000_000, 64, dtype=dtype)
    memory = MemoryPlacement(level=MemoryLevel.DDR, cache_bytes=100_000 * row_bytes, cache_dtype=cache_dtype)
    plan = make.plan(make.placed(one, memory=memory), topology=machine(1, 2))
    exported, _, entry = entry_of(plan)
    assert entry.cache_params.load_factor == 0.1
    assert from_torchrec(exported, plan.tables, plan.topology).shards[0].memory == memory
    entry.cache_params.load_factor = 1.0
    [whole] = from_torchrec(exported, plan.tables, plan.topology).shards
    assert whole.memory.cache_bytes == 1_000_000 * row_bytes


def test_constraints_hold_tables_as_the_plan_does():
    one, other = table("a"), table("b")
    memory = MemoryPlacement(level=MemoryLevel.DDR, cache_bytes=one.weight_bytes // 4)
    plan = make.plan(
        make.placed(one, memory=memory),
        *(over(other, [rank], Tier.TABLE_WISE, (8 * rank, 8 * rank + 8)) for rank in (0, 1)),
        topology=machine(1, 2),
    )
    made = parameter_constraints(plan)
    assert (made["a"].sharding_types, made["a"].compute_kernels) == (["table_wise"], ["fused_uvm_caching"])
    assert made["a"].cache_params.load_factor == 0.25
    assert (made["b"].sharding_types, made["b"].min_partition) == (["column_wise"], 8)
    assert made["b"].pooling_factors == [2.0]
