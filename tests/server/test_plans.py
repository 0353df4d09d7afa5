"""Stored plans over REST: made, listed, read, deleted; and requests that are sent twice."""

import concurrent.futures
import json

import pytest

from autoshard.cli import main
from server.problems import MEDIA_TYPE

TASK = {"tables": "criteo-kaggle", "topology": "cpu-8", "planner": "cost-greedy"}


def make(client, *, seed=0, key=None, **changes):
    headers = {} if key is None else {"Idempotency-Key": key}
    return client.post("/v1/plans", json={**TASK, "seed": seed, "planner": "random", **changes}, headers=headers)


def refused(answer, status, kind):
    assert (answer.status_code, answer.headers["content-type"]) == (status, MEDIA_TYPE)
    assert answer.json()["type"] == f"urn:autoshard:problem:{kind}"
    return answer.json()


def test_a_plan_is_listed_read_and_deleted(client):
    made = make(client, seed=101)
    plan_id = made.json()["id"]
    (listed,) = [plan for plan in client.get("/v1/plans").json()["plans"] if plan["id"] == plan_id]
    assert (listed["planner"], listed["device"], listed["num_tables"], listed["num_ranks"]) == ("random", "cpu", 26, 8)
    assert listed["topology"] == "cpu-8"
    assert listed["step_ms"] == made.json()["plan"]["predicted"]["step_ms"]["value"]

    read = client.get(f"/v1/plans/{plan_id}")
    assert read.content == made.content
    assert read.headers["etag"] == f'"{plan_id}"'
    for tags in (f'"{plan_id}"', f'"other", W/"{plan_id}"', "*"):
        known = client.get(f"/v1/plans/{plan_id}", headers={"If-None-Match": tags})
        assert (known.status_code, known.content, known.headers["etag"]) == (304, b"", f'"{plan_id}"')
    assert client.get(f"/v1/plans/{plan_id}", headers={"If-None-Match": '"other"'}).status_code == 200

    assert client.delete(f"/v1/plans/{plan_id}").status_code == 204
    refused(client.get(f"/v1/plans/{plan_id}"), 404, "unknown-plan")
    refused(client.get(f"/v1/plans/{plan_id}", headers={"If-None-Match": "*"}), 404, "unknown-plan")
    refused(client.delete(f"/v1/plans/{plan_id}"), 404, "unknown-plan")


def test_pages_follow_each_other(client):
    made = {make(client, seed=seed).json()["id"] for seed in range(110, 115)}
    found, cursor = [], {}
    while cursor is not None:
        page = client.get("/v1/plans", params={"planner": "random", "limit": 2, **cursor}).json()
        found += [plan["id"] for plan in page["plans"]]
        cursor = page["next"] and {"cursor": page["next"]}
    assert made <= set(found)
    assert len(found) == len(set(found))
    assert client.get("/v1/plans", params={"text": "no such name"}).json() == {"plans": [], "next": None}


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/plans?limit=0", "limit"),
        ("/v1/plans?limit=201", "limit"),
        ("/v1/plans?limit=many", "limit"),
        ("/v1/plans?num_ranks=0", "num_ranks"),
        ("/v1/plans?cursor=nonsense", "cursor"),
        ("/v1/plans/sha256:12", "plan_id"),
        ("/v1/plans/%2e%2e%2fetc", None),
    ],
)
def test_bad_parameters_are_named(client, path, field):
    answer = client.get(path)
    if field is None:
        assert answer.status_code == 404
    else:
        assert refused(answer, 400, "invalid-format")["field"] == field


def test_a_request_that_is_sent_again_is_answered_as_it_was(client):
    # A plan of `auto` is another one each time: the search ends by the clock.
    task = {"key": "again-1", "planner": "auto", "time_limit_s": 0.1}
    first = make(client, **task)
    assert first.status_code == 200
    assert make(client, **task).content == first.content
    refused(make(client, key="again-1", seed=1), 422, "idempotency-key-reused")

    wrong = make(client, key="again-2", planner="nobody")
    refused(wrong, 422, "unknown-name")
    assert make(client, key="again-2", planner="nobody").content == wrong.content
    refused(make(client, key="no spaces"), 400, "invalid-format")
    refused(make(client, key="x" * 129), 400, "invalid-format")


def test_a_request_that_is_sent_again_meanwhile_is_told_to_wait(client):
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        posted = [threads.submit(make, client, key="meanwhile", seed=7) for _ in range(4)]
        answers = [future.result() for future in posted]
    by_status = {answer.status_code: answer for answer in answers}
    assert set(by_status) <= {200, 409}
    assert len({answer.content for answer in answers if answer.status_code == 200}) == 1
    if 409 in by_status:
        refused(by_status[409], 409, "idempotency-key-in-use")
        assert int(by_status[409].headers["retry-after"]) >= 1


@pytest.mark.slow
def test_two_services_share_one_postgresql(own_service, postgresql, monkeypatch, tmp_path):
    address = postgresql.new_database()
    monkeypatch.setenv("AUTOSHARD_DATABASE_URL", address)
    assert main(["serve", "--port", "0"]) == 2  # its schema is not there yet
    assert main(["db", "upgrade"]) == 0
    folders = [tmp_path / name for name in ("one", "two")]
    services = [own_service("--workers", "1", folder=folder, database=address) for folder in folders]
    with services[0].client() as one, services[1].client() as two:
        made = make(one, key="shared")
        assert two.get(f"/v1/plans/{made.json()['id']}").content == made.content
        assert make(two, key="shared").content == made.content
        assert json.loads(one.get("/readyz").content) == {"status": "ready"}
    for service in services:
        assert service.stop() == 0


def test_a_deleted_plan_can_be_restored_for_a_day_and_is_there_again_when_it_is_made(client):
    task = {"tables": "criteo-kaggle", "topology": "cpu-8", "planner": "size-greedy", "seed": 39}
    plan_id = client.post("/v1/plans", json=task).json()["id"]
    path = f"/v1/plans/{plan_id}"

    def listed(**query):
        return [one["id"] for one in client.get("/v1/plans", params={"limit": 200, **query}).json()["plans"]]

    assert client.post(f"{path}/restore").status_code == 404
    for again in (lambda: client.post(f"{path}/restore"), lambda: client.post("/v1/plans", json=task)):
        assert client.delete(path).status_code == 204
        assert client.get(path).status_code == 404
        assert client.delete(path).status_code == 404
        assert client.patch(path, json={"name": "gone"}).status_code == 404
        assert plan_id not in listed()
        assert plan_id in listed(is_deleted=True)
        assert again().is_success
        assert client.get(path).status_code == 200
        assert plan_id not in listed(is_deleted=True)


def test_plans_are_named_and_tagged_and_found_by_both(client):
    task = {"tables": "criteo-kaggle", "topology": "cpu-8", "planner": "size-greedy", "seed": 40}
    plan_id = client.post("/v1/plans", json=task).json()["id"]
    assert client.patch(f"/v1/plans/{plan_id}", json={"name": "Ranker 39", "tags": "weekly canary"}).status_code == 204
    assert client.patch(f"/v1/plans/{plan_id}", json={"tags": "weekly"}).status_code == 204
    for text in ("Ranker 39", "weekly"):
        (found,) = client.get("/v1/plans", params={"text": text}).json()["plans"]
        assert (found["id"], found["name"], found["tags"]) == (plan_id, "Ranker 39", "weekly")
    assert client.get("/v1/plans", params={"text": "canary"}).json()["plans"] == []
    assert client.patch(f"/v1/plans/{plan_id}", json={"name": "n" * 129}).status_code == 400


def test_constraints_hold_for_bundled_tables_too(client):
    made = make(client, seed=103, constraints={"t3": {"pinned_ranks": [5]}})
    plan = made.json()["plan"]
    assert plan["tables"]["tables"][3]["constraints"] == {"pinned_ranks": [5]}
    assert [one["replicas"] for one in plan["shards"] if one["table"] == "t3"] == [[[5]]]


@pytest.mark.parametrize(
    ("constraints", "field", "text"),
    [
        ({"clicks": {}}, "constraints", '"clicks" is none of the tables'),
        ({"t3": {"pinned_ranks": [8]}}, "constraints.t3.pinned_ranks", "must be in [0, 8), got 8"),
        ({"t3": {"colocate_with": ["t99"]}}, "constraints.t3.colocate_with", '"t99", which is no table'),
        ({"t3": {"forbidden_tiers": ["nowhere"]}}, "constraints.t3.forbidden_tiers[0]", "must be one of"),
        ({"t3": {"pinned": [1]}}, "constraints.t3.pinned", "did you mean pinned_ranks?"),
    ],
)
def test_constraints_that_make_no_sense_are_told_at_once(client, constraints, field, text):
    task = {"tables": "criteo-kaggle", "topology": "cpu-8", "constraints": constraints}
    (fault,) = client.post("/v1/validations", json=task).json()["faults"]
    assert (fault["field"], text in fault["detail"]) == (field, True), fault
    for time_limit_s in (1, 61):
        answer = client.post("/v1/plans", json={**task, "time_limit_s": time_limit_s})
        assert (answer.status_code in (400, 422), answer.json().get("field")) == (True, field), answer.text


def test_constraints_of_tables_and_bodies_are_checked_without_a_topology_too(client):
    def fields(**task):
        answer = client.post("/v1/validations", json=task).json()
        assert answer["is_valid"] == (not answer["faults"])
        return [fault["field"] for fault in answer["faults"]]

    tables = make(client, seed=104).json()["plan"]["tables"]
    tables["tables"][2]["constraints"] = {"pinned_ranks": [9]}
    assert fields(tables=tables) == []
    assert fields(tables=tables, topology="cpu-8") == ["tables[2].constraints.pinned_ranks"]
    assert fields(tables=tables, topology="cpu-8", constraints={"t2": {}}) == []
    tables["tables"][2]["constraints"] = {"colocate_with": ["t99"]}
    assert fields(tables=tables) == ["tables[2].constraints.colocate_with"]
    assert fields(tables="criteo-kaggle", constraints={"clicks": {}}) == ["constraints"]
    assert fields(tables="criteo-kaggle", constraints={"t3": {"colocate_with": ["t99"]}}) == [
        "constraints.t3.colocate_with"
    ]


def test_a_start_that_is_no_plan_is_told_before_a_job_is_made(client):
    task = {"tables": "criteo-kaggle", "topology": "cpu-8", "start": {"schema": "autoshard.plan/1"}, "time_limit_s": 61}
    answer = client.post("/v1/plans", json=task)
    assert answer.status_code == 400, answer.text
    assert answer.json()["field"].startswith("start")
