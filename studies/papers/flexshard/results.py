"""FlexShard's tables and figures as numbers, from autoshard's equations and planner.

The letters of formulas are those of `autoshard.planners.flexshard.equations`.

Shape suffixes: N points of a curve.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autoshard.core import CostModels, TableSet, Tier
from autoshard.core.accepted import Range
from autoshard.core.access import FloatArray
from autoshard.core.errors import InvalidTopologyError
from autoshard.evaluation import AlphaBetaComm, AnalyticCostModel
from autoshard.formats.bundled import load_topology
from autoshard.planners.flexshard.equations import (
    PAPER_MEMORY_MULTIPLIER,
    Bandwidths,
    FlexMachine,
    ParetoFrontier,
    RowSet,
    TierStrategy,
    communication_s,
    dynamic_communication_s,
    dynamic_memory_bytes,
    memory_bytes,
    neutral_communication,
    pareto_frontier,
    static_communication_s,
)
from autoshard.planners.flexshard.planner import FlexShardPlanner
from autoshard.planners.planner import PlanRequest
from studies.papers.flexshard.models import (
    DIM,
    LOCAL_BATCH,
    MODELS,
    NUM_NODES,
    NUMBER_BYTES,
    RANKS_PER_NODE,
    WORLD,
    PaperModel,
    Run,
    TierShare,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedBandwidths(Bandwidths):
    """Bandwidths with that of sums, which the paper does not have."""

    reduce_scatter_global: float
    """Of the input of a reduce-scatter and the output of an all-gather, one after the other."""


def memory_neutral_probability(
    world_size: int, local_batch_size: float, memory_multiplier: float, sharded_multiplier: float = 1.0
) -> float:
    """Row probability above which replicating a row on every rank saves memory over row-wise sharding.

    Args:
        world_size: Number of ranks U, at least 2.
        local_batch_size: Samples per rank and step, B.
        memory_multiplier: Bytes held per replicated byte of weights (optimizer state, gradients).
        sharded_multiplier: Bytes held per byte of weights that are not replicated; the paper takes 1.

    Returns:
        Expected lookups of the row in one sample, in [0, inf); what no row reaches if replicas never save memory.

    Raises:
        InvalidTopologyError: If world_size is below 2.

    Source:
        FlexShard, Table 2 and Sec. 4.2: (m - 1/U) / B, with weights and payload of one dtype.
    """
    Range(at_least=2).check(world_size, "world_size", InvalidTopologyError)
    more = max(0.0, memory_multiplier - sharded_multiplier / world_size)
    return more / local_batch_size if local_batch_size > 0 else math.inf


def ids_distributed(strategy: TierStrategy, rows: RowSet, machine: FlexMachine) -> float:
    """Ids that a rank sends before lookups can start.

    Source:
        FlexShard, Table 3, "input data dist".
    """
    copies = {TierStrategy.COLUMN_WISE: machine.world_size, TierStrategy.DATA_PARALLEL: 0}.get(strategy, 1)
    return copies * machine.local_batch_size * rows.lookups_per_sample


def reduced_memory_bytes(rows: RowSet, machine: FlexMachine) -> float:
    """As `dynamic_memory_bytes`, of sums of rows over all ranks that are added up on the way: one comes of each U."""
    looked_up = dynamic_memory_bytes(TierStrategy.DATA_PARALLEL, rows, machine)
    return looked_up * (1 + 1 / machine.world_size)


def reduced_communication_s(rows: RowSet, machine: FlexMachine, bytes_per_s: float) -> float:
    """As `dynamic_communication_s`, of a reduce-scatter or of its all-gather; not in the paper."""
    num_bytes = machine.local_batch_size * rows.lookups_per_sample * rows.embedding_dim * rows.payload_bytes
    return num_bytes / bytes_per_s


#: Four nodes of eight A100, as in Sec. 5.
TOPOLOGY = "a100-32"
#: Of the table whose rows Fig. 5 replicates: not named in the paper.
FIG5_MODEL = MODELS[0]
#: Sec. 6.2: what two and three tiers add to RM-1's throughput.
TWO_TIER_GAIN, THREE_TIER_GAIN = 0.61, 0.81
#: Fig. 1 has up to so many tables, and histories of up to so many lookups in all.
FIG1_TABLES, FIG1_LENGTH = (1, 2, 4, 8), 2000


def fitted_machine() -> FlexMachine:
    """The paper's cluster, with the fitted bandwidths."""
    return FlexMachine(
        ranks_per_node=RANKS_PER_NODE,
        num_nodes=NUM_NODES,
        local_batch_size=LOCAL_BATCH,
        bandwidths=fitted_bandwidths(),
    )


def fitted_bandwidths() -> FittedBandwidths:
    """Bandwidths of the paper's cluster, from RM-1's runs alone.

    The global all-to-all is as fast as in the row-wise run of Table 6, and the global all-reduce three times as fast
    (Fig. 3's caption). A ring's all-reduce is a reduce-scatter and an all-gather of the same bytes, each of which takes
    half of its time. The collectives of Flex are as fast as in RM-1's 3-tier run.
    """
    model = MODELS[0]
    three = model.three_tier_run
    row_bytes = DIM * NUMBER_BYTES
    all_to_all = 2 * model.row_wise_run.volume * NUMBER_BYTES / (model.row_wise_run.all_to_all_ms / 1e3)
    flex_bytes = 2 * model.flexed.coverage * model.row_wise_run.volume * NUMBER_BYTES
    return FittedBandwidths(
        all_to_all_global=all_to_all,
        all_to_all_intra=flex_bytes / (three.intra_ms / 1e3),
        all_reduce_global=3 * all_to_all,
        all_reduce_cross=model.flexed.num_rows / RANKS_PER_NODE * row_bytes / (three.cross_ms / 1e3),
        reduce_scatter_global=2 * 3 * all_to_all,
    )


def planned_tiers(model: PaperModel, length: float, num_tiers: int) -> dict[Tier, TierShare]:
    """Tiers of the planner's plan by the paper's rule and memory multiplier, memory-neutral.

    Args:
        model: Whose table.
        length: Lookups per sample.
        num_tiers: 2 or 3.
    """
    request = PlanRequest(
        tables=TableSet(batch_size=WORLD * LOCAL_BATCH, tables=(model.table(length),)),
        topology=load_topology(TOPOLOGY),
        costs=CostModels(kernel=AnalyticCostModel.for_device("a100"), comm=AlphaBetaComm()),
        options={"tiers": num_tiers, "rule": "paper", "memory_multiplier": PAPER_MEMORY_MULTIPLIER},
    )
    return {
        placed.tier: TierShare(num_rows=placed.shard.num_embeddings, coverage=placed.shard.access()[1])
        for placed in FlexShardPlanner().plan(request).shards
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResult:
    """Plans and predicted runs of one model.

    Attributes:
        model: Published figures.
        neutral: Tiers with two and three tiers, with L from the paper's neutral 2-tier rows.
        measured: The same with L from Table 6's volume.
        leaving: The same with that volume as what leaves a rank.
        predicted: Runs of row-wise, 2-tier and 3-tier plans of `measured`, by Table 3's equations.
    """

    model: PaperModel
    neutral: tuple[dict[Tier, TierShare], dict[Tier, TierShare]]
    measured: tuple[dict[Tier, TierShare], dict[Tier, TierShare]]
    leaving: tuple[dict[Tier, TierShare], dict[Tier, TierShare]]
    predicted: tuple[Run, Run, Run]

    @classmethod
    def of(cls, model: PaperModel, machine: FlexMachine) -> ModelResult:
        """Plans the model's table."""

        def plans(length: float) -> tuple[dict[Tier, TierShare], dict[Tier, TierShare]]:
            return planned_tiers(model, length, 2), planned_tiers(model, length, 3)

        length = model.measured_length
        measured = plans(length)
        row_wise = {Tier.ROW_WISE: TierShare(num_rows=model.num_rows, coverage=1.0)}
        return cls(
            model=model,
            neutral=plans(model.neutral_length),
            measured=measured,
            leaving=plans(model.leaving_length),
            predicted=(
                predicted_run(row_wise, length, machine),
                predicted_run(measured[0], length, machine),
                predicted_run(measured[1], length, machine),
            ),
        )

    @property
    def measured_reductions(self) -> tuple[float, float]:
        """Share of the row-wise volume that two and three tiers save, in Table 6."""
        whole, two, three = (run.volume for run in self.model.runs)
        return 1 - two / whole, 1 - three / whole

    @property
    def predicted_reductions(self) -> tuple[float, float]:
        """The same by the plans of `measured`."""
        two, three = self.measured
        return 1 - two[Tier.ROW_WISE].coverage, 1 - three[Tier.ROW_WISE].coverage

    def gains(self, rest_ms: float, *, is_measured: bool, is_hidden: bool) -> tuple[float, float]:
        """What two and three tiers add to the throughput of row-wise sharding (Sec. 6.2).

        Args:
            rest_ms: Time of a step that is no communication of embeddings; alike for all.
            is_measured: As in `speedups`.
            is_hidden: As in `speedups`.
        """
        row_wise, two, three = (rest_ms + time_ms for time_ms in self._times_ms(is_measured, is_hidden))
        return row_wise / two - 1, row_wise / three - 1

    def speedups(self, *, is_measured: bool, is_hidden: bool) -> tuple[float, float]:
        """Communication of a row-wise step over that of a 2-tier and a 3-tier one (Fig. 7).

        Args:
            is_measured: Table 6, else the predictions.
            is_hidden: Whether collectives that may overlap take no time, as the paper counts.
        """
        row_wise, two, three = self._times_ms(is_measured, is_hidden)
        return row_wise / two, row_wise / three

    def _times_ms(self, is_measured: bool, is_hidden: bool) -> tuple[float, ...]:
        runs = self.model.runs if is_measured else self.predicted
        return tuple(run.exposed_ms if is_hidden else run.total_ms for run in runs)


def rest_of_step_ms(model: PaperModel, gain: float = TWO_TIER_GAIN) -> float:
    """Time of a step that is no communication of embeddings, by what two tiers add to the throughput.

    The paper prints no times of steps. With communication of row-wise and 2-tier sharding as measured (Table 6), only
    one rest gives the gain: (rest + row-wise) / (rest + 2-tier) = 1 + gain.
    """
    row_wise, two, _ = (run.exposed_ms for run in model.runs)
    return (row_wise - (1 + gain) * two) / gain


def predicted_run(tiers: dict[Tier, TierShare], length: float, machine: FlexMachine) -> Run:
    """Communication of a step by the equations of Table 3."""
    rows = {
        tier: RowSet(num_rows=share.num_rows, lookups_per_sample=share.coverage * length, embedding_dim=DIM)
        for tier, share in tiers.items()
    }
    times_ms = dict.fromkeys(("all_to_all_ms", "intra_ms", "all_reduce_ms", "cross_ms"), 0.0)
    times_ms["all_to_all_ms"] = 2e3 * dynamic_communication_s(TierStrategy.ROW_WISE, rows[Tier.ROW_WISE], machine)
    if Tier.DATA_PARALLEL in rows:
        times_ms["all_reduce_ms"] = 1e3 * static_communication_s(
            TierStrategy.DATA_PARALLEL, rows[Tier.DATA_PARALLEL], machine
        )
    if Tier.FLEX in rows:
        times_ms["intra_ms"] = 2e3 * dynamic_communication_s(TierStrategy.FLEX, rows[Tier.FLEX], machine)
        times_ms["cross_ms"] = 1e3 * static_communication_s(TierStrategy.FLEX, rows[Tier.FLEX], machine)
    volume = LOCAL_BATCH * rows[Tier.ROW_WISE].lookups_per_sample * DIM
    return Run(volume=round(volume), **times_ms)


def model_results() -> list[ModelResult]:
    """All four models."""
    machine = fitted_machine()
    return [ModelResult.of(model, machine) for model in MODELS]


def all_to_all_fit_ms(model: PaperModel, machine: FlexMachine) -> tuple[float, float, float]:
    """Times of Table 6's three measured volumes at the fitted bandwidth."""
    row_wise, two, three = (
        2e3 * run.volume * NUMBER_BYTES / machine.bandwidths.all_to_all_global for run in model.runs
    )
    return row_wise, two, three


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HistoryCosts:
    """Fig. 1: memory and communication of histories row-wise, kept as sequences or summed.

    Attributes:
        length_N: Lookups per sample, of all tables.
        sequence_gb_N: Dynamic memory per rank; alike for any number of tables.
        sequence_ms_N: Communication per step.
        pooled_gb: Dynamic memory per rank by number of tables, of sums that travel by all-to-all; alike for any length.
        pooled_ms: Communication per step.
        reduced_gb: As `pooled_gb`, of sums that travel by reduce-scatter and all-gather.
        reduced_ms: Communication per step.
    """

    length_N: FloatArray
    sequence_gb_N: FloatArray
    sequence_ms_N: FloatArray
    pooled_gb: dict[int, float]
    pooled_ms: dict[int, float]
    reduced_gb: dict[int, float]
    reduced_ms: dict[int, float]


def fig1_costs(machine: FlexMachine) -> HistoryCosts:
    """Costs by Tables 2 and 3; summed histories send a vector from each rank for each sample and table."""

    def vectors(per_sample: float) -> RowSet:
        return RowSet(num_rows=0, lookups_per_sample=per_sample, embedding_dim=DIM)

    def costs(per_sample: float) -> tuple[float, float]:
        rows = vectors(per_sample)
        return (
            dynamic_memory_bytes(TierStrategy.ROW_WISE, rows, machine) / 1e9,
            communication_s(TierStrategy.ROW_WISE, rows, machine) * 1e3,
        )

    length_N = np.unique(np.r_[np.geomspace(1, FIG1_LENGTH, 30).round(), np.linspace(0, FIG1_LENGTH, 41)[1:]])
    sequences = [costs(length) for length in length_N.tolist()]
    num_sums = {tables: tables * machine.world_size for tables in FIG1_TABLES}
    pooled = {tables: costs(sums) for tables, sums in num_sums.items()}
    return HistoryCosts(
        length_N=length_N,
        sequence_gb_N=np.array([memory for memory, _ in sequences]),
        sequence_ms_N=np.array([time for _, time in sequences]),
        pooled_gb={tables: memory for tables, (memory, _) in pooled.items()},
        pooled_ms={tables: time for tables, (_, time) in pooled.items()},
        reduced_gb={tables: reduced_memory_bytes(vectors(sums), machine) / 1e9 for tables, sums in num_sums.items()},
        # The gradients come back by an all-gather of the same bytes.
        reduced_ms={
            tables: 2e3 * reduced_communication_s(vectors(sums), machine, fitted_bandwidths().reduce_scatter_global)
            for tables, sums in num_sums.items()
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplicaCosts:
    """Fig. 3: costs of replicating a table over those of splitting it, by L = alpha x E.

    Attributes:
        alpha_N: Lookups per sample and row.
        memory_N: Ratio.
        communication_N: Ratio.
        memory_neutral: Alpha where memory is alike.
        communication_neutral: Alpha where communication is.
    """

    alpha_N: FloatArray
    memory_N: FloatArray
    communication_N: FloatArray
    memory_neutral: float
    communication_neutral: float


def fig3_costs(machine: FlexMachine) -> ReplicaCosts:
    """Ratios for 10 million rows; how many they are cancels."""
    num_rows = 10_000_000
    alpha_N = np.geomspace(1e-6, 1e-1, 101)
    row_sets = [
        RowSet(num_rows=num_rows, lookups_per_sample=alpha * num_rows, embedding_dim=DIM) for alpha in alpha_N.tolist()
    ]

    def ratio(cost: Callable[[TierStrategy, RowSet, FlexMachine], float]) -> FloatArray:
        return np.array(
            [
                cost(TierStrategy.DATA_PARALLEL, one, machine) / cost(TierStrategy.ROW_WISE, one, machine)
                for one in row_sets
            ]
        )

    return ReplicaCosts(
        alpha_N=alpha_N,
        memory_N=ratio(memory_bytes),
        communication_N=ratio(communication_s),
        memory_neutral=memory_neutral_probability(machine.world_size, LOCAL_BATCH, PAPER_MEMORY_MULTIPLIER),
        communication_neutral=neutral_communication(TierStrategy.DATA_PARALLEL, row_sets[0], machine),
    )


def fig5_frontier(machine: FlexMachine) -> ParetoFrontier:
    """The frontier of `FIG5_MODEL`, with L from its neutral 2-tier rows."""
    rows = RowSet(num_rows=FIG5_MODEL.num_rows, lookups_per_sample=FIG5_MODEL.neutral_length, embedding_dim=DIM)
    return pareto_frontier(FIG5_MODEL.access, rows, machine)
