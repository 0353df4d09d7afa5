"""plan.json: what is read back is what was written, what is left out follows from the tier, faults are named."""

import copy
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.core import (
    Collective,
    CostBreakdown,
    DType,
    Estimate,
    Exchange,
    GradSync,
    GroupLayout,
    LowerBound,
    MemoryLevel,
    MemoryPlacement,
    PlacedShard,
    Provenance,
    RankCost,
    ReplicaGroups,
    RowOrder,
    Shard,
    Split,
    SyncRows,
)
from autoshard.core.choices import Risk
from autoshard.core.errors import FormatError, InputError, InvalidPlanError
from autoshard.core.step import CollectiveTime, Overlap, StepCollective, StepPart
from autoshard.formats import (
    format_json,
    load_tables,
    load_topology,
    plan_from_json,
    plan_to_json,
    read_json,
    read_plan,
    write_plan,
)
from tests import builders as make

SCHEMA = "autoshard.plan/1"
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
times = st.floats(0, 1e9)


@pytest.fixture
def document(documents):
    return copy.deepcopy(documents[SCHEMA])


def test_whole_documents_are_read_field_by_field(document):
    plan = plan_from_json(document)
    clicks, views, hot, warm, cold, users = plan.shards
    assert clicks.memory == MemoryPlacement(
        level=MemoryLevel.DDR, cache_bytes=4096, policy="lfu", cache_dtype=DType.FP16
    )
    assert hot.replicas == ((0,), (1,), (2,), (3,))
    assert warm.replicas == ((0, 1), (2, 3))
    assert cold.replicas == ((0, 1, 2, 3),)
    assert (hot.deduplicate, cold.split) == (True, Split.HASH)
    assert users.fetch == (0, 0, 1, 1)
    assert views.memory == MemoryPlacement()
    assert {shard.shard.table for shard in plan.shards} == set(plan.tables.tables)
    assert plan.payload.forward is DType.FP16
    assert plan.row_orders == {
        "history": RowOrder(file="plan.history.parquet", digest="sha256:" + "0f" * 32, num_ordered=500)
    }
    assert plan.predicted is not None
    assert plan.predicted.ranks[3].hbm_bytes == 1000
    assert (plan.predicted.overlap, plan.predicted.dense_ms, plan.predicted.sync_ms) == (Overlap.NEO, 0.25, 0.0)
    assert plan.predicted.parts[StepPart.BACKWARD_EXCHANGE] == Estimate(value=0.1, low=0.0, high=1.0)
    assert plan.predicted.models["dense"] == "analytic:cpu"
    assert plan.provenance is not None
    assert plan.provenance.options == {"tiers": 3, "deep": {"list": [1.5, None, True]}}


def test_what_is_left_out_follows_from_tier_rows_and_pooling(document):
    for shard in document["shards"]:
        for name in ("split", "exchange", "grad_sync", "memory", "fetch"):
            shard.pop(name, None)
    shards = plan_from_json(document).shards
    assert [placed.split for placed in shards] == [
        Split.BLOCK,  # whole tables on one rank
        Split.BLOCK,
        Split.BLOCK,  # a rank each: nothing to split
        Split.CYCLIC,  # access ranks over several ranks
        Split.CYCLIC,
        Split.BLOCK,
    ]
    assert [placed.exchange for placed in shards] == [Exchange.PARTIAL_SUMS] * 2 + [Exchange.ROWS] * 3 + [
        Exchange.PARTIAL_SUMS
    ]
    assert [placed.grad_sync for placed in shards] == [
        GradSync.NONE,
        GradSync.NONE,
        GradSync.DENSE,
        GradSync.SPARSE,
        GradSync.NONE,
        GradSync.SPARSE,
    ]
    assert {placed.memory for placed in shards} == {MemoryPlacement()}
    assert {placed.fetch for placed in shards} == {None}


def test_the_collective_is_told_where_it_is_not_the_usual_one(document):
    assert {placed.collective for placed in plan_from_json(document).shards} == {Collective.ALL_TO_ALL}
    assert all("collective" not in shard for shard in plan_to_json(plan_from_json(document))["shards"])
    document["shards"][3]["collective"] = "reduce_scatter"
    read = plan_from_json(document)
    assert read.shards[3].collective is Collective.REDUCE_SCATTER
    assert plan_to_json(read)["shards"][3]["collective"] == "reduce_scatter"
    document["shards"][3]["collective"] = "broadcast"
    with pytest.raises(FormatError, match=r"shards\[3\]\.collective: .*all_to_all, reduce_scatter"):
        plan_from_json(document)


def test_a_document_is_written_back_as_it_was_with_all_defaults_told(document):
    written = plan_to_json(plan_from_json(document))
    assert plan_from_json(json.loads(format_json(written))) == plan_from_json(document)
    told = [
        {name: value for name, value in shard.items() if name in written["shards"][0]} for shard in document["shards"]
    ]
    for shard, before in zip(written["shards"], told, strict=True):
        assert before.items() <= shard.items()
    for name in ("replica_groups", "payload", "row_orders", "predicted", "provenance"):
        assert written[name] == document[name]


def test_what_a_plan_was_made_for_is_told_where_it_is_not_the_mean(document):
    plan = plan_from_json(document)
    assert plan.risk is Risk.MEAN
    assert "risk" not in plan_to_json(plan)["provenance"]
    document["provenance"]["risk"] = "high"
    assert plan_from_json(document).risk is Risk.HIGH
    assert plan_to_json(plan_from_json(document))["provenance"]["risk"] == "high"


@pytest.mark.parametrize("name", ["row_orders", "predicted", "provenance"])
def test_a_plan_written_by_hand_may_leave_these_out(name, document):
    del document[name]
    plan = plan_from_json(document)
    assert not getattr(plan, name)
    assert name not in plan_to_json(plan)


def test_predictions_of_before_there_were_parts_are_read_and_written_as_they_are(document):
    for name in ("overlap", "models", "dense_ms", "sync_ms", "parts"):
        del document["predicted"][name]
        plan = plan_from_json(document)
        assert plan.predicted is not None
        assert not getattr(plan.predicted, name)
        assert plan_to_json(plan)["predicted"] == document["predicted"]


def test_named_replicas_are_those_of_the_replica_group(document):
    document["replica_groups"].update(num_groups=2, layout="within_nodes")
    document["shards"] = document["shards"][2:5]
    del document["predicted"]
    hot, warm, cold = plan_from_json(document).shards
    assert (hot.replicas, warm.replicas, cold.replicas) == (((0,), (1,)), ((0, 1),), ((0, 1),))
    document["replica_groups"]["layout"] = "across_nodes"
    hot, warm, cold = plan_from_json(document).shards
    assert (hot.replicas, warm.replicas, cold.replicas) == (((0,), (1,)), ((0,), (1,)), ((0, 1),))


def test_a_name_that_makes_no_sense_in_a_group_is_refused(document):
    document["topology"].update(world_size=6, levels=[{**document["topology"]["levels"][0], "size": 2}])
    document["topology"]["levels"].append({**document["topology"]["levels"][0], "name": "cluster", "size": 6})
    del document["topology"]["fetch_ms"], document["predicted"]
    document["replica_groups"].update(num_groups=3, layout="across_nodes")
    document["shards"] = document["shards"][2:4]
    with pytest.raises(FormatError, match="must be all, each or a list") as caught:
        plan_from_json(document)
    assert caught.value.field == "shards[1].replicas"


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            lambda it: it["tables"]["tables"][1].update(embedding_dim=0),
            "tables.tables[1].embedding_dim: must be a whole",
        ),
        (lambda it: it["topology"].update(device=3), "topology.device: must be a text"),
        (
            lambda it: it["replica_groups"].update(num_groups=3),
            "replica_groups.num_groups: must divide the 4 ranks, got 3",
        ),
        (
            lambda it: it["replica_groups"].update(layout="x"),
            "replica_groups.layout: must be one of across_nodes, within_nodes",
        ),
        (
            lambda it: it["replica_groups"].update(sync_rows="hot"),
            'replica_groups.sync_rows: must be one of all, touched, got "hot"',
        ),
        (lambda it: it["payload"].update(forward="fp8"), "payload.forward: must be one of fp32, fp16, bf16, int8"),
        (lambda it: it["shards"][0].update(table="click"), 'shards[0].table: no table is named "click"'),
        (
            lambda it: it["shards"][0]["rows"].update(stop=1001),
            "shards[0].rows: must lie within [0, 1000), got 0, 1001",
        ),
        (lambda it: it["shards"][0]["rows"].update(stop=0), "shards[0].rows: must satisfy 0 <= start < stop"),
        (lambda it: it["shards"][0].update(columns=[0, 17]), "shards[0].columns: must lie within [0, 16), got 0, 17"),
        (lambda it: it["shards"][0].update(columns=[0]), "shards[0].columns: must hold 2 values, got 1"),
        (lambda it: it["shards"][0].update(tier="tablewise"), "shards[0].tier: must be one of table_wise, row_wise,"),
        (
            lambda it: it["shards"][0].update(replicas=[[4]]),
            "shards[0].replicas[0][0]: must be a whole number in [0, 3], got 4",
        ),
        (lambda it: it["shards"][0].update(replicas=[[]]), "shards[0].replicas[0]: must hold 1 to 4 values, got 0"),
        (
            lambda it: it["shards"][0].update(replicas="some"),
            "shards[0].replicas: must be all, each, each_node or a list",
        ),
        (lambda it: it["shards"][0].update(deduplicate=0), "shards[0].deduplicate: must be true or false, got 0"),
        (
            lambda it: it["shards"][0]["memory"].update(policy="fifo"),
            "shards[0].memory.policy: must be one of lru, lfu",
        ),
        (lambda it: it["shards"][5].update(fetch=[0, 0, 1]), "shards[5].fetch: must hold 4 values, got 3"),
        (
            lambda it: it["shards"][5]["fetch"].__setitem__(1, 2),
            "shards[5].fetch[1]: must be a whole number in [0, 1], got 2",
        ),
        (lambda it: it["row_orders"].update(none={}), "row_orders.none: no table has that name"),
        (
            lambda it: it["row_orders"]["history"].update(file="../x"),
            "row_orders.history.file: must be the name of a file",
        ),
        (
            lambda it: it["row_orders"]["history"].update(digest="md5"),
            "row_orders.history.digest: must be sha256: and 64",
        ),
        (lambda it: it["predicted"].pop("binding_rank"), "predicted.binding_rank: is missing"),
        (lambda it: it["predicted"]["ranks"].pop(), "predicted.ranks: must hold 4 values, got 3"),
        (
            lambda it: it["predicted"].update(overlap="some"),
            "predicted.overlap: must be one of none, neo, neo_prefetch, pipelined, got",
        ),
        (lambda it: it["predicted"].update(dense_ms=-1), "predicted.dense_ms: must be a finite number of at least 0"),
        (lambda it: it["predicted"]["models"].update(step=3), "predicted.models.step: must be a text"),
        (lambda it: it["predicted"]["parts"].pop("dense"), "predicted.parts.dense: is missing"),
        (lambda it: it["predicted"]["parts"].update(top={}), "predicted.parts.top: is not known"),
        (
            lambda it: it["predicted"]["parts"]["input"].update(high=0.09),
            "predicted.parts.input: must satisfy low <= value <= high",
        ),
        (
            lambda it: it["predicted"]["ranks"].reverse(),
            "predicted.ranks[0].rank: must be 0: ranks are listed in order",
        ),
        (lambda it: it["predicted"]["step_ms"].update(low=2), "predicted.step_ms: must satisfy low <= value <= high"),
        (
            lambda it: it["provenance"]["options"]["deep"]["list"].append(float("nan")),
            "provenance.options.deep.list[3]: must be a finite number, got NaN",
        ),
        (
            lambda it: it["provenance"]["options"].update(x=["\ud800"]),
            "provenance.options.x[0]: must be made of whole characters, got ",
        ),
        (
            lambda it: it["provenance"]["options"].update({"\ud800": 1}),
            "provenance.options: must be made of whole characters, got ",
        ),
        (lambda it: it["provenance"].update(models={"a": 1}), "provenance.models.a: must be a text"),
        (lambda it: it["provenance"].update(models=[]), "provenance.models: must be an object, got an empty list"),
    ],
)
def test_a_fault_is_one_line_with_its_field(change, line, document):
    change(document)
    with pytest.raises(InputError) as caught:
        plan_from_json(document)
    assert str(caught.value).startswith(line)


def small_plan():
    tables = load_tables("metasyn").sample(12, seed=5).scaled(512)
    shards = tuple(PlacedShard.table_wise(Shard.whole(table), index % 4) for index, table in enumerate(tables.tables))
    return make.plan(*shards, tables=tables, topology=load_topology("cpu-4"))


@given(
    groups=st.builds(
        ReplicaGroups,
        num_groups=st.sampled_from([1, 2, 4]),
        layout=st.sampled_from(GroupLayout),
        sync_every=st.integers(1, 100),
        moment_scale=st.floats(1e-6, 1),
        sync_rows=st.sampled_from(SyncRows),
    ),
    times_=st.lists(times, min_size=20, max_size=20),
    options=st.dictionaries(st.text(max_size=9), plain | st.lists(plain, max_size=3), max_size=3),
)
def test_what_is_written_is_read_back_equal(groups, times_, options, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "plan.json"
    plan = replace(
        small_plan(),
        replica_groups=groups,
        shards=tuple(replace(placed, replicas=((0,),)) for placed in small_plan().shards),
        provenance=Provenance(planner="é", version="1", seed=3, options=options, models={"kernel": "x"}),
    )
    ranks = [
        RankCost(
            rank=rank,
            **dict(zip([name for name in RankCost.__slots__ if name.endswith("_ms")], times_, strict=False)),
            hbm_bytes=rank,
            ddr_bytes=0,
            ssd_bytes=2**50,
            activation_bytes=1,
        )
        for rank in range(plan.group_size)
    ]
    low, value, high = sorted(times_[7:10])
    estimate = Estimate(value=value, low=low, high=high)
    plan = plan.with_predicted(
        CostBreakdown(
            step_ms=estimate,
            max_kernel_ms=times_[10],
            balance=times_[11],
            exchange_balance=times_[12],
            imbalance=times_[13],
            floor_kernel_ms=times_[14],
            binding_rank=0,
            binding_shard="t0",
            cost_model="m",
            ranks=tuple(ranks),
            overlap=Overlap.NONE,
            models={"kernel": "m"},
            dense_ms=times_[15],
            sync_ms=times_[16],
            parts=dict.fromkeys(StepPart, estimate),
            collectives={one: CollectiveTime(serialised_ms=high, exposed_ms=low) for one in StepCollective},
            bounds={"step": LowerBound(proven_ms=low, estimated_ms=value), "input": LowerBound(estimated_ms=0.0)},
        )
    )
    write_plan(plan, path)
    assert read_plan(path) == plan


def test_a_file_with_an_invalid_plan_is_refused_by_name(tmp_path):
    path = tmp_path / "plan.json"
    write_plan(small_plan(), path)
    document = read_json(path)
    document["shards"].append(document["shards"][0])
    path.write_text(format_json(document))
    with pytest.raises(InvalidPlanError) as caught:
        read_plan(path)
    assert str(caught.value).startswith(f"{path}: shards[12].columns: table ")


def test_ranks_in_named_replicas_cost_no_text():
    document = plan_to_json(small_plan())
    document["shards"] = [{**shard, "tier": "row_wise", "replicas": [[0, 1, 2, 3]]} for shard in document["shards"]]
    assert {shard["replicas"] for shard in plan_to_json(plan_from_json(document))["shards"]} == {"all"}
