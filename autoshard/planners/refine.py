"""Corrects a placement by what its ranks are measured to take.

Shape suffixes: N items, R ranks, H width of a code, X ranks of all placements that were measured, G items of one rank,
T what it may take in return, P pairs of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.core import CostModel, ShardingPlan
from autoshard.core.accepted import AT_LEAST_1
from autoshard.core.costs import KernelErrors, MsArray, recorded_errors
from autoshard.core.errors import InvalidOptionError
from autoshard.evaluation.uncertainty.set_errors import SetErrors, half_widths, numbered
from autoshard.planners.space.placement import PlacementProblem, RankArray

#: Measures the kernels of all ranks of some plans in the same interleaved rounds; milliseconds per rank, plan by plan.
MeasurePlans = Callable[[Sequence[ShardingPlan]], Sequence[MsArray]]

#: Errors of models that have none on record: a table's price is as uncertain as intervals of normal errors say.
_UNRECORDED = KernelErrors(table=1 / 1.645, kind=0.0, company=0.0)
#: Standard deviation of measured ranks, as a share.
_MEASURED_ERROR = 0.01
#: Most exchanges between two measurements.
_EXCHANGES_PER_RANK = 2
_ROUNDING = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Refined:
    """What measuring made of a plan.

    Attributes:
        plan: The plan whose slowest rank was the fastest one, among those measured.
        before_ms: The slowest rank of the plan that it began with, when the two were last measured together.
        after_ms: Of `plan`, likewise.
        num_measurements: How often ranks were measured.
    """

    plan: ShardingPlan
    before_ms: float
    after_ms: float
    num_measurements: int

    @property
    def summary(self) -> str:
        """One line for people."""
        times = f"{self.num_measurements} measurement{'s' if self.num_measurements > 1 else ''}"
        return f"measured slowest rank {self.before_ms:.4g} -> {self.after_ms:.4g} ms, {times}"


def refine(
    plan: ShardingPlan,
    model: CostModel,
    measure: MeasurePlans,
    *,
    num_measurements: int,
    kept_bytes_R: MsArray | float = 0.0,
    has_room: Callable[[ShardingPlan], bool] = lambda _: True,
) -> Refined:
    """Measures a plan's ranks, corrects the model by what it was wrong by, and levels the ranks, several times.

    What ranks were wrong by is put down to their items, see `_corrections`. Levelling takes as few exchanges as it can,
    so that what was learned of a rank stays true of most of what it holds. Every measurement but the first is of the
    first plan, the best one so far and a new one, in the same rounds; the fastest stays.

    Args:
        plan: Its shards are all on single ranks.
        model: What it was planned with.
        measure: Measures plans.
        num_measurements: Measurements in all, the first included.
        kept_bytes_R: Device memory of each rank that tables do not get.
        has_room: Whether a plan fits; one that does not is not measured, and ends the corrections.

    Raises:
        InvalidOptionError: If there are no measurements, or a shard is on several ranks, or in several replica groups.
    """
    AT_LEAST_1.check(num_measurements, "replay_refine")
    problem, first_N = _as_problem(plan, model)
    problem = replace(problem, capacity_R=(problem.capacity_R - kept_bytes_R).astype(np.int64))
    errors = recorded_errors(model) or _UNRECORDED
    best_N = first_N
    best, (best_ms_R,) = plan, measure([plan])
    before_ms = after_ms = float(best_ms_R.max())
    seen = [(first_N, best_ms_R)]
    done = 1
    while done < num_measurements:
        found_N = _levelled(problem, _corrections(problem, seen, errors), best_N)
        if (found_N == best_N).all():
            break
        candidate = _placed(plan, problem, found_N)
        if not has_room(candidate):
            break
        first_ms_R, best_ms_R, candidate_ms_R = measure([plan, best, candidate])
        seen += [(first_N, first_ms_R), (best_N, best_ms_R), (found_N, candidate_ms_R)]
        done += 1
        before_ms, after_ms = float(first_ms_R.max()), float(best_ms_R.max())
        if before_ms < after_ms:  # the best so far was so by luck
            best, best_N, after_ms = plan, first_N, before_ms
        if candidate_ms_R.max() < after_ms:
            best, best_N, after_ms = candidate, found_N, float(candidate_ms_R.max())
    return Refined(plan=best, before_ms=before_ms, after_ms=after_ms, num_measurements=done)


def _as_problem(plan: ShardingPlan, model: CostModel) -> tuple[PlacementProblem, RankArray]:
    if plan.replica_groups.num_groups > 1:
        raise InvalidOptionError(
            f"takes plans of one replica group, this one has {plan.replica_groups.num_groups}", field="replay_refine"
        )
    for index, placed in enumerate(plan.shards):
        if len(placed.replicas) > 1 or len(placed.replicas[0]) > 1:
            raise InvalidOptionError(
                f"takes plans whose shards are on single ranks; shards[{index}] ({placed.shard.table.name}) is "
                f"{placed.tier}",
                field="replay_refine",
            )
    shards = [placed.shard for placed in plan.shards]
    problem = PlacementProblem.of(plan.tables, plan.topology, model, shards, payload=plan.payload)
    rank_U = [placed.replicas[0][0] for placed in plan.shards]
    return problem, np.array([rank_U[group[0]] for group in problem.members], dtype=np.int64)


def _placed(plan: ShardingPlan, problem: PlacementProblem, ranks_N: RankArray) -> ShardingPlan:
    """The same shards, held as they were, on other ranks; without prediction."""
    rank_of = {index: int(rank) for group, rank in zip(problem.members, ranks_N, strict=True) for index in group}
    shards = tuple(replace(placed, replicas=((rank_of[index],),)) for index, placed in enumerate(plan.shards))
    return replace(plan, shards=shards, predicted=None)


def _levelled(problem: PlacementProblem, correction_ms_N: MsArray, ranks_N: RankArray) -> RankArray:
    """Moves and swaps items of the slowest rank, one at a time, as long as that makes it faster.

    A rank takes its price and the corrections of its items, and never less than nothing.
    """
    ranks_N = ranks_N.copy()
    for _ in range(_EXCHANGES_PER_RANK * problem.num_ranks):
        cost_ms_R = np.maximum(problem.rank_ms(ranks_N) + _summed(correction_ms_N, ranks_N, problem), 0.0)
        slow = int(cost_ms_R.argmax())
        found = _best_exchange(problem, correction_ms_N, ranks_N, slow)
        if found is None or found.slower_ms >= cost_ms_R[slow] * (1 - _ROUNDING):
            break
        ranks_N[found.given], slow_gets = found.rank, found.taken
        if slow_gets is not None:
            ranks_N[slow_gets] = slow
    return ranks_N


@dataclass(frozen=True, slots=True)
class _Exchange:
    given: int
    rank: int
    taken: int | None
    slower_ms: float


def _best_exchange(
    problem: PlacementProblem, correction_ms_N: MsArray, ranks_N: RankArray, slow: int
) -> _Exchange | None:
    """The item that a rank had best give away, where to, and what for; by the slower of the two ranks then."""
    mine_G = np.flatnonzero(ranks_N == slow)
    others_T = np.flatnonzero(ranks_N != slow)
    # After the items of other ranks, the ranks themselves, for moves that take nothing.
    to_T = np.concatenate([ranks_N[others_T], np.delete(np.arange(problem.num_ranks), slow)])
    taken_TH = np.pad(problem.codes_NH[others_T], ((0, problem.num_ranks - 1), (0, 0)))
    taken_ms_T = np.pad(correction_ms_N[others_T], (0, problem.num_ranks - 1))
    bytes_T = np.pad(problem.bytes_N[others_T], (0, problem.num_ranks - 1))
    welcome_T = np.pad(problem.allowed_NR[others_T, slow], (0, problem.num_ranks - 1), constant_values=True)
    free_R = problem.capacity_R - problem.rank_bytes(ranks_N)
    gained_GT = problem.bytes_N[mine_G][:, None] - bytes_T
    fits_GT = (gained_GT <= free_R[to_T]) & (-gained_GT <= free_R[slow])
    fits_GT &= problem.allowed_NR[mine_G][:, to_T] & welcome_T
    give, take = fits_GT.nonzero()
    if not len(give):
        return None
    codes_RH, correction_ms_R = problem.rank_codes(ranks_N), _summed(correction_ms_N, ranks_N, problem)
    given_P, rank_P = mine_G[give], to_T[take]
    change_PH = problem.codes_NH[given_P] - taken_TH[take]
    change_ms_P = correction_ms_N[given_P] - taken_ms_T[take]
    slow_ms_P = problem.model.predict_ms(codes_RH[slow] - change_PH) + correction_ms_R[slow] - change_ms_P
    other_ms_P = problem.model.predict_ms(codes_RH[rank_P] + change_PH) + correction_ms_R[rank_P] + change_ms_P
    slower_ms_P = np.maximum(np.maximum(slow_ms_P, other_ms_P), 0.0)
    best = int(slower_ms_P.argmin())
    taken = int(take[best])
    return _Exchange(
        given=int(given_P[best]),
        rank=int(to_T[taken]),
        taken=int(others_T[taken]) if taken < len(others_T) else None,
        slower_ms=float(slower_ms_P[best]),
    )


def _summed(correction_ms_N: MsArray, ranks_N: RankArray, problem: PlacementProblem) -> MsArray:
    """Corrections of the items of each rank, shape (R,)."""
    return np.bincount(ranks_N, weights=correction_ms_N, minlength=problem.num_ranks).astype(np.float64)


def _corrections(problem: PlacementProblem, seen: Sequence[tuple[RankArray, MsArray]], errors: KernelErrors) -> MsArray:
    """What the model most likely is wrong by for every item, given all measurements; shape (N,), milliseconds.

    The model's errors are those of `KernelErrors`, the measurements' independent and normal; the machine's own
    slowness, which all ranks of a measurement share, is none. So the effects of tables and kinds of kernels are those
    of a Bayesian linear regression. What a set's company does is true of that set alone, and corrects no item.
    """
    rank_ms_X = np.concatenate([problem.rank_ms(ranks_N) for ranks_N, _ in seen])
    measured_ms_X = np.concatenate([_scaled(ranks_N, ms_R, problem) for ranks_N, ms_R in seen])
    is_seen_X = (rank_ms_X > 0) & (measured_ms_X > 0)
    if not is_seen_X.any():
        return np.zeros(problem.num_items)
    seen_X = np.flatnonzero(is_seen_X)
    off_X = np.log(measured_ms_X[seen_X] / rank_ms_X[seen_X])
    labels_N, kinds_N = [problem.label(item) for item in range(problem.num_items)], _item_kinds(problem)
    set_errors = _set_errors(problem, [ranks_N for ranks_N, _ in seen], labels_N, kinds_N, errors)
    measured_XX = np.diag(np.full(len(seen_X), _MEASURED_ERROR**2))
    spread_XX = set_errors.covariance(errors)[np.ix_(seen_X, seen_X)] + measured_XX
    answer_X = np.linalg.solve(spread_XX, off_X)
    (table, table_XT), (kind, kind_XK), _ = set_errors.parts(errors)
    effect_N = np.zeros(problem.num_items)
    for deviation, loads, names_N in ((table, table_XT, labels_N), (kind, kind_XK, kinds_N)):
        effect_N += deviation**2 * (loads[seen_X].T @ answer_X)[numbered(names_N)]
    half_width = float(np.median(set_errors.half_width_X[seen_X]))
    # Ranks take less than the sum of their items alone.
    beside_ms_N = problem.kernel_ms_N * (rank_ms_X.sum() / (len(seen) * problem.kernel_ms_N.sum()))
    return np.asarray(beside_ms_N * np.expm1(half_width * effect_N))


def _scaled(ranks_N: RankArray, measured_ms_R: MsArray, problem: PlacementProblem) -> MsArray:
    """Measured times on the scale of prices: the ranks of a measurement take as long together as they are priced."""
    total_ms = float(measured_ms_R.sum())
    return measured_ms_R * (float(problem.rank_ms(ranks_N).sum()) / total_ms) if total_ms > 0 else measured_ms_R


def _set_errors(
    problem: PlacementProblem,
    placements: Sequence[RankArray],
    labels_N: list[str],
    kinds_N: list[str],
    errors: KernelErrors,
) -> SetErrors:
    """Errors of the ranks of several placements, one placement after the other; labels and kinds are the items'."""
    num_placements, num_ranks = len(placements), problem.num_ranks
    codes_XH = np.concatenate([problem.rank_codes(ranks_N) for ranks_N in placements])
    return SetErrors.of(
        owner_M=np.concatenate([number * num_ranks + ranks_N for number, ranks_N in enumerate(placements)]),
        tables_M=labels_N * num_placements,
        kinds_M=kinds_N * num_placements,
        alone_ms_M=np.tile(problem.kernel_ms_N, num_placements),
        half_width_X=half_widths(problem.model.predict_parts(codes_XH), errors),
        sets_X=[tuple(np.flatnonzero(ranks_N == rank)) for ranks_N in placements for rank in range(num_ranks)],
    )


def _item_kinds(problem: PlacementProblem) -> list[str]:
    """Kind of kernel of each item; of several shards that must share a rank, the first one's."""
    kind_U = [local.kernel_kind for local in problem.locals_()]
    return [kind_U[group[0]] for group in problem.members]
