"""The planner in TorchRec's planner's place."""

import pytest
import torch
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
from torchrec.optim import RowWiseAdagrad

from autoshard.core.errors import InfeasiblePlanError, InvalidTableError
from autoshard.torchrec import Planner
from autoshard.torchrec.topologies import topology_of

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


def test_reserved_memory_is_not_planned_with():
    table_bytes = 1000 * (16 * 4 + 4)
    machine = topology(memory=2 * table_bytes)
    planner(machine).plan(model())
    with pytest.raises(InfeasiblePlanError, match=r"^no planner found a plan for TorchRec: auto: "):
        planner(machine, storage_reservation=FixedPercentageStorageReservation(0.8)).plan(model())


def test_torchrecs_topology_is_carried():
    told = topology_of(topology(memory=1000), device="h100")
    assert (told.world_size, told.local_world_size, told.device) == (4, 2, "h100")
    assert [level.all_to_all.bytes_per_s for level in told.levels] == [6e11, 1e10]
    assert told.memory_of(3).hbm == 1000
    assert topology_of(topology("cpu", memory=77)).memory_of(0).hbm == 77
