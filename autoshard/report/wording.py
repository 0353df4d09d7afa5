"""Numbers, ranks and rows as reports write them."""

from __future__ import annotations

from autoshard.core import CostBreakdown, Estimate, LowerBound, PlacedShard, RowsBy, Shard
from autoshard.core.step import Overlap, StepPart

_OVERLAPS = {
    Overlap.NONE: "none, parts of a step run one after the other",
    Overlap.PIPELINED: "pipelined, exchanges hide behind dense layers, the next batch's input behind the whole step",
    Overlap.NEO: "neo, dense layers and their all-reduce hide behind lookups and exchange",
    Overlap.NEO_PREFETCH: "neo_prefetch, as neo, and the next batch's input hides behind dense layers",
}


def write_ms(milliseconds: float) -> str:
    """Milliseconds with three significant digits, without the unit: `0.0123`, `1.23`, `123`, `1,234`."""
    if milliseconds >= 100:
        return f"{milliseconds:,.0f}"
    if milliseconds == 0:
        return "0"
    digits = next((places for limit, places in ((10, 1), (1, 2), (0.1, 3)) if milliseconds >= limit), 4)
    return f"{milliseconds:.{digits}f}"


def write_interval(estimate: Estimate) -> str:
    """The ends of an interval: `0.9 to 1.1`, in milliseconds."""
    return f"{write_ms(estimate.low)} to {write_ms(estimate.high)}"


def write_overlap(overlap: Overlap) -> str:
    """Name and meaning of the assumed overlap of a step's parts."""
    return _OVERLAPS[overlap]


def write_part(part: StepPart, predicted: CostBreakdown) -> str:
    """Name of a step's part; the last one with its contents."""
    if part is not StepPart.DENSE or predicted.dense_ms is None or predicted.sync_ms is None:
        return part.value.replace("_", " ")
    groups = "" if predicted.group_sync_ms is None else f", of which groups {write_ms(predicted.group_sync_ms)}"
    return f"dense (layers {write_ms(predicted.dense_ms)}, sync {write_ms(predicted.sync_ms)}{groups})"


def write_bounds(predicted: CostBreakdown) -> list[str]:
    """How far the step and the slowest kernel are above lower bounds, a line for each that is known."""
    values = (
        ("step", "Step", predicted.step_ms.value),
        ("max_kernel", "Slowest kernel of whole tables", predicted.max_kernel_ms),
    )
    known = ((label, value_ms, predicted.bounds[name]) for name, label, value_ms in values if name in predicted.bounds)
    return [f"{label} {_write_bound(bound, value_ms)}" for label, value_ms, bound in known]


def _write_bound(bound: LowerBound, value_ms: float) -> str:
    """`8.0% above the proven lower bound of 2.18 ms`; with an estimate, what is proven follows it."""
    above, kind = bound.above(value_ms)
    proven = "none" if bound.proven_ms is None else f"{write_ms(bound.proven_ms)} ms"
    if kind == "proven":
        return f"{write_percent(above)} above the proven lower bound of {proven}"
    estimated = f"{write_ms(bound.estimated_ms or 0.0)} ms"
    return f"{write_percent(above)} above an estimated lower bound of {estimated} (proven: {proven})"


def write_percent(share: float, *, signed: bool = False) -> str:
    """A share as a percentage: `88.6%`, with `signed` `+3.1%`."""
    return f"{100 * share:{'+' if signed else ''}.1f}%"


def write_ranks(placed: PlacedShard) -> str:
    """The ranks that hold a shard: `3`, `0-7`, or replicas apart: `0-3 | 4-7`, `each of 0-7`."""
    if len(placed.replicas) > 1 and all(len(replica) == 1 for replica in placed.replicas):
        return f"each of {_runs(tuple(replica[0] for replica in placed.replicas))}"
    return " | ".join(_runs(replica) for replica in placed.replicas)


def write_rows(shard: Shard) -> str:
    """The rows of a shard: `all`, or a range of row ids or access ranks."""
    if shard.num_embeddings == shard.table.num_embeddings:
        return "all"
    label = "by access " if shard.rows.by is RowsBy.ACCESS_RANK else ""
    return f"{label}{shard.rows.start:,}-{shard.rows.stop - 1:,}"


def write_columns(shard: Shard) -> str:
    """The columns of a shard: `all`, or a range."""
    if shard.embedding_dim == shard.table.embedding_dim:
        return "all"
    return f"{shard.columns[0]}-{shard.columns[1] - 1}"


def _runs(ranks: tuple[int, ...]) -> str:
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    return ", ".join("-".join(str(rank) for rank in run) for run in runs)
