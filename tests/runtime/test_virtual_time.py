"""Virtual time: clocks, meetings, the wire, and plans that are executed on it."""

import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from autoshard.commands.run import NodeOptions, RunOptions, VirtualOptions
from autoshard.core import Collective, GroupLayout, Pooling, ReplicaGroups, Tier
from autoshard.core.errors import AutoshardError, InvalidOptionError
from autoshard.core.replica_groups import part_of
from autoshard.core.step import Overlap
from autoshard.evaluation.communication import AlphaBetaComm, link_bytes
from autoshard.formats import write_plan, write_topology
from autoshard.runtime import RunRequest, run_requests
from autoshard.runtime.clock import WALL
from autoshard.runtime.processes.session import Session, _in_turn
from autoshard.runtime.result_json import RUN
from autoshard.runtime.run_store import append_run, read_runs
from autoshard.runtime.virtual import Operation, Wire
from autoshard.runtime.virtual.clock import BusyTimes, CoreToken, VirtualClock, physical_cores
from autoshard.runtime.virtual.meeting import NUM_SLOTS, Meeting, SharedLinks
from autoshard.runtime.virtual.wire import ProcessorWork
from autoshard.whatif.trials import execute_plans, plan_task
from tests import builders as make


def burn(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


@pytest.fixture
def clock(tmp_path):
    return VirtualClock(CoreToken(tmp_path / "core"))


def test_threads_of_a_rank_share_its_core():
    core = BusyTimes()
    assert core.work(1.0, 2.0) == 3.0
    assert core.work(10.0, 1.0) == 11.0
    # It works in the gap from 3 to 10, and what does not fit after 11.
    assert core.work(2.0, 9.0) == 13.0
    assert core.work(0.0, 1.0) == 1.0
    assert core.work(0.0, 0.5) == 13.5
    assert core.work(20.0, 0.5) == 20.5


def test_work_that_fits_before_other_work_is_not_delayed():
    core = BusyTimes()
    core.work(5.0, 1.0)
    assert core.work(4.0, 1.0) == 5.0
    assert core.work(0.0, 1.0) == 1.0


def test_a_core_forgets_what_is_long_over():
    core = BusyTimes()
    for number in range(5000):
        core.work(2.0 * number, 1.0)
    assert core.work(20_000.0, 1.0) == 20_001.0
    assert len(core.begun_s) < 1000


def test_threads_that_compute_at_the_same_time_take_turns(clock):
    begun, told, ended_s = threading.Event(), threading.Event(), []

    def compute():
        clock.set_forward(5.0)
        clock.start()
        begun.set()
        burn(0.05)
        told.wait()
        burn(0.02)
        ended_s.append(clock.now_s())
        clock.stop()

    thread = threading.Thread(target=compute)
    clock.set_forward(5.0)
    clock.start()
    thread.start()
    begun.wait()
    burn(0.05)
    time.sleep(0.1)  # until the other one waits
    # It has had the core for as long as that one computed, which goes on after it.
    assert 5.1 <= clock.now_s() < 5.15
    told.set()
    clock.stop()
    thread.join()
    assert ended_s[0] >= clock.now_s() + 0.02 - 0.005


def test_a_clock_goes_on_by_work_alone(clock):
    clock.start()
    burn(0.02)
    worked = clock.now_s()
    assert worked >= 0.02
    with clock.idle():
        burn(0.02)
    with clock.uncounted() as now_s:
        burn(0.02)
    time.sleep(0.02)
    assert worked <= now_s <= clock.now_s() < worked + 0.02
    clock.stop()
    stopped = clock.now_s()
    burn(0.01)
    assert clock.now_s() == stopped


def test_a_clock_is_not_set_back(clock):
    clock.set_forward(3.0)
    clock.set_forward(2.0)
    with clock.at(7.0):
        assert clock.now_s() == 7.0
    assert clock.now_s() == 3.0


def test_what_waits_lets_others_have_the_core(clock, tmp_path):
    clock.start()
    other, has_it = CoreToken(tmp_path / "core"), threading.Event()

    def take():
        other.take()
        has_it.set()
        other.give()

    thread = threading.Thread(target=take)
    thread.start()
    assert not has_it.wait(0.05)
    with clock.idle():
        assert has_it.wait(10)
    thread.join()
    clock.stop()


def test_items_between_threads_carry_the_time(clock, tmp_path):
    asked, answered, seen = clock.handover(), clock.future(), []

    def work():
        while (item := asked.get()) is not None:
            burn(0.02)
            seen.append((item, clock.now_s()))
            answered.set_result(item)

    thread = threading.Thread(target=work)
    thread.start()
    clock.set_forward(5.0)
    clock.start()
    asked.put("x")
    assert answered.result() == "x"
    assert clock.now_s() >= 5.02
    assert answered.exception() is None
    asked.put(None)
    thread.join()
    clock.stop()
    assert seen[0][0] == "x"
    assert 5.02 <= seen[0][1] < 6.0
    CoreToken(tmp_path / "core").take()  # the thread that ended does not keep it


def test_an_error_of_another_thread_is_raised_at_its_time(clock):
    answered = clock.future()

    def fail():
        clock.set_forward(9.0)
        answered.set_exception(ValueError("no"))

    threading.Thread(target=fail).start()
    with pytest.raises(ValueError, match="no"):
        answered.result()
    assert clock.now_s() == 9.0


def test_the_clock_of_the_wall_is_the_machines():
    assert abs(WALL.now_s() - time.perf_counter()) < 1.0
    with WALL.idle(), WALL.uncounted():
        items, answer = WALL.handover(), WALL.future()
    items.put(3)
    answer.set_result(4)
    assert (items.get(), answer.result()) == (3, 4)


def test_cores_of_the_machine_are_told_once():
    cores = physical_cores()
    assert cores
    assert len(set(cores)) == len(cores)


def test_the_last_that_comes_to_a_meeting_ends_it_for_all(tmp_path):
    size, file = 3, tmp_path / "meeting"
    meetings = [Meeting(file, rank, size, 2, is_first=rank == 0) for rank in range(size)]
    told, heard = {}, {}

    def take_part(rank):
        for number in range(3 * NUM_SLOTS):
            all_told = meetings[rank].come(number, np.array([rank, number]))
            if all_told is not None:
                told[number] = all_told.tolist()
                meetings[rank].end(number, number + np.arange(size) / 10)
            heard[rank, number] = meetings[rank].wait(number)

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert told == {number: [[0, number], [1, number], [2, number]] for number in range(3 * NUM_SLOTS)}
    assert heard == {(rank, number): number + rank / 10 for rank in range(size) for number in range(3 * NUM_SLOTS)}
    assert meetings[1].ended_s == 3 * NUM_SLOTS - 1 + 0.2


def test_a_link_carries_one_collective_after_the_other(tmp_path):
    first, second = (SharedLinks(tmp_path / "links", 4, is_first=is_first) for is_first in (True, False))
    one = np.ones((2, 2))
    assert first.carry(0, (0, 1), 1.0, np.array([[2.0, 1.0]] * 2)) == 0.0
    # Rank 1's link is free at 2, rank 0's at 3: both wait for that.
    assert second.carry(0, (0, 1), 1.5, one) == 1.5
    assert second.carry(0, (2, 3), 1.5, one) == 0.0
    assert second.carry(1, (0, 1), 1.5, one) == 0.0  # other links
    assert first.carry(0, (0, 1), 0.0, one / 2) == 0.0  # before all of that
    assert first.carry(0, (0, 1), 2.0, 0 * one) == 0.0  # nothing uses no link


def test_links_that_send_are_free_to_receive(tmp_path):
    links, there = SharedLinks(tmp_path / "links", 2, is_first=True), np.array([[1.0, 0.0], [0.0, 1.0]])
    assert links.carry(0, (0, 1), 0.0, there) == 0.0
    assert links.carry(0, (0, 1), 0.5, 1 - there) == 0.0
    assert links.carry(0, (0, 1), 0.5, there) == 0.5


def test_an_all_to_all_uses_links_the_way_that_it_sends():
    wire = Wire(make.topology(2, bytes_per_s=100.0, latency_s=0.25), AlphaBetaComm())
    bytes_NN = np.array([[0.0, 100.0], [50.0, 0.0]])
    assert wire.in_use_s(Operation.ALL_TO_ALL, bytes_NN, (0, 1)) == pytest.approx(np.array([[1.0, 0.5], [0.5, 1.0]]))
    assert wire.in_use_s(Operation.ALL_REDUCE, bytes_NN[::-1], (0, 1)).shape == (2, 2)


def test_a_core_that_computes_for_a_collective_computes_nothing_else(clock):
    clock.charge(5.0, 1.0)
    clock.set_forward(5.5)
    clock.start()
    burn(0.02)
    assert 6.02 <= clock.now_s() < 6.1
    clock.stop()


def test_a_processor_computes_for_what_its_rank_sends():
    operations = {one: ProcessorWork(each_s=1.0, byte_s=1e-3) for one in Operation}
    wire = Wire(make.topology(2, 4), AlphaBetaComm(), operations)
    put_in_N = np.array([100.0, 0.0, 0.0, 0.0])
    found = {one: wire.work_s(one, put_in_N) for one in Operation}
    sent = {"all_to_all": 100, "all_reduce": 150, "reduce_scatter": 75, "all_gather": 300}
    assert found == {name: pytest.approx(1.0 + num_bytes / 1e3) for name, num_bytes in sent.items()}
    assert wire.work_s(Operation.ALL_TO_ALL, np.zeros(4)) == 0.0  # nobody sends anything
    assert wire.work_s(Operation.ALL_REDUCE, np.array([100.0])) == 0.0  # alone
    assert Wire(make.topology(2, 4), AlphaBetaComm()).work_s(Operation.ALL_TO_ALL, put_in_N) == 0.0


def test_an_all_to_all_takes_what_the_price_says():
    topology = make.topology(2, 4, bytes_per_s=1e6, latency_s=1e-3)
    wire, comm = Wire(topology, AlphaBetaComm()), AlphaBetaComm()
    sent_RR = np.random.default_rng(0).uniform(0, 1e6, (4, 4))
    whole = wire.seconds(Operation.ALL_TO_ALL, sent_RR, (0, 1, 2, 3))
    assert whole == pytest.approx(comm.links_ms(link_bytes(sent_RR, topology), topology) / 1e3)
    # Ranks 1 and 2 are on different nodes.
    two = wire.seconds(Operation.ALL_TO_ALL, np.array([[0.0, 2e6], [1e6, 0.0]]), (1, 2))
    link = topology.levels[1].all_to_all
    assert two == pytest.approx([link.latency_s + 2e6 / link.bytes_per_s] * 2)


def test_what_a_collective_takes_without_bytes_uses_no_link():
    topology = make.topology(2, 4, bytes_per_s=1e6, latency_s=1e-3)
    wire = Wire(topology, AlphaBetaComm())
    sent_RR = np.full((4, 4), 1e6)
    in_use_s = wire.seconds(Operation.ALL_TO_ALL, sent_RR, (0, 1, 2, 3)) - 1e-3
    found = wire.in_use_s(Operation.ALL_TO_ALL, sent_RR, (0, 1, 2, 3))
    assert found == pytest.approx(np.stack([in_use_s, in_use_s]), rel=1e-3)
    assert [wire.level(ranks) for ranks in ((0, 1), (2, 3), (1, 2), (0, 1, 2, 3))] == [0, 0, 1, 1]


def test_reductions_take_what_the_price_says():
    topology, comm = make.topology(2, 4, bytes_per_s=1e6, latency_s=1e-3), AlphaBetaComm()
    wire, ranks, put_in = Wire(topology, comm), (0, 1, 2, 3), np.zeros((4, 4))
    put_in[:, 0] = 1e5
    expected = {
        Operation.ALL_REDUCE: comm.collective_ms("all_reduce", 1e5, topology),
        Operation.REDUCE_SCATTER: comm.collective_ms("reduce_scatter", 1e5, topology),
        Operation.ALL_GATHER: comm.collective_ms("all_gather", 4e5, topology),
    }
    for operation, ms in expected.items():
        assert wire.seconds(operation, put_in, ranks) == pytest.approx([ms / 1e3] * 4)
    assert wire.seconds(Operation.ALL_REDUCE, np.ones((1, 1)), (2,)).tolist() == [0.0]


@pytest.mark.parametrize("layout", list(GroupLayout))
def test_a_part_of_the_ranks_has_the_links_that_plans_are_priced_with(layout):
    topology = make.topology(4, 8, 16, bytes_per_s=1e9, latency_s=1e-5)
    groups = ReplicaGroups(num_groups=4, layout=layout)
    size = groups.group_size(topology)
    holders = [tuple(groups.world_ranks(rank, topology)) for rank in range(size)]
    members = tuple(ranks[0] for ranks in holders)
    assert part_of(topology, members).levels == groups.group_topology(topology).levels
    assert part_of(topology, holders[0]).levels == groups.replica_topology(topology).levels


def test_ranks_that_no_level_deals_evenly_have_one_level():
    topology = make.topology(2, 4)
    part = part_of(topology, (0, 1, 2))
    assert (part.world_size, [level.size for level in part.levels]) == (3, [3])


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("device", {"device": "cuda"}),
        ("trace_path", {"trace_path": "trace.json"}),
        ("checkpoints_path", {"checkpoints_path": "job"}),
        ("metrics_path", {"metrics_path": "metrics"}),
        ("replan_every", {"replan_every": 5}),
        ("row_share", {"row_share": 0.0}),
        ("row_share", {"row_share": 1.5}),
        ("verify_steps", {"row_share": 0.5, "verify_steps": 1}),
        ("engine", {"row_share": 0.5, "engine": "torchrec"}),
    ],
)
def test_what_virtual_time_does_not_know_is_refused(field, options):
    with pytest.raises(InvalidOptionError) as caught:
        RunRequest(plan_path="plan.json", virtual_time=True, **options)
    assert caught.value.field == field


@pytest.mark.parametrize("field", ["topology_path", "registry_path", "row_share"])
def test_what_is_for_virtual_time_is_refused_without(field):
    with pytest.raises(InvalidOptionError, match="virtual time alone"):
        RunRequest(plan_path="plan.json", **{field: 0.5 if field == "row_share" else "x"})


@pytest.fixture
def plan():
    names = [make.table(f"t{index}", num_embeddings=500 + 100 * index) for index in range(4)]
    return make.table_wise_plan(names, [0, 1, 1, 0], world_size=2, batch_size=64)


def refused(plan, tmp_path, nproc, *more, rounds=1, **options):
    file = tmp_path / "plan.json"
    write_plan(plan, file)
    request = RunRequest(plan_path=str(file), virtual_time=True, **options)
    with pytest.raises(AutoshardError) as caught:
        run_requests([request, *(replace(request, **one) for one in more)], nproc, rounds=rounds)
    return str(caught.value)


def test_ranks_of_virtual_time_take_turns_on_one_machine():
    with pytest.raises(InvalidOptionError, match="take turns on one machine") as caught:
        RunOptions(
            plan=Path("plan.json"),
            nodes=NodeOptions(nnodes=2, rdzv="localhost:29500"),
            virtual=VirtualOptions(virtual_time=True),
        )
    assert caught.value.field == "nnodes"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--topology", "cpu-4"), "--virtual-time"),
        (("--row-share", 0.5), "--virtual-time"),
        (("--virtual-time", "--row-share", 2), "must be a number above 0 and up to 1"),
        (("--virtual-time", "--nproc", 1), "must be left out or 2 in virtual time, a process for each rank, got 1"),
        (("--virtual-time", "--topology", "cpu-4"), "must have the plan's 2 ranks"),
        (("--virtual-time", "--topology", "nowhere"), "nowhere: is neither a file nor bundled topology"),
        (("--virtual-time", "--checkpoints", "job"), "must be left out in virtual time"),
        (("--profile", "nowhere/profile.json"), "must be in a folder that is there"),
    ],
)
def test_bad_options_of_virtual_time_are_one_line(run, plan, tmp_path, words, said):
    file = tmp_path / "plan.json"
    write_plan(plan, file)
    _, err = run("run", file, *words, code=2)
    assert said in err
    assert len(err.splitlines()) == 1


def test_launches_in_virtual_time_are_checked_before_they_start(plan, tmp_path):
    assert "must be left out or 2 in virtual time" in refused(plan, tmp_path, 1)
    topology = tmp_path / "topology.json"
    write_topology(make.topology(4), topology)
    assert "must have the plan's 2 ranks" in refused(plan, tmp_path, 2, topology_path=str(topology))
    assert "of all requests of a launch" in refused(plan, tmp_path, 2, {"virtual_time": False})
    assert "rounds" in refused(plan, tmp_path, 2, rounds=0)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [Overlap.NONE, Overlap.PIPELINED])
def test_a_plan_in_virtual_time_equals_the_reference(plan, overlap, tmp_path):
    topology = replace(plan.topology, levels=make.levels(2, bytes_per_s=1e9, latency_s=0.5))
    slow = replace(plan, topology=topology)
    settings = {"steps": 4, "warmup_steps": 1, "verify_steps": 2, "overlap": overlap, "virtual_time": True}
    ((quick,), (slowed,)) = execute_plans([plan, slow], **settings)
    assert quick.backend == "virtual"
    assert quick.verification.max_error < 1e-4
    assert quick.step_low_ms <= quick.step_ms <= quick.step_high_ms
    assert (quick.virtual.wire, quick.virtual.row_share) == ("alpha-beta", 1.0)
    # Ids, embeddings, their gradients and those of the dense layers take half a second each. Pipelined, the first hide
    # behind the step before, the last beside the embeddings' gradients.
    expected_ms = 2000 if overlap is Overlap.NONE else 1000
    assert slowed.step_ms - quick.step_ms == pytest.approx(expected_ms, abs=100)
    assert slowed.verification == quick.verification
    append_run(tmp_path / "runs", plan, quick)
    (record,) = read_runs(tmp_path / "runs")
    assert record.result == RUN.from_json(RUN.to_json(quick)) == quick


def test_sums_are_added_up_on_the_links_of_a_topology():
    """As its price says: not sent whole, as processors do that add up what comes."""
    (level,) = make.levels(2, bytes_per_s=1e4, reduce_bytes_per_s=1e9)
    everyone, summed = make.everyone(2), Collective.REDUCE_SCATTER
    table = make.placed(make.table("t", 100), Tier.ROW_WISE, everyone, collective=summed)
    plan = make.plan(table, batch_size=64, topology=make.topology(2))
    plan = replace(plan, topology=replace(plan.topology, levels=(level,)))
    ((result,),) = execute_plans([plan], steps=2, verify_steps=2, virtual_time=True)
    assert result.verification.max_error < 1e-5
    # Ids take 35 ms; 32 samples of 16 columns would take 200.
    assert 30 < result.step_ms < 150


@pytest.mark.slow
def test_no_step_is_shorter_than_what_its_links_carry(plan):
    bytes_per_s = 1e5
    slow = replace(plan, topology=replace(plan.topology, levels=make.levels(2, bytes_per_s=bytes_per_s)))
    ((result,),) = execute_plans([slow], steps=4, overlap="pipelined", virtual_time=True)
    for rank in result.ranks:
        assert result.step_ms >= 0.98e3 * sum(rank.sent_bytes.values()) / bytes_per_s > 0


@pytest.mark.slow
@pytest.mark.parametrize("planner", ["flexshard", "oper", "replica-groups", "neo", "auto"])
def test_all_layouts_are_executed_in_virtual_time(planner):
    (first, *others), topology = make.draw_task(5, 4)[0].tables, make.two_nodes(4)
    tables = make.tables(replace(first, pooling=Pooling.SEQUENCE), *others, batch_size=64)
    plan = plan_task(planner, tables, topology, 0)
    ((result,),) = execute_plans([plan], steps=2, verify_steps=2, overlap="pipelined", virtual_time=True)
    assert result.verification.max_error < 1e-4
    assert len(result.ranks) == topology.world_size


@pytest.mark.slow
def test_plans_take_turns_in_rounds(plan):
    each = [{"engine": "thin"}, {"engine": "torchrec"}, {"seed": 7}]
    found = execute_plans([plan] * 3, each, rounds=3, steps=4, warmup_steps=1, verify_steps=1, virtual_time=True)
    assert all(one.verification.max_error < 1e-4 for (one,) in found)
    assert [(one.engine, one.steps, one.seed) for (one,) in found] == [
        ("thin", 12, 0),
        ("torchrec", 12, 0),
        ("thin", 12, 7),
    ]


@pytest.mark.slow
def test_rows_may_share_memory():
    large = make.table_wise_plan([make.table("t", num_embeddings=100_000)] * 1, [1], world_size=2, batch_size=64)
    ((whole,), (shared,)) = execute_plans(
        [large, large], [{"row_share": 1.0}, {"row_share": 0.1}], steps=2, virtual_time=True
    )
    assert (whole.virtual.row_share, shared.virtual.row_share) == (1.0, 0.1)
    assert shared.ranks[1].sent_bytes == whole.ranks[1].sent_bytes


def test_runs_in_turn_have_each_their_own_links():
    machine, links = SimpleNamespace(clock=WALL, wire=None), []
    session = Session([], torch.device("cpu"), lambda *_: None, machine=machine, rounds=3)

    def rounds(name):
        for turn in range(3):
            links.append((name, machine.wire))
            if turn < 2:
                yield
        return name

    def run(name):
        machine.wire = name
        return (yield from session._on_wire(rounds(name)))

    assert _in_turn([run("one"), run("other")]) == ["one", "other"]
    assert links == [("one", "one"), ("other", "other")] * 3
