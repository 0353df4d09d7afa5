"""One process of a benchmark of collectives: `torchrun -m bench.collectives.worker FOLDER`.

The folder holds `job.json`, written by `bench.collecting.collectives`; a process that fails writes
`error.<rank>.json`. Reports go to standard output, one JSON object a line.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from autoshard.core import DType
from autoshard.core.choices import Device
from autoshard.core.collector import collector_paused
from autoshard.core.errors import DeviceError
from autoshard.formats.stores.collective_samples import GroupLevel, MeasuredCollective, Operator, Splits
from autoshard.runtime.processes.devices import choose_device, joined
from autoshard.runtime.processes.worker import run_worker
from bench.collectives.operators import BoundCollective, Buffers, Movement, collective_from_json, verify
from bench.measuring.arena import free_bytes
from bench.measuring.robust_stats import MsArray, locate
from bench.measuring.timing import Clock, CudaClock, RoundSettings, WallClock, led_ms

#: The reference is measured more than once per round: its mean divides every sample of the chunk.
_REFERENCE_COPIES = 4
#: Backends need up to as much memory again as the buffers that they are given.
_BACKEND_FACTOR = 2
#: Up to here a rank's buffers are taken to fit into its share of the last-level cache.
_CACHED_BYTES = 2**22
#: Up to here a GPU runs a collective several times in a row, and a run counts as their mean. A single one takes tens of
#: microseconds, and begins on ranks as far apart as the host's agreement lets them go.
_REPEATED_BYTES = 2**23
_NUM_REPEATED = 20
#: From the first rank's coming to a collective on CPUs to the last one's. In a step ranks come one after the other, and
#: gloo's all-to-all takes longer then: who comes last sends its data ahead of the word that it may be sent some. Two
#: ranks with links of 200 Mbit/s send 512 KiB to each other in 42 ms then, and in 22 or 42 where they come at once.
_APART_S = 1e-3
#: What the ranks' clocks tell apart.
_LEAST_MS = 1e-3
_HEARTBEAT_S = 0.5
#: Of the running kernel; alike in all containers of a machine.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TIME_IS_UP = "the time given was up, or would have been before they were measured"


class CollectiveWorker:
    """This process's part in measuring chunks of collectives.

    Args:
        job: As `bench.collecting.collectives` wrote it.
        device: This process's device.
    """

    def __init__(self, job: dict[str, Any], device: torch.device) -> None:
        self._device = device
        self._rounds = RoundSettings(**job["rounds"])
        self._rng = np.random.default_rng(job["seed"])  # the same on every rank
        self._chunks = [[collective_from_json(document) for document in chunk] for chunk in job["chunks"]]
        self._reference = MeasuredCollective(
            level=GroupLevel.WORLD,
            operator=Operator.ALL_TO_ALL,  # its times spread less than an all-reduce's on a busy machine
            dtype=DType.FP32,
            bytes_per_rank=job["reference_bytes"],
        )
        self._num_left: int | None = job["num_samples"]
        self._seconds: float | None = job["seconds"]
        self._control = dist.new_group(backend="gloo")
        self._groups = _groups(job["node_size"])
        self._buffers = Buffers(device)
        self._refused: dict[tuple[object, ...], str | None] = {}
        self._deadline = float("inf")
        self._heard = 0.0
        self._clock: Clock = WallClock()
        self._aligned = torch.zeros(1, device=device)
        self._has_one_clock = self._ranks_share_a_clock()

    def _ranks_share_a_clock(self) -> bool:
        """Whether all ranks read the monotonic clock of one running kernel."""
        boots: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(boots, _BOOT_ID.read_text() if _BOOT_ID.exists() else "", group=self._control)
        return bool(boots[0]) and len(set(boots)) == 1

    def run(self) -> None:
        """Measures all chunks once, or again and again while there is time, until there are enough samples.

        Raises:
            DeviceError: If the device runs out of memory.
            ExecutionError: If wrong data arrives.
        """
        self._refusal(self._reference)
        self._report(event="ready")
        if self._seconds is not None:
            self._deadline = time.monotonic() + self._seconds
        sweep, some = 0, True
        while some:
            some = False
            for chunk in self._chunks:
                if self._num_left == 0:
                    return
                chosen = [one for one in (_in_sweep(one, sweep) for one in chunk) if self._can_run(one, sweep)]
                chosen = chosen[: self._num_left]
                measured = bool(chosen) and self._measure(chosen)
                if chosen and not measured and sweep == 0:
                    self._report(event="skipped", reason=_TIME_IS_UP, count=len(chosen))
                if measured and self._num_left is not None:
                    self._num_left -= len(chosen)
                some = some or measured
            if self._seconds is None:
                return
            sweep += 1

    def _can_run(self, one: MeasuredCollective, sweep: int) -> bool:
        reason = self._refusal(one) or self._shortage(one)
        if reason and sweep == 0:
            self._report(event="skipped", reason=reason, count=1)
        return reason is None

    def _refusal(self, one: MeasuredCollective) -> str | None:
        """Why the backend does not run it; a kind that it runs is verified when it is first met."""
        kind = (one.level, one.operator, one.splits, one.dtype)
        if kind not in self._refused:
            reason = ""
            try:
                verify(one, self._groups[one.level], self._device)
            except (RuntimeError, ValueError, TypeError) as error:
                reason = str(error).strip().splitlines()[0]
            # A peer that is gone fails here as well: only what all ranks live to agree on is a refusal.
            is_fine = self._agree(not reason)
            self._refused[kind] = (
                None if is_fine else f"{one.operator} of {one.dtype} is refused: {reason or 'by a peer'}"
            )
        return self._refused[kind]

    def _shortage(self, one: MeasuredCollective) -> str | None:
        group = self._groups[one.level]
        movement = Movement.of(one, dist.get_world_size(group))
        needed = _BACKEND_FACTOR * 2 * _largest_buffer(movement)
        share = 1 if self._device.type == "cuda" else dist.get_world_size()
        # What this process holds already is free for its own next collective.
        free = free_bytes(self._device) // share + self._buffers.num_bytes
        if self._agree(needed <= free):
            return None
        return f"memory does not hold {one.bytes_per_rank:,} bytes per rank and what the backend needs beside"

    def _measure(self, chosen: Sequence[MeasuredCollective]) -> bool:
        """Measures one chunk; false if there is no time for it."""
        collectives = [*[self._reference] * _REFERENCE_COPIES, *chosen]
        bound = self._bind(collectives)
        start_ms_SR, end_ms_SR = np.zeros((2, len(collectives), self._rounds.num_rounds))
        self._clock = CudaClock() if self._device.type == "cuda" else WallClock()
        begun = time.monotonic()
        with collector_paused():
            for round_ in range(self._rounds.num_rounds):
                for position, index in enumerate(self._rng.permutation(len(bound)).tolist()):
                    self._warm(bound[index])
                    if not self._agree(self._has_time(begun, round_, position)):
                        return False
                    start_ms_SR[index, round_], end_ms_SR[index, round_] = self._time(bound[index], index)
                    self._heartbeat()
        slowest_SR = self._slowest_ms(collectives, torch.from_numpy(start_ms_SR), torch.from_numpy(end_ms_SR))
        self._report_measured(chosen, slowest_SR.numpy()[:, self._rounds.num_warmup :])
        return True

    def _slowest_ms(
        self, collectives: Sequence[MeasuredCollective], start_ms_SR: torch.Tensor, end_ms_SR: torch.Tensor
    ) -> torch.Tensor:
        """From the start of a group's last rank to the end of its last one, of the slowest group; shape (S, rounds)."""
        if self._device.type == "cpu" and self._has_one_clock:
            for one, start_ms_R in zip(collectives, start_ms_SR, strict=True):
                dist.all_reduce(start_ms_R, op=dist.ReduceOp.MAX, group=self._groups[one.level])
        slowest_SR = (end_ms_SR - start_ms_SR).clamp(min=_LEAST_MS)
        dist.all_reduce(slowest_SR, op=dist.ReduceOp.MAX, group=self._control)
        return slowest_SR

    def _has_time(self, begun: float, round_: int, position: int) -> bool:
        """Whether to go on: after the warm-up it is known what the rest takes, and then it is finished or left."""
        num_warmup = self._rounds.num_warmup
        if (round_, position) > (num_warmup, 0):
            return True
        now = time.monotonic()
        ahead = (now - begun) / num_warmup * self._rounds.num_measured if round_ == num_warmup else 0.0
        return now + ahead < self._deadline

    def _bind(self, collectives: Sequence[MeasuredCollective]) -> list[BoundCollective]:
        groups = [self._groups[one.level] for one in collectives]
        moved = [Movement.of(one, dist.get_world_size(group)) for one, group in zip(collectives, groups, strict=True)]
        self._buffers.reserve(max(map(_largest_buffer, moved)))
        return [BoundCollective.bind(one, group, self._buffers) for one, group in zip(moved, groups, strict=True)]

    def _warm(self, bound: BoundCollective) -> None:
        """Runs what fits into caches once, untimed.

        Otherwise its time would tell how large the one before it was, and so would the reference's: 1 ms among small
        collectives, 4 ms among those of 256 MiB (gloo, 2 processes on 2 cores).
        """
        bound.prepare()
        if _largest_buffer(bound.movement) <= _CACHED_BYTES:  # of any rank: all have to decide alike
            bound.run()
            bound.prepare()

    def _time(self, bound: BoundCollective, key: int) -> tuple[float, float]:
        """When one collective began on this rank, and when its result was there, in ms.

        On a CPU ranks come to it one after the other, in an order of chance, and it counts from the last one on. Where
        ranks have no clock in common, the last one is taken to come `_APART_S` after the first.

        On a GPU it is queued behind a lead, as kernels are, and behind an all-reduce of one number, for ranks to begin
        together: otherwise the host's launch and the ranks' distance would count, which take longer than a small
        collective. Small ones are queued several times in a row and divided, as nccl-tests does: this mean is what
        is stored, since it is what a step's collectives take, whose ranks are at work before.

        Args:
            bound: What to run.
            key: Of its lead.
        """
        if self._device.type == "cuda":
            times = _NUM_REPEATED if _largest_buffer(bound.movement) <= _REPEATED_BYTES else 1
            return 0.0, led_ms(
                bound.run,
                self._clock,
                key=key,
                times=times,
                before=partial(dist.all_reduce, self._aligned, group=bound.group),
                again=bound.prepare,
                agree=self._agree,
            )
        agreed_s = time.perf_counter()
        turn_R = self._rng.permutation(dist.get_world_size())
        time.sleep(_APART_S * int(turn_R[dist.get_rank()]) / max(1, len(turn_R) - 1))
        came_s = time.perf_counter() if self._has_one_clock else agreed_s + _APART_S * (len(turn_R) > 1)
        bound.run()
        return 1e3 * came_s, 1e3 * time.perf_counter()

    def _agree(self, vote: bool) -> bool:
        """A barrier that tells whether every rank votes for it."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        votes = torch.tensor([int(vote)])
        dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=self._control)
        return bool(votes.item())

    def _report_measured(self, chosen: Sequence[MeasuredCollective], latency_ms_SR: MsArray) -> None:
        found = locate(latency_ms_SR, self._rounds.num_dropped)
        rows = enumerate(chosen, start=_REFERENCE_COPIES)
        self._report(
            event="measured",
            reference_ms=float(found.mean_ms_S[:_REFERENCE_COPIES].mean()),
            num_rounds=self._rounds.num_measured,
            measured=[
                {
                    "collective": asdict(one),
                    "latency_ms": float(found.mean_ms_S[row]),
                    "spread": float(found.spread_S[row]),
                }
                for row, one in rows
            ],
        )

    def _heartbeat(self) -> None:
        if time.monotonic() - self._heard >= _HEARTBEAT_S:
            self._report(event="alive")

    def _report(self, **event: object) -> None:
        self._heard = time.monotonic()
        if dist.get_rank() == 0:
            print(json.dumps(event, allow_nan=False), flush=True)


def _groups(node_size: int) -> dict[GroupLevel, dist.ProcessGroup]:
    """This rank's group of each level; every rank makes all of them, in the same order."""
    rank, nproc = dist.get_rank(), dist.get_world_size()
    nodes = [list(range(start, start + node_size)) for start in range(0, nproc, node_size)]
    across = [list(range(local, nproc, node_size)) for local in range(node_size)]
    world = dist.group.WORLD
    assert world is not None
    groups = {GroupLevel.WORLD: world}
    for level, parts in ((GroupLevel.NODE, nodes), (GroupLevel.ACROSS_NODES, across)):
        for ranks in parts:
            group = dist.new_group(ranks)
            if rank in ranks:
                groups[level] = group
    return groups


def _in_sweep(one: MeasuredCollective, sweep: int) -> MeasuredCollective:
    """Other splits each time that all is measured anew."""
    return replace(one, split_seed=one.split_seed + sweep) if one.splits is Splits.UNEQUAL else one


def _largest_buffer(movement: Movement) -> int:
    """Of any rank: ranks reserve alike, and all or none run out of memory."""
    return max(max(movement.buffer_bytes(rank)) for rank in range(movement.num_ranks))


def main() -> None:
    """Measures what the job in the folder that the command line names asks for."""
    run_worker(_measure)


def _measure(job: dict[str, Any], _folder: Path, _rank: int) -> None:
    device = choose_device({Device(job["device"])})
    with joined(device, timedelta(seconds=job["timeout_s"])):
        try:
            CollectiveWorker(job, device).run()
        except torch.OutOfMemoryError as error:
            raise DeviceError(f"{device} ran out of memory; others may be using it") from error


if __name__ == "__main__":
    main()
