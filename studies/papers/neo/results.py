"""Neo's runs, planned and priced.

Shape suffixes: R ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from autoshard.core import CostModels, Payload, ShardingPlan, Topology
from autoshard.core.dense import dense_shapes
from autoshard.core.step import KERNEL_PARTS, Overlap, StepCollective, StepPart, StepTimes
from autoshard.core.tables import DType
from autoshard.evaluation import AlphaBetaComm, AnalyticCostModel
from autoshard.evaluation.dense_time import AnalyticDenseModel
from autoshard.evaluation.device_memory import DEVICE_MEMORY
from autoshard.evaluation.evaluate import price_step
from autoshard.evaluation.step_price import StepPrice
from autoshard.evaluation.traffic import HELD_ID_BYTES, LENGTH_BYTES
from autoshard.formats import load_topology
from autoshard.planners.auto import AutoPlanner
from autoshard.planners.neo import NEO_TYPES, NeoPlanner
from autoshard.planners.planner import PlannerProtocol, PlanRequest
from studies.papers.neo.models import FULL_RANKS, MODEL_A, MODEL_F, MODEL_I, PaperModel

#: Share of a rank's device memory for tables and caches; the framework, NCCL, dense layers and a batch's inputs and
#: outputs have the rest. Chosen, for all models and rows.
MEMORY_SHARE: Final = 0.6
#: Most steps of `auto`'s search, and a time limit that ends no search before them.
AUTO_STEPS, AUTO_LIMIT_S = 30, 3600.0
#: Bytes that move for each parameter of the dense layers, once a step and behind nothing: Adam reads a weight, its
#: gradient and two moments and writes all but the gradient (28); DistributedDataParallel copies the gradient to its
#: bucket and back (16; Li et al. 2020, gradient bucketing). The paper names no optimizer: Adam is chosen, for all.
DENSE_PARAMETER_BYTES: Final = 28 + 16
_DENSE_FEATURE_BYTES: Final = 4
DEVICE: Final = "a100"
_MEMORY: Final = DEVICE_MEMORY[DEVICE]

#: Sec. 8.4: "FP16 in forward AlltoAll and BF16 in backward AlltoAll".
QUANTISED: Final = Payload(forward=DType.FP16, backward=DType.BF16)
PLAIN: Final = Payload()
_PLANNERS: Final[Mapping[str, type[PlannerProtocol]]] = {"auto": AutoPlanner, "neo": NeoPlanner}
#: Neo's seven sharding types (Sec. 4), and those of Fig. 11's baseline: row-wise is for tables that no rank can hold.
ALL_TYPES: Final = ",".join(NEO_TYPES)
BASELINE_TYPES: Final = "table_wise,row_wise"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A training run of the paper.

    Attributes:
        name: What it is called in tables.
        model: The model.
        planner: `auto` or `neo`.
        num_ranks: GPUs.
        dtype: Of the tables.
        payload: On the wire.
        sharding_types: That tables may have.
        local_batch: Samples of a rank; None for the model's.
        paper_qps: Samples per second; None where it is not published.
    """

    name: str
    model: PaperModel
    planner: str
    num_ranks: int = FULL_RANKS
    dtype: DType = DType.FP16
    payload: Payload = QUANTISED
    sharding_types: str = ALL_TYPES
    local_batch: int | None = None
    paper_qps: float | None = None

    @property
    def batch_size(self) -> int:
        """Samples per step of all ranks."""
        return self.num_ranks * (self.local_batch or self.model.local_batch)


#: Tables are fp16 where the paper says so: of A (Sec. 8.4) and F (8.5).
TABLE_DTYPES: Final = {"A": DType.FP16, "F": DType.FP16, "I": DType.FP32}


def throughput_runs(planner: str) -> tuple[Run, ...]:
    """Table 3: A, F and I on 128 ranks. F as Sec. 8.5 has it, row-wise with reduce-scatter, and as it is planned."""
    runs = [_full_run(model, planner) for model in (MODEL_A, MODEL_F, MODEL_I)]
    row_wise = replace(runs[1], name="F, row-wise", sharding_types="row_wise")
    return (runs[0], row_wise, *runs[1:]) if planner == "neo" else (runs[0], runs[2])


def scaling_runs(model: PaperModel, planner: str) -> tuple[Run, ...]:
    """Fig. 9: 1 to 16 nodes of 8 ranks; by `auto`, whose search takes minutes, both ends."""
    full = _full_run(model, planner)
    fewer = (8,) if planner == "auto" else (8, 16, 32, 64)
    nodes = (replace(full, name=f"{model.name}, {ranks} ranks", num_ranks=ranks) for ranks in fewer)
    return (*(replace(one, paper_qps=None) for one in nodes), full)


def _full_run(model: PaperModel, planner: str) -> Run:
    return Run(
        name=model.name,
        model=model,
        planner=planner,
        dtype=TABLE_DTYPES[model.name],
        paper_qps=model.paper_qps,
    )


#: Fig. 11: gain of each step over the one before it (Sec. 8.4); 256K samples take A from 1.2 to 1.5 MQPS.
FIG11_GAINS: Final = (0.0, 0.20, 0.20, 0.30, 0.25)
#: "Collectively": the three steps before the larger batch, and 1.2 x 1.2 x 1.3 = 1.87.
FIG11_TOTAL: Final = 0.87


def optimisation_runs(planner: str) -> tuple[Run, ...]:
    """Fig. 11: model A, one optimisation after the other."""
    base = Run(
        name="baseline, 64K samples",
        model=MODEL_A,
        planner=planner,
        dtype=DType.FP32,
        payload=PLAIN,
        sharding_types=BASELINE_TYPES,
    )
    sharded = replace(base, name="+ optimised sharding", sharding_types=ALL_TYPES)
    halved = replace(sharded, name="+ fp16 tables", dtype=DType.FP16)
    quantised = replace(halved, name="+ fp16/bf16 payloads", payload=QUANTISED)
    return base, sharded, halved, quantised, replace(quantised, name="+ 256K samples", local_batch=2048)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Price of a run.

    Attributes:
        times: Parts of the step at their slowest ranks.
        mean_times: The same with the embeddings' parts at the mean rank: the roofline of this machine.
        upload_ms: Transfer of a rank's inputs from the host.
        imbalance: Largest over mean kernel time.
    """

    times: StepTimes
    mean_times: StepTimes
    upload_ms: float
    imbalance: float

    @property
    def step_ms(self) -> float:
        """The step; the next batch's upload hides behind it as far as it goes."""
        return self.step_with(Overlap.NEO_PREFETCH)

    def step_with(self, overlap: Overlap) -> float:
        """The step with another overlap."""
        return max(self.times.step_ms(overlap), self.upload_ms)

    @property
    def roofline_ms(self) -> float:
        """The step of ranks that all do the same."""
        return max(self.mean_times.step_ms(Overlap.NEO_PREFETCH), self.upload_ms)

    def qps(self, run: Run) -> float:
        """Samples per second."""
        return run.batch_size / self.step_ms * 1e3

    def operators(self) -> dict[str, tuple[float, float]]:
        """Serialised and exposed milliseconds by operator (Fig. 10)."""
        times = self.times
        exposed = times.collectives(Overlap.NEO_PREFETCH)
        rest = times.step_ms(Overlap.NEO_PREFETCH)
        found = {"host to device": (self.upload_ms, max(0.0, self.upload_ms - rest))}
        for name, of in _EXCHANGES.items():
            found[name] = (
                sum(exposed[one].serialised_ms for one in of),
                sum(exposed[one].exposed_ms for one in of),
            )
        compute = {
            "embeddings": times.forward_kernel + times.backward_kernel,
            "perceptrons": times.dense_layers,
            "dense parameters": times.overhead,
        }
        return found | {name: (ms, ms) for name, ms in compute.items()}


_EXCHANGES: Final[Mapping[str, tuple[StepCollective, ...]]] = {
    "input all-to-all": (StepCollective.INPUT,),
    "embedding all-to-all": (StepCollective.FORWARD_EXCHANGE, StepCollective.BACKWARD_EXCHANGE),
    "all-reduce": (StepCollective.ALL_REDUCE,),
}


def paper_costs() -> CostModels:
    """Published bandwidths and, for dense layers, products in TF32 ("TF32 training", Sec. 8.4)."""
    return CostModels(
        kernel=AnalyticCostModel.for_device(DEVICE),
        comm=AlphaBetaComm(),
        dense=AnalyticDenseModel.for_device(DEVICE, tf32=True),
    )


def request_of(run: Run) -> PlanRequest:
    """A run's planning task."""
    options: dict[str, object] = {"sharding_types": run.sharding_types}
    if run.planner == "auto":
        options |= {"steps": AUTO_STEPS, "policy": False, "count_activations": False}
    return PlanRequest(
        tables=run.model.tables(run.num_ranks, run.dtype, run.local_batch),
        topology=zionex(run.num_ranks),
        costs=paper_costs(),
        options=options,
        time_limit_s=AUTO_LIMIT_S,
        payload=run.payload,
    )


def zionex(num_ranks: int) -> Topology:
    """The bundled machine with the share of its device memory that tables may take."""
    machine = load_topology(f"zionex-{num_ranks}")
    hbm = int(MEMORY_SHARE * machine.memory_bytes.hbm)
    return replace(machine, memory_bytes=replace(machine.memory_bytes, hbm=hbm))


def outcome(run: Run) -> Outcome:
    """Plans and prices a run."""
    request = request_of(run)
    return priced(_PLANNERS[run.planner]().plan(request), request.costs)


def priced(plan: ShardingPlan, costs: CostModels) -> Outcome:
    """Price of a plan."""
    price = price_step(plan, costs, overlap=Overlap.NEO_PREFETCH)
    overhead = _dense_parameters_ms(plan)
    kernels_R = np.sum([price.work[part][:, 0] for part in KERNEL_PARTS], axis=0)
    return Outcome(
        times=replace(price.times, overhead=overhead),
        mean_times=replace(price.times, overhead=overhead, **_mean_parts(price)),
        upload_ms=upload_ms(plan),
        imbalance=float(kernels_R.max() / kernels_R.mean()),
    )


def _mean_parts(price: StepPrice) -> dict[str, float]:
    """Models' milliseconds of the embeddings' parts at the mean rank."""
    parts = [part for part in StepPart if part is not StepPart.DENSE]
    return {part.value: float(price.work[part][:, 0].mean()) for part in parts}


def upload_ms(plan: ShardingPlan) -> float:
    """Time of a rank's ids, lengths and dense features on the published link to the host."""
    features = [feature for table in plan.tables.tables for feature in table.features]
    num_bytes = sum(feature.pooling_factor * HELD_ID_BYTES + LENGTH_BYTES for feature in features)
    if plan.tables.dense is not None:
        num_bytes += plan.tables.dense.num_dense_features * _DENSE_FEATURE_BYTES
    return num_bytes * plan.tables.batch_size / plan.topology.world_size / _MEMORY.host_bytes_per_s * 1e3


def _dense_parameters_ms(plan: ShardingPlan) -> float:
    assert plan.tables.dense is not None, "all of the paper's models have dense layers"
    dims = [table.embedding_dim for table in plan.tables.tables]
    num_parameters = sum(shape.num_parameters for shape in dense_shapes(plan.tables.dense, dims, 1))
    return num_parameters * DENSE_PARAMETER_BYTES / _MEMORY.gather_bytes_per_s * 1e3
