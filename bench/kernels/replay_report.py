"""What a replayed plan is shown as."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table

from autoshard.core import ShardingPlan
from autoshard.evaluation.measured import MeasuredPlan
from autoshard.report.wording import write_ms, write_percent
from bench.kernels.replay import Replay


def replay_json(plan: ShardingPlan, replay: Replay) -> dict[str, object]:
    """A replayed plan as the JSON object of `autoshard replay --json`."""
    (measured,) = replay.plans
    predicted = _predicted_ms(plan)
    shards = plan.local_shards()
    ranks = [
        {
            "rank": rank,
            "num_shards": len(shards[rank]),
            "forward_ms": measured.forward_ms_R[rank],
            "backward_ms": measured.backward_ms_R[rank],
            "kernel_ms": kernel_ms,
            "predicted_ms": predicted[rank] if predicted else None,
        }
        for rank, kernel_ms in enumerate(measured.kernel_ms_per_rank)
    ]
    return {
        "device": replay.device,
        "device_name": replay.device_name,
        "num_rounds": replay.num_rounds,
        "num_groups": replay.num_groups,
        "max_kernel_ms": measured.max_kernel_ms,
        "balance": measured.balance,
        "ceiling_balance": replay.ceiling.balance,
        "predicted_max_kernel_ms": plan.predicted.max_kernel_ms if plan.predicted else None,
        "max_error": _max_error(plan, measured),
        "mean_absolute_error": _mean_absolute_error(predicted, measured),
        "cost_model": plan.predicted.cost_model if plan.predicted else None,
        "ranks": ranks,
    }


def replay_table(plan: ShardingPlan, replay: Replay) -> RenderableType:
    """A replayed plan for people."""
    (measured,) = replay.plans
    predicted, shards = _predicted_ms(plan), plan.local_shards()
    table = Table(box=None, pad_edge=False, header_style="bold")
    headers = ["rank", "tables", "forward ms", "backward ms", "kernel ms"]
    for header in [*headers, *(["predicted ms", "error"] if predicted else [])]:
        table.add_column(header, justify="right")
    for rank, kernel_ms in enumerate(measured.kernel_ms_per_rank):
        parts = (measured.forward_ms_R[rank], measured.backward_ms_R[rank], kernel_ms)
        cells = [str(rank), str(len(shards[rank])), *map(write_ms, parts)]
        if predicted:
            error = write_percent(predicted[rank] / kernel_ms - 1, signed=True) if kernel_ms else ""
            cells += [write_ms(predicted[rank]), error]
        table.add_row(*cells)
    lines = [
        f"Measured on {replay.device} ({replay.device_name}): slowest rank {write_ms(measured.max_kernel_ms)} ms, "
        f"balance {write_percent(measured.balance)}; identical ranks have {write_percent(replay.ceiling.balance)} here"
    ]
    max_error, mean_error = _max_error(plan, measured), _mean_absolute_error(predicted, measured)
    if plan.predicted and max_error is not None and mean_error is not None:
        lines.append(
            f"Predicted by {plan.predicted.cost_model}: slowest rank {write_ms(plan.predicted.max_kernel_ms)} ms "
            f"({write_percent(max_error, signed=True)}); mean error per rank {write_percent(mean_error)}"
        )
    return Group(table, "", *lines)


def _predicted_ms(plan: ShardingPlan) -> tuple[float, ...]:
    """Predicted kernel time of each rank of a replica group; empty without a prediction."""
    if plan.predicted is None:
        return ()
    by_rank = {cost.rank: cost.kernel_ms for cost in plan.predicted.ranks}
    return tuple(by_rank[rank] for rank in range(plan.group_size)) if len(by_rank) >= plan.group_size else ()


def _max_error(plan: ShardingPlan, measured: MeasuredPlan) -> float | None:
    if plan.predicted is None or measured.max_kernel_ms <= 0:
        return None
    return plan.predicted.max_kernel_ms / measured.max_kernel_ms - 1


def _mean_absolute_error(predicted: Sequence[float], measured: MeasuredPlan) -> float | None:
    errors = [
        abs(expected / found - 1)
        for expected, found in zip(predicted, measured.kernel_ms_per_rank, strict=False)
        if found > 0
    ]
    return float(np.mean(errors)) if errors else None
