"""The client of the service, and the commands that use it."""

import asyncio
import json
import subprocess
import sys
from dataclasses import replace

import httpx
import numpy as np
import pytest

from autoshard.client import (
    AsyncClient,
    Client,
    ComparisonTask,
    InfeasibleTaskError,
    PlanTask,
    Replan,
    Retries,
    ServiceError,
    SimulationTask,
)
from autoshard.core.errors import (
    AutoshardError,
    FormatError,
    InputError,
    InvalidOptionError,
    InvalidTableError,
    UnknownNameError,
)
from autoshard.formats import load_tables, load_topology, read_plan, write_tables
from autoshard.formats.row_orders import read_row_orders, write_row_order
from autoshard.planning import make_costs, make_plan
from tests import builders as make

TASK = PlanTask(tables="criteo-kaggle", topology="cpu-8", planner="cost-greedy")


@pytest.fixture
def served(service):
    with Client(service.url) as client:
        yield client


def local_plan(**changes):
    tables, topology = load_tables("criteo-kaggle"), load_topology("cpu-8")
    request = make.request(tables, topology, costs=make_costs(tables, topology), **changes)
    return make_plan("cost-greedy", request)


def test_a_plan_is_that_of_this_machine(served):
    made = served.plan(TASK)
    assert made.plan == local_plan()
    assert served.read_plan(made.id) == made
    assert made.id in [plan.id for plan in served.list_plans(planner="cost-greedy", limit=200).plans]
    assert served.evaluate(made.plan).plan.predicted == made.plan.predicted
    given = PlanTask(tables=made.plan.tables, topology=made.plan.topology, planner="cost-greedy")
    assert served.plan(given) == made


def test_what_is_asked_of_stored_plans(served):
    made = served.plan(TASK)
    other = served.replan(made.id, Replan(batch_size=512))
    assert other.plan.tables.batch_size == 512
    difference = served.diff(made.id, other.id)
    assert "batch_size" in [change.name for change in difference.task]
    found = served.explain(made.id, tables=["t1"])
    assert [table.table for table in found.tables] == ["t1"]
    assert found.step_ms == pytest.approx(made.plan.predicted.step_ms.value)
    assert served.report(made.id).startswith("<!doctype html>")
    served.delete_plan(other.id)
    with pytest.raises(ServiceError, match="no plan sha256") as caught:
        served.read_plan(other.id)
    assert (caught.value.status, caught.value.problem) == (404, "unknown-plan")


def test_planners_are_compared_and_clusters_simulated(served):
    task = ComparisonTask(tables="criteo-kaggle", topology="cpu-8", planners=["random", "cost-greedy"])
    rows = served.compare(task).rows
    assert [row.planner for row in rows] == ["random", "cost-greedy"]
    assert rows[1].plan == local_plan()
    sweep = SimulationTask(tables="criteo-kaggle", topologies=["dgx-a100"], ranks=[8, 16], planner="size-greedy")
    assert [one.point.num_ranks for one in served.simulate(sweep).points] == [8, 16]
    assert served.validate("criteo-kaggle", "cpu-8").is_valid
    assert served.validate(topology="nothing").faults
    constraints = {"t3": {"pinned_ranks": (8,)}}
    (fault,) = served.validate("criteo-kaggle", "cpu-8", constraints=constraints).faults
    assert fault.field == "constraints.t3.pinned_ranks"
    assert served.validate("criteo-kaggle", constraints=constraints).is_valid


def test_answers_say_how_a_table_list_was_read(served):
    listed = {"text": "name,rows,dim\nuser,120000,64\nitem,5000,32\n"}
    task = {"tables": listed, "topology": "cpu-8"}
    made = served.plan(PlanTask(planner="size-greedy", **task))
    assert served.read_plan(made.id).notes == made.notes
    compared = served.compare(ComparisonTask(planners=["size-greedy"], **task))
    for notes in (made.notes, compared.notes):
        assert notes[0].startswith('columns: "name" is name')
        assert notes[1].startswith("the list says no batch size: 65,536 samples")


def test_errors_are_those_of_this_package(served):
    with pytest.raises(UnknownNameError, match=r"^planner: "):
        served.plan(PlanTask(tables="criteo-kaggle", topology="cpu-8", planner="nobody"))
    with pytest.raises(InvalidTableError):
        served.explain(served.plan(TASK).id, tables=["t99"])
    with pytest.raises(InfeasibleTaskError) as caught:
        served.plan(PlanTask(tables="criteo-1tb", topology="cpu-4", planner="size-greedy"))
    error = caught.value
    assert (error.exit_code, error.rank, error.missing_bytes > 0) == (3, 0, True)
    assert error.remedies
    assert error.remedies[0].text in str(error)


def test_an_address_that_is_none_or_does_not_answer_is_said_so():
    with pytest.raises(InvalidOptionError, match="must be the address of a service"):
        Client("localhost")
    with Client("http://127.0.0.1:1", retries=Retries(most=0)) as client, pytest.raises(ServiceError, match="answer"):
        client.list_plans()


def test_who_never_answered_is_given_up_sooner_than_who_did(monkeypatch):
    monkeypatch.setattr("autoshard.client.clients.time.sleep", lambda _: None)
    page, asked = httpx.Response(200, json={"plans": [], "next": None}), []

    def answer(request):
        asked.append(request)
        if len(asked) == 4:
            return page
        raise httpx.ConnectError("refused")

    with Client("http://service", transport=httpx.MockTransport(answer)) as client:
        with pytest.raises(ServiceError, match="refused"):
            client.list_plans()
        assert len(asked) == 3
        client.list_plans()
        with pytest.raises(ServiceError, match="refused"):
            client.list_plans()
        assert len(asked) == 4 + 7


class Answers:
    """Answers requests one after the other, and keeps them."""

    def __init__(self, *answers):
        self.answers, self.seen = list(answers), []

    def __call__(self, request):
        self.seen.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


PAGE = httpx.Response(200, json={"plans": [], "next": None})
NOW = {"Retry-After": "0"}


@pytest.mark.parametrize("status", [409, 429, 503])
def test_requests_are_sent_again_when_the_service_says_so(status, monkeypatch):
    waits = []
    monkeypatch.setattr("autoshard.client.clients.time.sleep", waits.append)
    answers = Answers(httpx.Response(status, headers={"Retry-After": "3"}), httpx.ReadError("cut off"), PAGE)
    with Client("http://service", key="secret", transport=httpx.MockTransport(answers)) as client:
        assert client.list_plans().plans == []
    assert waits == [3.0, 0.5]
    assert {request.headers["authorization"] for request in answers.seen} == {"Bearer secret"}


@pytest.mark.parametrize("answer", [{"text": "<html>"}, {"json": {"plans": "none"}}, {"json": {}}])
def test_what_is_no_answer_of_the_service_is_told(answer):
    answers = Answers(httpx.Response(200, **answer))
    opened = Client("http://service", transport=httpx.MockTransport(answers))
    with opened as client, pytest.raises(ServiceError, match="answers as no service of this version"):
        client.list_plans()


def test_a_request_that_is_sent_again_has_the_same_key(monkeypatch):
    monkeypatch.setattr("autoshard.client.clients.time.sleep", lambda _: None)
    made = httpx.Response(400, json={"type": "urn:autoshard:problem:invalid-option", "detail": "x: no", "field": "x"})
    answers = Answers(httpx.Response(503, headers=NOW), made)
    opened = Client("http://service", transport=httpx.MockTransport(answers))
    with opened as client, pytest.raises(InvalidOptionError, match=r"^x: no$"):
        client.plan(TASK)
    first, second = (request.headers["idempotency-key"] for request in answers.seen)
    assert first == second


def test_what_stays_busy_is_told_after_a_while(monkeypatch):
    monkeypatch.setattr("autoshard.client.clients.time.sleep", lambda _: None)
    answers = Answers(*(httpx.Response(503, headers=NOW, text="busy") for _ in range(3)))
    opened = Client("http://service", retries=Retries(most=2), transport=httpx.MockTransport(answers))
    with opened as client, pytest.raises(ServiceError, match=r"Service Unavailable \(HTTP 503\)"):
        client.list_plans()
    assert answers.answers == []


def test_the_client_for_asyncio_does_the_same(service):
    async def work():
        async with AsyncClient(service.url) as client:
            made, again = await asyncio.gather(client.plan(TASK), client.plan(TASK))
            assert made == again == await client.read_plan(made.id)
            assert (await client.diff(made.id, again.id)).is_empty
            assert (await client.explain(made.id, tables=["t0"])).tables
            explained, changes = await client.improve(made.id, tables=["t0"])
            assert explained == await client.explain(made.id, tables=["t0"])
            assert changes[0].gain == max(change.gain for change in changes)
            assert (await client.replan(made.id, Replan())).id == made.id
            assert (await client.evaluate(made.plan)).plan.predicted == made.plan.predicted
            assert "<h1>" in await client.report(made.id)
            assert (await client.validate("criteo-kaggle")).is_valid
            assert not (await client.validate("criteo-kaggle", constraints={"clicks": {}})).is_valid
            assert (await client.list_plans(limit=1)).plans
            compared = await client.compare(
                ComparisonTask(tables="criteo-kaggle", topology="cpu-8", planners=["random"])
            )
            assert compared.rows[0].plan is not None
            sweep = SimulationTask(tables="criteo-kaggle", topologies=["cpu-8"], ranks=[8], planner="random")
            assert len((await client.simulate(sweep)).points) == 1
            with pytest.raises(ServiceError):
                await client.delete_plan("sha256:" + "0" * 64)

    asyncio.run(work())


def test_commands_let_the_service_do_the_work(run, service, tmp_path):
    plan, other = tmp_path / "plan.json", tmp_path / "other.json"
    task = ("criteo-kaggle", "--topology", "cpu-8")
    server = ("--server", service.url)
    run("plan", *task, "--planner", "cost-greedy", *server, "-o", plan)
    run("plan", *task, "--planner", "cost-greedy", "--no-bound", "-o", other)
    assert read_plan(plan) == read_plan(other)

    def printed(*arguments):
        return json.loads(run(*arguments, "--json")[0])

    explain = ("explain", plan, "--table", "t3")
    there, here = printed(*explain, *server), printed(*explain)
    assert there.pop("improvements")
    assert here.pop("improvements")
    assert there == here
    there, here = (printed("explain", plan, "--most", 2, *where)["tables"] for where in (server, ()))
    assert there == here
    assert len(there) == 2
    compare = ("compare", *task, "--planners", "random,cost-greedy", "--output-dir", str(tmp_path / "plans"))
    here, there = printed(*compare), printed(*compare, *server)
    for row in (*here["planners"], *there["planners"]):
        row.pop("planning_s")
    assert here == there


def test_plans_of_the_service_have_the_row_orders_beside_them(run, service, tmp_path):
    for name in ("tables", "plan", "plans"):
        (tmp_path / name).mkdir()
    ids = np.arange(1000)[::-1].copy()
    order = write_row_order(tmp_path / "tables" / "hot.parquet", ids)
    table = replace(make.table("a", 100_000, 64, 3.0, alpha=1.3), row_order=order)
    tables = tmp_path / "tables" / "tables.json"
    write_tables(make.tables(table), tables)
    task = (tables, "--topology", "cpu-8", "--server", service.url)
    run("plan", *task, "--planner", "oper", "-o", tmp_path / "plan" / "plan.json")
    run("compare", *task, "--planners", "oper,size-greedy", "-o", tmp_path / "plans")
    for file in (tmp_path / "plan" / "plan.json", tmp_path / "plans" / "oper.json"):
        assert read_row_orders(read_plan(file), file)["a"].tolist() == ids.tolist()


def test_commands_say_no_plan_fits_as_they_do_here(service, run):
    compare = ("compare", "criteo-1tb", "--topology", "cpu-4", "--planners", "size-greedy,dim-greedy")
    printed = []
    for more in ((), ("--server", service.url)):
        printed.append(run(*compare, *more, code=3)[1].splitlines()[-1])
    assert printed[0] == printed[1]
    plan = ("plan", "criteo-1tb", "--topology", "cpu-4", "--planner", "size-greedy", "--server", service.url)
    assert "; a plan was found with " in run(*plan, code=3)[1]


def test_a_long_task_is_a_job_that_the_client_waits_for(served, service):
    task = TASK.model_copy(update={"time_limit_s": 61.0})
    made = served.plan(task)
    assert made == served.plan(TASK)
    assert asyncio.run(planned(service.url, task)) == made
    listed = served.list_jobs(kind="plan", state="succeeded").jobs
    assert {one.plan_id for one in (served.read_job(one.id) for one in listed)} >= {made.id}


async def planned(url, task):
    async with AsyncClient(url) as client:
        return await client.plan(task)


def test_all_jobs_are_listed_and_as_many_are_printed_as_people_read(served, service, run, monkeypatch):
    wanted = [
        served.make_job("plan", {**TASK.model_dump(include={"tables", "topology"}), "seed": seed}) for seed in (1, 2)
    ]
    monkeypatch.setattr("autoshard.commands.jobs._MAX_LINES", 1)
    listed = ("jobs", "--kind", "plan", "--server", service.url)
    found = json.loads(run(*listed, "--json")[0])["jobs"]
    assert {one.id for one in wanted} <= {one["id"] for one in found}
    assert found == sorted(found, key=lambda one: one["created_at"], reverse=True)
    left = len(found) - 1
    assert f"{left:,} older job{'s' if left > 1 else ''}; --json" in run(*listed)[0]
    monkeypatch.setattr("autoshard.commands.jobs._MAX_LINES", left)
    assert "1 older job; --json" in run(*listed)[0]


@pytest.mark.slow
def test_jobs_are_made_followed_and_cancelled(served, service, run, published):
    body = {"tables": "criteo-kaggle", "topology": "cpu-8", "planner": "cost-greedy"}
    job = served.make_job("plan", body)
    seen = []
    found = served.wait_for(job.id, seen.append)
    assert (found.id, found.state, found.plan_id) == (job.id, "succeeded", served.plan(TASK).id)
    assert seen[-1] == found
    failed = served.wait_for(served.make_job("train-cost", {"device": "nothing-here"}).id)
    assert "samples: is no folder" in str(failed.failure)
    assert served.retry_job(failed.id).attempt == 2
    assert served.wait_for(failed.id).state == "failed"
    arguments = ["--server", service.url, "--json"]
    held, waiting = (served.make_job("collect", {"seconds": 3600.0}) for _ in range(2))
    assert served.prioritise_job(waiting.id, -1).priority == -1
    moved = published("job", run("jobs", "prioritise", waiting.id, "--priority", "-2", *arguments)[0])
    assert (moved["priority"], moved["state"]) == (-2, "queued")
    assert "--priority: is needed" in run("jobs", "prioritise", waiting.id, "--server", service.url, code=2)[1]
    assert "prioritise" in run("jobs", "show", waiting.id, "--priority", "1", "--server", service.url, code=2)[1]
    for one in (waiting, held):
        served.cancel_job(one.id)
    assert published("job", run("jobs", "show", job.id, *arguments)[0])["plan_id"] == found.plan_id
    waited = published("job", run("jobs", "wait", failed.id, *arguments, code=1)[0])
    assert "samples: is no folder" in waited["problem"]["detail"]
    assert published("job", run("jobs", "cancel", failed.id, *arguments)[0])["state"] == "failed"
    assert job.id in [one["id"] for one in published("jobs", run("jobs", "--kind", "plan", *arguments)[0])["jobs"]]
    assert job.id[:8] in run("jobs", "list", "--server", service.url)[0]
    assert "needs the id of a job" in run("jobs", "show", "--server", service.url, code=2)[1]


def test_schedules_are_made_paused_and_deleted(service):
    with Client(service.url) as client:
        made = client.make_schedule("of-the-client", "0 3 29 2 *", "collect", {"seconds": 600.0})
        assert (made.kind, made.is_paused, made.last_fired_at) == ("collect", False, None)
        assert made.next_fires_at.startswith("2028-02-29T03:00")
        assert made in client.list_schedules()
        assert client.pause_schedule(made.name).is_paused
        assert client.resume_schedule(made.name) == client.read_schedule(made.name) == made
        with pytest.raises(InputError, match="cron: must be five fields"):
            client.make_schedule("other", "soon", "collect")
        client.delete_schedule(made.name)
        with pytest.raises(AutoshardError, match="of-the-client"):
            client.read_schedule(made.name)


def test_the_client_for_asyncio_has_schedules_too(service):
    async def work():
        async with AsyncClient(service.url) as client:
            made = await client.make_schedule("of-asyncio", "0 3 29 2 *", "train-cost")
            assert (await client.pause_schedule(made.name)).is_paused
            assert await client.resume_schedule(made.name) == made == await client.read_schedule(made.name)
            assert made in await client.list_schedules()
            await client.delete_schedule(made.name)

    asyncio.run(work())


def test_a_client_imports_neither_numpy_nor_planners():
    program = (
        "import sys; from autoshard.client import Client, PlanTask; PlanTask(tables='a', topology='b'); "
        "Client('http://service'); print([name for name in sys.modules if name in ('numpy', 'autoshard.planners')])"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_plans_are_listed_by_their_figures(served):
    made = served.plan(TASK)
    num_ranks, num_tables = made.plan.topology.world_size, len(made.plan.tables.tables)
    assert made.id in [plan.id for plan in served.list_plans(num_ranks=num_ranks, num_tables=num_tables).plans]
    assert served.list_plans(num_ranks=num_ranks, num_tables=num_tables + 1).plans == []
    with pytest.raises(InvalidOptionError, match=r"^colour: is nothing that plans are listed by; there are: limit, "):
        served.list_plans(colour="red")
    with pytest.raises(FormatError, match=r"^colour: is unknown; the body takes: tables, topology, "):
        PlanTask(tables="criteo-kaggle", topology="cpu-8", colour="red")
