"""How often a step of the thin engine would make the host wait for a GPU: `python -m studies host-waits`.

Gloo processes train on CPUs, and what they call is counted: tensors that are read into Python, operators whose result
has a size that the host has to ask for, and lists that are copied to the device, where a copy from pageable memory
waits. Batches are prefetched; one step is counted, and the batch that is distributed beside it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Final, TypeAlias
from unittest.mock import patch

import torch
import torch.distributed as dist
import typer
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from autoshard.commands.options import command_options
from autoshard.core import AccessProfile, EmbeddingTable, Exchange, Feature, Pooling, RowsBy, ShardingPlan, TableSet
from autoshard.formats import read_plan
from autoshard.runtime.batch import BatchOfIds, Embedded
from autoshard.runtime.embeddings import ShardedEmbeddings, StartedLookup
from autoshard.runtime.engine import staging
from autoshard.runtime.engine.ids import addresses, jagged, requests
from autoshard.runtime.engine.ids.prefetch import Prefetched
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.runtime.training.synthetic import draw_samples
from autoshard.table import Table
from autoshard.whatif.trials import local_topology
from studies.engines.input_work import plans_of
from studies.frame import OutputOptions, StudyResult
from studies.frame.jobs import do_job, run_job

#: Steps before the one that is counted: messages have found their room by then.
_WARM_UP = 3
#: Operators whose result is on the host, or of a size that the host has to ask for.
_WAITING = frozenset(
    ("_local_scalar_dense", "nonzero", "_unique2", "unique_consecutive", "unique_dim", "masked_select", "bincount")
)


#: Counts of a step by thread, for each of some plans on a number of processes.
CountSteps: TypeAlias = Callable[[Sequence[ShardingPlan], int], Sequence[Mapping[str, Mapping[str, int]]]]


def counted_steps(plans: Iterable[ShardingPlan]) -> list[dict[str, dict[str, int]]]:
    """What `counted_step` gives for each plan."""
    return [counted_step(plan) for plan in plans]


def counted_step(plan: ShardingPlan) -> dict[str, dict[str, int]]:
    """Counts of one step with prefetched ids, by thread: `step`, and `prefetch`, which sends the next batch's ids."""
    with as_on_a_gpu():
        settings = FusedSettings(learning_rate=0.05)
        return _counted(ShardedEmbeddings(plan, settings, row_orders=row_orders_of(plan)))


def row_orders_of(plan: ShardingPlan) -> dict[str, torch.Tensor]:
    """By table that a plan cuts by access, half of its rows, the last one first."""
    return {
        one.shard.table.name: torch.arange(one.shard.table.num_embeddings).flip(0)[
            : one.shard.table.num_embeddings // 2
        ]
        for one in plan.shards
        if one.shard.rows.by is RowsBy.ACCESS_RANK
    }


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """While embeddings read no sizes from a CPU, which would not wait for them, and make room for what may come."""
    with ExitStack() as replaced:
        for module in (staging, jagged, addresses, requests):
            replaced.enter_context(patch.object(module, "waits", lambda _: True))
        yield


def _counted(engine: ShardedEmbeddings) -> dict[str, dict[str, int]]:
    batch = draw_samples(engine.owners.tables, 0, engine.local_batch_size, (0, 0, dist.get_rank())).ids
    counts = Counts()
    prefetched = engine.prefetch(batch)
    for _ in range(_WARM_UP):
        prefetched = _step(engine, prefetched, batch)
    prefetched._arrived.result()  # so that the next one alone is counted
    with counts.counting():
        prefetched = _step(engine, prefetched, batch)
        prefetched._arrived.result()
    engine(prefetched)
    engine.close()
    return {thread: dict(of_thread) for thread, of_thread in counts.by_thread.items()}


def _step(engine: ShardedEmbeddings, prefetched: Prefetched, batch: BatchOfIds) -> Prefetched:
    """Trains on a batch; the next one, on its way."""
    started, following = engine.start(prefetched), engine.prefetch(batch)
    finish_step(engine, started)
    return following


def finish_step(engine: ShardedEmbeddings, started: StartedLookup) -> None:
    """The backward pass of a batch, from gradients of ones, and the updates."""
    embedded = started.wait()
    assert isinstance(embedded, Embedded), "the batch has no keys"
    outputs = [one for one in (embedded.pooled_BC, *embedded.sequences.values()) if one.numel()]
    # On a CPU, the backward pass runs on the thread that asks for it.
    torch.autograd.backward(outputs, [torch.ones_like(one) for one in outputs])
    engine.end_step()


class Counts:
    """What torch is called for, by thread.

    Operators are seen as they are dispatched. What never is on a CPU is replaced meanwhile: lists that become tensors,
    and tensors that become lists.

    Attributes:
        by_thread: Counts of `step` and `prefetch`.
    """

    def __init__(self) -> None:
        self.by_thread = {"step": Counter[str](), "prefetch": Counter[str]()}

    def add(self, what: str) -> None:
        """Counts a call of this thread, if it is not FBGEMM's Python, whose own counters stay on the host."""
        if not _is_of_fbgemm():
            is_prefetch = threading.current_thread().name == "autoshard-prefetch"
            self.by_thread["prefetch" if is_prefetch else "step"][what] += 1

    @contextmanager
    def counting(self) -> Iterator[None]:
        """While calls are counted."""
        distribute = Prefetched.distribute

        def distribute_counted(*arguments: Any) -> None:
            with _Operators(self):  # of this thread
                distribute(*arguments)

        with ExitStack() as replaced:
            for owner, name, what_of in _CALLS:
                counted = self._counted(getattr(owner, name), what_of)
                replaced.enter_context(patch.object(owner, name, counted))
            replaced.enter_context(patch.object(Prefetched, "distribute", distribute_counted))
            replaced.enter_context(_Operators(self))
            yield

    def _counted(self, function: Callable[..., Any], what_of: Callable[..., str | None]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            if what := what_of(*arguments):
                self.add(what)
            return function(*arguments, **options)

        return counted


class _Operators(TorchDispatchMode):
    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    @override
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._counts.add("operators")
        if wait := _wait_of(func.__name__.split(".")[0], args, kwargs or {}):
            self._counts.add(wait)
        return func(*args, **(kwargs or {}))


def _of_list(*_: object) -> str:
    return "staged copies" if sys._getframe(2).f_code.co_name == "staged" else "copied from a list"


def _of_index(_: torch.Tensor, index: object, *_value: object) -> str | None:
    indices = index if isinstance(index, tuple) else (index,)
    return "copied from a list" if any(isinstance(one, list) for one in indices) else None


def _of_reading(*_: object) -> str:
    return "read by the host"


#: What is replaced, and what a call of it counts as.
_CALLS: Final[tuple[tuple[Any, str, Callable[..., str | None]], ...]] = (
    (torch, "tensor", _of_list),
    *((torch.Tensor, name, _of_reading) for name in ("tolist", "numpy", "cpu")),
    *((torch.Tensor, name, _of_index) for name in ("__getitem__", "__setitem__")),
)


def _wait_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """What an operator waits for, if it does."""
    if name == "_local_scalar_dense":
        return "read by the host"
    if name in _WAITING:
        return "size of the result"
    if name == "repeat_interleave" and kwargs.get("output_size") is None:
        return "size of the result"
    if name == "permute_2D_sparse_data" and (len(args) < 5 or args[4] is None):
        return "size of the result"
    if name in ("index", "index_put", "index_put_"):
        is_mask = any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])
        return "size of the result" if is_mask else None
    return None


def _is_of_fbgemm() -> bool:
    """Whether FBGEMM's Python asks, whose counters stay on the host."""
    frame = sys._getframe(1)
    while f"{os.sep}torch{os.sep}" in frame.f_code.co_filename or frame.f_code.co_filename == __file__:
        assert frame.f_back is not None, "the outermost frame is a thread's or a program's"
        frame = frame.f_back
    return f"{os.sep}fbgemm_gpu{os.sep}" in frame.f_code.co_filename


SCHEMA: Final = "autoshard.host_waits/1"
_ROWS, _DIM, _BATCH_PER_PROCESS = 40, 8, 8
#: Plans by name: pooling, and how tables are held.
_PLANS: Final = {
    "table-wise": (Pooling.SUM, "whole tables"),
    "row-wise": (Pooling.SUM, "blocks of rows"),
    "means": (Pooling.MEAN, "whole tables"),
    "sequences": (Pooling.SEQUENCE, "whole tables"),
    "tiers": (Pooling.SUM, "hot rows on all ranks"),
    "tiers of sequences": (Pooling.SEQUENCE, "hot rows on all ranks"),
    "rows exchanged once": (Pooling.SUM, "rows in turn, rows exchanged once"),
}
_WAITS: Final = ("read by the host", "size of the result", "copied from a list")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWaits:
    """What one step calls, on one process.

    Attributes:
        plan: Name of the plan.
        num_features: Features, each of a table of its own.
        step_waits: Waits of the thread that trains.
        prefetch_waits: Waits of the thread that distributes the next batch.
        copies: Copies to the device that do not wait, on both threads.
        operators: Operators of the thread that trains.
    """

    plan: str
    num_features: int
    step_waits: int
    prefetch_waits: int
    copies: int
    operators: int

    @property
    def cells(self) -> tuple[str, ...]:
        """A row of the table of results."""
        numbers = (self.num_features, self.step_waits, self.prefetch_waits, self.copies, self.operators)
        return (self.plan, *map(str, numbers))


@command_options()
class HostWaitsOptions:
    """Options of the study `host-waits`."""

    features: Annotated[
        list[int] | None, typer.Option(help="Features, each of a table of its own.  [default: 10, 1000]")
    ] = None
    nproc: Annotated[int, typer.Option(min=2, help="Processes, one per rank.")] = 2


def plans(num_features: int, num_processes: int) -> dict[str, ShardingPlan]:
    """Small plans of every kind, by name."""
    topology = local_topology("cpu", num_processes, 1 << 30)
    tables = TableSet(
        batch_size=_BATCH_PER_PROCESS * num_processes,
        tables=tuple(
            EmbeddingTable(
                name=f"t{number}",
                num_embeddings=_ROWS,
                embedding_dim=_DIM,
                features=(Feature(name=f"f{number}", pooling_factor=2.0),),
                access=AccessProfile.zipf(_ROWS, 1.0),
            )
            for number in range(num_features)
        ),
    )
    made = {}
    for name, (pooling, layout) in _PLANS.items():
        of_pooling = replace(tables, tables=tuple(replace(one, pooling=pooling) for one in tables.tables))
        plan = plans_of(of_pooling, topology)[layout]
        if pooling is Pooling.SEQUENCE:
            plan = replace(plan, shards=tuple(replace(one, exchange=Exchange.ROWS) for one in plan.shards))
        made[name] = plan
    return made


def count(num_features: Sequence[int], num_processes: int) -> list[HostWaits]:
    """Counts a step of every plan, on process 0.

    Raises:
        AutoshardError: If a process fails.
    """
    return waits_of(num_features, num_processes, partial(run_job, "studies.engines.host_waits", {}))


def waits_of(num_features: Sequence[int], num_processes: int, counted: CountSteps) -> list[HostWaits]:
    """What a step of every plan waits for, as processes that execute the plans have counted it."""
    made = [(name, number, plan) for number in num_features for name, plan in plans(number, num_processes).items()]
    return [
        HostWaits(
            plan=name,
            num_features=number,
            step_waits=sum(of["step"].get(one, 0) for one in _WAITS),
            prefetch_waits=sum(of["prefetch"].get(one, 0) for one in _WAITS),
            copies=sum(of_thread.get("staged copies", 0) for of_thread in of.values()),
            operators=of["step"]["operators"],
        )
        for (name, number, _), of in zip(made, counted([plan for *_, plan in made], num_processes), strict=True)
    ]


def main(options: HostWaitsOptions, output: OutputOptions) -> None:
    """Counts how often a step would make the host wait for a GPU.

    Example:
        python -m studies host-waits
    """
    found = count(options.features or [10, 1000], options.nproc)
    table = Table(
        columns=("plan", "features", "waits of the step", "waits of the prefetch", "copies", "operators of the step"),
        rows=tuple(one.cells for one in found),
        caption=f"One step on {options.nproc} processes: where the host would wait for a GPU, and what it calls",
    )
    document = {
        "schema": SCHEMA,
        "processes": options.nproc,
        "plans": [{name: getattr(one, name) for name in one.__dataclass_fields__} for one in found],
    }
    output.write(StudyResult(name="host-waits", document=document, tables=(table,)))


if __name__ == "__main__":
    do_job(lambda job: counted_steps(map(read_plan, job["plan_paths"])))
