"""TorchRec's planner: told the task as it is, and its plan taken over as it is."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.optim import RowWiseAdagrad

from autoshard.core import (
    Collective,
    Constraints,
    DType,
    Feature,
    MemoryBandwidth,
    Optimizer,
    Payload,
    Pooling,
    Tier,
)
from autoshard.core.errors import InfeasiblePlanError, InvalidOptionError, InvalidTableError
from autoshard.core.quoting import write_bytes
from autoshard.evaluation import DEVICE_MEMORY
from autoshard.formats.torchrec.configs import meta_module
from autoshard.planners.torchrec_planner import TorchRecPlanner, _sharders, torchrec_topology
from autoshard.validator import validate_plan
from tests import builders as make


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, on torch's own import
def test_gives_what_a_user_of_torchrec_gets():
    tables, topology = make.draw_task(24, 4, seed=1, batch_size=1024)
    module = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=table.name,
                num_embeddings=table.num_embeddings,
                embedding_dim=table.embedding_dim,
                feature_names=[table.features[0].name],
            )
            for table in tables.tables
        ],
    )
    from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward

    apply_optimizer_in_backward(RowWiseAdagrad, module.parameters(), {"lr": 0.1})
    # The same task in the user's own words, built apart from the planner's code.
    user = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=4,
            compute_device="cpu",
            ddr_cap=topology.memory_bytes.hbm,
            ddr_mem_bw=DEVICE_MEMORY["cpu"].bytes_per_s / 1000,
            intra_host_bw=1e6,
            inter_host_bw=1e6,
        ),
        batch_size=256,
        storage_reservation=FixedPercentageStorageReservation(percentage=0),
        constraints={
            table.name: ParameterConstraints(
                sharding_types=["table_wise"], pooling_factors=[table.features[0].pooling_factor]
            )
            for table in tables.tables
        },
        debug=False,
    )
    (sharding,) = user.plan(module, [EmbeddingBagCollectionSharder()]).plan.values()
    ours = TorchRecPlanner().plan(make.request(tables, topology))
    expected = [sharding[table.name].ranks[0] for table in tables.tables]
    assert make.problem(tables, topology).ranks_of(ours).tolist() == expected
    assert len(set(expected)) == 4


def test_topology_is_told_in_torchrecs_units():
    told = torchrec_topology(replace(make.topology(4, hbm=1000), device="h100"))
    assert told.compute_device == "cuda"
    assert [device.storage.hbm for device in told.devices] == [1000] * 4
    # Bytes per ms: 1 GB/s between ranks, 3.35 TB/s of memory.
    assert (told.intra_host_bw, told.inter_host_bw, told.hbm_mem_bw) == (1e6, 1e6, 3.35e9)


def test_topology_is_told_how_fast_its_memory_is():
    # 2.1 TB/s of gathered rows, which reach 84% of the memory's bandwidth.
    stated = MemoryBandwidth(hbm=2.1e12)
    for device in ("h100", "nobody-knows"):
        told = torchrec_topology(replace(make.topology(4), device=device, memory_bandwidth=stated))
        assert told.hbm_mem_bw == pytest.approx(2.5e9)


def test_exchanges_are_estimated_in_the_formats_that_are_sent():
    tables, topology = make.draw_task(6, 4, seed=1, batch_size=1024)

    def exchanges_ms(payload, sharding_type):
        options = EmbeddingEnumerator(torchrec_topology(topology), 256).enumerate(
            meta_module(tables.tables), _sharders(payload)
        )
        shards = [shard for one in options if one.sharding_type == sharding_type for shard in one.shards]
        return np.array([(shard.perf.fwd_comms, shard.perf.bwd_comms) for shard in shards])

    narrow = Payload(forward=DType.INT8, backward=DType.BF16)
    whole = exchanges_ms(Payload(), "table_wise")
    assert len(whole) == 6
    np.testing.assert_allclose(exchanges_ms(narrow, "table_wise"), whole / [4, 2])
    # Sums of rows over all ranks go by reduce-scatter.
    by_rows = exchanges_ms(Payload(), "row_wise")
    np.testing.assert_allclose(exchanges_ms(narrow, "row_wise")[:, 0], by_rows[:, 0] / 4)


def test_takes_every_kind_of_table():
    tables, topology = make.draw_task(12, 3, seed=2)
    kinds = [
        replace(
            table,
            pooling=list(Pooling)[index % 3],
            dtype=list(DType)[index % 4],
            optimizer=list(Optimizer)[index % 4],
            features=(*table.features, Feature(name=f"second_{index}", pooling_factor=float(index % 2))),
        )
        for index, table in enumerate(tables.tables)
    ]
    roomy = replace(topology, memory_bytes=replace(topology.memory_bytes, hbm=1 << 34))
    plan = TorchRecPlanner().plan(make.request(replace(tables, tables=tuple(kinds)), roomy))
    assert [placed.shard.table for placed in plan.shards] == kinds


@pytest.mark.parametrize("sharding_types", ["table_wise", "data_parallel"])
def test_is_quiet(capfd, caplog, sharding_types):
    TorchRecPlanner().plan(make.request(*make.draw_task(6, 2), options={"sharding_types": sharding_types}))
    assert capfd.readouterr() == ("", "")
    assert not [record for record in caplog.records if record.name == "root"]


def test_counts_memory_as_the_others_do():
    # 3% to spare: with a batch's inputs and outputs on top of the tables, TorchRec's own estimate exceeds it.
    tables, topology = make.draw_task(40, 4, seed=3, spare=0.03, batch_size=65536)
    plan = TorchRecPlanner().plan(make.request(tables, topology))
    for shards in plan.local_shards():
        assert sum(shard.memory_bytes for shard in shards) <= topology.memory_bytes.hbm


def test_a_table_that_forbids_all_sharding_types_is_named():
    whole = Constraints(forbidden_tiers=tuple(tier for tier in Tier if tier is not Tier.TABLE_WISE))
    tables = make.tables(make.table("a"), make.table("b", constraints=whole))
    with pytest.raises(
        InfeasiblePlanError, match=r"^b: no sharding type is left: the table forbids tier row_wise \(row_wise\)$"
    ):
        TorchRecPlanner().plan(make.request(tables, make.topology(2), options={"sharding_types": "row_wise"}))


def test_says_what_does_not_fit():
    tables = tuple(make.table(f"t{index}") for index in range(3))
    size = tables[0].storage_bytes
    task = (make.tables(*tables, batch_size=8), make.topology(2, hbm=int(size / 0.6)))
    with pytest.raises(
        InfeasiblePlanError, match=f"all need {write_bytes(3 * size)} .* the largest {write_bytes(size)}"
    ):
        TorchRecPlanner().plan(make.request(*task))


@pytest.mark.parametrize(
    ("constraints", "label"),
    [(Constraints(pinned_ranks=(1,)), "pinned_ranks"), (Constraints(colocate_with=("b",)), "colocate_with")],
)
def test_refuses_what_torchrec_cannot_express(constraints, label):
    tables = make.tables(make.table("a", constraints=constraints), make.table("b"), batch_size=8)
    with pytest.raises(InvalidTableError, match=rf"tables\[a\]\.constraints\.{label}"):
        TorchRecPlanner().plan(make.request(tables, make.topology(2)))


def test_all_sharding_types_are_planned():
    tables, topology = make.draw_task(8, 4, seed=4, batch_size=1024)
    task = (tables, replace(topology, device="a100"))
    plan = TorchRecPlanner().plan(make.request(*task, options={"sharding_types": "all", "timeout_s": 60}))
    validate_plan(plan)
    assert {placed.shard.table for placed in plan.shards} == set(tables.tables)
    rows = TorchRecPlanner().plan(make.request(*task, options={"sharding_types": "row_wise"}))
    assert {placed.tier for placed in rows.shards} == {Tier.ROW_WISE}
    assert {placed.collective for placed in rows.shards} == {Collective.REDUCE_SCATTER}


def test_types_that_tables_forbid_are_not_planned():
    forbidden = Constraints(forbidden_tiers=(Tier.TABLE_WISE, Tier.DATA_PARALLEL))
    tables = make.tables(make.table("a", constraints=forbidden))
    request = make.request(tables, make.topology(2), options={"sharding_types": "row_wise,table_wise"})
    (placed,) = TorchRecPlanner().plan(request).shards
    assert placed.tier is Tier.ROW_WISE


def test_a_failure_says_what_was_reserved_and_what_torchrec_calls_it():
    tables = make.tables(make.table("a"), batch_size=8)
    task = (tables, replace(make.topology(1, hbm=tables.tables[0].storage_bytes * 2), device="a100"))
    with pytest.raises(InfeasiblePlanError, match=r"60% of them reserved, .* TorchRec calls it "):
        TorchRecPlanner().plan(make.request(*task, options={"reserved_share": 0.6}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sharding_types": "by_magic"}, r"options\.sharding_types: must be one of all, table_wise, .*by_magic"),
        ({"reserved_share": 1}, r"options\.reserved_share: must be in \[0, 1\)"),
        ({"timeout_s": -1}, r"options\.timeout_s: must be at least 0"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(InvalidOptionError, match=f"^{message}"):
        TorchRecPlanner().plan(make.request(*make.draw_task(2, 2), options=options))
