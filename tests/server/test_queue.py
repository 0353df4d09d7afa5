"""The queue before the planning processes: its bounds, and whose turn it is."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from server.planning.queue import QueueLimits, WorkerQueue
from server.problems import BusyError, ClientBusyError, ClientGoneError


def queue_of(*workers, dead=(), **changes):
    limits = {"max_waiting": 4, "max_waiting_per_client": 3, "max_running_per_client": 1, "max_wait_s": 60.0}
    queue = WorkerQueue(QueueLimits(**{**limits, **changes}), lambda worker: worker not in dead)
    for worker in workers:
        queue.put(worker)
    return queue


async def waiting(queue, *clients):
    """Tasks that wait for a turn, in this order."""
    tasks = []
    for client in clients:
        tasks.append(asyncio.ensure_future(queue.turn(client)))
        await asyncio.sleep(0)
    return tasks


def test_an_idle_worker_is_handed_out_at_once():
    assert asyncio.run(queue_of("one").turn("a")) == "one"


def test_a_client_holds_no_more_than_its_share_while_others_find_a_worker():
    async def play():
        queue = queue_of("one", "two")
        held = await queue.turn("a")
        (second,) = await waiting(queue, "a")
        assert {held, await queue.turn("b")} == {"one", "two"}
        assert not second.done()
        queue.leave("a")
        queue.put(held)
        assert await second == held

    asyncio.run(play())


def test_clients_that_hold_less_are_first_then_those_that_came_first():
    async def play():
        queue = queue_of("one", max_running_per_client=2)
        await queue.turn("a")
        tasks = await waiting(queue, "a", "b", "c")
        for worker, expected in (("two", 1), ("three", 2), ("four", 0)):
            queue.put(worker)
            await asyncio.sleep(0)
            assert await tasks[expected] == worker

    asyncio.run(play())


def test_the_queue_is_bounded_for_one_client_and_for_all():
    async def play():
        queue = queue_of()
        tasks = await waiting(queue, "a", "a", "a")
        with pytest.raises(ClientBusyError):
            await queue.turn("a")
        tasks += await waiting(queue, "b")
        with pytest.raises(BusyError):
            queue.check_room("c")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        queue.check_room("a")

    asyncio.run(play())


def test_once_it_is_full_nobody_waits_longer_than_workers_are_held(monkeypatch):
    passed_s = []
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(passed_s))
    monkeypatch.setattr("server.planning.queue.time", clock)

    async def play():
        queue = queue_of("one", calm_s=60.0)
        for _ in range(3):
            held = await queue.turn("a")
            queue.leave("a")
            queue.put(held)
        held = await queue.turn("a")
        tasks = await waiting(queue, "a", "b", "c", "d")
        with pytest.raises(BusyError, match="4 requests wait"):
            await queue.turn("e")
        for task in tasks:
            with pytest.raises(BusyError, match="more requests than the planning processes can answer"):
                await task
        (hasty,) = await waiting(queue, "a")
        with pytest.raises(BusyError, match="1 requests wait"):
            await queue.turn("b")
        with pytest.raises(BusyError, match="more requests than"):
            await hasty
        passed_s.append(61.0)
        (later,) = await waiting(queue, "a")  # nobody was refused for a while: it may wait again
        await asyncio.sleep(0.1)
        queue.leave("a")
        queue.put(held)
        assert await later == held

    asyncio.run(play())


def test_waits_end_after_their_time_and_when_the_client_leaves():
    async def play():
        with pytest.raises(BusyError, match=r"waited 0\.01 s"):
            await queue_of(max_wait_s=0.01).turn("a")
        gone = asyncio.get_running_loop().create_future()
        gone.set_result(None)
        queue = queue_of(max_waiting_per_client=1)
        with pytest.raises(ClientGoneError):
            await queue.turn("a", gone)
        queue.check_room("a")

    asyncio.run(play())


def test_a_worker_whose_request_is_cancelled_goes_to_the_next():
    async def play():
        queue = queue_of()
        first, second = await waiting(queue, "a", "b")
        queue.put("one")
        first.cancel()
        assert await second == "one"
        with pytest.raises(asyncio.CancelledError):
            await first

    asyncio.run(play())


def test_dead_workers_are_passed_over():
    assert asyncio.run(queue_of("one", "two", dead=("two",)).turn("a")) == "one"
