"""Neo's Tables and Fig. 9, 10 and 11: its production models on ZionEX, planned and priced by autoshard.

Shape suffixes: N tables, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import plotly.graph_objects as go

from autoshard.commands.options import command_options
from autoshard.core import (
    AccessProfile,
    CostModels,
    DenseLayers,
    EmbeddingTable,
    Payload,
    ShardingPlan,
    TableSet,
    Topology,
)
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
from autoshard.report.figures import BLUE, GREEN, GREY, ORANGE, PINK, SKY, YELLOW, in_house_style
from autoshard.table import Table
from studies.frame import OutputOptions, PartStore, StudyResult
from studies.frame.options import PartsOption
from studies.papers.drawn import FloatArray, drawn_tables, normal_quantiles, scaled_to

#: Ranks of the paper's cluster.
FULL_RANKS: Final = 128
#: Standard deviations of the logarithms of tables' rows, lookups and dims, where these vary. Chosen, for all models.
ROWS_DEVIATION, POOLING_DEVIATION, DIMS_DEVIATION = 1.5, 0.75, 0.8
#: Dense features. Chosen, for all models.
NUM_DENSE_FEATURES = 1000
#: Numbers of rows that tables have; those of one size have one access curve.
_NUM_SIZES = 100
#: Dims are multiples of this.
_DIM_STEP = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Massive:
    """A model's few tables that no rank can hold.

    Attributes:
        num_tables: How many. Chosen.
        num_embeddings: "~10B rows" (Sec. 8.5).
    """

    num_tables: int
    num_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperModel:
    """A column of Table 3.

    Attributes:
        name: Its letter.
        num_parameters: Of the tables.
        flops: Floating-point operations of a sample's forward pass. The paper has "MFLOPS per sample": it fits twice
            the products of layers of the published number and mean size, as those of a forward pass are.
        num_tables: Chosen; the paper has the order of magnitude.
        dims: Smallest, largest and mean embedding dim.
        mean_pooling: Lookups per sample and table in the mean.
        num_layers: Of all perceptrons.
        local_batch: Samples of a rank.
        paper_qps: Samples per second on 128 ranks.
        paper_scaling: Throughput per rank on 128 ranks over that on 8 (Sec. 8.3); None where it is not published.
        massive: Tables that no rank can hold.
    """

    name: str
    num_parameters: float
    flops: float
    num_tables: int
    dims: tuple[int, int, float]
    mean_pooling: float
    num_layers: int
    local_batch: int
    paper_qps: float
    paper_scaling: float | None = None
    massive: Massive | None = None

    def tables(self, num_ranks: int, dtype: DType, local_batch: int | None = None) -> TableSet:
        """Its tables and dense layers.

        Args:
            num_ranks: With fewer than 128, tables have as many rows fewer: "we reduce the embedding table cardinality"
                (Sec. 8.3).
            dtype: Of the tables.
            local_batch: Samples of a rank; those of Table 3 if left out.
        """
        tables = tuple(replace(table, dtype=dtype) for table in _drawn_tables(self, num_ranks))
        width = sum(table.embedding_dim for table in tables)
        return TableSet(
            batch_size=num_ranks * (local_batch or self.local_batch), tables=tables, dense=self.dense_layers(width)
        )

    def dense_layers(self, embedding_width: int) -> DenseLayers:
        """Perceptrons of one width, half of the layers before the interaction, with the published operations.

        Args:
            embedding_width: Columns of all embeddings, which the first layer of the top perceptron takes in.
        """
        num_bottom = self.num_layers // 2

        def layers(width: int) -> DenseLayers:
            return DenseLayers(
                num_dense_features=NUM_DENSE_FEATURES,
                bottom_mlp=(width,) * num_bottom,
                top_mlp=(*(width,) * (self.num_layers - num_bottom - 1), 1),
                interaction="concat",
            )

        def flops(width: int) -> float:
            return sum(shape.forward_flops for shape in dense_shapes(layers(width), (embedding_width,), 1))

        return layers(round(_root(flops, self.flops, 1.0, 20_000.0)))


def _root(rising: Callable[[int], float], value: float, low: float, high: float) -> float:
    while high - low > 0.5:
        middle = (low + high) / 2
        low, high = (middle, high) if rising(round(middle)) < value else (low, middle)
    return high


@lru_cache(maxsize=16)
def _drawn_tables(model: PaperModel, num_ranks: int) -> tuple[EmbeddingTable, ...]:
    """Evenly spaced quantiles of the distributions, paired at random; massive tables come first."""
    rng, count = np.random.default_rng(0), model.num_tables
    dims_N = rng.permutation(_dims(model))
    pooling_N = scaled_to(np.exp(POOLING_DEVIATION * normal_quantiles(count)), model.mean_pooling * count)
    pooling_N = rng.permutation(pooling_N)
    rows_N = _rows(model, rng, dims_N) * num_ranks / FULL_RANKS
    return drawn_tables(rows_N, dims_N, pooling_N, AccessProfile.uniform)


def _dims(model: PaperModel) -> FloatArray:
    """Lognormal between the published ends, with the published mean; shape (N,)."""
    least, most, mean = model.dims
    deviates_N = np.exp(DIMS_DEVIATION * normal_quantiles(model.num_tables))

    def drawn(median: float) -> FloatArray:
        return np.clip(np.round(median * deviates_N / _DIM_STEP) * _DIM_STEP, least, most)

    return drawn(_root(lambda median: float(drawn(median).mean()), mean, 1.0, 1000.0))


def _rows(model: PaperModel, rng: np.random.Generator, dims_N: FloatArray) -> FloatArray:
    """Rows of each table, shape (N,); those of one size are alike."""
    massive, count = model.massive or Massive(num_tables=0, num_embeddings=1), model.num_tables
    sizes_N = rng.permutation(np.exp(ROWS_DEVIATION * np.resize(normal_quantiles(_NUM_SIZES), count)))
    is_massive_N = np.arange(count) < massive.num_tables
    rest = model.num_parameters - float(dims_N[is_massive_N].sum()) * massive.num_embeddings
    sizes_N[~is_massive_N] = scaled_to((sizes_N * dims_N)[~is_massive_N], rest) / dims_N[~is_massive_N]
    sizes_N[is_massive_N] = massive.num_embeddings
    return np.asarray(sizes_N)


MODEL_A: Final = PaperModel(
    name="A",
    num_parameters=793e9,
    flops=638e6,
    num_tables=1000,
    dims=(4, 384, 93.0),
    mean_pooling=15.0,
    num_layers=20,
    local_batch=512,
    paper_qps=1.2e6,
    paper_scaling=0.50,
)
MODEL_F: Final = PaperModel(
    name="F",
    num_parameters=12e12,
    flops=5e6,
    num_tables=44,
    dims=(256, 256, 256.0),
    mean_pooling=20.0,
    num_layers=7,
    local_batch=512,
    paper_qps=1.7e6,
    massive=Massive(num_tables=4, num_embeddings=10_000_000_000),
)
MODEL_I: Final = PaperModel(
    name="I",
    num_parameters=332e9,
    flops=60e6,
    num_tables=120,
    dims=(92, 92, 92.0),
    mean_pooling=70.0,
    num_layers=43,
    local_batch=2048,
    paper_qps=3.4e6,
    paper_scaling=0.75,
)


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


SCHEMA = "autoshard.papers.neo/1"
#: Runs with their prices.
Priced = Sequence[tuple[Run, Outcome]]


@dataclass(frozen=True, slots=True, kw_only=True)
class NeoResults:
    """All that is computed, by planner.

    Attributes:
        throughput: Table 3.
        scaling: Fig. 9 by model.
        optimisations: Fig. 11.
    """

    throughput: Mapping[str, Priced]
    scaling: Mapping[str, Mapping[str, Priced]]
    optimisations: Mapping[str, Priced]


def results_tables(results: NeoResults) -> tuple[Table, ...]:
    """Table 3, Fig. 9 to 11, the roofline and the overlaps."""
    return (
        _throughput_table(results.throughput),
        _scaling_table(results.scaling),
        *(_operator_table(planner, of["A"]) for planner, of in results.scaling.items()),
        *(_optimisation_table(planner, runs) for planner, runs in results.optimisations.items()),
        _overlap_table(results.throughput),
    )


def _lines(by_planner: Mapping[str, Priced]) -> list[tuple[str, Run, Outcome]]:
    return [(planner, run, found) for planner, runs in by_planner.items() for run, found in runs]


def _throughput_table(by_planner: Mapping[str, Priced]) -> Table:
    return Table.of(
        _lines(by_planner),
        (
            ("model", lambda one: one[1].name),
            ("planner", lambda one: f"`{one[0]}`"),
            ("here", lambda one: f"{one[2].qps(one[1]) / 1e6:.2f}"),
            ("paper", lambda one: _million(one[1].paper_qps)),
            ("error", lambda one: _error(one[2].qps(one[1]), one[1].paper_qps)),
            ("step, ms", lambda one: f"{one[2].step_ms:.1f}"),
            ("roofline, ms", lambda one: f"{one[2].roofline_ms:.1f}"),
            ("paper's throughput over the roofline's", lambda one: _share_of_roofline(one[1], one[2])),
        ),
        caption="Table 3: million samples per second on 128 GPUs",
    )


def _scaling_table(by_planner: Mapping[str, Mapping[str, Priced]]) -> Table:
    lines = [(planner, model, runs) for planner, of in by_planner.items() for model, runs in of.items()]
    ranks = sorted({run.num_ranks for *_, runs in lines for run, _ in runs})
    return Table(
        caption="Fig. 9: throughput per GPU over that of one node, by number of GPUs",
        columns=("model", "planner", *map(str, ranks), "paper, 128"),
        rows=tuple(
            (
                model,
                f"`{planner}`",
                *(_percent(scaling(runs).get(count)) for count in ranks),
                f"about {100 * (runs[-1][0].model.paper_scaling or 0):.0f}%",
            )
            for planner, model, runs in lines
        ),
    )


def scaling(runs: Priced) -> dict[int, float]:
    """Throughput per rank over that of the first run, by number of ranks."""
    base_ms = runs[0][1].step_ms
    return {run.num_ranks: base_ms / found.step_ms for run, found in runs}


def gains(runs: Priced) -> list[float]:
    """Throughput over that of the run before, less one; 0 for the first."""
    qps = [found.qps(run) for run, found in runs]
    return [0.0, *(after / before - 1 for before, after in pairwise(qps))]


def total_gain(runs: Priced) -> float:
    """Throughput of Fig. 11's run before the larger batch over that of its baseline, less one."""
    qps = [found.qps(run) for run, found in runs]
    return qps[-2] / qps[0] - 1


def _operator_table(planner: str, runs: Priced) -> Table:
    (first, few), (last, many) = runs[0], runs[-1]
    return Table(
        caption=f"Fig. 10, model A, `{planner}`: serialised and exposed milliseconds by operator",
        columns=(
            "operator",
            *(f"{run.num_ranks} GPUs, {kind}" for run in (first, last) for kind in ("serialised", "exposed")),
        ),
        rows=tuple(
            (name, *(f"{ms:.1f}" for found in (few, many) for ms in found.operators()[name]))
            for name in few.operators()
        ),
    )


def _optimisation_table(planner: str, runs: Priced) -> Table:
    steps = zip(runs, gains(runs), FIG11_GAINS, strict=True)
    lines = [
        (
            run.name,
            f"{found.qps(run) / 1e6:.2f}",
            f"{found.step_ms:.1f}",
            f"{found.imbalance:.2f}",
            f"{100 * gain:+.0f}%" if number else "-",
            f"{100 * published:+.0f}%" if number else "-",
        )
        for number, ((run, found), gain, published) in enumerate(steps)
    ]
    lines.append(("all but the last", "", "", "", f"{100 * total_gain(runs):+.0f}%", f"{100 * FIG11_TOTAL:+.0f}%"))
    return Table(
        caption=f"Fig. 11, model A, `{planner}`: one optimisation after the other",
        columns=("run", "million samples/s", "step, ms", "kernels, max/mean", "gain", "paper"),
        rows=tuple(lines),
    )


def _overlap_table(by_planner: Mapping[str, Priced]) -> Table:
    return Table.of(
        _lines(by_planner),
        (
            ("model", lambda one: one[1].name),
            ("planner", lambda one: f"`{one[0]}`"),
            ("nothing", lambda one: f"{one[2].step_with(Overlap.NONE):.1f}"),
            ("Eq. 1", lambda one: f"{one[2].step_with(Overlap.NEO):.1f}"),
            ("Eq. 1 and Sec. 4.2", lambda one: f"{one[2].step_ms:.1f}"),
            ("input behind all", lambda one: f"{one[2].step_with(Overlap.PIPELINED):.1f}"),
        ),
        caption="Steps of Table 3 by what overlaps, ms",
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}%"


def _million(qps: float | None) -> str:
    return "-" if qps is None else f"{qps / 1e6:.2f}"


def _error(qps: float, paper_qps: float | None) -> str:
    return "-" if paper_qps is None else f"{100 * (qps / paper_qps - 1):+.0f}%"


def _share_of_roofline(run: Run, found: Outcome) -> str:
    return "-" if run.paper_qps is None else f"{100 * run.paper_qps * found.roofline_ms / 1e3 / run.batch_size:.0f}%"


def chosen_numbers() -> dict[str, object]:
    """What the paper leaves open, as in `models` and `results`."""
    return {
        "num_tables": {model.name: model.num_tables for model in (MODEL_A, MODEL_F, MODEL_I)},
        "rows_deviation": ROWS_DEVIATION,
        "pooling_deviation": POOLING_DEVIATION,
        "dims_deviation": DIMS_DEVIATION,
        "num_dense_features": NUM_DENSE_FEATURES,
        "memory_share": MEMORY_SHARE,
        "dense_parameter_bytes": DENSE_PARAMETER_BYTES,
        "auto_steps": AUTO_STEPS,
    }


def results_document(results: NeoResults) -> dict[str, object]:
    """The numbers, as JSON."""
    return {
        "schema": SCHEMA,
        "chosen": chosen_numbers(),
        "throughput": {planner: [_run(*one) for one in runs] for planner, runs in results.throughput.items()},
        "scaling": {
            planner: {model: [_run(*one) for one in runs] for model, runs in of.items()}
            for planner, of in results.scaling.items()
        },
        "optimisations": {planner: [_run(*one) for one in runs] for planner, runs in results.optimisations.items()},
    }


def _run(run: Run, found: Outcome) -> dict[str, object]:
    return {
        "name": run.name,
        "model": run.model.name,
        "num_tables": run.model.num_tables,
        "planner": run.planner,
        "num_ranks": run.num_ranks,
        "batch_size": run.batch_size,
        "table_dtype": run.dtype.value,
        "payload": str(run.payload),
        "sharding_types": run.sharding_types,
        "paper_qps": run.paper_qps,
        "qps": found.qps(run),
        "step_ms": found.step_ms,
        "roofline_ms": found.roofline_ms,
        "imbalance": found.imbalance,
        "upload_ms": found.upload_ms,
        "parts_ms": asdict(found.times),
        "operators_ms": {
            name: {"serialised": serialised, "exposed": exposed}
            for name, (serialised, exposed) in found.operators().items()
        },
    }


#: Height of the images in pixels.
HEIGHT = 480
_COLOURS = {
    "host to device": GREY,
    "input all-to-all": SKY,
    "embedding all-to-all": GREEN,
    "all-reduce": PINK,
    "embeddings": BLUE,
    "perceptrons": ORANGE,
    "dense parameters": YELLOW,
}


def fig9_figure(by_planner: Mapping[str, Mapping[str, Priced]]) -> go.Figure:
    """Throughput over that of one node, with the paper's efficiencies on 16."""
    figure = in_house_style(go.Figure(), height=HEIGHT)
    for planner, by_model in by_planner.items():
        for (model, runs), colour in zip(by_model.items(), (BLUE, ORANGE), strict=True):
            nodes = [count // 8 for count in scaling(runs)]
            values = [count * share for count, share in zip(nodes, scaling(runs).values(), strict=True)]
            figure.add_scatter(
                name=f"model {model}, {planner}",
                x=nodes,
                y=values,
                mode="lines+markers" if len(nodes) > 2 else "markers",
                line={"color": colour, "width": 3},
                marker={"color": colour, "size": 8 if len(nodes) > 2 else 12, "symbol": "diamond"},
            )
    for paper_model, colour in ((MODEL_A, BLUE), (MODEL_I, ORANGE)):
        figure.add_scatter(
            name=f"model {paper_model.name}, paper",
            x=[16],
            y=[16 * (paper_model.paper_scaling or 0.0)],
            mode="markers",
            marker={"color": colour, "size": 12, "symbol": "circle-open", "line": {"width": 2}},
        )
    figure.add_scatter(name="linear", x=[1, 16], y=[1, 16], mode="lines", line={"color": GREY, "dash": "dot"})
    figure.update_xaxes(title_text="nodes of 8 GPUs", type="log", tickvals=[1, 2, 4, 8, 16])
    figure.update_yaxes(title_text="throughput over that of one node", type="log", tickvals=[1, 2, 4, 8, 16])
    return figure


def fig10_figure(runs: Priced) -> go.Figure:
    """Serialised and exposed time by operator, of one node and of all."""
    figure = in_house_style(go.Figure(), height=HEIGHT)
    ends = (runs[0], runs[-1])
    bars = [
        [f"{run.num_ranks} GPUs" for run, _ in ends for _ in range(2)],
        ["serialised", "exposed"] * len(ends),
    ]
    for name, colour in _COLOURS.items():
        values = [ms for _, found in ends for ms in found.operators()[name]]
        figure.add_bar(name=name, x=bars, y=values, marker_color=colour)
    figure.update_layout(barmode="stack")
    figure.update_yaxes(title_text="ms per step")
    return figure


def fig11_figure(by_planner: Mapping[str, Priced]) -> go.Figure:
    """Throughput of model A, one optimisation after the other, beside the paper's."""
    figure = in_house_style(go.Figure(), height=HEIGHT)
    first = next(iter(by_planner.values()))
    names = [run.name for run, _ in first]
    for (planner, runs), colour in zip(by_planner.items(), (BLUE, SKY), strict=False):
        figure.add_bar(name=planner, x=names, y=[found.qps(run) / 1e6 for run, found in runs], marker_color=colour)
    figure.add_scatter(
        name="paper",
        x=names,
        y=[qps / 1e6 for qps in published_qps()],
        mode="markers",
        marker={"color": ORANGE, "size": 12, "symbol": "diamond"},
    )
    figure.update_layout(barmode="group")
    figure.update_yaxes(title_text="million samples per second")
    return figure


def published_qps() -> list[float]:
    """Fig. 11's throughputs: 1.2 MQPS with 64K samples (Table 3), the others by the gains in the text."""
    published = [MODEL_A.paper_qps]
    for gain in reversed(FIG11_GAINS[1:-1]):
        published.insert(0, published[0] / (1 + gain))
    return [*published, published[-1] * (1 + FIG11_GAINS[-1])]


#: Planners whose plans are priced; the first one's are drawn in Fig. 10.


@command_options()
class NeoStudyOptions:
    """Options of the study `neo`."""

    parts: PartsOption = None


def main(options: NeoStudyOptions, output: OutputOptions) -> None:
    """Plans and prices Neo's models on ZionEX, prints its Table 3, and draws its Fig. 9, 10 and 11.

    Example:
        python -m studies neo --parts neo-parts -o docs/figures
    """
    results = _results(options.parts)
    output.write(
        StudyResult(
            name="neo",
            document=results_document(results),
            tables=results_tables(results),
            images={
                "-fig9": fig9_figure(results.scaling),
                "-fig10": fig10_figure(results.scaling["auto"][MODEL_A.name]),
                "-fig11": fig11_figure(results.optimisations),
            },
        )
    )


def _results(folder: Path | None) -> NeoResults:
    throughput = {planner: throughput_runs(planner) for planner in _PLANNERS}
    scaling = {
        planner: {model.name: scaling_runs(model, planner) for model in (MODEL_A, MODEL_I)} for planner in _PLANNERS
    }
    optimisations = {planner: optimisation_runs(planner) for planner in _PLANNERS}
    curves = [runs for of in scaling.values() for runs in of.values()]
    wanted = [run for runs in (*throughput.values(), *curves, *optimisations.values()) for run in runs]
    store = PartStore.of(folder, {"chosen": chosen_numbers()})
    found = _outcomes(wanted, store)

    def with_prices(runs: tuple[Run, ...]) -> Priced:
        return [(run, found[_key(run)]) for run in runs]

    return NeoResults(
        throughput={planner: with_prices(runs) for planner, runs in throughput.items()},
        scaling={planner: {model: with_prices(runs) for model, runs in of.items()} for planner, of in scaling.items()},
        optimisations={planner: with_prices(runs) for planner, runs in optimisations.items()},
    )


def _outcomes(runs: list[Run], store: PartStore) -> dict[str, Outcome]:
    """Prices by `_key`; runs that the tables share are planned once."""
    distinct = {_key(run): run for run in runs}
    makers = {
        f"{number:02d}-{run.planner}-{run.model.name}-{run.num_ranks}": partial(outcome, run)
        for number, run in enumerate(distinct.values())
    }
    return dict(zip(distinct, store.find_all("Planning", Outcome, makers), strict=True))


def _key(run: Run) -> str:
    """All that a price depends on."""
    settings = asdict(run)
    del settings["name"], settings["paper_qps"]
    return repr(settings)
