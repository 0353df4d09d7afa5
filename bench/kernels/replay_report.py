"""What a replayed plan is shown as."""

from __future__ import annotations

from functools import partial

from rich.console import Group, RenderableType

from autoshard.core import ShardingPlan
from autoshard.report.replay_json import ReplayedRank, ReplayResult
from autoshard.report.wording import write_ms, write_percent
from autoshard.table import Column, Table
from bench.kernels.replay import Replay


def replay_result(plan: ShardingPlan, replay: Replay) -> ReplayResult:
    """A replayed plan beside its prediction."""
    (measured,) = replay.plans
    predicted, shards = _predicted_ms(plan), plan.local_shards()
    return ReplayResult(
        device=replay.device,
        device_name=replay.device_name,
        num_rounds=replay.num_rounds,
        num_groups=replay.num_groups,
        ceiling_balance=replay.ceiling.balance,
        predicted_max_kernel_ms=plan.predicted.max_kernel_ms if plan.predicted else None,
        cost_model=plan.predicted.cost_model if plan.predicted else None,
        ranks=tuple(
            ReplayedRank(
                rank=rank,
                num_shards=len(shards[rank]),
                forward_ms=forward_ms,
                backward_ms=backward_ms,
                predicted_ms=predicted[rank] if predicted else None,
            )
            for rank, (forward_ms, backward_ms) in enumerate(
                zip(measured.forward_ms_R, measured.backward_ms_R, strict=True)
            )
        ),
    )


def replay_table(found: ReplayResult) -> RenderableType:
    """A replayed plan for people."""
    is_predicted = any(rank.predicted_ms is not None for rank in found.ranks)
    ms = partial(Column, unit="ms", text=write_ms, justify="right")
    table = Table.of(
        found.ranks,
        [
            (Column("rank", justify="right"), lambda rank: rank.rank),
            ("tables", lambda rank: rank.num_shards),
            (ms("forward"), lambda rank: rank.forward_ms),
            (ms("backward"), lambda rank: rank.backward_ms),
            (ms("kernel"), lambda rank: rank.kernel_ms),
            *([(ms("predicted"), lambda rank: rank.predicted_ms)] if is_predicted else []),
            *([("error", _error)] if is_predicted else []),
        ],
    )
    lines = [
        f"Measured on {found.device} ({found.device_name}): slowest rank {write_ms(found.max_kernel_ms)} ms, "
        f"balance {write_percent(found.balance)}; identical ranks have {write_percent(found.ceiling_balance)} here"
    ]
    predicted_ms, max_error, mean_error = found.predicted_max_kernel_ms, found.max_error, found.mean_absolute_error
    if predicted_ms is not None and max_error is not None and mean_error is not None:
        lines.append(
            f"Predicted by {found.cost_model}: slowest rank {write_ms(predicted_ms)} ms "
            f"({write_percent(max_error, signed=True)}); mean error per rank {write_percent(mean_error)}"
        )
    return Group(table, "", *lines)


def _error(rank: ReplayedRank) -> str:
    """Predicted over measured time, minus 1."""
    if rank.predicted_ms is None or not rank.kernel_ms:
        return ""
    return write_percent(rank.predicted_ms / rank.kernel_ms - 1, signed=True)


def _predicted_ms(plan: ShardingPlan) -> tuple[float, ...]:
    """Predicted kernel time of each rank of a replica group; empty without a prediction."""
    if plan.predicted is None:
        return ()
    by_rank = {cost.rank: cost.kernel_ms for cost in plan.predicted.ranks}
    return tuple(by_rank[rank] for rank in range(plan.group_size)) if len(by_rank) >= plan.group_size else ()
