"""Batches of training data: where they come from, which samples each process takes, and how a job goes on in them.

Samples of an epoch are one stream, the same for all processes: step k of an epoch takes samples kG to (k + 1)G of it,
the last one what is left, and process r of R takes those from floor(r g / R) to floor((r + 1) g / R) of these g. A
position is therefore one place in the stream, whoever reads it, and a job that goes on with another number of processes
or another batch size sees each sample once.

Shape suffixes: B samples of a local batch, G of a global one, W of a window.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import torch.distributed as dist
from torchdata.nodes import IterableWrapper, Loader, Prefetcher
from typing_extensions import override

from autoshard.core import TableSet
from autoshard.core.errors import InputError
from autoshard.formats.sample_files import LABEL, FilePlace, SampleBlock, SampleFiles, open_samples, with_lists
from autoshard.runtime.batch import BatchOfIds
from autoshard.runtime.releases import all_gather
from autoshard.runtime.training.synthetic import IdsOfRanks, Samples, draw_samples, global_samples

#: Batches that are read ahead of training.
_READ_AHEAD = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Which samples of a global batch a process takes.

    Attributes:
        batch_size: Samples of a global batch, G.
        process: Rank of the process.
        num_processes: All processes.
    """

    batch_size: int
    process: int
    num_processes: int

    @property
    def largest(self) -> int:
        """Most samples that a process takes."""
        return -(-self.batch_size // self.num_processes)

    def weight(self, size: int) -> float:
        """Weight of this process's samples among `size`, see `Samples`."""
        return len(self.of(size)) * self.num_processes / size

    def of(self, size: int) -> range:
        """Those of this process among `size` samples."""
        first, stop = (size * rank // self.num_processes for rank in (self.process, self.process + 1))
        return range(first, stop)


class GeneratedSamples:
    """Endless batches that are drawn from the tables' access profiles.

    A global batch consists of equal parts, as many as there were processes at the start of the job, each drawn by
    itself. A process takes its share of the samples.

    Args:
        tables: Tables whose features are looked up.
        num_dense: Dense features of a sample.
        share: This process's.
        seed: Seed of the batches.
        device: Where batches are kept.
        first: Number of the first batch.
        num_different: Batches that are repeated in turn.
        drift_every: Steps after which other rows are hot, and other batches are drawn; 0 for never.
        ranked: Row ids of access ranks, by table, see `draw_samples`.
    """

    def __init__(
        self,
        tables: TableSet,
        num_dense: int,
        share: Share,
        *,
        seed: int,
        device: torch.device,
        first: int = 0,
        num_different: int,
        drift_every: int = 0,
        ranked: Mapping[str, IdsOfRanks] | None = None,
    ) -> None:
        self._tables, self._num_dense, self._share, self._seed, self._device = tables, num_dense, share, seed, device
        self._first, self._num_different, self._drift_every = first, num_different, drift_every
        self._ranked = ranked or {}
        self._num_parts, self._step, self._phase = share.num_processes, 0, 0
        self._drawn: dict[int, Samples] = {}

    def __iter__(self) -> Iterator[Samples]:
        """Batches from the position on."""
        # What is repeated is drawn before the first step, which is not to wait for it, nor to be measured with it.
        for index in range(self._num_different):
            self._batch(self._step + index)
        while True:
            self._step += 1
            yield self._batch(self._step - 1)

    def state_dict(self) -> dict[str, Any]:
        """Steps taken, and parts of a batch."""
        return {"step": self._step, "parts": self._num_parts, "seed": self._seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes to a position."""
        _check_same("seed", state_dict["seed"], self._seed)
        self._step, self._num_parts = state_dict["step"], state_dict["parts"]
        self._drawn.clear()

    def _batch(self, step: int) -> Samples:
        phase = step // self._drift_every if self._drift_every else 0
        if phase != self._phase:
            self._phase = phase
            self._drawn.clear()
        index = step % self._num_different
        if index not in self._drawn:
            self._drawn[index] = self._draw(index, phase).to(self._device)
        return self._drawn[index]

    def _draw(self, index: int, phase: int) -> Samples:
        """This process's samples of the parts in which it has some."""
        G, own = self._share.batch_size, self._share.of(self._share.batch_size)
        bounds = [G * part // self._num_parts for part in range(self._num_parts + 1)]
        parts = []
        for part, (first, stop) in enumerate(pairwise(bounds)):
            within = range(max(first, own.start) - first, min(stop, own.stop) - first)
            if within:
                key = (self._seed, self._first + index, part)
                drawn = draw_samples(self._tables, self._num_dense, stop - first, key, self._ranked, phase)
                parts.append(drawn.only(within))
        return replace(global_samples(parts), weight=self._share.weight(G))


class FileSamples:
    """Samples of files, in the files' order or shuffled in a buffer, for some epochs.

    Samples are shuffled among those of a window: blocks that follow each other until they have as many samples as the
    buffer. The order depends on seed, epoch and buffer, not on batches or processes, so that a position is the place
    where a window begins and the number of its samples that were taken.

    Every process reads all files, and makes batches of its own samples.

    Args:
        files: The files.
        tables: Tables of the features.
        num_dense: Dense features.
        share: This process's.
        epochs: How often the files are read.
        buffer: Samples that are shuffled among each other; 0 for the files' order.
        seed: Seed of the order.
        is_balanced: Whether samples of a global batch are dealt to processes by falling lookups, there and back, so
            that all have about as many lookups; it has the same samples.

    Attributes:
        identity: What has to be the same where a position is used: names and sizes of the files, and how they are
            shuffled.
    """

    def __init__(
        self,
        files: SampleFiles,
        tables: TableSet,
        num_dense: int,
        share: Share,
        *,
        epochs: int = 1,
        buffer: int = 0,
        seed: int = 0,
        is_balanced: bool = False,
    ) -> None:
        self._is_balanced = is_balanced
        self._files, self._tables, self._num_dense, self._share = files, tables, num_dense, share
        self._epochs, self._buffer, self._seed = epochs, buffer, seed
        self.identity: list[object] = [[[path.name, path.stat().st_size] for path in files.paths], buffer, seed]
        self._epoch, self._begin, self._taken, self._num_samples = 0, FilePlace(), 0, 0
        self._skipped = 0
        self._first_skipped: str | None = None
        self._window: _Window | None = None

    @property
    def skipped(self) -> tuple[int, str | None]:
        """How many lines are none and were left out of what was read, and what is wrong with the first."""
        if self._window is None:
            return self._skipped, self._first_skipped
        return self._skipped + self._window.num_bad, self._first_skipped or self._window.first_bad

    @property
    def share_read(self) -> float:
        """Which share of all was read, in [0, 1]; about."""
        return min(1.0, (self._epoch + self._files.share_before(self._begin)) / self._epochs)

    def __iter__(self) -> Iterator[Samples]:
        """Batches from the position on.

        Raises:
            FormatError: If a file cannot be read.
            InputError: If the files have no sample.
        """
        while self._epoch < self._epochs:
            yield from self._rest_of_epoch()
            if not self._num_samples:
                paths, (_, first_bad) = self._files.paths, self.skipped
                why = "" if first_bad is None else f": {first_bad}"
                of = paths[0] if len(paths) == 1 else paths[0].parent
                raise InputError(f"holds no samples{why}", field="data", source=str(of))

    def state_dict(self) -> dict[str, Any]:
        """Epoch, window, samples taken of it, and what was skipped before it."""
        return {
            "identity": self.identity,
            "epoch": self._epoch,
            "begin": list(self._begin),
            "taken": self._taken,
            "samples": self._num_samples,
            "skipped": self._skipped,
            "first_skipped": self._first_skipped,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes to a position."""
        for name, saved, own in zip(("data", "shuffle", "seed"), state_dict["identity"], self.identity, strict=True):
            _check_same(name, saved, own)
        self._epoch, self._begin = state_dict["epoch"], FilePlace(*state_dict["begin"])
        self._taken, self._num_samples = state_dict["taken"], state_dict["samples"]
        self._skipped, self._first_skipped = state_dict["skipped"], state_dict["first_skipped"]

    def _rest_of_epoch(self) -> Iterator[Samples]:
        windows = self._windows()
        self._window = next(windows, None)
        while self._window is not None:
            parts, size = list[tuple[_Window, int, int]](), 0
            while self._window is not None and size < self._share.batch_size:
                if self._taken == len(self._window.order_W):
                    self._leave(next(windows, None))
                    continue
                stop = min(self._taken + self._share.batch_size - size, len(self._window.order_W))
                parts.append((self._window, self._taken, stop))
                size, self._taken = size + stop - self._taken, stop
            if size:
                self._num_samples += size
                yield self._samples(parts, size)

    def _leave(self, following: _Window | None) -> None:
        self._skipped, self._first_skipped = self.skipped
        self._window, self._taken = following, 0
        self._begin = FilePlace() if following is None else following.begin
        self._epoch += following is None

    def _windows(self) -> Iterator[_Window]:
        begin, blocks, size = self._begin, list[SampleBlock](), 0
        for block in self._files.blocks(self._tables, self._num_dense, begin):
            blocks.append(block)
            size += len(block.rows)
            if size > self._buffer:
                yield self._shuffled(begin, blocks)
                begin, blocks, size = block.after, [], 0
        if blocks:
            yield self._shuffled(begin, blocks)

    def _shuffled(self, begin: FilePlace, blocks: Sequence[SampleBlock]) -> _Window:
        rows = _joined([block.rows for block in blocks])
        order_W = np.arange(len(rows))
        if self._buffer:
            np.random.default_rng([self._seed, self._epoch, begin.file, begin.offset]).shuffle(order_W)
        first_bad = next((block.first_bad for block in blocks if block.first_bad), None)
        lookups_W = np.zeros(len(rows), np.int64)
        if self._is_balanced:
            for table in self._tables.tables:
                for feature in table.features:
                    lookups_W += _bags(rows[feature.name])[0]
        return _Window(begin, rows, order_W, lookups_W, sum(block.num_bad for block in blocks), first_bad)

    def _samples(self, parts: Sequence[tuple[_Window, int, int]], size: int) -> Samples:
        """This process's samples of a global batch."""
        places_B = self._places(parts, size)
        before, tables = 0, []
        for window, start, stop in parts:
            within_B = places_B[(places_B >= before) & (places_B < before + stop - start)] - before
            tables.append(window.rows.take(window.order_W[start + within_B]))
            before += stop - start
        rows = _joined(tables)
        bags = [_bags(rows[feature.name]) for table in self._tables.tables for feature in table.features]
        dense = [rows[f"int_{index}"].to_numpy() for index in range(self._num_dense)]
        return Samples(
            BatchOfIds(
                torch.from_numpy(np.stack([lengths_B for lengths_B, _ in bags])),
                torch.from_numpy(np.concatenate([ids_L for _, ids_L in bags])),
            ),
            torch.from_numpy(np.stack(dense, axis=1) if dense else np.empty((len(rows), 0), np.float32)),
            torch.from_numpy(rows[LABEL].to_numpy().copy()),
            weight=len(rows) * self._share.num_processes / size,
        )

    def _places(self, parts: Sequence[tuple[_Window, int, int]], size: int) -> np.ndarray:
        """Places of this process's samples in a global batch, in rising order."""
        process, num_processes = self._share.process, self._share.num_processes
        if not self._is_balanced:
            own = self._share.of(size)
            return np.arange(own.start, own.stop)
        lookups_G = np.concatenate([window.lookups_W[window.order_W[start:stop]] for window, start, stop in parts])
        falling_G = np.argsort(-lookups_G, kind="stable")
        # There and back: the process that comes last in one round comes first in the next.
        turn_G, place_G = np.divmod(np.arange(size), num_processes)
        dealt_G = np.where(turn_G % 2 == 0, place_G, num_processes - 1 - place_G)
        return np.sort(falling_G[dealt_G == process])


@dataclass(frozen=True, slots=True)
class _Window:
    """Samples that are shuffled among each other.

    Attributes:
        begin: Where its first block begins.
        rows: The samples.
        order_W: Their order.
        lookups_W: Lookups of each, where batches are balanced.
        num_bad: Lines that were none.
        first_bad: The first of these.
    """

    begin: FilePlace
    rows: pa.Table
    order_W: np.ndarray
    lookups_W: np.ndarray
    num_bad: int
    first_bad: str | None


def _bags(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """Lengths and ids of a feature's bags."""
    array = column.combine_chunks()
    if pa.types.is_integer(array.type):
        return array.is_valid().to_numpy(zero_copy_only=False).astype(np.int64), array.drop_null().to_numpy()
    return pc.list_value_length(array).to_numpy(), array.flatten().to_numpy()


def _joined(parts: Sequence[pa.Table]) -> pa.Table:
    """Samples of several blocks; where one has lists of a feature's ids and another numbers, ids of all are lists."""
    if any(part.schema != parts[0].schema for part in parts):
        parts = [with_lists(part) for part in parts]
    return pa.concat_tables(parts).combine_chunks()


def _check_same(name: str, saved: object, own: object) -> None:
    if saved != json.loads(json.dumps(own)):
        raise InputError(
            f"the checkpoint is of another: it was {json.dumps(saved)}, this job has {json.dumps(own)}", field=name
        )


def file_samples(path: Path, tables: TableSet, num_dense: int, share: Share, **options: Any) -> FileSamples:
    """The samples of a file or folder, see `open_samples` and `FileSamples`, whose options it takes.

    Raises:
        InputError: If there are none, or a column is missing.
    """
    files = open_samples(path)
    files.check(tables, num_dense)
    return FileSamples(files, tables, num_dense, share, **options)


class _Reader(IterableWrapper[Any]):  # type: ignore[misc]
    """Gives an error as the last item: a thread that reads ahead would raise the text of its traceback."""

    @override
    def next(self) -> Any:
        try:
            return super().next()
        except StopIteration:
            raise
        except Exception as error:  # noqa: BLE001 - raised again by `Feed`
            return error


class Feed:
    """Gives training its batches, with those that follow, and knows the position after each.

    Args:
        samples: This process's batches, any iterable of `Samples` such as a `torch.utils.data.IterableDataset`. Its
            `state_dict`, JSON, is the position after the last batch that it gave, and `load_state_dict` goes there.
            Without the two, a resumed job goes forward in it batch by batch.
        device: Where batches go.
        ahead: Batches that training wants to know ahead.
        in_thread: Whether a thread reads ahead.
        repair: What is done to each batch; None for nothing.
        is_common: Whether all processes read one stream, so that they end together, know the weights of their batches,
            and have one position. Else a process whose batches have ended goes on with empty ones until all have, and
            the processes add up the sizes of their batches for each step, which a GPU waits for; a resumed job has to
            have as many processes.
    """

    def __init__(
        self,
        samples: Iterable[Samples],
        device: torch.device,
        ahead: int = 0,
        *,
        in_thread: bool = False,
        repair: Callable[[Samples], Samples] | None = None,
        is_common: bool = True,
    ) -> None:
        self._repair = repair
        node = _Reader(samples)
        self._loader = Loader(Prefetcher(node, _READ_AHEAD) if in_thread else node, restart_on_stop_iteration=False)
        self._device, self._ahead, self._is_common = device, ahead, is_common
        self._following: deque[tuple[Samples, Any]] = deque()
        self._batches: Iterator[Samples | Exception] | None = None
        self._state: Any = None

    def take(self, num_left: int | None = None) -> tuple[Samples, tuple[Samples, ...]] | None:
        """The next batch and those that follow it, as many as are wanted ahead; None at the end.

        Args:
            num_left: How many more are taken, with this one; None if that is open.
        """
        wanted = 1 + self._ahead if num_left is None else min(1 + self._ahead, num_left)
        while len(self._following) < wanted:
            samples = self._read()
            if samples is None:
                break
            self._following.append((samples.to(self._device), self._loader.state_dict()))
        if not self._following:
            return None
        samples, self._state = self._following.popleft()
        return samples, tuple(one for one, _ in self._following)

    def _read(self) -> Samples | None:
        if self._batches is None:
            self._batches = iter(self._loader)
        samples = next(self._batches, None)
        if isinstance(samples, Exception):
            raise samples
        if samples is not None and self._repair is not None:
            samples = self._repair(samples)
        if self._is_common:
            return samples
        shape = (
            [0, 0, 0] if samples is None else [len(samples.labels_B), len(samples.ids.lengths_FB), samples.num_dense]
        )
        own = torch.tensor(shape, device=self._device)
        everybody = own.new_empty(3 * dist.get_world_size())
        all_gather(everybody, own)
        sizes, features, dense = zip(*everybody.view(-1, 3).tolist(), strict=True)
        if not sum(sizes):
            return None
        weight = shape[0] * len(sizes) / sum(sizes)
        return replace(samples or Samples.none(max(features), max(dense)), weight=weight)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was taken; all processes call it if each has its own."""
        if self._is_common:
            return {"position": json.dumps(self._state)}
        positions: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(positions, self._state)
        return {"position": json.dumps(positions)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes to a position.

        Raises:
            InputError: If it is one of other data, or of another number of processes that each have their own.
        """
        position = json.loads(state_dict["position"])
        if position is not None and not self._is_common:
            _check_same("nproc", len(position), dist.get_world_size())
            position = position[dist.get_rank()]
        if position is not None:
            self._state = position
            self._loader.load_state_dict(position)
            self._batches = iter(self._loader)
            self._following.clear()
