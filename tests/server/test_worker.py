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


def test_a_plan_may_be_the_start_of_another():
    task = {"tables": "criteo-kaggle", "topology": "a100-8"}
    status, older = answer({**task, "planner": "cost-greedy"})
    assert status == 200
    status, newer = answer({**task, "options": {"steps": 1, "policy": False}, "start": older["plan"]})
    assert status == 200
    step_ms = [reply["plan"]["predicted"]["step_ms"]["value"] for reply in (older, newer)]
    assert step_ms[1] <= step_ms[0]


@pytest.mark.parametrize(
    ("change", "field", "detail"),
    [
        ({"topology": "a100-32"}, "start", "must be a plan for 32 ranks, got one for 8"),
        ({"planner": "neo"}, "start", "the planner neo searches from no start; auto does"),
        ({"start": {"schema": "autoshard.plan/1"}}, "start", "is missing"),
    ],
)
def test_a_start_of_another_task_is_refused_by_name(change, field, detail):
    task = {"tables": "criteo-kaggle", "topology": "a100-8"}
    _, older = answer({**task, "planner": "cost-greedy"})
    status, problem = answer({**task, "start": older["plan"], **change})
    assert 400 <= status < 500
    assert problem["field"].startswith(field)
    assert detail in problem["detail"]
