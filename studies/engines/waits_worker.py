"""One process of the study `host-waits`: `torchrun -m studies.engines.waits_worker FOLDER`.

The folder holds `job.json`; the process of rank 0 writes `results.json` into it: its counts of every plan.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from autoshard.core import RowsBy, ShardingPlan
from autoshard.formats import atomic_write, read_plan
from autoshard.runtime.batch import Embedded
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.engine.ids.prefetch import Prefetched
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.runtime.processes.job import JOB_FILE, RESULTS_FILE
from autoshard.runtime.processes.worker import run_worker
from autoshard.runtime.training.synthetic import draw_samples

#: Steps before the one that is counted: messages have found their room by then.
_WARM_UP = 3
#: Operators whose result is on the host, or of a size that the host has to ask for.
_WAITING = frozenset(
    ("_local_scalar_dense", "nonzero", "_unique2", "unique_consecutive", "unique_dim", "masked_select", "bincount")
)
#: Methods of a tensor that read it into Python.
_READING = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu)
_INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


def main() -> None:
    """Counts in the plans in the folder that the command line names."""
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])

    def work() -> None:
        job = json.loads((folder / JOB_FILE).read_text(encoding="utf-8"))
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        counts = [counted_step(read_plan(path)) for path in job["plan_paths"]]
        if rank == 0:
            atomic_write(folder / RESULTS_FILE, json.dumps(counts))
        dist.destroy_process_group()

    run_worker(work, folder, rank)


def counted_step(plan: ShardingPlan) -> dict[str, dict[str, int]]:
    """Counts of one step with prefetched ids, by thread: `step`, and `prefetch`, which sends the ids."""
    orders = {
        one.shard.table.name: torch.arange(one.shard.table.num_embeddings).flip(0)[
            : one.shard.table.num_embeddings // 2
        ]
        for one in plan.shards
        if one.shard.rows.by is RowsBy.ACCESS_RANK
    }
    engine = ShardedEmbeddings(plan, FusedSettings(learning_rate=0.05), row_orders=orders)
    batch = draw_samples(plan.tables, 0, engine.local_batch_size, (0, 0, dist.get_rank())).ids
    counts = {"step": Counter[str](), "prefetch": Counter[str]()}
    with _counting_prefetches(counts["prefetch"]):
        prefetched = engine.prefetch(batch)
        for step in range(_WARM_UP + 1):
            if step == _WARM_UP:
                prefetched._arrived.result()  # what is counted is the last step, and the batch after it
                for of_thread in counts.values():
                    of_thread.clear()
            following = engine.prefetch(batch)
            with _counting(counts["step"]):
                _train(engine, prefetched)
            prefetched = following
        engine(prefetched)
    engine.close()
    return {thread: dict(of_thread) for thread, of_thread in counts.items()}


def _train(engine: ShardedEmbeddings, prefetched: Prefetched) -> None:
    embedded = engine(prefetched)
    assert isinstance(embedded, Embedded), "the batch has no keys"
    outputs = [one for one in (embedded.pooled_BC, *embedded.sequences.values()) if one.numel()]
    # On a CPU, the backward pass runs on the thread that asks for it.
    torch.autograd.backward(outputs, [torch.ones_like(one) for one in outputs])
    engine.end_step()


@contextmanager
def _counting(counts: Counter[str]) -> Iterator[None]:
    with _Calls(counts), _Operators(counts):
        yield


@contextmanager
def _counting_prefetches(counts: Counter[str]) -> Iterator[None]:
    """Counts on the thread that distributes batches; modes of torch are those of one thread."""
    distribute = Prefetched.distribute

    def counted(*arguments: Any) -> None:
        with _counting(counts):
            distribute(*arguments)

    with patch.object(Prefetched, "distribute", counted):
        yield


class _Operators(TorchDispatchMode):
    """Counts operators, and those at which the host would wait for a GPU."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    @override
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not _is_of_fbgemm():
            self._counts["operators"] += 1
            if waits := _wait_of(func.__name__.split(".")[0], args, kwargs or {}):
                self._counts[waits] += 1
        return func(*args, **(kwargs or {}))


class _Calls(TorchFunctionMode):
    """Counts what never reaches the dispatcher on a CPU: lists that become tensors, and tensors that become lists."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not _is_of_fbgemm():
            if func in _READING:
                self._counts["read by the host"] += 1
            elif func is torch.tensor:
                is_staged = sys._getframe(1).f_code.co_name == "staged"
                self._counts["staged copies" if is_staged else "copied from a list"] += 1
            elif func in _INDEXING and any(isinstance(one, list) for one in _indices(args[1])):
                self._counts["copied from a list"] += 1
        return func(*args, **(kwargs or {}))


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


def _indices(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _is_of_fbgemm() -> bool:
    """Whether FBGEMM's Python asks, whose counters stay on the host."""
    frame = sys._getframe(2)
    while f"{os.sep}torch{os.sep}" in frame.f_code.co_filename or frame.f_code.co_filename == __file__:
        assert frame.f_back is not None, "the outermost frame is a thread's or a program's"
        frame = frame.f_back
    return f"{os.sep}fbgemm_gpu{os.sep}" in frame.f_code.co_filename


if __name__ == "__main__":
    main()
