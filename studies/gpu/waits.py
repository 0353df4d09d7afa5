"""Stage `waits`: how often the host waits for the device in a step of the thin engine, and how busy the host is."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from autoshard.core import ShardingPlan
from autoshard.report.images import Section
from autoshard.report.wording import write_ms
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.engine.ids.prefetch import Prefetched
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.runtime.training.synthetic import draw_samples
from autoshard.table import Table
from studies.engines.host_waits import finish_step, plans, row_orders_of
from studies.frame import Numbers
from studies.gpu.stages import Stage, Visit

_FEATURES: Final = (10, 1000)
#: Ranks of the plans, all of which one process executes.
_RANKS: Final = 2
_WARM_UP, _COUNTED, _TIMED = 4, 2, 20
_NUM_BATCHES: Final = 4


def _run(visit: Visit) -> Numbers:
    device = visit.device.device
    rows: list[dict[str, Any]] = []
    is_cuda = device.type == "cuda"
    own, store = torch.device("cuda", torch.cuda.current_device()) if is_cuda else None, HashStore()
    dist.init_process_group("nccl" if is_cuda else "gloo", store=store, rank=0, world_size=1, device_id=own)
    try:
        for num_features in _FEATURES:
            for name, plan in plans(num_features, _RANKS).items():
                if visit.seconds_left < 1:
                    return {"rows": rows}
                for is_prefetched in (False, True):
                    found = _measured(plan, device, is_prefetched=is_prefetched)
                    rows.append({"plan": name, "features": num_features, "prefetched": is_prefetched, **found})
                visit.keep({"rows": rows})
    finally:
        dist.destroy_process_group()
    return {"rows": rows}


def _measured(plan: ShardingPlan, device: torch.device, *, is_prefetched: bool) -> dict[str, float | None]:
    """Waits of a step, and its milliseconds: of the thread that trains, on its processor, and in all."""
    settings = FusedSettings(learning_rate=0.05)
    engine = ShardedEmbeddings(plan, settings, device=device, row_orders=row_orders_of(plan))
    drawn = (draw_samples(plan.tables, 0, engine.local_batch_size, (0, number)) for number in range(_NUM_BATCHES))
    batches = [one.ids.to(device) for one in drawn]
    coming: Prefetched | None = engine.prefetch(batches[0]) if is_prefetched else None
    number = 0

    def step() -> None:
        nonlocal coming, number
        own, number = coming, number + 1
        coming = engine.prefetch(batches[number % _NUM_BATCHES]) if is_prefetched else None
        finish_step(engine, engine.start(batches[number % _NUM_BATCHES] if own is None else own))

    for _ in range(_WARM_UP):
        step()
    waits = _waits_of(step) if device.type == "cuda" else None
    begun, busy = time.perf_counter(), time.thread_time()
    for _ in range(_TIMED):
        step()
    busy = time.thread_time() - busy
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    wall = time.perf_counter() - begun
    if coming is not None:
        engine.start(coming).wait()
    engine.close()
    return {"waits": waits, "host_ms": busy / _TIMED * 1e3, "step_ms": wall / _TIMED * 1e3}


def _waits_of(step: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    with _synchronising() as found:
        for _ in range(_COUNTED):
            step()
    return len(found) / _COUNTED


@contextmanager
def _synchronising() -> Iterator[list[str]]:
    """Warnings of torch about calls that wait for the device, on all threads."""
    found: list[str] = []

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if "synchroniz" in str(message):
            found.append(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _show(numbers: Numbers) -> Sequence[Section]:
    table = Table.of(
        numbers["rows"],
        (
            ("plan", lambda one: one["plan"]),
            ("features", lambda one: f"{one['features']:,}"),
            ("ids", lambda one: "prefetched" if one["prefetched"] else "at once"),
            ("waits a step", lambda one: "" if one["waits"] is None else f"{one['waits']:g}"),
            ("host busy, ms", lambda one: write_ms(one["host_ms"])),
            ("step, ms", lambda one: write_ms(one["step_ms"])),
        ),
        caption=f"Steps of the thin engine's tables alone, one process that executes {_RANKS} ranks",
    )
    return (Section(title="Host waits", caption="Counted by torch (`set_sync_debug_mode`).", tables=(table,)),)


def _headline(numbers: Numbers) -> str:
    waits = [one["waits"] for one in numbers["rows"] if one["waits"] is not None]
    return f"at most {max(waits):g} host waits a step" if waits else ""


STAGE: Final = Stage(name="waits", share=0.04, run=_run, show=_show, headline=_headline)
