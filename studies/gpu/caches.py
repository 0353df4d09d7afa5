"""Stage `caches`: rows in host memory behind FBGEMM's cache: hits and milliseconds, as predicted and as measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Final

import torch

from autoshard.core import AccessProfile, LocalShard, MemoryLevel
from autoshard.evaluation.analytic import AnalyticCostModel, kernel_seconds
from autoshard.evaluation.cached_rows import cache_traffic
from autoshard.report.images import Section
from autoshard.report.wording import write_ms, write_percent
from autoshard.table import Table
from bench.kernels.fused import ShardSet, TimedFusedKernel
from bench.kernels.inputs import ShardBatch, draw_batch
from bench.measuring.arena import Arenas
from bench.measuring.timing import Clock, device_clock, led_ms
from studies.frame import Numbers
from studies.gpu.stages import Stage, Visit

_NUM_EMBEDDINGS, _DIM, _BAGS, _POOLING, _ALPHA = 4_000_000, 64, 16_384, 10.0, 0.9
_SHARES: Final = (0.02, 0.1, 0.3)
#: Batches that fill the cache, and batches that are measured.
_FILLING, _MEASURED = 24, 8


def _run(visit: Visit) -> Numbers:
    if not visit.device.is_cuda:
        return {"rows": [], "reason": "rows are cached in the memory of a GPU alone"}
    rows: list[dict[str, Any]] = []
    batches = [draw_batch(_shard(1.0, "lru"), draw, visit.device.device) for draw in range(_FILLING + _MEASURED)]
    for share, policy in product(_SHARES, ("lru", "lfu")):
        rows.append(_measured(_shard(share, policy), batches, visit))
        visit.keep({"rows": rows})
        if visit.seconds_left < 1.0:
            break
    near = replace(_shard(1.0, "lru"), level=MemoryLevel.HBM, cache_bytes=0)
    rows.append(_measured(near, batches, visit))
    return {"rows": rows}


def _shard(share: float, policy: str) -> LocalShard:
    """A table in host memory, with a cache of a share of its rows."""
    return LocalShard(
        table="cached",
        num_embeddings=_NUM_EMBEDDINGS,
        embedding_dim=_DIM,
        num_bags=_BAGS,
        pooling_factor=_POOLING,
        access=AccessProfile.zipf(_NUM_EMBEDDINGS, _ALPHA),
        level=MemoryLevel.DDR,
        cache_bytes=int(share * _NUM_EMBEDDINGS) * _DIM * 4,
        cache_policy=policy,
    )


def _measured(shard: LocalShard, batches: Sequence[ShardBatch], visit: Visit) -> dict[str, Any]:
    device = visit.device.device
    as_drawn = [replace(batch, measured=replace(batch.measured, shard=shard)) for batch in batches]
    running = ShardSet([as_drawn], Arenas(0, device), device)
    clock, is_cached = device_clock(device), shard.level is MemoryLevel.DDR
    for _ in range(_FILLING):
        running.backward(running.forward())
    hits, forward_ms, backward_ms = [], [], []
    for batch in as_drawn[_FILLING:]:
        if is_cached:
            hits.append(_hit_share(running, batch))
        forward, backward = _pass(running, clock)
        forward_ms.append(forward)
        backward_ms.append(backward)
    memory = AnalyticCostModel.for_device(visit.device.key).memory
    forward_s, backward_s = kernel_seconds([shard], memory)[0].tolist()
    return {
        "share": shard.cache_bytes / (shard.num_embeddings * shard.embedding_dim * 4) if is_cached else 1.0,
        "policy": shard.cache_policy if is_cached else "in device memory",
        "hit_rate": sum(hits) / len(hits) if hits else None,
        "predicted_hit_rate": cache_traffic(shard).hit_rate if is_cached else None,
        "forward_ms": sorted(forward_ms)[_MEASURED // 2],
        "backward_ms": sorted(backward_ms)[_MEASURED // 2],
        "predicted_forward_ms": forward_s * 1e3 + memory.forward_launch_ms,
        "predicted_backward_ms": backward_s * 1e3 + memory.backward_launch_ms,
    }


def _pass(running: ShardSet, clock: Clock) -> tuple[float, float]:
    """Milliseconds of one forward and backward pass; each batch is met once, so that a late run counts as it is."""
    outputs: list[Any] = []
    forward = _once(lambda: outputs.extend(running.forward()), clock)
    return forward, _once(lambda: running.backward(outputs), clock)


def _once(run: Callable[[], object], clock: Clock) -> float:
    def settled(_: bool) -> bool:
        clock.settle()
        return True

    return led_ms(run, clock, agree=settled)


def _hit_share(running: ShardSet, batch: ShardBatch) -> float:
    """Share of a batch's lookups whose row is in FBGEMM's cache now."""
    [kernel] = running.kernels
    assert isinstance(kernel, TimedFusedKernel)
    module = kernel.kernel.module
    places_L = torch.ops.fbgemm.lxu_cache_lookup(batch.ids_L, module.lxu_cache_state, module.total_cache_hash_size)
    return float((places_L >= 0).float().mean())


def _show(numbers: Numbers) -> Sequence[Section]:
    return list(_sections(numbers))


def _sections(numbers: Numbers) -> Iterator[Section]:
    if not numbers["rows"]:
        return
    table = Table.of(
        numbers["rows"],
        (
            ("cache", lambda one: one["policy"]),
            ("of the rows", lambda one: write_percent(one["share"])),
            ("hits, predicted", lambda one: _share(one["predicted_hit_rate"])),
            ("measured", lambda one: _share(one["hit_rate"])),
            ("forward, predicted, ms", lambda one: write_ms(one["predicted_forward_ms"])),
            ("measured, ms", lambda one: write_ms(one["forward_ms"])),
            ("backward, predicted, ms", lambda one: write_ms(one["predicted_backward_ms"])),
            ("measured, ms ", lambda one: write_ms(one["backward_ms"])),
        ),
        caption="One table; each batch was met once",
    )
    yield Section(
        title="Rows behind caches",
        caption=f"{_NUM_EMBEDDINGS:,} rows of dim {_DIM} in host memory, {_BAGS:,} bags of {_POOLING:g} lookups, Zipf "
        f"{_ALPHA:g}; the cache was filled by {_FILLING} batches. Predicted by the analytic model.",
        tables=(table,),
    )


def _share(value: float | None) -> str:
    return "–" if value is None else write_percent(value)


def _headline(numbers: Numbers) -> str:
    measured = [one for one in numbers["rows"] if one["hit_rate"] is not None]
    if not measured:
        return str(numbers.get("reason", ""))
    worst = max(abs(one["hit_rate"] - one["predicted_hit_rate"]) for one in measured)
    return f"hit rates at most {100 * worst:.1f} points from predicted"


STAGE: Final = Stage(name="caches", share=0.08, run=_run, show=_show, headline=_headline)
