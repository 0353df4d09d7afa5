"""Times training steps of TorchRec's DLRM with the recorder of access profiles and without, in turn."""

from __future__ import annotations

import tempfile
import time
import warnings
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Annotated

import torch
import torch.distributed as dist
import typer

from autoshard.console import JsonOption, emit, progress
from autoshard.core import PlacedShard, Shard, ShardingPlan
from autoshard.torchrec import record, shard
from autoshard.torchrec.recording import Recorder
from autoshard.torchrec.sharded import ShardedModel
from studies.engines.dlrm.model import Batch, Dlrm, draw_batches
from studies.engines.dlrm.setting import DlrmSetting

#: Different batches, which all steps repeat.
_NUM_BATCHES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RecorderCost:
    """Time of the recorder as a share of a training step's.

    Attributes:
        batch_size: Samples of a step, on one process.
        every: Forward passes from one that is counted to the next; a block has so many steps.
        rounds: Pairs of blocks, one with the recorder and one without; which comes first alternates.
        step_ms: Median of a step without it, in milliseconds.
        share: Median over rounds of the share of a step that the recorder adds.
        low: First quartile of the share.
        high: Third quartile.
        num_counted: Batches that the recorder counted, one per round.
    """

    batch_size: int
    every: int
    rounds: int
    step_ms: float
    share: float
    low: float
    high: float
    num_counted: int


def measure(setting: DlrmSetting, *, every: int, rounds: int) -> RecorderCost:
    """Trains on one process, on autoshard's engine, and switches the recorder on and off between blocks of steps."""
    warnings.simplefilter("ignore")  # of TorchRec's modules on import and first use
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        try:
            return _measured(setting, every, rounds)
        finally:
            dist.destroy_process_group()


def _measured(setting: DlrmSetting, every: int, rounds: int) -> RecorderCost:
    model, batches = Dlrm(setting), draw_batches(setting, 0)
    recorder = record(model, batch_size=setting.batch_size, every=every)
    recorder.close()
    tables = setting.table_set()
    shards = tuple(PlacedShard.table_wise(Shard.whole(table), 0) for table in tables.tables)
    sharded = shard(model, ShardingPlan(tables=tables, topology=setting.topology(), shards=shards))
    optimizer = torch.optim.SGD(model.parameters(), lr=setting.learning_rate)
    _block_s(sharded, optimizer, batches, every)
    plain: list[float] = []
    recorded: list[float] = []
    with progress("Training", rounds) as advance:
        for number in range(rounds):
            for is_recorded in (number % 2 == 0, number % 2 == 1):
                _switch(recorder, sharded, is_recorded)
                taken_s = _block_s(sharded, optimizer, batches, every)
                (recorded if is_recorded else plain).append(taken_s)
            advance(1)
    recorder.close()
    sharded.close()
    shares = [one / other - 1 for one, other in zip(recorded, plain, strict=True)]
    low, _, high = quantiles(shares, n=4) if rounds > 1 else (shares[0],) * 3
    return RecorderCost(
        batch_size=setting.batch_size,
        every=every,
        rounds=rounds,
        step_ms=1e3 * median(plain) / every,
        share=median(shares),
        low=low,
        high=high,
        num_counted=recorder.num_counted,
    )


def _switch(recorder: Recorder, sharded: ShardedModel, is_recorded: bool) -> None:
    recorder.close()
    if is_recorded:
        for collection in sharded.collections.values():
            recorder.watch(collection)


def _block_s(model: ShardedModel, optimizer: torch.optim.Optimizer, batches: list[Batch], steps: int) -> float:
    """Seconds of a block of training steps."""
    started_s = time.perf_counter()
    for step in range(steps):
        loss = model(batches[step % len(batches)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.end_step()
    return time.perf_counter() - started_s


def main(
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of a step.")] = 2048,
    scale: Annotated[int, typer.Option(min=1, help="Divides the rows of Criteo's tables.")] = 16,
    every: Annotated[int, typer.Option(min=1, help="Steps from one that is counted to the next.")] = 100,
    rounds: Annotated[int, typer.Option(min=1, help="Pairs of blocks of so many steps.")] = 15,
    as_json: JsonOption = False,
) -> None:
    """Measures what recording access profiles adds to training steps, in paired blocks of steps.

    Example:
        OMP_NUM_THREADS=1 python -m studies recorder
    """
    setting = DlrmSetting(batch_size=batch_size, scale=scale, num_processes=1, warmup=0, steps=_NUM_BATCHES)
    cost = measure(setting, every=every, rounds=rounds)
    text = (
        f"{100 * cost.share:+.2f}% of a step ({100 * cost.low:+.2f}% to {100 * cost.high:+.2f}%, quartiles of "
        f"{cost.rounds} pairs of {cost.every} steps of {cost.step_ms:.1f} ms, batch {cost.batch_size:,})"
    )
    emit(asdict(cost), text, as_json=as_json)
