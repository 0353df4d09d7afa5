"""What checkpoints cost: `python -m studies checkpoint-cost`.

Processes of this machine save tables that one plan holds, and load them under another one; beside it, the same bytes
are written to and read from the same disk as plain files. Training goes on during a checkpoint, and is timed.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final

import torch.distributed as dist
import typer

from autoshard.commands.options import command_options
from autoshard.core import (
    AccessProfile,
    EmbeddingTable,
    Feature,
    Optimizer,
    PlacedShard,
    Shard,
    ShardingPlan,
    TableSet,
    Tier,
)
from autoshard.formats import read_plan
from autoshard.runtime.checkpoints import Checkpoints
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.runtime.training.synthetic import draw_samples
from autoshard.table import Table
from autoshard.whatif.trials import local_topology
from studies.frame import Machine, OutputOptions, StudyResult
from studies.frame.jobs import do_job, greatest, run_job, slowest_s

#: Columns of every table.
DIM: Final = 64
_SETTINGS: Final = FusedSettings(learning_rate=0.05)
#: Bytes that plain files are written and read in.
_PIECE_BYTES: Final = 1 << 24


@command_options()
class CheckpointCostOptions:
    """Options of the study `checkpoint-cost`."""

    mib: Annotated[int, typer.Option(min=4, help="Size of all tables in MiB, weights alone.")] = 4096
    processes: Annotated[int, typer.Option(min=1, help="Processes.")] = 2
    batch_size: Annotated[int, typer.Option(min=1, help="Samples per step over all processes.")] = 2048
    repeats: Annotated[int, typer.Option(min=1, help="How often each is measured; medians are told.")] = 3
    folder: Annotated[Path | None, typer.Option(help="Folder on the disk to measure; left out: a temporary one.")] = (
        None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one checkpoint takes, medians of the slowest process; sizes of the process that has most.

    Attributes:
        checkpoint_bytes: Its size.
        share_bytes: Weights and moments over the number of processes.
        disk_write_s: Seconds in which as many bytes are written as plain files and brought to the disk.
        disk_read_s: Seconds in which they are read from there.
        stall_s: Seconds that training waits while the state is copied.
        save_s: Seconds until the checkpoint is there.
        load_s: Seconds to load it under another plan, hashes checked.
        extra_save_bytes: Peak memory beside that of training, while it is saved.
        extra_load_bytes: The same while it is loaded.
        step_s: Seconds of a step without checkpoints.
        slowed_s: Seconds by which training is longer for one checkpoint.
    """

    checkpoint_bytes: int
    share_bytes: int
    disk_write_s: float
    disk_read_s: float
    stall_s: float
    save_s: float
    load_s: float
    extra_save_bytes: int
    extra_load_bytes: int
    step_s: float
    slowed_s: float


def tables_of_ranks(mib: int, num_ranks: int, *, pooling_factor: float) -> tuple[EmbeddingTable, ...]:
    """A table for each rank, all alike, whose weights take so many MiB together."""
    num_rows = mib * 2**20 // (4 * DIM * num_ranks)
    return tuple(
        EmbeddingTable(
            name=f"t{rank}",
            num_embeddings=num_rows,
            embedding_dim=DIM,
            optimizer=Optimizer.ROWWISE_ADAGRAD,
            features=(Feature(name=f"f{rank}", pooling_factor=pooling_factor),),
            access=AccessProfile.zipf(num_rows, 1.0),
        )
        for rank in range(num_ranks)
    )


def plans(options: CheckpointCostOptions) -> tuple[ShardingPlan, ShardingPlan]:
    """The same tables by the plan that saves and by the one that loads: a table a rank, and rows over all ranks."""
    ranks = range(options.processes)
    tables = tables_of_ranks(options.mib, len(ranks), pooling_factor=4.0)
    by_table = tuple(PlacedShard.table_wise(Shard.whole(one), rank) for rank, one in enumerate(tables))
    by_row = tuple(PlacedShard(shard=Shard.whole(one), tier=Tier.ROW_WISE, replicas=(tuple(ranks),)) for one in tables)
    table_set = TableSet(batch_size=options.batch_size, tables=tables)
    topology = local_topology("cpu", len(ranks), options.mib << 21)
    first, second = (ShardingPlan(tables=table_set, topology=topology, shards=shards) for shards in (by_table, by_row))
    return first, second


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Saves and loads the tables of a job's plans, as often as it says."""
    first, second = (read_plan(path) for path in job["plan_paths"])
    folder = Path(job["folder"])
    share = first.tables.storage_bytes // dist.get_world_size()
    found = []
    for number in range(job["repeats"]):
        place = folder / str(number)
        with closing(ShardedEmbeddings(first, _SETTINGS)) as embeddings:
            found.append(_saved(embeddings, first, place, share))
        with closing(ShardedEmbeddings(second, _SETTINGS)) as embeddings:
            found[-1] |= _loaded(embeddings, place)
        if dist.get_rank() == 0:
            shutil.rmtree(place)
        dist.barrier()
    medians = {name: statistics.median(one[name] for one in found) for name in found[0]}
    return {"share_bytes": share, **medians}


def _saved(embeddings: ShardedEmbeddings, plan: ShardingPlan, place: Path, share: int) -> dict[str, float]:
    """Plain files and a checkpoint of as many bytes, and steps without and with one."""
    place.mkdir(exist_ok=True)
    plain = place / f"plain{dist.get_rank()}"
    disk_write_s = slowest_s(lambda: _write_plain(plain, share))
    _forget_cached(place)
    disk_read_s = slowest_s(lambda: _read_plain(plain))
    plain.unlink()
    samples = draw_samples(plan.tables, 1, embeddings.local_batch_size, (0, dist.get_rank()))

    def steps(count: int) -> None:
        for _ in range(count):
            embeddings(samples.ids).pooled_BC.square().mean().backward()
            embeddings.end_step()

    steps(3)
    before_s = slowest_s(lambda: steps(20)) / 20
    with Checkpoints(place / "checkpoints") as checkpoints, _peak() as extra:
        begun = time.perf_counter()
        stall_s = slowest_s(lambda: checkpoints.save(1, {"embeddings": embeddings}, plan=plan))
        count = 0
        # All processes make as many steps as the first, until it is there.
        while _is_any(checkpoints.is_saving):
            steps(10)
            count += 10
        trained_s = time.perf_counter() - begun
        checkpoints.wait()
        [made] = checkpoints.all()
    after_s = slowest_s(lambda: steps(20)) / 20
    step_s = (before_s + after_s) / 2
    return {
        "checkpoint_bytes": made.manifest.num_bytes,
        "disk_write_s": disk_write_s,
        "disk_read_s": disk_read_s,
        "stall_s": stall_s,
        "save_s": greatest(trained_s),
        "extra_save_bytes": greatest(extra[0]),
        "step_s": step_s,
        "slowed_s": greatest(trained_s - count * step_s),
    }


def _loaded(embeddings: ShardedEmbeddings, place: Path) -> dict[str, float]:
    _forget_cached(place)
    checkpoints = Checkpoints(place / "checkpoints")
    latest = checkpoints.latest()
    assert latest is not None
    with _peak() as extra:
        load_s = slowest_s(lambda: latest.load({"embeddings": embeddings}))
    checkpoints.close()
    return {"load_s": load_s, "extra_load_bytes": greatest(extra[0])}


def _write_plain(path: Path, num_bytes: int) -> None:
    piece = os.urandom(_PIECE_BYTES)
    with path.open("wb", buffering=0) as file:
        for _ in range(-(-num_bytes // _PIECE_BYTES)):
            file.write(piece)
        os.fsync(file.fileno())


def _read_plain(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        while file.read(_PIECE_BYTES):
            pass


def _forget_cached(place: Path) -> None:
    """Has the system read the files of a folder from the disk again."""
    for path in place.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _is_any(value: bool) -> bool:
    return bool(greatest(float(value)))


@contextmanager
def _peak() -> Iterator[list[int]]:
    """Bytes by which this process's memory was at most above what it had at first: the list's item, at the end."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    before, found = _memory_bytes("VmRSS"), [0]
    yield found
    found[0] = _memory_bytes("VmHWM") - before


def _memory_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    [line] = [one for one in lines if one.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


def main(options: CheckpointCostOptions, output: OutputOptions) -> None:
    """Measures checkpoints against what the disk takes, in time, memory and training.

    Example:
        python -m studies checkpoint-cost --mib 4096 -o docs/figures
    """
    with TemporaryDirectory(prefix="autoshard-checkpoints-", dir=options.folder) as name:
        job = {"folder": name, "repeats": options.repeats}
        found = run_job(_MODULE, job, plans(options), options.processes)
    whole = {"checkpoint_bytes", "share_bytes", "extra_save_bytes", "extra_load_bytes"}
    cost = Cost(**{key: round(value) if key in whole else value for key, value in found.items()})
    output.write(_result(options, cost))


def _result(options: CheckpointCostOptions, cost: Cost) -> StudyResult:
    def ratio(value: float, of: float) -> str:
        return f"{value / of:.2f}"

    rows = (
        ("save", f"{cost.save_s:.1f} s", f"{cost.disk_write_s:.1f} s to write", ratio(cost.save_s, cost.disk_write_s)),
        ("load", f"{cost.load_s:.1f} s", f"{cost.disk_read_s:.1f} s to read", ratio(cost.load_s, cost.disk_read_s)),
        *(
            (name, _mib(size), f"{_mib(cost.share_bytes)} a rank's share", ratio(size, cost.share_bytes))
            for name, size in (
                ("memory to save", cost.extra_save_bytes),
                ("memory to load", cost.extra_load_bytes),
            )
        ),
        ("training waits", f"{cost.stall_s:.2f} s", "60 s", ratio(cost.stall_s, 60)),
        ("training is longer", f"{cost.slowed_s:.2f} s", "60 s", ratio(cost.slowed_s, 60)),
    )
    caption = (
        f"{options.mib:,} MiB of tables on {options.processes} processes, medians of {options.repeats}; a checkpoint "
        f"has {_mib(cost.checkpoint_bytes)}, a step takes {1000 * cost.step_s:.1f} ms"
    )
    table = Table(columns=("", "measured", "against", "ratio"), rows=rows, caption=caption)
    found = {"mib": options.mib, "processes": options.processes, "cost": asdict(cost)}
    document = Machine.of("checkpoint-cost", options).document(found, "autoshard.checkpoint-cost/1")
    return StudyResult(name="checkpoint-cost", document=document, tables=(table,))


def _mib(size: float) -> str:
    return f"{size / 2**20:,.0f} MiB"


_MODULE: Final = "studies.runtime.checkpoint_cost"

if __name__ == "__main__":
    do_job(measure)
