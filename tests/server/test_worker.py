"""What a planning process answers; no process of its own is needed for that."""

import json
import multiprocessing
import sys
import threading
import time
from dataclasses import replace

import pytest
import structlog

from autoshard.planning import make_plan
from server.planning.worker import answered
from server.settings import ServerSettings
from server.tasks import infeasible
from server.tasks.work import Body, Work, WorkKind


def answer(body, **limits):
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = answered(Work(kind=WorkKind.PLAN, body=Body(text)), ServerSettings(**limits))
    return reply.status, json.loads(reply.body)


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


def test_time_that_a_plan_has_waited_counts_to_its_limit(monkeypatch):
    asked = []
    monkeypatch.setattr(infeasible, "make_plan", lambda _, request: asked.append(request) or make_plan(_, request))
    body = {"tables": "criteo-kaggle", "topology": "cpu-8", "planner": "size-greedy", "time_limit_s": 7.0}
    work = Work(kind=WorkKind.PLAN, body=Body(json.dumps(body).encode()), received_s=1000.0)
    assert answered(work, ServerSettings()).status == 200
    assert asked[0].deadline_s() == 1007.0


@pytest.mark.parametrize("error", [OverflowError, ZeroDivisionError, MemoryError, RecursionError])
def test_a_task_that_breaks_the_arithmetic_is_the_request_s_fault(error, monkeypatch):
    def broken(*_):
        raise error

    monkeypatch.setattr(infeasible, "make_plan", broken)
    status, problem = answer({"tables": "criteo-kaggle", "topology": "cpu-8", "planner": "size-greedy"})
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


def test_lines_of_the_log_have_the_id_of_their_request():
    answered(Work(kind=WorkKind.VALIDATE, body=Body(b'{"topology": "cpu-8"}'), request_id="mine"), ServerSettings())
    assert structlog.contextvars.get_contextvars() == {"request_id": "mine"}


def tables(count, access=None):
    table = {"num_embeddings": 10, "embedding_dim": 4, "dtype": "fp32", "pooling": "sum"}
    listed = [
        {
            **table,
            "name": f"t{index}",
            "features": [{"name": f"f{index}", "pooling_factor": 1.0}],
            "access": access or {"kind": "uniform"},
        }
        for index in range(count)
    ]
    return {"schema": "autoshard.tables/1", "batch_size": 64, "tables": listed}


CURVE = {"kind": "curve", "knots": [[0, 0], [5, 0.5], [10, 1]]}


@pytest.mark.parametrize(
    ("changes", "limits", "field", "text"),
    [
        ({"topology": "cpu-host-131072"}, {}, "topology", "must have at most 16,384 ranks, got 131,072"),
        ({"topology": {**topology(1e9), "world_size": 70_000}}, {}, "topology.world_size", "16,384 ranks"),
        ({"tables": tables(2_049)}, {}, "tables.tables", "must have at most 2,048 tables, got 2,049"),
        ({"tables": tables(2, CURVE)}, {"max_knots": 5}, "tables", "at most 5 knots of access curves, got 6"),
        ({"tables": {"text": json.dumps(tables(2, CURVE))}}, {"max_knots": 5}, "tables", "at most 5 knots"),
        ({"tables": "metasyn"}, {"max_tables": 855}, "tables", "must have at most 855 tables, got 856"),
        (
            {"tables": "metasyn", "topology": "dgx-a100-512"},
            {},
            "topology",
            "tables times ranks must be at most 262,144, got 856 x 512 = 438,272",
        ),
    ],
)
def test_a_task_larger_than_can_be_planned_in_time_is_refused(changes, limits, field, text):
    status, problem = answer(
        {"tables": "criteo-kaggle", "topology": "cpu-8", "planner": "cost-greedy", **changes}, **limits
    )
    assert (status, problem["field"]) == (422, field)
    assert text in problem["detail"]


@pytest.mark.parametrize(
    ("kind", "body"),
    [(WorkKind.VALIDATE, {}), (WorkKind.SIMULATE, {"topologies": ["cpu-8"], "ranks": [8], "planner": "random"})],
)
def test_knots_of_a_text_count_where_no_plan_is_made_too(kind, body):
    sent = json.dumps({**body, "tables": {"text": json.dumps(tables(2, CURVE))}}).encode()
    reply = answered(Work(kind=kind, body=Body(sent)), ServerSettings(max_knots=5))
    assert "must have at most 5 knots of access curves, got 6" in reply.body.decode()


def test_a_fault_of_tables_is_where_it_is_also_if_they_are_sent_as_a_text():
    convex = tables(2, {"kind": "curve", "knots": [[0, 0], [5, 0.1], [10, 1]]})
    twice = tables(2)
    twice["tables"][1]["name"] = "t0"
    for document, field in ((convex, "tables.tables[0].access"), (twice, "tables.tables.name")):
        for given in (document, {"text": json.dumps(document)}):
            status, problem = answer({"tables": given, "topology": "cpu-8", "planner": "cost-greedy"})
            assert (status, problem["type"]) == (422, "urn:autoshard:problem:invalid-table")
            assert problem["field"].startswith(field)


def test_overtime_grows_with_the_time_limit_up_to_its_own():
    settings = ServerSettings()
    assert settings.overtime_of(0.1) == 21.0
    assert settings.overtime_of(0.5) == 25.0
    assert settings.overtime_of(60.0) == settings.overtime_s == 30.0


@pytest.mark.parametrize(("waited_s", "is_warned"), [(0.1, False), (0.9, True)])
def test_a_search_that_waited_for_most_of_its_time_says_so(waited_s, is_warned):
    body = {"tables": "criteo-kaggle", "topology": "a100-8", "planner": "auto", "options": {"policy": False}}
    work = Work(
        kind=WorkKind.PLAN,
        body=Body(json.dumps({**body, "time_limit_s": 1.0}).encode()),
        received_s=time.perf_counter() - waited_s,
    )
    reply = answered(work, ServerSettings())
    assert waited_s <= reply.waited_s < waited_s + 0.5
    assert reply.worked_s > 0
    warnings = json.loads(reply.body)["warnings"]
    assert [("of its 1 s, for it waited" in line) for line in warnings] == [True] * is_warned


@pytest.mark.parametrize("num_blanks", [0, 2 << 20])
def test_nothing_of_a_body_is_kept_where_it_has_been(num_blanks):
    text = b'{"topology": "cpu-8"}' + b" " * num_blanks
    sent, (ours, theirs) = Work(kind=WorkKind.VALIDATE, body=Body(text), stored=(b"a", b"b")), multiprocessing.Pipe()
    received = []
    receiving = threading.Thread(target=lambda: received.append(Work.receive(theirs)))
    receiving.start()
    sent.send(ours)
    receiving.join()
    (work,) = received
    assert (work.kind, work.body.text, work.stored) == (WorkKind.VALIDATE, text, (b"a", b"b"))
    assert sent.body.text == text  # for a job
    assert sum(sys.getsizeof(value) for value in vars(sent.body).values()) < 50_000
    assert answered(replace(work, stored=()), ServerSettings()).status == 200
    assert work.body.text == b""
