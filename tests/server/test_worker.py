"""What a planning process answers; no process of its own is needed for that."""

import json

import pytest

from server import worker
from server.settings import ServerSettings
from server.worker import _answer


def answer(body):
    reply = _answer(body if isinstance(body, bytes) else json.dumps(body).encode(), ServerSettings())
    return int(reply[:3]), json.loads(reply[3:])


def topology(bytes_per_s):
    link = {"bytes_per_s": bytes_per_s, "latency_s": 0}
    level = {"name": "node", "size": 2, "all_to_all": link, "all_reduce": link}
    return {
        "schema": "autoshard.topology/1",
        "world_size": 2,
        "device": "cpu",
        "memory_bytes": {"hbm": 1 << 40},
        "levels": [level],
    }


@pytest.mark.parametrize("bytes_per_s", [1e-300, 0.5, 1e19])
def test_a_topology_that_no_arithmetic_can_price_is_refused_by_name(bytes_per_s):
    body = {"tables": "criteo-kaggle", "topology": topology(bytes_per_s), "planner": "size-greedy"}
    status, problem = answer(body)
    assert (status, problem["field"]) == (400, "topology.levels[0].all_to_all.bytes_per_s")


@pytest.mark.parametrize("bytes_per_s", [1.0, 1e18])
def test_the_slowest_and_the_fastest_links_have_a_price(bytes_per_s):
    body = {"tables": "criteo-kaggle", "topology": topology(bytes_per_s), "planner": "size-greedy"}
    status, reply = answer(body)
    assert status == 200
    assert reply["plan"]["predicted"]["step_ms"]["value"] > 0


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"tables":' * 100_000, b'{"tables": {"a":' + b"[" * 500])
def test_bodies_that_nest_too_deep_are_told_so(body):
    status, problem = answer(body)
    assert status == 400
    assert "\n" not in problem["detail"]


@pytest.mark.parametrize("error", [OverflowError, ZeroDivisionError, MemoryError, RecursionError])
def test_a_task_that_breaks_the_arithmetic_is_the_request_s_fault(error, monkeypatch):
    def broken(*_):
        raise error

    monkeypatch.setattr(worker, "make_plan", broken)
    status, problem = answer({"tables": "criteo-kaggle", "topology": "cpu-8"})
    assert (status, problem["field"]) == (422, "body")
    assert problem["detail"] == "body: its numbers are too large or too small to plan with"
