"""Stage `clock`: whether milliseconds are right: beside other clocks, cold and warm, over and over.

Source:
    torch.profiler adds up what kernels take by themselves, gaps between them left out; triton's do_bench writes 256 MB
    before each run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Final

import torch

from autoshard.core import AccessProfile, LocalShard
from autoshard.formats import load_tables
from autoshard.report.images import Section
from autoshard.report.wording import write_ms, write_percent
from autoshard.runtime.processes.threads import intra_op_threads
from autoshard.table import Table
from bench.kernels.fused import ShardSet
from bench.kernels.harness import Harness, Settings
from bench.kernels.inputs import draw_batch
from bench.kernels.measurable import set_bytes
from bench.measuring.arena import Arenas
from bench.measuring.caches import CacheFlush
from bench.measuring.devices import BenchDevice
from bench.measuring.timing import device_clock, led_ms
from bench.sampling.stream import table_wise_pool
from studies.frame import Numbers
from studies.gpu.stages import LEAST_SECONDS, Stage, Visit
from studies.kernels.eviction import Eviction, described, measure_eviction
from studies.kernels.repeatability import measure_repeatability, verdicts

_BAGS: Final = {"cuda": 65_536, "cpu": 1_024}
_SCALE: Final = {"cuda": 1, "cpu": 64}
_REPETITIONS: Final = 7
_PROFILED: Final = 5
#: Sets that share the rounds of the repeated ones: drawing more of them takes longer than measuring.
_GROUP_SETS: Final = 8


def _run(visit: Visit) -> Numbers:
    device = visit.device
    numbers: dict[str, object] = {"flush": asdict(measure_eviction(device.device))}
    visit.keep(numbers)
    harness = Harness(device)
    cases: dict[str, dict[str, float | None]] = {}
    for name, shards in _cases(device).items():
        cases[name] = _beside(harness, shards)
        numbers |= {
            "cases": cases,
            "num_runs": harness.num_runs,
            "num_discarded": harness.num_discarded,
            "num_waiting": harness.num_waiting,
            "lowest_sm_mhz": harness.clocks.lowest_mhz,
            "highest_sm_mhz": harness.clocks.highest_mhz,
        }
        visit.keep(numbers)
        if visit.seconds_left < LEAST_SECONDS:
            return numbers
    kind = replace(Settings.for_collecting(device), max_group_sets=_GROUP_SETS)
    repeated = measure_repeatability(
        device, {"collecting": kind}, seconds=visit.share(0.8), scale=_SCALE[device.device.type]
    )
    return {**numbers, "repeated": [asdict(one) for one in verdicts(repeated)], "bound": repeated.bound}


def _cases(device: BenchDevice) -> dict[str, tuple[LocalShard, ...]]:
    bags = _BAGS[device.device.type]

    def table(rows: int, dim: int, pooling_factor: float, num_bags: int = bags) -> LocalShard:
        return LocalShard(
            table="table",
            num_embeddings=rows,
            embedding_dim=dim,
            num_bags=num_bags,
            pooling_factor=pooling_factor,
            access=AccessProfile.zipf(rows, 0.8),
        )

    pool = table_wise_pool(load_tables("metasyn").scaled(_SCALE[device.device.type]))
    return {
        "one table": (table(15 * bags, 64, 10.0),),
        "a small batch": (table(bags, 32, 2.0, num_bags=bags // 16),),
        "a thin tier": (table(15 * bags, 128, 0.01),),
        "ten tables": pool[:10],
    }


def _beside(harness: Harness, shards: Sequence[LocalShard]) -> dict[str, float | None]:
    """Milliseconds of forward and backward by each clock; None for a clock that the device does not have."""
    [ours] = harness.measure([shards])
    device = harness.device.device
    running = ShardSet(
        [[draw_batch(shard, device=device)] for shard in shards],
        Arenas(0 if device.type == "cuda" else 2 * set_bytes(shards) + 2**20, device),
        device,
    )
    flush = CacheFlush(device)

    def step() -> None:
        running.backward(running.forward())

    with intra_op_threads(harness.settings.num_threads):
        clock = device_clock(device)
        cold = [led_ms(step, clock, before=flush) for _ in range(_REPETITIONS)]
        warm = [led_ms(step, clock, before=step) for _ in range(_REPETITIONS)]
        profiled_ms = _profiled_ms(step, flush) if device.type == "cuda" else None
    return {
        "forward_ms": ours.forward_ms,
        "backward_ms": ours.backward_ms,
        "cold_ms": sorted(cold)[_REPETITIONS // 2],
        "warm_ms": sorted(warm)[_REPETITIONS // 2],
        "profiled_ms": profiled_ms,
        "triton_ms": _triton_ms(step) if device.type == "cuda" else None,
    }


def _profiled_ms(step: Callable[[], object], flush: Callable[[], object]) -> float:
    """What the kernels of a step take by themselves, after a flush."""

    def both() -> None:
        flush()
        step()

    return (_total_ms(both) - _total_ms(flush)) / _PROFILED


def _total_ms(run: Callable[[], object]) -> float:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(_PROFILED):
            run()
        torch.cuda.synchronize()
    return float(sum(event.self_device_time_total for event in profile.key_averages()) / 1e3)


def _triton_ms(step: Callable[[], object]) -> float | None:
    try:
        from triton.testing import do_bench
    except ImportError:
        return None
    return float(do_bench(step, warmup=10, rep=50, return_mode="median"))


def _show(numbers: Numbers) -> Sequence[Section]:
    flush = Eviction(**numbers["flush"])
    sections = [Section(title="The flush", caption=f"On this device, {described(flush)}.")]
    if "cases" in numbers:
        sections.append(_clocks_section(numbers))
    if "repeated" in numbers:
        sections.append(_repeated_section(numbers))
    return sections


def _clocks_section(numbers: Numbers) -> Section:
    lines = [
        (name, *(_ms(case[column]) for column in ("forward_ms", "backward_ms")), *map(partial(_total, case), _CLOCKS))
        for name, case in numbers["cases"].items()
    ]
    runs, discarded = numbers["num_runs"], numbers["num_discarded"]
    return Section(
        title="Clocks side by side",
        caption="Forward and backward with the fused optimizer, by the harness and by other clocks; all but "
        f"`warm` after a flush. Of {runs + discarded} runs of the harness, {discarded} were thrown away, since the "
        f"device began before the host had queued them; {numbers['num_waiting']} kernels "
        "wait for the host by themselves.",
        tables=(
            Table(
                columns=("set", "forward, ms", "backward, ms", *_CLOCKS.values()),
                rows=tuple(lines),
                caption="Milliseconds of the same sets by several clocks",
            ),
        ),
    )


#: Columns of the totals.
_CLOCKS: Final[Mapping[str, str]] = {
    "harness_ms": "harness",
    "cold_ms": "one run, cold",
    "warm_ms": "one run, warm",
    "profiled_ms": "torch.profiler, kernels alone",
    "triton_ms": "triton do_bench",
}


def _total(case: Mapping[str, float | None], column: str) -> str:
    if column == "harness_ms":
        return _ms((case["forward_ms"] or 0.0) + (case["backward_ms"] or 0.0))
    return _ms(case[column])


def _ms(value: float | None) -> str:
    return "–" if value is None else write_ms(value)


def _repeated_section(numbers: Numbers) -> Section:
    table = Table.of(
        numbers["repeated"],
        (
            ("tables", lambda one: str(one["num_tables"])),
            ("samples", lambda one: str(one["num_measurements"])),
            ("ms", lambda one: write_ms(one["median_ms"])),
            ("CoV as measured", lambda one: write_percent(one["raw"]["plain"])),
            ("CoV, drift divided out", lambda one: write_percent(one["corrected"]["plain"])),
            ("spread of runs", lambda one: write_percent(one["median_spread"])),
        ),
        caption="Samples of a set, its reference's drift divided out",
    )
    return Section(
        title="The same sets over and over",
        caption=f"A sample should repeat within {write_percent(numbers['bound'])}.",
        tables=(table,),
    )


def _headline(numbers: Numbers) -> str:
    flush, repeated = numbers["flush"], numbers.get("repeated", [])
    text = f"a flushed cache is {flush['after_flush']:.1f} times slower"
    if repeated:
        worst = max(one["corrected"]["plain"] for one in repeated)
        text += f"; samples of a set differ by {write_percent(worst)} at most (CoV)"
    return text


STAGE: Final = Stage(name="clock", share=0.13, run=_run, show=_show, headline=_headline)
