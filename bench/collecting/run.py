"""A run of the command `collect`: kernels, dense layers and collectives, one after the other, on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from autoshard.core.accepted import check_choice
from autoshard.formats import canonical_json, digest, load_tables, tables_to_json
from autoshard.formats.stores.collective_samples import COLLECTIVE_SAMPLES
from autoshard.formats.stores.dense_samples import DENSE_SAMPLES
from autoshard.formats.stores.samples import KERNEL_SAMPLES, devices_in, measured_sets, read_samples
from autoshard.plugins import find_trainer
from bench.collecting.collection import CollectedSamples
from bench.collecting.kernels import KernelKind
from bench.collecting.options import GIB, CollectOptions, SampleKind, seconds_until
from bench.collecting.retraining import collect_and_train
from bench.collecting.sample_log import Advance
from bench.collecting.set_queue import StreamPosition
from bench.collecting.store_lock import CollectorLock, Measuring, device_claimed, device_lock_name
from bench.collecting.termination import Terminated
from bench.collectives.sampling import Processes
from bench.kernels.harness import Harness, Settings
from bench.kernels.measurable import is_measurable
from bench.measuring.devices import BenchDevice, find_device
from bench.measuring.provenance import installed_software
from bench.sampling.stream import CALIBRATION_WEIGHTS, DEFAULT_WEIGHTS, STRATEGIES, SetSource, stream_sets

#: Bytes of the largest table of a calibration, beside what fills the memory limit: a group then holds some twenty sets.
#: Caches are emptied between rounds, so that of a larger table no more is in them.
_CALIBRATED_TABLE_BYTES = 64 * 2**20


def run_collection(options: CollectOptions, advance: Advance = lambda *_: None) -> tuple[CollectedSamples, ...]:
    """Measures and appends to the store; one collection per kind.

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
    found: list[CollectedSamples] = []
    with CollectorLock(options.store, device_lock_name(device)), device_claimed(device, Measuring.COLLECT):
        check_store(options.store)
        for index, kind in enumerate(options.sample_kinds):
            deadline = options.deadline_of_part(len(options.sample_kinds) - index)
            try:
                found.append(_COLLECT[kind](options, device, deadline, advance))
            except Terminated:  # before anything of the kind was measured
                found.append(CollectedSamples(kind=kind, device=device.key, is_terminated=True))
            if found[-1].is_terminated:
                break
    return tuple(found)


def check_names(options: CollectOptions) -> None:
    """Makes sure that strategies, processes and tables can be as they are asked for, before a store is made.

    Raises:
        InputError: If they cannot.
    """
    for name in options.shares or ():
        check_choice(name, STRATEGIES, "strategies")
    if SampleKind.COLLECTIVES in options.sample_kinds:
        _processes(options)
    load_tables(options.tables)


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
    tables = load_tables(options.tables).scaled(options.scale)
    if options.is_calibrating:
        # The strategy `memory-limit` has the tables of more rows.
        tables = tables.held_within(_CALIBRATED_TABLE_BYTES)
    return SetSource(
        tables=tables,
        max_tables=options.max_tables,
        device=device.key,
        memory_bytes=memory_limit(device) if options.memory_bytes is None else options.memory_bytes,
        registry=options.registry,
        accepts=partial(is_measurable, on_cuda=device.is_cuda),
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
        **({"is_calibrating": True} if options.is_calibrating else {}),
        "seed": options.set_seed,
    }
    return StreamPosition.of_stream(options.store, description)


def _collect_kernels(
    options: CollectOptions, device: BenchDevice, deadline: float, advance: Advance
) -> CollectedSamples:
    is_calibrating = options.is_calibrating
    settings = Settings.for_calibrating if is_calibrating else Settings.for_collecting
    usual = CALIBRATION_WEIGHTS if is_calibrating else DEFAULT_WEIGHTS

    def collect(asked: CollectOptions, until: float) -> CollectedSamples:
        source = set_source(asked, device)
        position = stream_position(asked, source, device)
        return KernelKind.collect(
            Harness(device, settings(device, asked.rounds)),
            stream_sets(source, seed=asked.set_seed, start=position.start, weights=asked.shares, usual=usual),
            asked.store,
            num_samples=asked.num_samples,
            seconds=seconds_until(until),
            position=position,
            advance=advance,
        )

    if not options.retrain:
        return collect(options, deadline)
    return collect_and_train(options, device.key, deadline, collect, find_trainer("--retrain"))


def _collect_dense(options: CollectOptions, device: BenchDevice, deadline: float, advance: Advance) -> CollectedSamples:
    from bench.collecting.dense import DenseLayersKind
    from bench.dense.harness import DenseHarness
    from bench.dense.sampling import choose_dense_shapes

    harness = DenseHarness(device)
    return DenseLayersKind.collect(
        harness,
        choose_dense_shapes(seed=options.set_seed, dtypes=harness.dtypes),
        options.store,
        num_samples=options.num_samples,
        seconds=seconds_until(deadline),
        advance=advance,
    )


def _processes(options: CollectOptions) -> Processes:
    return Processes(nproc=options.nproc, node_size=options.node_size)


def _collect_collectives(
    options: CollectOptions, _device: BenchDevice, deadline: float, advance: Advance
) -> CollectedSamples:
    from bench.collecting.collectives import collect_collectives

    return collect_collectives(
        options.store,
        _processes(options),
        device=options.device,
        num_samples=options.num_samples,
        seconds=seconds_until(deadline),
        seed=options.set_seed,
        advance=advance,
    )


#: How samples of each kind are collected until a time of the monotonic clock.
_COLLECT: Mapping[SampleKind, Callable[[CollectOptions, BenchDevice, float, Advance], CollectedSamples]] = {
    SampleKind.KERNELS: _collect_kernels,
    SampleKind.DENSE: _collect_dense,
    SampleKind.COLLECTIVES: _collect_collectives,
}
