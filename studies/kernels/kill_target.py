"""A collector that the kill test kills: the real one, on sets so small that much of its time goes into writing."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path

from autoshard.core import AccessProfile, EmbeddingTable, Feature, TableSet
from bench.collecting.kernels import KernelKind
from bench.collecting.run import check_store
from bench.collecting.set_queue import StreamPosition
from bench.collecting.store_lock import CollectorLock, device_lock_name
from bench.kernels.harness import Harness, Settings
from bench.measuring.devices import find_device
from bench.measuring.timing import RoundSettings
from bench.sampling.stream import SetSource, stream_sets


def collect_endlessly(store: str, name: str, seed: int, written: Connection) -> None:
    """Collects until it is killed, with a new file for every group of sets.

    Args:
        store: The store's folder.
        name: Added to the lock's name, so that several may run at once.
        seed: Of the sets; the position in their stream is kept in the store.
        written: Gets the name of every file, as a line, once it is in the store.
    """
    device = find_device("cpu")
    tables = tuple(
        EmbeddingTable(
            name=f"t{index}",
            num_embeddings=50 + index,
            embedding_dim=8,
            features=(Feature(name=f"f{index}", pooling_factor=2.0),),
            access=AccessProfile.uniform(50 + index),
        )
        for index in range(400)
    )
    source = SetSource(tables=TableSet(batch_size=16, tables=tables), max_tables=8)
    rounds = RoundSettings(num_warmup=0, num_measured=1, num_dropped=0, flush_every_run=False)
    settings = Settings(rounds=rounds, max_group_sets=4, max_bytes=2**24, reference_bags=8, max_spread=1e9)
    folder = Path(store)

    def report(file: Path) -> None:
        # Less than a pipe takes at once, so the other end never sees half a name.
        os.write(written.fileno(), f"{file.name}\n".encode())

    with CollectorLock(folder, f"{device_lock_name(device)}-{name}"):
        check_store(folder)
        KernelKind.collect(
            Harness(device, settings),
            stream_sets(source, seed=seed, weights={"random": 1.0}),
            folder,
            seconds_per_file=0.0,
            position=StreamPosition.of_stream(folder, ["kill test", name, seed]),
            on_file=report,
        )
