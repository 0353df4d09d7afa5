"""The planner in TorchRec's planner's place."""

import re
from dataclasses import replace

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    CustomTopologyData,
    HardwareConfig,
    KernelConfig,
    ParameterConstraints,
    TopologyFactory,
    TrainerConfig,
)
from torchrec.distributed.types import CacheParams
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.optim import RowWiseAdagrad

from autoshard.core import DType, MemoryBytes, Optimizer, Payload
from autoshard.core.errors import InfeasiblePlanError, InvalidTableError
from autoshard.torchrec import Planner
from autoshard.torchrec.topologies import topology_of
from tests import builders as make

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, on torchrec's own import


def model(num_tables=6, *, fused=True, num_embeddings=1000):
    bags = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(name=f"t{n}", num_embeddings=num_embeddings, embedding_dim=16, feature_names=[f"f{n}"])
            for n in range(num_tables)
        ],
    )
    if fused:
        for parameter in bags.parameters():
            parameter._optimizer_classes = [RowWiseAdagrad]
    return torch.nn.ModuleDict({"bags": bags})


def topology(device="cuda", memory=1 << 34):
    capacities = {"hbm_cap": [memory] * 4, "ddr_cap": [0] * 4} if device == "cuda" else {"ddr_cap": [memory] * 4}
    return TopologyFactory.create_topology(
        TrainerConfig(
            world_size=4,
            local_world_size=2,
            additional_params={"custom_topology_data": CustomTopologyData(capacities, 4)},
        ),
        HardwareConfig(intra_host_bw=6e8, inter_host_bw=1e7),
        KernelConfig(compute_device=device, use_hardware_based_bandwidth=True),
    )


def planner(machine=None, **settings):
    return Planner(machine or topology(), batch_size=64, timeout_seconds=1.0, **settings)


def test_a_plan_has_every_table_where_the_model_has_it():
    ours = planner()
    plan = ours.plan(model(), [EmbeddingBagCollectionSharder()])
    assert list(plan.plan) == ["bags"]
    assert sorted(plan.plan["bags"]) == [f"t{n}" for n in range(6)]
    assert ours.chosen.predicted.step_ms.value > 0
    assert {entry.sharding_type for entry in plan.plan["bags"].values()}.isdisjoint({"data_parallel"})


def test_constraints_are_kept():
    constraints = {f"t{n}": ParameterConstraints(sharding_types=["table_row_wise"]) for n in range(6)}
    plan = planner(constraints=constraints).plan(model())
    assert {entry.sharding_type for entry in plan.plan["bags"].values()} == {"table_row_wise"}


def test_a_module_at_several_paths_is_refused():
    one = model()
    one.again = one.bags
    with pytest.raises(InvalidTableError, match=r"^bags: stands at again, too, and DistributedModelParallel would"):
        planner().plan(one)


def test_sharders_are_kept_to():
    # TorchRec's own sharder splits no rows on a CPU.
    plan = planner(topology("cpu")).plan(model(2))
    assert {entry.sharding_type for entry in plan.plan["bags"].values()} <= {"table_wise", "column_wise"}
    with pytest.raises(InvalidTableError, match=r"^bags: has no sharder: EmbeddingBagCollection is not among"):
        planner().plan(model(), [])
    constraints = {"t0": ParameterConstraints(sharding_types=["row_wise"])}
    with pytest.raises(InvalidTableError, match=r"^constraints\.t0\.sharding_types: allows row_wise, its sharder "):
        planner(topology("cpu"), constraints=constraints).plan(model())


class RowWiseSharder(EmbeddingBagCollectionSharder):
    def sharding_types(self, *_):
        return ["row_wise"]


class FusedSharder(EmbeddingBagCollectionSharder):
    def compute_kernels(self, *_):
        return ["fused"]


class OwnCollection(EmbeddingBagCollection):
    """Of a type of its own, which TorchRec's sharders leave aside."""


def test_a_module_gets_the_last_sharder_of_its_very_type():
    sharders = [EmbeddingBagCollectionSharder(), RowWiseSharder()]
    assert set(types_of(planner().plan(model(2), sharders))) == {"row_wise"}
    config = EmbeddingBagConfig(name="t0", num_embeddings=1000, embedding_dim=16, feature_names=["f0"])
    own = torch.nn.ModuleDict({"bags": OwnCollection(device=torch.device("meta"), tables=[config])})
    with pytest.raises(InvalidTableError, match=r"^bags: has no sharder: OwnCollection is not among"):
        planner().plan(own)


def test_sharders_name_the_optimizer_of_tables_whose_parameters_name_none(caplog):
    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": EmbOptimType.ADAM})
    for fused, optimizer in ((False, Optimizer.ADAM), (True, Optimizer.ROWWISE_ADAGRAD)):
        ours = planner(planners=["cost-greedy"])
        ours.plan(model(2, fused=fused), [sharder])
        assert {table.optimizer for table in ours.chosen.tables.tables} == {optimizer}
    assert "looked up alike" in caplog.text
    assert "no optimizer" not in caplog.text
    planner(planners=["cost-greedy"]).plan(model(2, fused=False))
    assert "2 tables have no optimizer in their backward pass: taken as rowwise_adagrad" in caplog.text


@pytest.mark.parametrize("is_own", [False, True])
def test_reserved_memory_is_not_planned_with(is_own):
    table_bytes = 1000 * (16 * 4 + 4)
    machine = topology(memory=2 * table_bytes)
    if is_own:
        machine = topology_of(machine, device="a100")
    planner(machine).plan(model())
    with pytest.raises(InfeasiblePlanError, match=r"^no planner found a plan for TorchRec: auto: "):
        planner(machine, storage_reservation=FixedPercentageStorageReservation(0.8)).plan(model())


def test_a_topology_of_autoshards_keeps_all_but_what_is_reserved():
    machine = topology_of(topology(memory=1 << 30), device="a100")
    machine = replace(machine, overrides=((1, MemoryBytes(hbm=1 << 29, ddr=7)),))
    ours = planner(machine, storage_reservation=FixedPercentageStorageReservation(0.5), planners=["cost-greedy"])
    ours.plan(model())
    halves = MemoryBytes(hbm=1 << 29), (1, MemoryBytes(hbm=1 << 28, ddr=7))
    assert ours.chosen.topology == replace(machine, memory_bytes=halves[0], overrides=halves[1:])


def test_torchrecs_topology_is_carried():
    told = topology_of(topology(memory=1000), device="h100")
    assert (told.world_size, told.local_world_size, told.device) == (4, 2, "h100")
    assert [level.all_to_all.bytes_per_s for level in told.levels] == [6e11, 1e10]
    assert told.memory_of(3).hbm == 1000
    assert topology_of(topology("cpu", memory=77)).memory_of(0).hbm == 77


def mean_model(*, shared=False, poolings=("MEAN", "SUM"), **config):
    bags = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=f"t{n}",
                feature_names=["f0" if shared else f"f{n}"],
                pooling=PoolingType[pooling],
                **{"num_embeddings": 1000, "embedding_dim": 16, **config},
            )
            for n, pooling in enumerate(poolings)
        ],
    )
    return torch.nn.ModuleDict({"bags": bags})


def types_of(plan):
    return [entry.sharding_type for _, entry in sorted(plan.plan["bags"].items())]


def test_means_are_split_by_rows_only_with_all_of_their_module():
    # Whole where they fit; where no rank holds a table whole, rows of all tables are split, those of sums, too.
    assert not {"row_wise", "table_row_wise"} & {types_of(planner().plan(mean_model()))[0]}
    narrow = mean_model(poolings=("MEAN", "SUM", "MEAN"), num_embeddings=10_000, embedding_dim=4)
    small = planner(topology(memory=180_000))
    assert set(types_of(small.plan(narrow))) <= {"row_wise", "table_row_wise"}
    by_rows = {"t0": ParameterConstraints(sharding_types=["row_wise"])}
    assert set(types_of(planner(constraints=by_rows).plan(mean_model()))) <= {"row_wise", "table_row_wise"}
    whole = {**by_rows, "t1": ParameterConstraints(sharding_types=["table_wise"])}
    for constraints, settings, reason in (
        (whole, {}, "splits means by rows only where all tables of a module are"),
        (by_rows, {"shared": True}, "computes wrong means by rows of features that sums by rows look up, too, as"),
    ):
        with pytest.raises(InvalidTableError, match=rf"^constraints\.t0\.sharding_types: TorchRec {reason}"):
            planner(constraints=constraints).plan(mean_model(**settings))


@pytest.mark.parametrize(
    ("device", "config", "types", "message"),
    [
        ("cuda", {"poolings": ["MEAN"]}, "grid_shard", "computes wrong means of grid_shard tables"),
        ("cuda", {"data_type": DataType.INT8}, None, 't0: TorchRec trains fp32, fp16, bf16 on cuda; "t0" is int8'),
        ("cpu", {"data_type": DataType.BF16}, None, 't0: TorchRec trains fp32, fp16 on cpu; "t0" is bf16'),
        ("cuda", {"num_embeddings": 5}, "row_wise", 'needs rows in every block; "t0" has 5 for 4 ranks; column_wise'),
        ("cuda", {"embedding_dim": 10}, "table_wise", '4; "t0" has 10; data_parallel would do'),
    ],
)
def test_what_torchrec_computes_wrongly_is_refused_by_name(device, config, types, message):
    constraints = {"t0": ParameterConstraints(sharding_types=[types])} if types else None
    with pytest.raises(InvalidTableError, match=re.escape(message)):
        planner(topology(device), constraints=constraints).plan(mean_model(**config))


@pytest.mark.parametrize("kind", ["column_wise", "table_column_wise"])
def test_a_table_too_narrow_to_cut_is_one_column_shard(kind):
    constraints = {"t0": ParameterConstraints(sharding_types=[kind])}
    entry = planner(constraints=constraints).plan(mean_model(poolings=["SUM"], embedding_dim=4)).plan["bags"]["t0"]
    assert (entry.sharding_type, [shard.shard_sizes for shard in entry.sharding_spec.shards]) == (kind, [[1000, 4]])


def one_rank_a_node(num_nodes):
    return make.topology(1, num_nodes, device="a100", hbm=1 << 34)


@pytest.mark.parametrize(
    "kind", ["column_wise", "table_column_wise", "row_wise", "table_row_wise", "grid_shard", "data_parallel"]
)
def test_one_process_holds_whole_tables_by_any_sharding_type(kind):
    constraints = {"t0": ParameterConstraints(sharding_types=[kind])}
    entry = planner(one_rank_a_node(1), constraints=constraints).plan(model(2, fused=False)).plan["bags"]["t0"]
    assert (entry.sharding_type, entry.ranks) == (kind, [0])
    if kind == "data_parallel":
        assert (entry.compute_kernel, entry.sharding_spec) == ("dense", None)
    else:
        assert [shard.shard_sizes for shard in entry.sharding_spec.shards] == [[1000, 16]]


def test_one_process_has_copies_of_tables_that_no_other_way_trains():
    plan = planner(one_rank_a_node(1)).plan(mean_model(poolings=["SUM"], embedding_dim=10)).plan["bags"]
    assert [(one.sharding_type, one.compute_kernel) for one in plan.values()] == [("data_parallel", "dense")]


def test_rows_are_split_over_nodes_of_one_rank():
    constraints = {"t0": ParameterConstraints(sharding_types=["table_row_wise"])}
    plan = planner(one_rank_a_node(2), constraints=constraints).plan(model(2)).plan["bags"]
    assert plan["t0"].sharding_type == "table_row_wise"
    assert [shard.shard_sizes for shard in plan["t0"].sharding_spec.shards] == [[1000, 16]]


def test_means_of_one_process_are_split_by_rows_as_asked():
    by_rows = {"t0": ParameterConstraints(sharding_types=["row_wise"])}
    plan = planner(one_rank_a_node(1), constraints=by_rows).plan(mean_model())
    assert set(types_of(plan)) <= {"row_wise", "table_row_wise"}


def test_settings_of_kernels_are_handed_on_and_others_kept():
    constraints = {
        "t0": ParameterConstraints(min_partition=32, sharding_types=["column_wise"], enforce_hbm=False),
        "t1": ParameterConstraints(stochastic_rounding=True, output_dtype=DataType.FP16, compute_kernels=["fused"]),
    }
    entries = planner(constraints=constraints).plan(mean_model(poolings=["SUM"] * 2, embedding_dim=64)).plan["bags"]
    assert (entries["t0"].enforce_hbm, entries["t0"].output_dtype) == (False, None)
    assert (entries["t1"].stochastic_rounding, entries["t1"].output_dtype) == (True, DataType.FP16)
    assert min(shard.shard_sizes[1] for shard in entries["t0"].sharding_spec.shards) >= 32
    with pytest.raises(InvalidTableError, match=r"^constraints\.t0\.device_group: must be cuda as the"):
        planner(constraints={"t0": ParameterConstraints(device_group="cpu")}).plan(mean_model())


def of_all(**fields):
    return {f"t{n}": ParameterConstraints(**fields) for n in range(2)}


def test_compute_kernels_decide_which_sharding_types_are_planned():
    tables = model(2, fused=False, num_embeddings=10)
    assert types_of(planner(constraints=of_all(compute_kernels=["dense"])).plan(tables)) == ["data_parallel"] * 2
    # Tables of this size are otherwise data-parallel.
    auto = {"planners": ["auto"]}
    assert set(types_of(planner(**auto).plan(tables))) == {"data_parallel"}
    fused = planner(constraints=of_all(compute_kernels=["fused"]), **auto).plan(tables)
    of_sharder = planner(**auto).plan(tables, [FusedSharder()])
    for plan in (fused, of_sharder):
        assert {entry.compute_kernel for entry in plan.plan["bags"].values()} == {"fused"}


@pytest.mark.parametrize("kernel", ["dense", "key_value"])
def test_compute_kernels_of_no_sharding_type_are_refused(kernel):
    message = rf"^constraints\.t0\.compute_kernels: allows {kernel}; its sharding types, column_wise, .* have fused"
    with pytest.raises(InvalidTableError, match=message):
        planner(constraints=of_all(compute_kernels=[kernel])).plan(model(2))


def test_output_formats_of_all_tables_are_priced(caplog):
    half = planner(constraints=of_all(output_dtype=DataType.FP16), planners=["cost-greedy"])
    entries = half.plan(model(2)).plan["bags"]
    assert {entry.output_dtype for entry in entries.values()} == {DataType.FP16}
    assert half.chosen.payload == Payload(forward=DType.FP16, backward=DType.FP16)
    mixed = planner(constraints={"t0": ParameterConstraints(output_dtype=DataType.FP16)}, planners=["cost-greedy"])
    assert "priced in fp32" not in caplog.text
    mixed.plan(model(2))
    assert mixed.chosen.payload == Payload()
    assert "embeddings are priced in fp32" in caplog.text


def test_constraints_that_repeat_what_is_so_are_accepted(caplog):
    same = of_all(num_poolings=[1.0], batch_sizes=[64], cache_params=CacheParams(load_factor=0.1))
    planner(constraints=same, planners=["cost-greedy"]).plan(model(2))
    assert "constraints.t0.cache_params is not kept" in caplog.text
    with pytest.raises(InvalidTableError, match=r"^constraints\.t0\.batch_sizes: is set, and plans do not hold it"):
        planner(constraints=of_all(batch_sizes=[32])).plan(model(2))
