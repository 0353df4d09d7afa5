"""Collectives between real gloo processes, what they leave in the store, and the links fitted to them."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.core import DType
from autoshard.core.errors import DeviceError, ExecutionError, InvalidOptionError, SampleStoreError
from autoshard.formats.stores.collective_samples import (
    COLLECTIVE_SAMPLES,
    GroupLevel,
    MeasuredCollective,
    Operator,
    Splits,
)
from autoshard.hardware import this_processor
from bench.collecting.collectives import collect_collectives
from bench.collectives.operators import Movement, expected_output, rank_content, refusal, split_matrix, verify
from bench.collectives.sampling import (
    OPERATORS,
    CollectiveSettings,
    Processes,
    choose_collectives,
    fewest_first,
    powers_of_four,
)
from bench.collectives.worker import CollectiveWorker
from bench.measuring.timing import RoundSettings
from tests import builders as make
from tests.ranks import on_ranks

ROOT = Path(__file__).parents[2]
TWO, FOUR = Processes(nproc=2, node_size=2), Processes(nproc=4, node_size=2)
QUICK = RoundSettings(num_warmup=1, num_measured=3, num_dropped=1, flush_every_run=False)
FOREVER_S = 1000.0


def quick(*sizes, **values):
    return CollectiveSettings(sizes=sizes, rounds=QUICK, **values)


def collective_of(operator=Operator.ALL_TO_ALL, bytes_per_rank=4096, level=GroupLevel.WORLD, **values):
    return MeasuredCollective(
        operator=operator, bytes_per_rank=bytes_per_rank, level=level, **{"dtype": DType.FP32} | values
    )


def unequal_of(**values):
    return collective_of(**{"splits": Splits.UNEQUAL, "skew": 0.7, "split_seed": 3} | values)


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    """Where runs keep their files; its name is on the command line of every process of a run."""
    folder = tmp_path / "runs"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def is_running(folder):
    return subprocess.run(["pgrep", "-f", str(folder)], stdout=subprocess.DEVNULL, check=False).returncode == 0


def worker(folder, rank):
    return int(next(folder.glob(f"*/pid.{rank}")).read_text())


# Real processes


@pytest.mark.slow
def test_every_operator_and_dtype_is_measured_on_every_level(tmp_path, run_folder):
    heard = []
    impossible = 2**50
    collection = collect_collectives(
        tmp_path / "store",
        FOUR,
        quick(1024, impossible),
        device="cpu",
        advance=lambda count, seconds: heard.append((count, seconds)),
    )
    samples = COLLECTIVE_SAMPLES.read(tmp_path / "store")
    measured = Counter(
        (one.collective.level, one.collective.operator, one.collective.splits, one.collective.dtype) for one in samples
    )
    wanted = {
        (level, operator, splits, dtype)
        for level in GroupLevel
        for operator, splits in OPERATORS
        for dtype in (DType.FP32, DType.FP16, DType.INT8)
        if not (operator.is_reduction and dtype is DType.INT8)
    }
    assert measured == dict.fromkeys(wanted, 1)
    assert all(one.machine.is_like(this_processor()) and one.memory_bytes_per_s > 0 for one in samples)
    assert collection.num_samples == len(samples) == 48 == sum(count for count, _ in heard)
    assert (collection.device, collection.added) == ("cpu", {"gloo": 48})
    assert set(collection.reasons) == set(collection.failed)
    assert {reason.split(":")[0]: count for reason, count in collection.failed.items()} == {
        "all_reduce of int8": 6,
        "reduce_scatter of int8": 6,
        f"memory does not hold {impossible:,} bytes per rank and what the backend needs beside": 39,
    }
    for sample in samples:
        assert (sample.nproc, sample.node_size, sample.num_hosts, sample.num_rounds) == (4, 2, 1, 3)
        assert (sample.group_size, sample.num_nodes) == FOUR.group_shape(sample.collective.level)
        assert sample.collective.bytes_per_rank == 1024
        assert sample.latency_ms > 0
        assert sample.reference_ms > 0
    assert not is_running(run_folder)
    assert list(run_folder.iterdir()) == []


ORACLE = """
import os, sys, time
import torch, torch.distributed as dist
from autoshard.core import DType
from autoshard.formats.stores.collective_samples import MeasuredCollective, GroupLevel, Operator, Splits
from bench.collectives.operators import BoundCollective, Movement, verify
from bench.collectives.sampling import OPERATORS
from autoshard.runtime.engine.staging import TORCH_DTYPES

rank, size = int(sys.argv[1]), 3
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], size), rank=rank, world_size=size)
for operator, splits in OPERATORS:
    for dtype in (DType.FP32, DType.FP16, DType.INT8):
        skew = 1.0 if splits is Splits.UNEQUAL else 0.0
        one = MeasuredCollective(level=GroupLevel.WORLD, operator=operator, dtype=dtype, bytes_per_rank=240,
                         splits=splits, skew=skew)
        verify(one, dist.group.WORLD, torch.device("cpu"))
        movement = Movement.of(one, size)
        kind = TORCH_DTYPES[dtype]
        mine = torch.randint(-9, 9, (movement.num_inputs(rank),)).to(kind)
        everyones = [None] * size
        dist.all_gather_object(everyones, mine)
        bound = BoundCollective(movement=movement, group=dist.group.WORLD, inputs=mine,
                                outputs=torch.zeros(movement.num_outputs(rank), dtype=kind))
        bound.prepare()
        bound.run()
        if operator is Operator.ALL_TO_ALL:
            starts = movement.count_RR.cumsum(axis=1) - movement.count_RR
            parts = [everyones[i][starts[i, rank]:starts[i, rank] + movement.count_RR[i, rank]] for i in range(size)]
            wanted = torch.cat(parts)
        elif operator is Operator.ALL_GATHER:
            wanted = torch.cat(everyones)
        else:
            wanted = everyones[0] + everyones[1] + everyones[2]
            if operator is Operator.REDUCE_SCATTER:
                share = len(wanted) // size
                wanted = wanted[rank * share:(rank + 1) * share]
        assert len(wanted) and torch.equal(bound.outputs, wanted), (operator, splits, dtype)
dist.barrier()
time.sleep(0.2)
os._exit(0)  # gloo's threads, if they are still winding down, abort an orderly exit
"""


@pytest.mark.slow
def test_what_arrives_is_what_three_processes_sent(tmp_path):
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", ORACLE]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "rendezvous")],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    failures = [process.communicate(timeout=100)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], failures


@pytest.fixture
def one_process():
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("operator", Operator)
def test_wrong_data_is_noticed(operator, one_process):
    import torch

    one, device = collective_of(operator), torch.device("cpu")
    verify(one, one_process, device)

    def moves_and_breaks_one(bound):
        bound.run()
        bound.outputs[-1] += 1

    with pytest.raises(ExecutionError, match=f"^{operator} with equal splits of fp32 over world brought wrong data"):
        verify(one, one_process, device, moves_and_breaks_one)


def reports_of(capsys, seconds, *chunks, num_samples=None):
    job = {
        "rounds": asdict(QUICK),
        "seed": 0,
        "reference_bytes": 1024,
        "num_samples": num_samples,
        "seconds": seconds,
        "node_size": 1,
        "chunks": [[asdict(one) for one in chunk] for chunk in chunks],
    }
    CollectiveWorker(job, torch.device("cpu")).run()
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.usefixtures("one_process")
def test_what_there_is_no_time_for_is_skipped_and_counted(capsys):
    chunks = [[collective_of()], [unequal_of(), collective_of(Operator.ALL_GATHER)]]
    reports = reports_of(capsys, 1e-9, *chunks)
    skipped = [report for report in reports if report["event"] == "skipped"]
    assert [report["count"] for report in skipped] == [1, 2]
    assert all("time given was up" in report["reason"] for report in skipped)
    assert not [report for report in reports if report["event"] == "measured"]


@pytest.mark.usefixtures("one_process")
def test_all_is_measured_anew_with_other_splits_while_there_is_time(capsys):
    reports = reports_of(capsys, 0.5, [unequal_of(split_seed=7), collective_of()])
    measured = [report["measured"] for report in reports if report["event"] == "measured"]
    seeds = [[row["collective"]["split_seed"] for row in rows] for rows in measured]
    assert len(seeds) > 1
    assert seeds == [[7 + sweep, 0] for sweep in range(len(seeds))]
    assert all(row["latency_ms"] > 0 for rows in measured for row in rows)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("num_samples", "seconds", "counts"), [(3, None, [2, 1]), (2, 60.0, [2]), (7, 60.0, [2, 3, 2])]
)
def test_no_more_is_measured_than_samples_are_asked_for(capsys, num_samples, seconds, counts):
    chunks = [[collective_of(), unequal_of()], [collective_of(bytes_per_rank=size) for size in (1024, 2048, 8192)]]
    reports = reports_of(capsys, seconds, *chunks, num_samples=num_samples)
    assert [len(report["measured"]) for report in reports if report["event"] == "measured"] == counts
    assert not [report for report in reports if report["event"] == "skipped"]


JOB = {"rounds": asdict(QUICK), "seed": 0, "reference_bytes": 1024, "num_samples": None, "seconds": None, "chunks": []}


def latencies_of(told):
    """What ranks of one node make of the starts and ends that each noted of a collective of every level."""
    levels = (GroupLevel.WORLD, GroupLevel.NODE, GroupLevel.ACROSS_NODES)
    worker = CollectiveWorker({**JOB, "node_size": 2}, torch.device("cpu"))
    start_ms_SR, end_ms_SR = (torch.tensor([ms_R] * len(levels)) for ms_R in told[torch.distributed.get_rank()])
    return worker._slowest_ms([collective_of(level=level) for level in levels], start_ms_SR, end_ms_SR).tolist()


@pytest.mark.slow
def test_a_collective_counts_from_the_last_rank_that_comes():
    """The second rank comes last to one round, the first rank to the other."""
    told = [([2000.0, 4000.0], [5020.0, 4010.0]), ([5000.0, 1000.0], [5030.0, 4040.0])]
    # Across nodes each rank is alone: its own time counts.
    assert on_ranks(latencies_of, 2, told) == [[[30.0, 40.0], [30.0, 40.0], [3020.0, 3040.0]]] * 2


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("has_one_clock", [True, False])
def test_a_rank_notes_when_it_comes_to_a_collective_and_when_it_leaves(has_one_clock, monkeypatch):
    now = [100.0]

    class Slept(CollectiveWorker):
        _ranks_share_a_clock = staticmethod(lambda: has_one_clock)

    def sleep(seconds):
        now[0] += seconds + 0.5  # late, as on a busy machine

    class Bound:
        def run(self):
            now[0] += 0.25

    worker = Slept({**JOB, "node_size": 1}, torch.device("cpu"))
    monkeypatch.setattr("bench.collectives.worker.time.sleep", sleep)
    monkeypatch.setattr("bench.collectives.worker.time.perf_counter", lambda: now[0])
    start_ms, end_ms = worker._time(Bound(), 0)
    assert end_ms - start_ms == pytest.approx(250.0 if has_one_clock else 750.0)


@pytest.mark.slow
def test_a_killed_worker_is_named_quickly_and_earlier_samples_stay(tmp_path, run_folder):
    def kill(*_):
        os.kill(worker(run_folder, 1), signal.SIGKILL)

    with pytest.raises(ExecutionError, match=r"^process 1 was killed by signal 9 \(SIGKILL\)$"):
        collect_collectives(tmp_path, TWO, quick(1024), device="cpu", seconds=FOREVER_S, advance=kill)
    assert not is_running(run_folder)
    assert list(run_folder.iterdir()) == []
    assert len(COLLECTIVE_SAMPLES.read(tmp_path)) >= 13


@pytest.mark.slow
def test_a_worker_that_hangs_is_noticed(tmp_path, run_folder):
    def freeze(*_):
        os.kill(worker(run_folder, 1), signal.SIGSTOP)

    settings = quick(1024, stall_timeout_s=10)
    with pytest.raises(ExecutionError, match="no process has answered for 10 s; one of them hangs"):
        collect_collectives(tmp_path, TWO, settings, device="cpu", seconds=FOREVER_S, advance=freeze)
    assert not is_running(run_folder)


@pytest.mark.slow
def test_a_killed_run_leaves_its_samples_and_no_process(tmp_path, run_folder, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(run_folder))
    code = (
        "from pathlib import Path\n"
        "from bench.collecting.collectives import collect_collectives\n"
        "from bench.collectives.sampling import CollectiveSettings, Processes\n"
        "processes, settings = Processes(nproc=2, node_size=2), CollectiveSettings(seconds_per_file=1)\n"
        f"store = Path({str(tmp_path / 'store')!r})\n"
        f"collect_collectives(store, processes, settings, device='cpu', seconds={FOREVER_S})"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as collecting:
        while not list((tmp_path / "store").glob("*/*/part-*")):
            assert collecting.poll() is None
            time.sleep(0.1)
        collecting.kill()
    assert COLLECTIVE_SAMPLES.read(tmp_path / "store")
    while is_running(run_folder):  # pytest's own timeout ends this if they stay
        time.sleep(0.1)


# What is chosen


def test_sizes_are_powers_of_four():
    assert powers_of_four() == tuple(2**power for power in range(10, 29, 2))
    assert powers_of_four(1024, 4095) == (1024,)


@pytest.mark.parametrize(
    ("nproc", "node_size", "levels"),
    [
        (4, 2, ("node", "across_nodes", "world")),
        (4, 4, ("node",)),
        (4, 1, ("across_nodes",)),
        (2, 2, ("node",)),
    ],
)
def test_levels_with_the_same_ranks_are_measured_once(nproc, node_size, levels):
    processes = Processes(nproc=nproc, node_size=node_size)
    assert processes.levels == levels
    chosen = choose_collectives(processes, quick(1024, 4096))
    assert len(chosen) == len(set(chosen)) == 2 * len(levels) * len(OPERATORS) * 3


def test_reductions_of_int8_are_refused_with_a_reason():
    assert "overflow" in refusal(collective_of(Operator.ALL_REDUCE, dtype=DType.INT8))
    assert refusal(collective_of(Operator.ALL_GATHER, dtype=DType.INT8)) is None


def sample_of(collective, seconds=1e-3, *, nproc=4, node_size=2, reference_ms=1.0, **fields):
    group_size, _ = Processes(nproc=nproc, node_size=node_size).group_shape(collective.level)
    sent_R, received_R = Movement.of(collective, group_size).sent_bytes()
    return make.collective_sample(
        collective,
        nproc=nproc,
        node_size=node_size,
        mean_sent_bytes=float(sent_R.mean()),
        max_sent_bytes=int(sent_R.max()),
        max_received_bytes=int(received_R.max()),
        latency_ms=seconds * 1e3 * reference_ms,
        reference_ms=reference_ms,
        **{"spread": 0.0, **fields},
    )


def test_what_has_fewest_samples_comes_first(tmp_path):
    chosen = choose_collectives(TWO, quick(1024, 4096))
    assert fewest_first(chosen, tmp_path, "cpu", TWO) == chosen
    small = chosen[: len(chosen) // 2]
    COLLECTIVE_SAMPLES.write(tmp_path, [sample_of(one, nproc=2) for one in small])
    assert fewest_first(chosen, tmp_path, "cpu", TWO) == chosen[len(small) :] + small
    assert fewest_first(chosen, tmp_path, "cpu", FOUR) == chosen  # measured by other processes


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"nproc": 1}, InvalidOptionError, "nproc: must be at least 2"),
        ({"nproc": 4, "node_size": 3}, InvalidOptionError, "node_size: must divide the 4 processes, got 3"),
        ({"nproc": 4, "node_size": 0}, InvalidOptionError, "node_size: must divide the 4 processes, got 0"),
        ({"seconds": 0.0}, InvalidOptionError, "seconds: must be a number above 0, got 0.0"),
        ({"seconds": float("nan")}, InvalidOptionError, "seconds: must be a number above 0, got nan"),
        ({"device": "tpu"}, InvalidOptionError, "device: must be one of auto, cpu, cuda"),
        ({"nproc": 4096, "node_size": 1, "device": "cuda"}, DeviceError, "GPU"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(options, error, text, tmp_path, run_folder):
    numbers = {name: options[name] for name in ("nproc", "node_size") if name in options}
    others = {name: value for name, value in options.items() if name not in numbers}
    with pytest.raises(error, match=text):
        collect_collectives(tmp_path / "store", Processes(**numbers), **others)
    assert list(run_folder.iterdir()) == []


def test_a_store_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "store").write_text("not a folder")
    with pytest.raises(SampleStoreError, match="is no folder"):
        collect_collectives(tmp_path / "store", Processes())


@pytest.mark.parametrize(
    ("values", "field"),
    [({"sizes": ()}, "sizes"), ({"sizes": (0,)}, "sizes"), ({"skew": 0.0}, "skew"), ({"min_chunk": 0}, "min_chunk")],
)
def test_bad_settings_are_refused(values, field):
    with pytest.raises(InvalidOptionError) as caught:
        CollectiveSettings(**values)
    assert caught.value.field == field


# What is moved


@given(
    num_ranks=st.integers(1, 16),
    elements=st.integers(1, 10**9),
    skew=st.floats(0.01, 20),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=50)
def test_unequal_splits_conserve_bytes(num_ranks, elements, skew, seed):
    count_RR = split_matrix(num_ranks, elements, skew, seed)
    assert count_RR.shape == (num_ranks, num_ranks)
    assert (count_RR >= 0).all()
    assert count_RR.sum() == num_ranks * elements
    np.testing.assert_array_equal(count_RR, split_matrix(num_ranks, elements, skew, seed))


def test_splits_are_more_unequal_with_more_skew():
    spreads = [split_matrix(8, 10**6, skew, 5).std() for skew in (0.1, 0.5, 1.5)]
    assert spreads == sorted(spreads)
    assert spreads[0] > 0


def test_one_way_the_first_rank_sends_all():
    one = collective_of(splits=Splits.ONE_WAY, bytes_per_rank=4000)
    movement = Movement.of(one, 4)
    assert movement.bytes_per_rank == one.bytes_per_rank
    sent_R, received_R = movement.sent_bytes()
    assert sent_R.tolist() == [3 * 4000, 0, 0, 0]
    assert received_R.tolist() == [0, 4000, 4000, 4000]


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize(
    "one",
    [*(collective_of(operator) for operator in Operator), unequal_of(), collective_of(splits=Splits.ONE_WAY)],
    ids=str,
)
def test_ranks_send_what_others_receive(one, num_ranks):
    movement = Movement.of(one, num_ranks)
    sent_R, received_R = movement.sent_bytes()
    assert sent_R.sum() == received_R.sum() > 0
    if one.operator is Operator.ALL_TO_ALL:
        inputs, outputs = (sum(map(count, range(num_ranks))) for count in (movement.num_inputs, movement.num_outputs))
        assert inputs == outputs == movement.bytes_per_rank * num_ranks // 4
    # Rounded down to whole elements for every pair.
    assert one.bytes_per_rank - 4 * num_ranks < movement.bytes_per_rank <= one.bytes_per_rank


def test_bytes_that_have_to_leave_a_rank():
    # 4096 bytes over 4 ranks: 3/4 of them leave, in an all-reduce twice.
    sent = {operator: Movement.of(collective_of(operator), 4).sent_bytes()[0].tolist() for operator in Operator}
    assert sent == {
        Operator.ALL_TO_ALL: [3072] * 4,
        Operator.REDUCE_SCATTER: [3072] * 4,
        Operator.ALL_GATHER: [3072] * 4,
        Operator.ALL_REDUCE: [6144] * 4,
    }


def test_contents_differ_between_ranks_and_between_blocks():
    movement = Movement.of(collective_of(bytes_per_rank=480 * 4), 4)
    blocks = {tuple(block.tolist()) for rank in range(4) for block in rank_content(movement, rank).chunk(4)}
    assert len(blocks) == 16
    assert len({tuple(expected_output(movement, rank).tolist()) for rank in range(4)}) == 4
