"""Benchmark of embedding collectives: which are measured, and the samples they leave."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from autoshard.core import DType
from autoshard.core.errors import DeviceError, InvalidOptionError, SampleStoreError
from autoshard.formats.stores.collective_samples import (
    COLLECTIVE_SAMPLES,
    Collective,
    CollectiveSample,
    GroupLevel,
    Operator,
    Splits,
)
from autoshard.runtime.launch import START_S, running_workers
from bench.collectives.operators import Movement, refusal
from bench.measuring.devices import BenchDevice, find_device
from bench.measuring.provenance import installed_software
from bench.measuring.timing import RoundSettings
from bench.store.writer import SampleWriter

_WORKER = "bench.collectives.worker"
MIN_BYTES = 2**10
MAX_BYTES = 2**28
OPERATORS = (
    (Operator.ALL_TO_ALL, Splits.EQUAL),
    (Operator.ALL_TO_ALL, Splits.UNEQUAL),
    (Operator.REDUCE_SCATTER, Splits.EQUAL),
    (Operator.ALL_GATHER, Splits.EQUAL),
    (Operator.ALL_REDUCE, Splits.EQUAL),
)


def powers_of_four(smallest: int = MIN_BYTES, largest: int = MAX_BYTES) -> tuple[int, ...]:
    """Sizes from the smallest to the largest, each four times the one before."""
    return tuple(smallest * 4**power for power in range(int(math.log(largest / smallest, 4) + 1e-9) + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSettings:
    """Which collectives are measured, and how.

    Attributes:
        sizes: Bytes per rank, see `Collective.bytes_per_rank`.
        dtypes: Formats of the payload.
        skew: Of unequal splits, see `split_matrix`.
        rounds: Rounds of a chunk. Every collective of a chunk runs once per round, beside the reference.
        chunk_bytes: Bytes per rank that a chunk may move in a round, so that it takes seconds, not minutes.
        min_chunk: Collectives of a chunk, whatever their size: rounds are compared over them.
        max_chunk: Most collectives of a chunk.
        reference_bytes: Of the reference, an fp32 all-to-all with equal splits over all ranks.
    """

    sizes: tuple[int, ...] = field(default_factory=powers_of_four)
    dtypes: tuple[DType, ...] = (DType.FP32, DType.FP16, DType.INT8)
    skew: float = 0.5
    rounds: RoundSettings = field(
        default_factory=lambda: RoundSettings(num_warmup=1, num_measured=9, num_dropped=2, flush_every_run=False)
    )
    chunk_bytes: int = 2**27
    min_chunk: int = 4
    max_chunk: int = 40
    reference_bytes: int = 2**20

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1:
            raise InvalidOptionError("must be at least one size of at least 1 byte", field="sizes")
        if not (math.isfinite(self.skew) and self.skew > 0):
            raise InvalidOptionError(f"must be a number above 0, got {self.skew}", field="skew")
        for name in ("chunk_bytes", "min_chunk", "max_chunk", "reference_bytes"):
            if getattr(self, name) < 1:
                raise InvalidOptionError(f"must be at least 1, got {getattr(self, name)}", field=name)
        if self.rounds.num_warmup < 1:
            raise InvalidOptionError("must be at least 1: it tells how long the rest takes", field="num_warmup")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCollection:
    """What a run added.

    Attributes:
        device: Key of the device.
        backend: `gloo` or `nccl`.
        num_samples: Samples written.
        files: Files written, in order.
        seconds: Time taken, starting processes included.
        skipped: (reason, number of collectives) of what was not measured.
    """

    device: str
    backend: str
    num_samples: int
    files: tuple[Path, ...]
    seconds: float
    skipped: tuple[tuple[str, int], ...]

    def to_json(self) -> dict[str, Any]:
        """The result as a JSON object."""
        return asdict(self) | {"files": [str(file) for file in self.files], "skipped": dict(self.skipped)}


def choose_collectives(
    nproc: int, node_size: int, settings: CollectiveSettings, seed: int = 0
) -> tuple[Collective, ...]:
    """Everything that settings name, from small to large, for the levels that the processes have.

    Groups that are the same ranks are measured once: one node is its world, and so are nodes of one rank each.

    Raises:
        InvalidOptionError: If the processes cannot form nodes of this size.
    """
    return tuple(
        Collective(
            level=level,
            operator=operator,
            dtype=dtype,
            bytes_per_rank=size,
            splits=splits,
            skew=settings.skew if splits is Splits.UNEQUAL else 0.0,
            split_seed=seed if splits is Splits.UNEQUAL else 0,
        )
        for size in settings.sizes
        for level in levels_of(nproc, node_size)
        for operator, splits in OPERATORS
        for dtype in settings.dtypes
    )


def levels_of(nproc: int, node_size: int) -> tuple[GroupLevel, ...]:
    """Levels with groups of their own.

    Raises:
        InvalidOptionError: If the processes cannot form nodes of this size.
    """
    if nproc < 2:
        raise InvalidOptionError(f"must be at least 2: one process exchanges nothing; got {nproc}", field="nproc")
    if node_size < 1 or nproc % node_size:
        raise InvalidOptionError(f"must divide the {nproc} processes, got {node_size}", field="node_size")
    if node_size == nproc:
        return (GroupLevel.NODE,)
    if node_size == 1:
        return (GroupLevel.ACROSS_NODES,)
    return (GroupLevel.NODE, GroupLevel.ACROSS_NODES, GroupLevel.WORLD)


def group_shape(level: GroupLevel, nproc: int, node_size: int) -> tuple[int, int]:
    """Ranks of one group of a level, and the nodes that it spans."""
    num_nodes = nproc // node_size
    return {
        GroupLevel.NODE: (node_size, 1),
        GroupLevel.ACROSS_NODES: (num_nodes, num_nodes),
        GroupLevel.WORLD: (nproc, num_nodes),
    }[level]


def collect_collectives(
    store: str | Path,
    nproc: int = 4,
    node_size: int = 2,
    *,
    device: str = "auto",
    seconds: float | None = None,
    settings: CollectiveSettings | None = None,
    seed: int = 0,
    seconds_per_file: float = 5.0,
    stall_timeout_s: float = 120.0,
    advance: Callable[[int, float], None] = lambda *_: None,
) -> CollectiveCollection:
    """Measures collectives on processes of this machine and appends the samples to a store.

    What the store has fewest samples of comes first, small sizes before large, so that a run that was ended early is
    continued by the next one.

    Args:
        store: The store's folder.
        nproc: Processes, at least 2; on CUDA each has a GPU of its own.
        node_size: Processes that count as one node; divides `nproc`.
        device: `cpu` (gloo), `cuda` (NCCL), or `auto`: CUDA where every process gets a GPU.
        seconds: Time to measure, without the start of the processes; what does not fit is skipped and counted, and
            what is left over goes into measuring all again. None for measuring all once.
        settings: What and how.
        seed: Of unequal splits and of the order of runs.
        seconds_per_file: Samples are written this often: what a killed run can lose, beside the chunk in hand.
        stall_timeout_s: A process that is silent for this long is taken to hang; a single collective must be quicker.
        advance: Told how many samples have just been measured, and the seconds since the last call.

    Raises:
        InputError: If an option makes no sense, or the store holds files of another kind.
        SampleStoreError: If the store cannot be written.
        DeviceError: If a GPU is missing or out of memory.
        ExecutionError: If a process dies, hangs, or receives wrong data. Earlier samples are written.
    """
    settings = settings or CollectiveSettings()
    chosen = choose_collectives(nproc, node_size, settings, seed)
    for name, value in (("seconds", seconds), ("stall_timeout_s", stall_timeout_s)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise InvalidOptionError(f"must be above 0, got {value}", field=name)
    if Path(store).exists() and not Path(store).is_dir():
        raise SampleStoreError("is no folder", source=str(store))
    bench_device = _device_for(device, nproc)
    started = time.monotonic()
    log = _SampleLog(Path(store), bench_device, nproc, node_size, seconds_per_file)
    log.skipped.update(reason for one in chosen if (reason := refusal(one)))
    chosen = fewest_first(tuple(one for one in chosen if not refusal(one)), store, bench_device.key, nproc, node_size)
    job = {
        "device": bench_device.device.type,
        "node_size": node_size,
        "rounds": asdict(settings.rounds),
        "reference_bytes": settings.reference_bytes,
        "seconds": seconds,
        "seed": seed,
        "timeout_s": START_S + stall_timeout_s,  # this process looks after hanging ones
        "chunks": [[asdict(one) for one in chunk] for chunk in _chunks(chosen, settings)],
    }
    reported = started
    try:
        # `bench` is a generic name: the one beside this file has to come first.
        path = [str(Path(__file__).resolve().parents[2])]
        with running_workers(_WORKER, job, nproc, stall_timeout_s=stall_timeout_s, path=path) as (_, events):
            for event in events:
                count = log.take(event) if isinstance(event, dict) and "event" in event else 0
                if count:
                    advance(count, time.monotonic() - reported)
                    reported = time.monotonic()
    finally:
        log.writer.write()
    return CollectiveCollection(
        device=bench_device.key,
        backend=log.backend,
        num_samples=log.writer.num_samples,
        files=tuple(log.writer.files),
        seconds=time.monotonic() - started,
        skipped=tuple(sorted(log.skipped.items())),
    )


class _SampleLog:
    """Turns what workers report into samples, and writes them every few seconds."""

    def __init__(self, store: Path, device: BenchDevice, nproc: int, node_size: int, seconds_per_file: float) -> None:
        software = installed_software()
        self.backend = "nccl" if device.is_cuda else "gloo"
        self.skipped: Counter[str] = Counter()
        self.writer = SampleWriter(COLLECTIVE_SAMPLES, store, seconds_per_file)
        self._fixed: dict[str, Any] = {
            "device": device.key,
            "device_name": device.name,
            "backend": self.backend,
            "torch_version": software.torch_version,
            "autoshard_version": software.autoshard_version,
            "git_commit": software.git_commit,
            "num_hosts": 1,
            "nproc": nproc,
            "node_size": node_size,
        }

    def take(self, event: dict[str, Any]) -> int:
        """Takes one report; returns how many samples it brought."""
        if event["event"] == "skipped":
            self.skipped[event["reason"]] += event["count"]
        if event["event"] != "measured":
            return 0
        for row in event["measured"]:
            self.writer.add(self._sample(collective_from_json(row.pop("collective")), row, event))
        self.writer.write_when_due()
        return len(event["measured"])

    def _sample(self, collective: Collective, row: dict[str, Any], event: dict[str, Any]) -> CollectiveSample:
        group_size, num_nodes = group_shape(collective.level, self._fixed["nproc"], self._fixed["node_size"])
        movement = Movement.of(collective, group_size)
        sent_R, received_R = movement.sent_bytes()
        return CollectiveSample(
            **self._fixed,
            **row,
            collected_at=datetime.now(UTC),
            collective=replace(collective, bytes_per_rank=movement.bytes_per_rank),
            group_size=group_size,
            num_nodes=num_nodes,
            mean_sent_bytes=float(sent_R.mean()),
            max_sent_bytes=int(sent_R.max()),
            max_received_bytes=int(received_R.max()),
            reference_ms=event["reference_ms"],
            num_rounds=event["num_rounds"],
        )


def collective_from_json(document: dict[str, Any]) -> Collective:
    """The collective that `dataclasses.asdict` made a JSON object of."""
    kinds = {"level": GroupLevel, "operator": Operator, "dtype": DType, "splits": Splits}
    return Collective(**document | {name: kind(document[name]) for name, kind in kinds.items()})


def _device_for(wanted: str, nproc: int) -> BenchDevice:
    num_gpus = torch.cuda.device_count()
    if wanted == "auto":
        wanted = "cuda" if num_gpus >= nproc else "cpu"
    found = find_device(wanted)
    if found.is_cuda and num_gpus < nproc:
        raise DeviceError(f"{nproc} processes need a GPU each, this machine has {num_gpus}")
    return found


def fewest_first(
    chosen: tuple[Collective, ...], store: str | Path, device: str, nproc: int, node_size: int
) -> tuple[Collective, ...]:
    """Puts first what a store has fewest samples of from this arrangement of processes; otherwise keeps the order.

    Raises:
        SampleStoreError: If a file of the store cannot be read.
        FormatError: If one is not a sample file of this version.
    """
    if device not in COLLECTIVE_SAMPLES.devices(store):
        return chosen
    counts = Counter(
        _kind(sample.collective, sample.group_size)
        for sample in COLLECTIVE_SAMPLES.read(store, device)
        if (sample.nproc, sample.node_size) == (nproc, node_size)
    )

    def num_samples(one: Collective) -> int:
        group_size, _ = group_shape(one.level, nproc, node_size)
        exact = replace(one, bytes_per_rank=Movement.of(one, group_size).bytes_per_rank)
        return counts[_kind(exact, group_size)]

    return tuple(sorted(chosen, key=num_samples))


def _kind(one: Collective, group_size: int) -> tuple[object, ...]:
    return one.level, one.operator, one.splits, one.dtype, one.bytes_per_rank, group_size


def _chunks(chosen: Sequence[Collective], settings: CollectiveSettings) -> Iterator[list[Collective]]:
    chunk: list[Collective] = []
    for one in chosen:
        is_full = sum(held.bytes_per_rank for held in chunk) + one.bytes_per_rank > settings.chunk_bytes
        if len(chunk) >= settings.max_chunk or (is_full and len(chunk) >= settings.min_chunk):
            yield chunk
            chunk = []
        chunk.append(one)
    if chunk:
        yield chunk
