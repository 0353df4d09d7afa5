"""Teams, roles and owners: who sees and changes what, and keys that are made while the service runs."""

import json
import re

import pytest

from autoshard.api import JobKind, RunAnswer, ScheduleBody, Scope
from autoshard.client import Client
from autoshard.core.errors import AutoshardError
from server.access import ALL_SCOPES, COMMAND_LINE, Principal
from server.storage.database import Database
from server.storage.idempotency import KeptAnswer
from server.storage.jobs import JobEnd, NewJob
from server.storage.location import DATABASE_VARIABLE, database_url
from server.storage.storage import Storage
from server.storage.upgrading import upgrade
from server.tasks.reply import PlanFacts
from tests.server.test_strangers import PLACES, application, bearer, caller

ID = "sha256:" + "1" * 64
FIGURES = {"planner": "auto", "device": "cpu", "num_tables": 1, "num_ranks": 1, "step_ms": 1.0}
NIGHTLY = {"name": "nightly", "cron": "0 3 * * *", "kind": "collect", "body": {}}


@pytest.fixture
def storage(database_address, monkeypatch):
    monkeypatch.setenv(DATABASE_VARIABLE, database_address)
    database = Database(database_url())
    upgrade(database)
    yield Storage(database)
    database.close()


def key(storage, *scopes, team=""):
    made, secret = storage.keys.create("some", scopes or ALL_SCOPES, COMMAND_LINE, team)
    return made, bearer(secret)


def stored(storage, team):
    """A plan, a job of each kind and a schedule of a team; returns the jobs' ids by kind."""
    actor = Principal(name=f"key of {team}", team=team)
    facts = PlanFacts(id=ID, search_text="", **FIGURES)
    storage.keep(KeptAnswer(status=200, body=f'{{"of": "{team}"}}'.encode()), facts, None, actor)
    run = RunAnswer(
        measured_ms=1,
        predicted_ms=1,
        is_drifted=False,
        low_ms=1,
        high_ms=1,
        is_outside=False,
        features=[],
        drifted_ms=1,
    )
    storage.keep_run(ID, run, KeptAnswer(status=200, body=b"{}"), None, actor)
    storage.make_schedule(ScheduleBody.parse({**NIGHTLY, "body": {"device": team}}), None, actor)
    jobs = {}
    for kind in JobKind:
        secret = {"secret of": team}
        job = NewJob(
            kind=kind,
            request=json.dumps(secret).encode(),
            task=json.dumps({"tables": str(secret)}),
            client=actor.name,
            team=team,
        )
        made = storage.add_job(job, None, actor)
        jobs[kind] = json.loads(made.body)["id"]
    for _ in JobKind:
        job = storage.jobs.claim()
        storage.jobs.report(job, f"log of {team}")
        storage.finish_job(job, JobEnd(state="succeeded", result=json.dumps({"made by": team}).encode()), None)
    return jobs


def test_what_is_of_another_team_is_not_there(storage):
    app, routes = application(storage)
    client = caller(app)
    jobs = stored(storage, "red")
    places = {**PLACES, "plan_id": ID, "other_id": ID, "job_id": jobs[JobKind.PLAN], "name": "nightly"}
    of_red = key(storage, team="red")
    blue, none = key(storage, team="blue")[1], key(storage)[1]
    places["key_id"] = of_red[0].id
    seen = 0
    for route in routes.routes:
        if not re.search(r"\{(plan_id|job_id|key_id)\}|schedules/\{name\}", route.path):
            continue
        path = re.sub(r"\{(\w+)\}", lambda place: places.get(place[1], "x"), route.path)
        for method in route.methods:
            if method == "POST" and path.endswith(("replans", "runs")):
                continue  # have no body here
            for headers in (blue,) if "key_id" in route.path else (blue, none):  # no team's admin sees to all keys
                body = {"name": "taken"} if method == "PATCH" else None
                answer = client.request(method, path, headers=headers, json=body)
                assert answer.status_code in (404, 503), (method, path, answer.text)  # 503: there are no processes
                seen += answer.status_code == 404
    assert seen >= 20
    for headers in (blue, none):
        for path in ("/v1/plans", "/v1/jobs", "/v1/schedules"):
            assert next(iter(client.get(path, headers=headers).json().values())) == [], path
    mine = client.get("/v1/plans", headers=of_red[1]).json()["plans"]
    assert [(plan["id"], plan["owner"]) for plan in mine] == [(ID, "key of red")]
    assert client.get("/v1/plans?owner=nobody", headers=of_red[1]).json()["plans"] == []
    assert {job["owner"] for job in client.get("/v1/jobs", headers=of_red[1]).json()["jobs"]} == {"key of red"}


def test_teams_have_the_same_plan_and_names_of_schedules_each_by_itself(storage):
    stored(storage, "red")
    stored(storage, "blue")
    app, _ = application(storage)
    client = caller(app)
    red, blue = (key(storage, team=team)[1] for team in ("red", "blue"))
    assert client.get(f"/v1/plans/{ID}", headers=blue).json() == {"of": "blue"}
    assert client.delete(f"/v1/plans/{ID}", headers=blue).status_code == 204
    assert client.get(f"/v1/plans/{ID}", headers=red).json() == {"of": "red"}
    assert client.get(f"/v1/plans/{ID}/runs", headers=red).json()["runs"] != []
    assert client.delete("/v1/schedules/nightly", headers=blue).status_code == 204
    assert client.get("/v1/schedules/nightly", headers=red).json()["body"] == {"device": "red"}


def test_jobs_are_read_by_the_scope_of_their_kind(storage):
    jobs = stored(storage, "")
    app, _ = application(storage)
    client = caller(app)
    for scopes, kinds in (
        ((Scope.READ,), {JobKind.PLAN, JobKind.COMPARE}),
        ((Scope.PLAN,), {JobKind.PLAN, JobKind.COMPARE}),
        ((Scope.TRAIN,), set(JobKind) - {JobKind.PLAN, JobKind.COMPARE}),
        ((Scope.ADMIN,), set(JobKind)),
    ):
        headers = key(storage, *scopes)[1]
        assert {one["kind"] for one in client.get("/v1/jobs", headers=headers).json()["jobs"]} == kinds
        for kind, job in jobs.items():
            for what in ("", "/result", "/events"):
                status = client.get(f"/v1/jobs/{job}{what}", headers=headers).status_code
                assert status == (200 if kind in kinds else 403), (scopes, kind, what)
            assert client.get(f"/v1/jobs?kind={kind}", headers=headers).json()["jobs"] != [] or kind not in kinds


def test_who_may_only_read_changes_nothing(storage):
    jobs = stored(storage, "")
    app, routes = application(storage)
    client, headers = caller(app), key(storage, Scope.READ)[1]
    assert client.get(f"/v1/plans/{ID}", headers=headers).status_code == 200
    for route in routes.routes:
        path = re.sub(
            r"\{(\w+)\}", lambda place: {**PLACES, "job_id": jobs[JobKind.PLAN]}.get(place[1], "x"), route.path
        )
        for method in set(getattr(route, "methods", None) or ()) - {"GET", "HEAD"}:
            if path != "/page/session":
                assert client.request(method, path, headers=headers).status_code == 403, (method, path)


def test_a_job_that_waits_is_moved_up_by_admins_and_down_by_those_who_make_such_jobs(storage):
    new = NewJob(kind=JobKind.PLAN, request=b"{}", task="{}", client="a client", team="")
    job = f"/v1/jobs/{json.loads(storage.add_job(new, None, COMMAND_LINE).body)['id']}"
    app, _ = application(storage)
    client = caller(app)
    planner, admin, trainer = (key(storage, scope)[1] for scope in (Scope.PLAN, Scope.ADMIN, Scope.TRAIN))
    for headers, priority, status, field in (
        (planner, 1, 403, "priority"),
        (trainer, 0, 403, "authorization"),
        (admin, 10, 400, "priority"),
        (admin, 9, 200, None),
        (planner, -9, 200, None),
    ):
        answer = client.patch(job, json={"priority": priority}, headers=headers)
        assert (answer.status_code, answer.json().get("field")) == (status, field)
        assert status != 200 or client.get(job, headers=admin).json()["priority"] == priority
    assert client.patch(job, json={}, headers=admin).json()["field"] == "priority"
    assert client.patch(f"/v1/jobs/{'0' * 32}", json={"priority": 1}, headers=admin).status_code == 404
    client.post(f"{job}/cancel", headers=planner)
    refused = client.patch(job, json={"priority": 1}, headers=admin)
    assert (refused.status_code, refused.json()["type"]) == (409, "urn:autoshard:problem:job-state")


def test_models_are_for_all_teams_and_admins_of_one_do_not_change_them(storage):
    app, _ = application(storage)
    of_team, operator = key(storage, Scope.ADMIN, team="red")[1], key(storage, Scope.ADMIN)[1]
    for headers, status in ((of_team, 403), (operator, 415)):  # the latter for want of a body
        assert caller(app).post("/v1/models/cost/cpu/rollbacks", headers=headers).status_code == status


def test_keys_are_made_listed_and_ended_while_the_service_runs(storage):
    app, _ = application(storage)
    client, (admin, headers) = caller(app), key(storage)
    made = client.post("/v1/keys", json={"name": "trainer", "scopes": ["read"], "team": "red"}, headers=headers)
    assert made.status_code == 201
    described, secret = made.json()["key"], made.json()["secret"]
    assert (described["scopes"], described["team"], described["revoked_at"]) == (["read"], "red", None)
    assert client.get("/v1/plans", headers=bearer(secret)).status_code == 200
    assert client.get("/v1/keys", headers=bearer(secret)).status_code == 403
    listed = client.get("/v1/keys", headers=headers)
    assert [one["id"] for one in listed.json()["keys"]] == [admin.id, described["id"]]
    assert secret not in listed.text
    assert client.delete(f"/v1/keys/{described['id']}", headers=headers).status_code == 204
    assert client.get("/v1/plans", headers=bearer(secret)).status_code == 401
    assert client.delete("/v1/keys/000000000000", headers=headers).status_code == 404
    for body in (
        {"name": "x", "scopes": []},
        {"name": "", "scopes": ["read"]},
        {"name": "x", "scopes": ["root"]},
        {"name": "x", "scopes": ["read"], "team": "../x"},
        {"name": "two\nlines", "scopes": ["read"]},
        {"name": "x" * 5000, "scopes": ["read"]},
    ):
        assert client.post("/v1/keys", json=body, headers=headers).status_code in (400, 413, 422), body


def test_the_first_key_is_not_made_by_anybody(storage):
    app, _ = application(storage)
    answer = caller(app).post("/v1/keys", json={"name": "mine", "scopes": ["admin"]})
    assert (answer.status_code, answer.json()["field"]) == (403, "authorization")
    assert not storage.keys.exist()


def test_an_admin_of_a_team_sees_to_its_keys_only(storage):
    app, _ = application(storage)
    client, other = caller(app), key(storage, team="blue")[0]
    admin, headers = key(storage, Scope.ADMIN, team="red")
    made = client.post("/v1/keys", json={"name": "mine", "scopes": ["plan"]}, headers=headers).json()["key"]
    assert made["team"] == "red"
    for team in ("blue", ""):
        body = {"name": "x", "scopes": ["plan"], "team": team}
        assert client.post("/v1/keys", json=body, headers=headers).status_code == 403
    assert [one["id"] for one in client.get("/v1/keys", headers=headers).json()["keys"]] == [admin.id, made["id"]]
    assert client.delete(f"/v1/keys/{other.id}", headers=headers).status_code == 404
    assert storage.keys.list(COMMAND_LINE)[0].revoked_at is None
    entries = client.get("/v1/audit", headers=headers).json()["entries"]
    assert [(one["action"], one["target"], one["team"]) for one in entries] == [("key.create", made["id"], "red")]


def test_the_audit_log_is_read_and_filtered(storage):
    stored(storage, "red")
    app, _ = application(storage)
    client, (_, headers) = caller(app), key(storage, Scope.ADMIN)

    def found(**chosen):
        return client.get("/v1/audit", params=chosen, headers=headers).json()

    def actions(page):
        return [one["action"] for one in page["entries"]]

    assert actions(found(limit=1)) == ["key.create"]
    assert actions(found(action="job.make")) == ["job.make"] * 6
    assert set(actions(found(action="job"))) == {"job.make", "job.succeeded"}
    assert actions(found(target=ID)) == ["run.report", "plan.make"]
    assert set(actions(found(actor="key of red"))) == {"job.make", "schedule.make", "run.report", "plan.make"}
    assert found(actor="nobody") == {"entries": [], "next": None}
    pages, before = [], None
    while True:
        page = found(limit=4, **({} if before is None else {"before": before}))
        pages += page["entries"]
        if (before := page["next"]) is None:
            break
    assert [one["id"] for one in pages] == sorted((one["id"] for one in found(limit=200)["entries"]), reverse=True)
    assert client.get("/v1/audit", headers=key(storage, Scope.PLAN)[1]).status_code == 403


def test_the_client_sees_to_keys(own_service):
    service = own_service("--workers", "1", "--first-key")
    secret = next(line["secret"] for line in service.log() if line["event"] == "first key")
    with Client(service.url, key=secret) as admin:
        made = admin.make_key("trainer", ["plan"], team="red")
        with Client(service.url, key=made.secret) as trainer:
            assert trainer.list_plans().plans == []
            admin.revoke_key(made.key.id)
            with pytest.raises(AutoshardError):
                trainer.list_plans()
        assert [key.team for key in admin.list_keys()] == ["", "red"]
        assert [one.action for one in admin.list_audit(action="key").entries] == [
            "key.revoke",
            "key.create",
            "key.create",
        ]
