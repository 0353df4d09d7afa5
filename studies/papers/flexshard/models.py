"""FlexShard's published figures of its four models (Tables 4 to 6), and access curves through its points.

Shape suffixes: K knots of a curve, P points that the paper prints.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autoshard.core import AccessProfile, EmbeddingTable, Feature, ImpliedOrder, Pooling
from autoshard.planners.flexshard.equations import PAPER_MEMORY_MULTIPLIER

#: The cluster and the batch of Sec. 5: four nodes of eight A100, 4,096 samples each, rows of 256 fp32.
RANKS_PER_NODE, NUM_NODES, LOCAL_BATCH, DIM = 8, 4, 4096, 256
WORLD = RANKS_PER_NODE * NUM_NODES
NUMBER_BYTES = 4
#: Memory of a replicated row, over row-wise and in rows per rank: on each rank, and on each node (Table 2).
EACH_ROWS = PAPER_MEMORY_MULTIPLIER - 1 / WORLD
EACH_NODE_ROWS = PAPER_MEMORY_MULTIPLIER / RANKS_PER_NODE - 1 / WORLD

_KNOTS_PER_OCTAVE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TierShare:
    """Rows of a tier and the share of all lookups that goes to them, as Table 5 prints them."""

    num_rows: int
    coverage: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Communication of a step, measured (a line of Table 6) or predicted.

    Attributes:
        volume: Numbers of the global all-to-all, each way.
        all_to_all_ms: Global, forward and backward together, as all times.
        intra_ms: All-to-all within nodes, which may overlap.
        all_reduce_ms: Global.
        cross_ms: All-reduce across nodes, which may overlap.
    """

    volume: int
    all_to_all_ms: float
    intra_ms: float = 0.0
    all_reduce_ms: float = 0.0
    cross_ms: float = 0.0

    @property
    def exposed_ms(self) -> float:
        """Time of communication where the parts that can overlap do so (as in Fig. 7)."""
        return self.all_to_all_ms + self.all_reduce_ms

    @property
    def total_ms(self) -> float:
        """All parts one after the other."""
        return self.exposed_ms + self.intra_ms + self.cross_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperModel:
    """One of the paper's four models.

    Attributes:
        name: As printed.
        num_rows: Of its table (Table 4).
        two_tier: Rows that 2-tier sharding replicates (Table 5).
        replicated: Rows that 3-tier sharding replicates.
        flexed: Rows that it keeps once per node.
        row_wise_run: Table 6.
        two_tier_run: Table 6.
        three_tier_run: Table 6.
    """

    name: str
    num_rows: int
    two_tier: TierShare
    replicated: TierShare
    flexed: TierShare
    row_wise_run: Run
    two_tier_run: Run
    three_tier_run: Run

    @property
    def runs(self) -> tuple[Run, Run, Run]:
        """Row-wise, 2-tier and 3-tier."""
        return self.row_wise_run, self.two_tier_run, self.three_tier_run

    @property
    def three_tier_coverage(self) -> float:
        """Share of the lookups that leave the row-wise tier with three tiers."""
        return self.replicated.coverage + self.flexed.coverage

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        """Rows and coverage of the ends of the paper's tiers, and of the table."""
        replicated, two_tier = self.replicated, self.two_tier
        held = replicated.num_rows + self.flexed.num_rows
        return (
            (replicated.num_rows, replicated.coverage),
            (two_tier.num_rows, two_tier.coverage),
            (held, self.three_tier_coverage),
            (self.num_rows, 1.0),
        )

    @property
    def neutral_length(self) -> float:
        """Lookups per sample by which the 2-tier rows are neutral in memory."""
        return EACH_ROWS * self.two_tier.num_rows / (LOCAL_BATCH * self.two_tier.coverage)

    @property
    def measured_length(self) -> float:
        """Lookups per sample by the measured volume of row-wise sharding: B x L x D numbers (Table 3)."""
        return self.row_wise_run.volume / (LOCAL_BATCH * DIM)

    @property
    def leaving_length(self) -> float:
        """The same if the measured volume is what leaves a rank, which keeps 1 / U of what it looks up."""
        return self.measured_length / (1 - 1 / WORLD)

    @property
    def access(self) -> AccessProfile:
        """The curve of `power_law_curve` through the paper's points.

        Up to the first point the exponent is that by which the last row's probability is the memory-neutral one,
        since data-parallel rows end there (Sec. 4.5, A in Fig. 5). That probability is coverage over rows of the
        2-tier point, which is neutral as a whole (B): L cancels.
        """
        first_rows, first_coverage = self.points[0]
        slope = self.two_tier.coverage / self.two_tier.num_rows
        return power_law_curve(self.points, first_exponent=slope * first_rows / first_coverage)

    def table(self, length: float) -> EmbeddingTable:
        """The model's table with a mean history length."""
        return EmbeddingTable(
            row_order=ImpliedOrder.BY_ID,
            name=self.name.lower(),
            num_embeddings=self.num_rows,
            embedding_dim=DIM,
            features=(Feature(name=f"{self.name.lower()}_history", pooling_factor=length),),
            access=self.access,
            pooling=Pooling.SEQUENCE,
        )


def power_law_curve(points: tuple[tuple[float, float], ...], *, first_exponent: float) -> AccessProfile:
    """A coverage curve through points, a power of the access rank between any two of them.

    Straight lines in doubly logarithmic axes, sampled at 32 knots per octave. Concave where exponents fall, as they do
    through points of skewed distributions, and below 1.

    Args:
        points: Rows and coverage, rising; the last is all rows and 1.
        first_exponent: Of the part before the first point.

    Raises:
        InvalidTableError: If the curve is not concave.
    """
    starts = ((1.0, points[0][1] * points[0][0] ** -first_exponent), *points)
    ranks, cumulative = [np.array([0.0])], [np.array([0.0])]
    for (start, before), (stop, after) in pairwise(starts):
        num_knots = max(1, round(np.log2(stop / start) * _KNOTS_PER_OCTAVE))
        ranks_K = np.geomspace(start, stop, num_knots + 1)[:-1]
        ranks.append(ranks_K)
        cumulative.append(before * (ranks_K / start) ** (np.log(after / before) / np.log(stop / start)))
    last, whole = points[-1]
    return AccessProfile(np.concatenate([*ranks, [last]]), np.concatenate([*cumulative, [whole]]))


def _model(
    name: str,
    num_rows: int,
    shares: tuple[tuple[int, float], tuple[int, float], tuple[int, float]],
    runs: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]],
) -> PaperModel:
    two_tier, replicated, flexed = (TierShare(num_rows=rows, coverage=coverage) for rows, coverage in shares)
    names = ("all_to_all_ms", "intra_ms", "all_reduce_ms", "cross_ms")
    row_wise, two, three = (Run(volume=int(volume), **dict(zip(names, times, strict=False))) for volume, *times in runs)
    return PaperModel(
        name=name,
        num_rows=num_rows,
        two_tier=two_tier,
        replicated=replicated,
        flexed=flexed,
        row_wise_run=row_wise,
        two_tier_run=two,
        three_tier_run=three,
    )


#: Tables 4 to 6.
MODELS: tuple[PaperModel, ...] = (
    _model(
        "RM-1",
        30_000_000,
        ((346_144, 0.525), (100_064, 0.368), (1_184_544, 0.306)),
        ((972_424_960, 307), (450_510_848, 149, 0, 3), (297_697_024, 99, 30, 3, 14)),
    ),
    _model(
        "RM-2",
        30_000_000,
        ((507_072, 0.770), (128_736, 0.639), (2_397_216, 0.217)),
        ((958_656_768, 308), (220_126_208, 80, 0, 6), (138_198_784, 49, 21, 3, 27)),
    ),
    _model(
        "RM-3",
        10_000_000,
        ((115_296, 0.349), (36_704, 0.227), (318_560, 0.259)),
        ((466_826_496, 156), (311_369_728, 101, 0, 4), (246_077_440, 85, 13, 2, 5)),
    ),
    _model(
        "RM-4",
        10_000_000,
        ((184_864, 0.570), (55_040, 0.390), (592_992, 0.360)),
        ((473_709_312, 155), (201_887_232, 72, 0, 5), (118_944_768, 45, 18, 3, 9)),
    ),
)
