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
from torchrec import KeyedJaggedTensor

from autoshard.console import JsonOption, emit, progress
from autoshard.core import PlacedShard, Shard, ShardingPlan
from autoshard.torchrec import record, shard
from autoshard.torchrec.recording import Recorder
from autoshard.torchrec.sharded import ShardedModel
from studies.engines.dlrm.model import Batch, Dlrm, draw_batches
from studies.engines.dlrm.setting import DlrmSetting

#: Different batches, which all steps repeat.
_NUM_BATCHES = 20
#: Steps before any is timed.
_WARMUP = 10
#: Calls of a module that does nothing, by which hooks are timed: that are counted, and that are not.
_NUM_COUNTED, _NUM_PASSED = 1000, 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RecorderCost:
    """Time of the recorder as a share of a training step's.

    Hooks are timed by themselves, for they take less than steps differ. Pairs of steps check that nothing else is
    slower for them.

    Attributes:
        batch_size: Samples of a step, on one process.
        every: Forward passes from one that is counted to the next.
        rounds: Pairs of steps, one that is counted and one without the recorder; which comes first alternates.
        step_ms: Median of a step without it, in milliseconds.
        counted_ms: What the hooks of a step that is counted take, in the mean.
        passed_ms: What the hooks of any other step take.
        share: Share of a step that the recorder takes: of `every` steps, one is counted.
        longer_ms: Median over pairs of what a counted step takes longer.
        longer_low_ms: First quartile of that.
        longer_high_ms: Third quartile.
        num_counted: Steps that the recorder counted.
    """

    batch_size: int
    every: int
    rounds: int
    step_ms: float
    counted_ms: float
    passed_ms: float
    share: float
    longer_ms: float
    longer_low_ms: float
    longer_high_ms: float
    num_counted: int


def measure(setting: DlrmSetting, *, every: int, rounds: int) -> RecorderCost:
    """Times hooks, and trains on one process, on autoshard's engine, with and without a recorder that counts all steps.

    Args:
        setting: Sizes of model and batches.
        every: Forward passes from one that is counted to the next, in what is reported.
        rounds: Pairs of steps.
    """
    warnings.simplefilter("ignore")  # of TorchRec's modules on import and first use
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        try:
            return _measured(setting, every, rounds)
        finally:
            dist.destroy_process_group()


def _measured(setting: DlrmSetting, every: int, rounds: int) -> RecorderCost:
    model, batches = Dlrm(setting), draw_batches(setting, 0)
    counting, passing, recorder = (_closed(model, setting, number) for number in (1, 2 * _NUM_PASSED, 1))
    tables = setting.table_set()
    shards = tuple(PlacedShard.table_wise(Shard.whole(table), 0) for table in tables.tables)
    sharded = shard(model, ShardingPlan(tables=tables, topology=setting.topology(), shards=shards))
    counted_ms = _hook_ms(counting, batches, _NUM_COUNTED)
    passed_ms = _hook_ms(passing, batches, _NUM_PASSED)
    optimizer = torch.optim.SGD(model.parameters(), lr=setting.learning_rate)
    plain_ms, longer_ms = _paired_ms(sharded, optimizer, recorder, batches, rounds)
    num_modules = len(sharded.collections)
    sharded.close()
    low_ms, _, high_ms = quantiles(longer_ms, n=4) if rounds > 1 else longer_ms * 3
    return RecorderCost(
        batch_size=setting.batch_size,
        every=every,
        rounds=rounds,
        step_ms=median(plain_ms),
        counted_ms=counted_ms * num_modules,
        passed_ms=passed_ms * num_modules,
        share=num_modules * (counted_ms + (every - 1) * passed_ms) / (every * median(plain_ms)),
        longer_ms=median(longer_ms),
        longer_low_ms=low_ms,
        longer_high_ms=high_ms,
        num_counted=recorder.num_counted,
    )


def _closed(model: Dlrm, setting: DlrmSetting, every: int) -> Recorder:
    """A recorder of a model that watches nothing yet."""
    recorder = record(model, batch_size=setting.batch_size, every=every)
    recorder.close()
    return recorder


def _hook_ms(recorder: Recorder, batches: list[Batch], num_calls: int) -> float:
    """What a recorder adds to each call of a module, whose first call is not timed."""
    module = torch.nn.Identity()
    given = [_fresh(batches[number % len(batches)].ids) for number in range(num_calls)]
    without_ms = _calls_ms(module, given)
    recorder.watch(module)
    module(batches[0].ids)
    with_ms = _calls_ms(module, given)
    recorder.close()
    return (with_ms - without_ms) / num_calls


def _fresh(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The same ids in a batch that keeps nothing of its parts yet."""
    return KeyedJaggedTensor(keys=ids.keys(), values=ids.values(), lengths=ids.lengths())


def _calls_ms(module: torch.nn.Module, given: list[KeyedJaggedTensor]) -> float:
    started_s = time.perf_counter()
    for ids in given:
        module(ids)
    return 1e3 * (time.perf_counter() - started_s)


def _paired_ms(
    sharded: ShardedModel, optimizer: torch.optim.Optimizer, recorder: Recorder, batches: list[Batch], rounds: int
) -> tuple[list[float], list[float]]:
    """Times of steps without the recorder, and what counted ones of the same batches take longer."""
    plain_ms: list[float] = []
    counted_ms: list[float] = []
    with progress("Training", _WARMUP + 2 * rounds) as advance:
        for number in range(_WARMUP):
            _step_ms(sharded, optimizer, batches[number % len(batches)])
            advance(1)
        for number in range(rounds):
            for is_counted in (number % 2 == 0, number % 2 == 1):
                _switch(recorder, sharded, is_counted)
                taken_ms = _step_ms(sharded, optimizer, batches[number % len(batches)])
                (counted_ms if is_counted else plain_ms).append(taken_ms)
                advance(1)
    recorder.close()
    return plain_ms, [one - other for one, other in zip(counted_ms, plain_ms, strict=True)]


def _switch(recorder: Recorder, sharded: ShardedModel, is_recorded: bool) -> None:
    recorder.close()
    if is_recorded:
        for collection in sharded.collections.values():
            recorder.watch(collection)


def _step_ms(model: ShardedModel, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """Time of one training step."""
    started_s = time.perf_counter()
    loss = model(batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.end_step()
    return 1e3 * (time.perf_counter() - started_s)


def main(
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of a step.")] = 2048,
    scale: Annotated[int, typer.Option(min=1, help="Divides the rows of Criteo's tables.")] = 16,
    every: Annotated[int, typer.Option(min=1, help="Steps from one that is counted to the next.")] = 100,
    rounds: Annotated[int, typer.Option(min=1, help="Pairs of steps.")] = 50,
    as_json: JsonOption = False,
) -> None:
    """Measures what recording access profiles adds to training steps: its hooks, and pairs of steps with and without.

    Takes about 20 seconds of one core.

    Example:
        OMP_NUM_THREADS=1 python -m studies recorder
    """
    setting = DlrmSetting(batch_size=batch_size, scale=scale, num_processes=1, warmup=0, steps=_NUM_BATCHES)
    cost = measure(setting, every=every, rounds=rounds)
    text = (
        f"{cost.share:.3%} of a step of {cost.step_ms:.1f} ms (batch {cost.batch_size:,}): of one step in {cost.every} "
        f"hooks take {cost.counted_ms:.2f} ms, of any other {1e3 * cost.passed_ms:.1f} us; "
        f"counted steps took {cost.longer_ms:+.1f} ms longer ({cost.longer_low_ms:+.1f} to "
        f"{cost.longer_high_ms:+.1f} ms, quartiles of {cost.rounds} pairs)"
    )
    emit(asdict(cost), text, as_json=as_json)
