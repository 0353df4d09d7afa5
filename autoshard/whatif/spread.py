"""Variation of a step from batch to batch: lookups and distinct rows are drawn, not taken at their means.

Shape suffixes: B batches, R ranks of a replica group, G replica groups, N small tables as ranks hold them, H width of
a code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import numpy as np
from numpy.typing import NDArray

from autoshard.core import (
    AccessProfile,
    CommModel,
    CostModel,
    CostModels,
    EmbeddingTable,
    Exchange,
    LocalShard,
    ShardingPlan,
    Topology,
)
from autoshard.core.accepted import Range
from autoshard.core.choices import Lengths
from autoshard.core.costs import LinkBytes
from autoshard.core.plan import HeldShard
from autoshard.core.step import Overlap, StepPart
from autoshard.evaluation.evaluate import price_step
from autoshard.evaluation.rank_work import EXCHANGED, SCATTERED
from autoshard.evaluation.stages import all_to_alls_ms, scatters_ms
from autoshard.evaluation.step_price import StepPrice
from autoshard.evaluation.traffic import Stream, plan_traffic, wire_bytes
from autoshard.results.sweep import StepSpread

MsArray = NDArray[np.float64]

#: Relative changes by which prices are differentiated: fluctuations of a batch are of this order.
_STEP = 0.02


def sample_steps(
    plan: ShardingPlan,
    costs: CostModels,
    *,
    num_batches: int,
    seed: int = 0,
    lengths: Lengths = Lengths.DECLARED,
    overlap: Overlap | None = None,
) -> StepSpread:
    """Draws batches and prices the step of each.

    The lookups of a table in a batch are drawn with the mean and the variance of the sum of its samples' lengths:
    negative binomial where the variance is above the mean, Poisson where it equals it, binomial below. Shares of them
    go to shards and ranks at random. Distinct rows are drawn around what the access profile expects of so many
    lookups. Kernel and exchange times follow by the models' derivatives at the means, and each group and rank draws
    for itself.

    Args:
        plan: Any valid plan.
        costs: Models to price it with.
        num_batches: Batches, at least 2.
        seed: Same seed, same batches.
        lengths: Source of the samples' lengths.
        overlap: As in `evaluate`.

    Raises:
        InvalidOptionError: If there are too few batches.
    """
    Range(at_least=2).check(num_batches, "num_batches")
    rng = np.random.default_rng(seed)
    price = price_step(plan, costs, overlap=overlap)
    group, num_groups = plan.of_one_group(), plan.replica_groups.num_groups
    held = group.held_shards()
    slopes = _Slopes.of(held, group, costs.kernel)
    noise, exchanges = _Noise.of(held, group, slopes, lengths), _Exchanges.of(held, group, costs.comm)
    forward_R, backward_R = (price.work[part][:, 0] for part in (StepPart.FORWARD_KERNEL, StepPart.BACKWARD_KERNEL))
    steps_B, kernels_B = np.empty(num_batches), np.empty(num_batches)
    for batch in range(num_batches):
        forward_GR, backward_GR, ids_GR = noise.draw(num_groups, rng)
        forward_GR = np.maximum(forward_R + forward_GR, 0.0)
        backward_GR = np.maximum(backward_R + backward_GR, 0.0)
        kernels_B[batch] = (forward_GR + backward_GR).max()
        ratios = {
            StepPart.FORWARD_KERNEL: _ratio(forward_GR.max(), forward_R.max()),
            StepPart.BACKWARD_KERNEL: _ratio(backward_GR.max(), backward_R.max()),
            **exchanges.ratios(ids_GR),
        }
        steps_B[batch] = _step_ms(price, ratios)
    return StepSpread(
        num_batches=num_batches,
        mean_ms=float(steps_B.mean()),
        p50_ms=float(np.quantile(steps_B, 0.5)),
        p90_ms=float(np.quantile(steps_B, 0.9)),
        p99_ms=float(np.quantile(steps_B, 0.99)),
        expected_max_kernel_ms=float(kernels_B.mean()),
        max_expected_kernel_ms=float((forward_R + backward_R).max()),
    )


def draw_lookups(mean: float, variance: float, size: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draws lookups of a batch with a given mean and variance, both at least 0; shape (`size`,).

    Negative binomial above a Poisson's variance, binomial below, and a constant without any.
    """
    if mean <= 0 or variance <= 0:
        return np.full(size, float(mean))
    ratio = variance / mean
    if ratio > 1 + 1e-9:
        return rng.negative_binomial(mean / (ratio - 1), 1 / ratio, size).astype(np.float64)
    if ratio < 1 - 1e-9:
        trials = max(1, round(mean / (1 - ratio)))
        return rng.binomial(trials, min(1.0, mean / trials), size).astype(np.float64)
    return rng.poisson(mean, size).astype(np.float64)


def batch_variance(table: EmbeddingTable, num_samples: float, lengths: Lengths) -> float:
    """Variance of a table's lookups in a batch of independent samples, all features together."""
    total = 0.0
    for feature in table.features:
        mean, variance = feature.pooling_factor, feature.pooling_variance
        if variance <= 0:
            share = mean - math.floor(mean)
            variance = mean if lengths is Lengths.POISSON else share * (1 - share)
        total += variance
    return total * num_samples


def distinct_variance(access: AccessProfile, num_lookups: float) -> float:
    """Variance of the distinct rows among a fixed number of independent lookups.

    Source:
        The occupancy problem, with rows' counts taken as Poisson and conditioned on their sum (as in Feller, An
        Introduction to Probability Theory, vol. 1, IV): sum of q (1 - q) less (sum of rate q)² over the lookups, for a
        row of that rate that stays out with q = exp(-rate).
    """
    if num_lookups <= 0:
        return 0.0
    rows_I = np.diff(access.ranks_K)
    rates_I = num_lookups * np.diff(access.cumulative_K) / rows_I
    missed_I = np.exp(-rates_I)
    variance = float(np.sum(rows_I * missed_I * (1 - missed_I)))
    return max(0.0, variance - float(np.sum(rows_I * rates_I * missed_I)) ** 2 / num_lookups)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slopes:
    """Milliseconds per lookup and per distinct row of each small table, forward and backward, shapes (N,)."""

    forward_lookup_N: MsArray
    backward_lookup_N: MsArray
    forward_distinct_N: MsArray
    backward_distinct_N: MsArray

    @classmethod
    def of(cls, held: Sequence[HeldShard], group: ShardingPlan, model: CostModel) -> _Slopes:
        codes_NH = model.encode([one.local for one in held])
        codes_RH = np.zeros((group.group_size, codes_NH.shape[1]), dtype=np.float32)
        for one, code_H in zip(held, codes_NH, strict=True):
            codes_RH[one.ranks] += code_H
        # The first rank that holds a table stands for the others.
        around_NH = codes_RH[[int(one.ranks[0]) for one in held]]

        def change(grown: Sequence[LocalShard]) -> tuple[MsArray, MsArray]:
            moved_NH = around_NH + model.encode(grown) - codes_NH
            before, after = model.predict_parts(around_NH), model.predict_parts(moved_NH)
            return after.forward_ms_S - before.forward_ms_S, after.backward_ms_S - before.backward_ms_S

        lookups_N = np.array([one.local.num_lookups for one in held])
        distinct_N = np.array([one.local.access.expected_distinct(one.local.num_lookups) for one in held])
        forward_N, backward_N = change([_with_lookups(one.local) for one in held])
        rarer = [_with_distinct(one.local) for one in held]
        more_N = np.array([shard.access.expected_distinct(shard.num_lookups) for shard in rarer]) - distinct_N
        forward_distinct_N, backward_distinct_N = change(rarer)
        return cls(
            forward_lookup_N=_divided(forward_N, _STEP * lookups_N),
            backward_lookup_N=_divided(backward_N, _STEP * lookups_N),
            forward_distinct_N=_divided(forward_distinct_N, more_N),
            backward_distinct_N=_divided(backward_distinct_N, more_N),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Noise:
    """Deviations of batches from the means, per rank.

    Draws of a table are common to all that hold it; what is left, shares and distinct rows, is independent and a sum
    over many shards, so that it is drawn as normal with its variance.

    Attributes:
        tables: For each table, mean and variance of its lookups in a batch.
        per_lookup: For each table, what one lookup more adds on each rank: forward and backward milliseconds and ids
            served, with the ranks.
        deviation_R: Standard deviations of what is left, in the same order, shape (3, R).
    """

    tables: Mapping[str, tuple[float, float]]
    per_lookup: Mapping[str, Sequence[tuple[NDArray[np.int64], tuple[float, float, float]]]]
    deviation_R: MsArray

    @classmethod
    def of(cls, held: Sequence[HeldShard], group: ShardingPlan, slopes: _Slopes, lengths: Lengths) -> _Noise:
        num_ranks, batch = group.group_size, group.group_batch_size
        by_name = {table.name: table for table in group.tables.tables}
        tables = {
            name: (batch * table.pooling_factor, batch_variance(table, batch, lengths))
            for name, table in by_name.items()
        }
        per_lookup: dict[str, list[tuple[NDArray[np.int64], tuple[float, float, float]]]] = {}
        left_R = np.zeros((3, num_ranks))
        for index, one in enumerate(held):
            local = one.local
            mean = tables[local.table][0]
            share = local.num_lookups / mean if mean > 0 else 0.0
            slope = (slopes.forward_lookup_N[index], slopes.backward_lookup_N[index])
            per_lookup.setdefault(local.table, []).append((one.ranks, (slope[0] * share, slope[1] * share, share)))
            thinning = local.num_lookups * max(0.0, 1 - share)
            distinct = distinct_variance(local.access, local.num_lookups)
            left_R[0, one.ranks] += slope[0] ** 2 * thinning + slopes.forward_distinct_N[index] ** 2 * distinct
            left_R[1, one.ranks] += slope[1] ** 2 * thinning + slopes.backward_distinct_N[index] ** 2 * distinct
            left_R[2, one.ranks] += thinning
        return cls(tables=tables, per_lookup=per_lookup, deviation_R=np.sqrt(left_R))

    def draw(self, num_groups: int, rng: np.random.Generator) -> tuple[MsArray, MsArray, MsArray]:
        """Forward and backward milliseconds and ids on top of the means, shapes (G, R)."""
        shape = (num_groups, self.deviation_R.shape[1])
        added = [rng.standard_normal(shape) * deviation_R for deviation_R in self.deviation_R]
        for name, (mean, variance) in self.tables.items():
            if variance <= 0:
                continue
            more_G = draw_lookups(mean, variance, num_groups, rng) - mean
            for ranks, per_lookup in self.per_lookup.get(name, ()):
                for of_part, value in zip(added, per_lookup, strict=True):
                    of_part[:, ranks] += value * more_G[:, None]
        return added[0], added[1], added[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exchanges:
    """Exchanges of a group, whose bytes follow the lookups.

    Attributes:
        links: Bytes that leave and reach ranks at mean lookups, by all-to-all.
        scatter_ms_2: Time of the reduce-scatter and of the all-gather, which move as much in any batch.
        ids_R: Expected ids that each rank serves.
        row_share_R: Share of the values that it sends that are requested rows; bags send as much in any batch.
        base: Time of each part at mean lookups, at the slowest rank.
    """

    topology: Topology
    comm: CommModel
    links: Mapping[Stream, LinkBytes]
    scatter_ms_2: MsArray
    ids_R: MsArray
    row_share_R: MsArray
    base: Mapping[StepPart, float]

    @classmethod
    def of(cls, held: Sequence[HeldShard], group: ShardingPlan, comm: CommModel) -> _Exchanges:
        ids_R, rows_R, values_R = (np.zeros(group.group_size) for _ in range(3))
        for one in held:
            local = one.local
            is_rows = local.output is Exchange.ROWS
            values = (local.num_lookups if is_rows else local.num_bags) * local.embedding_dim
            ids_R[one.ranks] += local.num_lookups
            rows_R[one.ranks] += values if is_rows else 0.0
            values_R[one.ranks] += values
        traffic = plan_traffic(group)
        scattered_2 = np.array([traffic.scattered_bytes(stream) for stream in SCATTERED])
        # Sums that travel by reduce-scatter are none of what the all-to-all carries.
        values_R -= scattered_2[0] / wire_bytes(group.payload.forward)
        exchanges = cls(
            topology=group.topology,
            comm=comm,
            links=traffic.links(group.topology),
            scatter_ms_2=scatters_ms(scattered_2, comm, group.topology),
            ids_R=ids_R,
            row_share_R=_divided(rows_R, values_R),
            base={},
        )
        return replace(exchanges, base=exchanges.parts_ms(np.zeros((1, group.group_size))))

    def ratios(self, ids_GR: MsArray) -> dict[StepPart, float]:
        """Times of a batch with so many ids more, over those at mean lookups."""
        return {part: _ratio(value, self.base[part]) for part, value in self.parts_ms(ids_GR).items()}

    def parts_ms(self, ids_GR: MsArray) -> dict[StepPart, float]:
        """Times at the slowest rank of the slowest group."""
        growth_GR = _divided(np.maximum(self.ids_R + ids_GR, 0.0), np.broadcast_to(self.ids_R, ids_GR.shape))
        row_growth_GR = 1 + (growth_GR - 1) * self.row_share_R
        growth = {
            Stream.LENGTHS: np.ones_like(growth_GR),
            Stream.IDS: growth_GR,
            Stream.FORWARD: row_growth_GR,
            Stream.BACKWARD: row_growth_GR,
        }
        slowest = {}
        for part, streams in EXCHANGED.items():
            links = reduce(add, [self._grown(stream, growth[stream]) for stream in streams])
            slowest[part] = float(all_to_alls_ms(links, self.comm, self.topology).max())
        for part, scatter_ms in zip(
            (StepPart.FORWARD_EXCHANGE, StepPart.BACKWARD_EXCHANGE), self.scatter_ms_2, strict=True
        ):
            slowest[part] += float(scatter_ms)
        return slowest

    def _grown(self, stream: Stream, growth_GR: MsArray) -> LinkBytes:
        """Owners move as much more as they serve, readers as much more as all owners on average do."""
        links = self.links[stream]
        mean_G1 = np.average(growth_GR, axis=1, weights=self.ids_R + 1e-12)[:, None]
        reading_LGR = (links.leaving_LR if stream.asks else links.arriving_LR)[:, None] * mean_G1
        owning_LGR = (links.arriving_LR if stream.asks else links.leaving_LR)[:, None] * growth_GR
        if stream.asks:
            return LinkBytes(leaving_LR=reading_LGR, arriving_LR=owning_LGR)
        return LinkBytes(leaving_LR=owning_LGR, arriving_LR=reading_LGR)


def _step_ms(price: StepPrice, ratios: Mapping[StepPart, float]) -> float:
    parts = {part.value: float(getattr(price.times, part.value)) * ratio for part, ratio in ratios.items()}
    return replace(price.times, **parts).step_ms(price.overlap)


def _with_lookups(shard: LocalShard) -> LocalShard:
    return replace(shard, pooling_factor=shard.pooling_factor * (1 + _STEP))


def _with_distinct(shard: LocalShard) -> LocalShard:
    """The same lookups over a few more rows."""
    num_rows = max(1, round(shard.num_embeddings * (1 + _STEP)))
    if num_rows == shard.num_embeddings:
        return shard
    return replace(shard, num_embeddings=num_rows, access=shard.access.thinned(num_rows))


def _ratio(value: float, base: float) -> float:
    return value / base if base > 0 else 1.0


def _divided(values: MsArray, by: MsArray) -> MsArray:
    return np.divide(values, by, out=np.zeros_like(values), where=np.abs(by) > 0)
