"""Stage `samples`: sets of tables as AutoShard collects them, and as plans cut them; forward and backward apart."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import numpy as np

from autoshard.core import DType, LocalShard, Optimizer, TableSet
from autoshard.formats import load_tables
from autoshard.formats.files import atomic_write
from autoshard.formats.stores.samples import KERNEL_SAMPLES, Sample
from autoshard.report.images import Section
from autoshard.report.wording import write_percent
from autoshard.table import Table
from bench.collecting.kernels import KernelKind
from bench.collecting.run import memory_limit
from bench.kernels.harness import Harness, Settings
from bench.kernels.measurable import is_measurable
from bench.measuring.devices import BenchDevice
from bench.sampling.strategies import SetSource
from bench.sampling.stream import ChosenSet, stream_sets, table_wise_pool
from studies.frame import Numbers
from studies.gpu.stages import Stage, Visit

SAMPLES_FILE: Final = "samples.parquet"
#: Sources of samples for AutoShard's Table 3: sets of seen tables, to train on and to test on, and of unseen ones.
SEEN, SEEN_TEST, UNSEEN_TEST = "seen", "seen-test", "unseen-test"
#: AutoShard's Table 3: tables of a test set, and test sets.
_TEST_TABLES, _TEST_SETS = 10, 100
#: AutoShard B.1 has the dims of FBGEMM's own; wider ones are what large models have today.
_DIMS: Final = (4, 8, 16, 32, 64, 128, 192, 256)
_MIXTURE: Final = {
    "random": 0.25,
    "placements": 0.15,
    "memory-limit": 0.05,
    "singles": 0.05,
    "copies": 0.1,
    "slices": 0.15,
    "kinds": 0.25,
}
#: Divisors of rows and batch: batches of 65,536, 16,384 and 4,096 on a GPU.
_SCALES: Final = {"cuda": (1, 4, 16), "cpu": (256, 1024)}
#: Counted runs of each set on a GPU, and at most two before them.
_CUDA_ROUNDS: Final = 7
#: In which order sources come.
_TURNS: Final = ("mixture", SEEN, "mixture", SEEN_TEST, "mixture", SEEN, "mixture", UNSEEN_TEST)
#: Samples are written this often at least, as shares of the stage's time.
_WRITES: Final = 6


def read_samples(folder: Path) -> tuple[Sample, ...]:
    """The samples of a run; none before it has any."""
    file = folder / SAMPLES_FILE
    return KERNEL_SAMPLES.read_file(file) if file.exists() else ()


def _run(visit: Visit) -> Numbers:
    before, device = read_samples(visit.folder), visit.device
    seconds = visit.seconds_left
    harness = Harness(device, _settings(device))
    samples = list(before)

    def numbers() -> dict[str, Any]:
        return _summary(samples, len(before), harness, seconds - visit.seconds_left)

    def on_file(file: Path) -> None:
        samples.extend(KERNEL_SAMPLES.read_file(file))
        atomic_write(visit.folder / SAMPLES_FILE, KERNEL_SAMPLES.file_content(samples))
        visit.keep(numbers())

    with tempfile.TemporaryDirectory() as store:
        collected = KernelKind.collect(
            harness,
            drawn_sets(device, seed=len(before)),
            Path(store),
            seconds=0.95 * visit.seconds_left,
            seconds_per_file=seconds / _WRITES,
            on_file=on_file,
        )
    return {**numbers(), "failed": dict(collected.failed), "reasons": list(collected.reasons)[:5]}


def _settings(device: BenchDevice) -> Settings:
    """Those of the collector, on a GPU with fewer rounds: more sets teach more than steadier ones."""
    usual = Settings.for_collecting(device, _CUDA_ROUNDS if device.is_cuda else None)
    return replace(usual, rounds=replace(usual.rounds, num_warmup=min(2, usual.rounds.num_warmup)))


def _summary(samples: Sequence[Sample], num_before: int, harness: Harness, seconds: float) -> dict[str, Any]:
    forward, backward = ([getattr(one, name) for one in samples] for name in ("forward_ms", "backward_ms"))
    return {
        "num_samples": len(samples),
        "num_new": len(samples) - num_before,
        "seconds": seconds,
        "samples_per_s": (len(samples) - num_before) / seconds if seconds else 0.0,
        "timed_share": harness.timed_share,
        "by_source": dict(Counter(one.source for one in samples)),
        "by_kind": dict(Counter(shard.kernel_kind for one in samples for shard in one.local_shards).most_common()),
        "by_dim": dict(
            sorted(Counter(str(shard.embedding_dim) for one in samples for shard in one.local_shards).items())
        ),
        "num_noisy": sum(one.is_noisy for one in samples),
        "num_runs": harness.num_runs,
        "num_discarded": harness.num_discarded,
        "num_waiting": harness.num_waiting,
        "lowest_sm_mhz": harness.clocks.lowest_mhz,
        "highest_sm_mhz": harness.clocks.highest_mhz,
        "throttled": sum(bool(one.throttle_reasons) for one in samples),
        "forward_ms": np.percentile(forward, (0, 50, 100)).tolist() if forward else [],
        "backward_ms": np.percentile(backward, (0, 50, 100)).tolist() if backward else [],
    }


def drawn_sets(device: BenchDevice, seed: int) -> Iterator[ChosenSet]:
    """Endless sets of all sources in turn; test sets until there are enough."""
    sources = {
        SEEN: _halves(device, 0, seed, tests=False),
        SEEN_TEST: _halves(device, 0, seed, tests=True),
        UNSEEN_TEST: _halves(device, 1, seed, tests=True),
    }
    mixtures = cycle([_mixture(device, scale, seed) for scale in _SCALES[device.device.type]])
    for name in cycle(_TURNS):
        chosen = next(sources[name] if name in sources else next(mixtures), None)
        if chosen is not None:
            yield chosen


def varied(tables: TableSet, dtype: DType | None = None) -> TableSet:
    """The tables with dims of all widths, by turns of a fixed draw, in another number format where it is given."""
    dims = np.random.default_rng(0).choice(_DIMS, len(tables.tables)).tolist()
    changed = tuple(
        replace(table, embedding_dim=dim, dtype=dtype or table.dtype, optimizer=Optimizer.ROWWISE_ADAGRAD)
        for table, dim in zip(tables.tables, dims, strict=True)
    )
    return replace(tables, tables=changed)


def _mixture(device: BenchDevice, scale: int, seed: int) -> Iterator[ChosenSet]:
    source = SetSource(
        tables=varied(load_tables("metasyn").scaled(scale)),
        max_tables=15,
        device=device.key,
        memory_bytes=memory_limit(device),
        accepts=partial(is_measurable, on_cuda=device.is_cuda),
    )
    return stream_sets(source, seed=seed, weights=_MIXTURE)


def _halves(device: BenchDevice, half: int, seed: int, *, tests: bool) -> Iterator[ChosenSet]:
    """Sets of every other table, fp16 as in the paper: of ten to test on, of 1 to 15 to train on."""
    tables = varied(load_tables("metasyn").scaled(_SCALES[device.device.type][0]), DType.FP16)
    fits = memory_limit(device) // _TEST_TABLES
    pool: list[LocalShard] = [shard for shard in table_wise_pool(tables)[half::2] if shard.memory_bytes <= fits]
    rng = np.random.default_rng([seed, half, tests])
    source = (SEEN if not half else "") if not tests else (SEEN_TEST, UNSEEN_TEST)[half]
    number = 0
    while not tests or number < _TEST_SETS:
        number += 1
        size = _TEST_TABLES if tests else int(rng.integers(1, 16))
        chosen = rng.choice(len(pool), size, replace=False).tolist()
        yield ChosenSet(shards=tuple(pool[index] for index in chosen), source=source)


def _show(numbers: Numbers) -> Sequence[Section]:
    lines = [(name, str(count)) for name, count in numbers["by_source"].items()]
    kinds = [(name, str(count)) for name, count in numbers["by_kind"].items()]
    dims = [(name, str(count)) for name, count in sorted(numbers["by_dim"].items(), key=lambda pair: int(pair[0]))]
    total = numbers["num_runs"] + numbers["num_discarded"]
    caption = (
        f"{numbers['num_samples']:,} sets, {numbers['samples_per_s']:.1f} a second in this run, "
        f"{write_percent(numbers['timed_share'])} of the time in timed kernels. {numbers['num_noisy']} stayed noisy. "
        f"Of {total:,} runs {numbers['num_discarded']:,} were run again behind longer leads; "
        f"{numbers['num_waiting']:,} kernels wait for the host by themselves; "
        f"the clock was held back in {numbers['throttled']:,} samples."
    )
    return (
        Section(
            title="Samples",
            caption=caption,
            tables=(
                Table(columns=("source", "samples"), rows=tuple(lines), caption="How sets were chosen"),
                Table(columns=("kind of kernel", "shards"), rows=tuple(kinds), caption="What they hold"),
                Table(columns=("embedding dim", "shards"), rows=tuple(dims), caption="How wide they are"),
            ),
        ),
    )


def _headline(numbers: Numbers) -> str:
    return f"{numbers['num_samples']:,} samples, {numbers['samples_per_s']:.1f} a second"


STAGE: Final = Stage(name="samples", share=0.34, run=_run, show=_show, headline=_headline)
