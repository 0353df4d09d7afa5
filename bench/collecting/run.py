"""A run of the command `collect`: kernels, dense layers and collectives, one after the other, on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from autoshard.core import LocalShard
from autoshard.core.errors import InvalidOptionError
from autoshard.core.quoting import shown
from autoshard.formats import canonical_json, digest, load_tables, tables_to_json
from autoshard.formats.stores.collective_samples import COLLECTIVE_SAMPLES
from autoshard.formats.stores.dense_samples import DENSE_SAMPLES
from autoshard.formats.stores.samples import KERNEL_SAMPLES, devices_in, measured_sets, read_samples
from autoshard.plugins import find_trainer
from bench.collecting.kernels import collect_samples
from bench.collecting.options import GIB, CollectOptions, SampleKind, seconds_until
from bench.collecting.outcome import Outcome
from bench.collecting.retraining import collect_and_train
from bench.collecting.set_queue import StreamPosition
from bench.collecting.store_lock import CollectorLock, device_lock_name
from bench.collecting.termination import Terminated
from bench.kernels.harness import Harness, Settings
from bench.kernels.measurable import is_measurable
from bench.measuring.devices import BenchDevice, find_device
from bench.measuring.provenance import installed_software
from bench.sampling.stream import STRATEGIES, SetSource, stream_sets

Advance = Callable[[int, float], None]


def run_collection(options: CollectOptions, advance: Advance = lambda *_: None) -> tuple[Outcome, ...]:
    """Measures and appends to the store; one outcome per kind.

    Args:
        options: What to do.
        advance: Told how many samples have just been measured, and how long it took.

    Raises:
        DeviceError: If the device is missing, another collector is measuring on it, or nothing can be measured.
        SampleStoreError: If the store cannot be read or written.
        FormatError: If the store is of another version.
        InvalidOptionError: If a strategy is unknown or cannot work.
    """
    check_names(options)
    device = find_device(options.device)
    collect = {
        SampleKind.KERNELS: _collect_kernels,
        SampleKind.DENSE: _collect_dense,
        SampleKind.COLLECTIVES: _collect_collectives,
    }
    outcomes: list[Outcome] = []
    with CollectorLock(options.store, device_lock_name(device)):
        check_store(options.store)
        for index, kind in enumerate(options.sample_kinds):
            deadline = options.deadline_of_part(len(options.sample_kinds) - index)
            outcomes.append(_until_terminated(collect[kind], kind, options, device, deadline, advance))
            if outcomes[-1].is_terminated:
                break
    return tuple(outcomes)


def check_names(options: CollectOptions) -> None:
    """Makes sure that tables and strategies are there, before a store is made.

    Raises:
        InputError: If they are not.
    """
    load_tables(options.tables)
    for name in options.shares or ():
        if name not in STRATEGIES:
            raise InvalidOptionError(f"must be of {', '.join(STRATEGIES)}; got {shown(name)}", field="strategies")


def check_store(store: Path) -> None:
    """Makes sure that every file of a store is of this version, and clears what killed writers left.

    Raises:
        SampleStoreError: If a file cannot be read, or removed.
        FormatError: If a file is of another version.
    """
    for samples in (KERNEL_SAMPLES, DENSE_SAMPLES, COLLECTIVE_SAMPLES):
        samples.remove_leftovers(store)
    measured_sets(store)


def set_source(options: CollectOptions, device: BenchDevice) -> SetSource:
    """What sets are chosen from on a device."""
    samples = None
    # Samples change what `uncertain` chooses, so a run that is to be resumed by its seed has to name it.
    looks_back = "uncertain" in options.shares if options.shares else not options.is_resumable
    if looks_back and options.store.exists() and device.key in devices_in(options.store):
        samples = read_samples(options.store, device.key)
    return SetSource(
        tables=load_tables(options.tables).scaled(options.scale),
        max_tables=options.max_tables,
        device=device.key,
        memory_bytes=memory_limit(device) if options.memory_bytes is None else options.memory_bytes,
        registry=options.registry,
        accepts=partial(_accepts, on_cuda=device.is_cuda),
        samples=samples,
    )


def memory_limit(device: BenchDevice) -> int:
    """What sets near the memory limit fill when nothing is said: the same on every run, so that streams are.

    A quarter of a GPU's memory, for what runs beside the weights of a group needs the rest; on a CPU, where no such
    limit decides anything, an eighth of the memory and at most 1 GiB.
    """
    if device.is_cuda:
        return max(1, torch.cuda.get_device_properties(device.device).total_memory // 4 // GIB) * GIB
    return min(GIB, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8)


def stream_position(options: CollectOptions, source: SetSource, device: BenchDevice) -> StreamPosition:
    """Where the stream of these options ended last time; kept only where a later run can have the same seed."""
    if not options.is_resumable:
        return StreamPosition()
    software = installed_software()
    description = {
        "lock": device_lock_name(device),
        "device_name": device.name,
        "versions": [software.torch_version, software.fbgemm_version],
        "tables": digest(tables_to_json(source.tables)),
        "max_tables": source.max_tables,
        "memory_bytes": source.memory_bytes,
        "strategies": None if options.shares is None else canonical_json(dict(options.shares)),
        "seed": options.set_seed,
    }
    return StreamPosition.of_stream(options.store, description)


def _accepts(shard: LocalShard, on_cuda: bool) -> bool:
    return is_measurable(shard, on_cuda=on_cuda)


def _until_terminated(
    collect: Callable[[CollectOptions, BenchDevice, float, Advance], Outcome],
    kind: SampleKind,
    options: CollectOptions,
    device: BenchDevice,
    deadline: float,
    advance: Advance,
) -> Outcome:
    counts: list[int] = []

    def count(number: int, elapsed: float) -> None:
        counts.append(number)
        advance(number, elapsed)

    try:
        return collect(options, device, deadline, count)
    except Terminated:
        return Outcome(
            kind=kind, device=device.key, added={kind.value: sum(counts)} if counts else {}, is_terminated=True
        )


def _collect_kernels(options: CollectOptions, device: BenchDevice, deadline: float, advance: Advance) -> Outcome:
    def collect(asked: CollectOptions, until: float) -> Outcome:
        return _collect_kernels_until(asked, device, until, advance)

    if not options.retrain:
        return collect(options, deadline)
    return collect_and_train(options, device.key, deadline, collect, find_trainer("--retrain"))


def _collect_kernels_until(options: CollectOptions, device: BenchDevice, deadline: float, advance: Advance) -> Outcome:
    source = set_source(options, device)
    position = stream_position(options, source, device)
    sets = stream_sets(source, seed=options.set_seed, start=position.start, weights=options.shares)
    done = collect_samples(
        Harness(device, Settings.for_collecting(device, options.rounds)),
        sets,
        options.store,
        num_samples=options.num_samples,
        seconds=seconds_until(deadline),
        position=position,
        advance=advance,
    )
    return Outcome.of_kernels(done, device.key)


def _collect_dense(options: CollectOptions, device: BenchDevice, deadline: float, advance: Advance) -> Outcome:
    from bench.collecting.dense import collect_dense_samples
    from bench.dense.harness import DenseHarness
    from bench.dense.sampling import choose_dense_shapes

    harness = DenseHarness(device)
    done = collect_dense_samples(
        harness,
        choose_dense_shapes(seed=options.set_seed, dtypes=harness.dtypes),
        options.store,
        num_samples=options.num_samples,
        seconds=seconds_until(deadline),
        advance=advance,
    )
    return Outcome(
        kind=SampleKind.DENSE,
        device=device.key,
        files=done.files,
        added={SampleKind.DENSE.value: done.num_samples} if done.num_samples else {},
        failed={SampleKind.DENSE.value: sum(done.failed.values())} if done.failed else {},
        reasons=("not run by the device, or not in the time or memory there is",) if done.failed else (),
        num_noisy=done.num_noisy,
        is_terminated=done.is_terminated,
    )


def _collect_collectives(options: CollectOptions, _device: BenchDevice, deadline: float, advance: Advance) -> Outcome:
    from bench.collectives.collector import collect_collectives

    done = collect_collectives(
        options.store,
        options.nproc,
        options.node_size,
        device=options.device,
        seconds=seconds_until(deadline),
        seed=options.set_seed,
        advance=advance,
    )
    skipped = dict(done.skipped)
    return Outcome(
        kind=SampleKind.COLLECTIVES,
        device=done.device,
        files=done.files,
        added={done.backend: done.num_samples} if done.num_samples else {},
        failed=skipped,
        reasons=tuple(skipped),
    )
