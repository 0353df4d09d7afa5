"""The service's answers, to good and to bad requests."""

import asyncio
import json
import re
import socket
from html.parser import HTMLParser

import pytest
from starlette.requests import Request

from autoshard.formats import digest, load_tables, load_topology, plan_from_json, tables_to_json, topology_to_json
from autoshard.validator import validate_plan
from server.problems import BodyTimeoutError, problem_of
from server.settings import ServerSettings
from server.web.buffers import BufferBudget
from server.web.reading import read_body
from tests.golden.openapi import RECORDED, lines_of

JSON = {"content-type": "application/json"}
TASK = {"tables": "criteo-kaggle", "topology": "cpu-8", "planner": "cost-greedy"}


def small_task(**changes):
    tables = tables_to_json(load_tables("criteo-kaggle"))
    return {**TASK, "tables": tables, "topology": topology_to_json(load_topology("cpu-8")), **changes}


def problem(answer, status, kind):
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    document = answer.json()
    assert document["status"] == status
    assert document["type"] == f"urn:autoshard:problem:{kind}"
    assert "Traceback" not in answer.text
    return document


def test_health_says_alive_and_ready(client):
    assert client.get("/livez").json() == {"status": "alive"}
    assert client.get("/readyz").json() == {"status": "ready"}


@pytest.mark.parametrize("planner", ["auto", "cost-greedy", "random"])
def test_a_plan_is_valid_named_by_its_content_and_repeatable(client, planner):
    answers = [client.post("/v1/plans", json={**TASK, "planner": planner, "seed": 3}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    document = answers[0].json()
    if planner != "auto":  # which searches for as long as it may
        assert document == answers[1].json()
    assert document["id"] == digest(document["plan"])
    plan = plan_from_json(document["plan"])
    validate_plan(plan)
    assert plan.tables == load_tables("criteo-kaggle")
    assert plan.provenance.planner == planner
    assert plan.predicted.max_kernel_ms > 0


def test_a_plan_has_the_payload_of_the_request(client):
    answer = client.post("/v1/plans", json={**TASK, "payload": "int8/bf16"})
    assert answer.json()["plan"]["payload"] == {"forward": "int8", "backward": "bf16"}
    refused = problem(client.post("/v1/plans", json={**TASK, "payload": "fp8"}), 422, "invalid-option")
    assert refused["field"] == "payload"


def test_tables_and_topology_may_be_objects(client):
    inline = client.post("/v1/plans", json=small_task())
    named = client.post("/v1/plans", json=TASK)
    assert inline.status_code == 200
    assert inline.json() == named.json()


def test_machines_are_made_for_any_number_of_ranks(client):
    answer = client.post("/v1/plans", json={**TASK, "topology": "dgx-a100-16"})
    assert answer.status_code == 200
    assert answer.json()["plan"]["topology"]["world_size"] == 16
    problem(client.post("/v1/plans", json={**TASK, "topology": "dgx-a100-12"}), 422, "invalid-topology")


def test_request_ids_are_kept_or_made(client, service):
    kept = client.post("/v1/plans", json=TASK, headers={"X-Request-ID": "mine-1.2_3"})
    assert kept.headers["x-request-id"] == "mine-1.2_3"
    made = client.get("/livez", headers={"X-Request-ID": "no good\x07" * 20})
    assert re.fullmatch("[0-9a-f]{32}", made.headers["x-request-id"])
    line = next(line for line in service.log() if line.get("request_id") == "mine-1.2_3")
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/plans", 200)
    assert (line["work"], line["planner"]) == ("plan", "cost-greedy")


def changed_table(**changes):
    task = small_task()
    task["tables"]["tables"][3] |= changes
    return json.dumps(task)


@pytest.mark.parametrize(
    ("body", "status", "kind", "field"),
    [
        ("", 400, "invalid-format", None),
        ("{", 400, "invalid-format", None),
        ("[]", 400, "invalid-format", None),
        (b"\xff{}", 400, "invalid-format", None),
        ("[" * 100_000, 400, "invalid-format", None),
        ('{"tables": "param-a", "tables": "param-b", "topology": "cpu-8"}', 400, "invalid-format", "tables"),
        ('{"tables": "param-a"}', 400, "invalid-format", "topology"),
        (json.dumps({**TASK, "colour": 1}), 400, "invalid-format", "colour"),
        (json.dumps({**TASK, "seed": -1}), 400, "invalid-format", "seed"),
        (json.dumps({**TASK, "seed": 2**32}), 400, "invalid-format", "seed"),
        (json.dumps({**TASK, "seed": "1"}), 400, "invalid-format", "seed"),
        (json.dumps({**TASK, "seed": True}), 400, "invalid-format", "seed"),
        (json.dumps({**TASK, "time_limit_s": 3601}), 400, "invalid-format", "time_limit_s"),
        (json.dumps({**TASK, "time_limit_s": float("nan")}), 400, "invalid-format", "time_limit_s"),
        (json.dumps({**TASK, "tables": 5}), 400, "invalid-format", "tables"),
        (json.dumps({**TASK, "options": {"x": [1]}}), 400, "invalid-format", "options.x"),
        (json.dumps({**TASK, "tables": "/etc/passwd"}), 422, "unknown-name", "tables"),
        (json.dumps({**TASK, "topology": "tables.json"}), 422, "unknown-name", "topology"),
        (json.dumps({**TASK, "planner": "nobody"}), 422, "unknown-name", "planner"),
        (json.dumps({**TASK, "options": {"nonsense": 1}}), 422, "invalid-option", "options.nonsense"),
        (changed_table(num_embeddings=float("nan")), 400, "invalid-format", "tables.tables[3].num_embeddings"),
        (changed_table(num_embeddings=-4), 400, "invalid-format", "tables.tables[3].num_embeddings"),
        (changed_table(colour="red"), 400, "invalid-format", "tables.tables[3].colour"),
        (changed_table(name="t0"), 422, "invalid-table", "tables.tables.name"),
        (changed_table(name="\ud800"), 400, "invalid-format", "tables.tables[3].name"),
        (changed_table(num_embeddings=10**10, access={"kind": "uniform"}), 422, "infeasible", None),
        (changed_table(access={"kind": "counts", "file": "/etc/passwd"}), 400, "invalid-format", None),
    ],
)
def test_bad_bodies_are_told_what_is_wrong(client, body, status, kind, field):
    document = problem(client.post("/v1/plans", content=body, headers=JSON), status, kind)
    if field is not None:
        assert document["field"] == field
    assert "\n" not in document["detail"]


def test_an_infeasible_task_says_what_is_missing(client):
    body = changed_table(num_embeddings=10**10, access={"kind": "uniform"})
    document = problem(client.post("/v1/plans", content=body, headers=JSON), 422, "infeasible")
    assert "GiB on one rank" in document["detail"]
    table = json.loads(body)["tables"]["tables"][3]["name"]
    assert (document["table"], document["rank"], document["missing_bytes"] > 0) == (table, 0, True)
    assert document["remedies"]
    for remedy in document["remedies"]:
        changed = json.loads(body)
        changed["topology"] = client.post("/v1/plans", json=TASK).json()["plan"]["topology"]
        within = changed
        *parents, last = remedy["field"].split(".")
        for name in parents:
            within = within[name]
        within[last] = remedy["value"]
        assert client.post("/v1/plans", json=changed).status_code == 200, remedy


def test_other_media_types_paths_and_methods_are_refused(client):
    problem(client.post("/v1/plans", content="{}", headers={"content-type": "text/plain"}), 415, "media-type")
    problem(client.get("/v1/plans", params={"plannr": "auto"}), 400, "invalid-format")
    compressed = {"content-type": "application/json", "content-encoding": "gzip"}
    problem(client.post("/v1/plans", content=b"x", headers=compressed), 415, "media-type")
    for answer, status in ((client.get("/nothing"), 404), (client.put("/v1/plans"), 405)):
        assert answer.status_code == status
        assert answer.headers["content-type"] == "application/problem+json"


@pytest.fixture(scope="module")
def documented(service):
    """Verbs of each documented path with the ids of a plan and a job filled in, and of some that are not documented."""
    with service.client() as client:
        plan = client.post("/v1/plans", json=TASK).json()["id"]
        job = client.post("/v1/jobs/plan", json=TASK).json()["id"]
        paths = client.get("/openapi.json").json()["paths"]
    ids = {"plan_id": plan, "other_id": plan, "job_id": job, "kind": "cost", "device": "cpu", "version": "0" * 16}
    filled = {path.format_map({**ids, "name": "none", "key_id": "none"}): set(verbs) for path, verbs in paths.items()}
    return {**filled, "/": {"get"}, "/page/app.css": {"get"}, "/page/session": {"get", "post", "delete"}}


def test_a_refused_method_is_told_which_ones_are_answered(client, documented):
    for path, verbs in documented.items():
        answer = client.request("OPTIONS", path)
        assert answer.status_code == 405, path
        answered = set(answer.headers["allow"].split(", "))
        assert answered >= {verb.upper() for verb in verbs} | ({"HEAD"} if "get" in verbs else set()), path
        for verb in {"GET", "POST", "PUT", "PATCH", "DELETE"} - answered:
            assert client.request(verb, path).status_code == 405, (verb, path)


def test_head_is_answered_as_get_without_the_body(client, documented):
    for path in [path for path, verbs in documented.items() if "get" in verbs]:
        read, asked = client.get(path), client.head(path)
        assert asked.content == b"", path
        assert asked.status_code == read.status_code, path
        assert asked.headers.get("content-type") == read.headers.get("content-type"), path
        if not re.search("/metrics|/jobs|/improvements", path):  # which differ from one moment to the next
            assert asked.headers.get("content-length") == read.headers.get("content-length"), path


def test_who_asks_for_the_head_of_events_does_not_wait_for_them(client):
    waiting = client.post("/v1/jobs/collect", json={"seconds": 3600})
    address = waiting.headers["location"]
    try:
        assert client.head(f"{address}/events", timeout=10).headers["content-type"].startswith("text/event-stream")
    finally:
        client.post(f"{address}/cancel")


def test_too_large_bodies_are_refused_before_they_have_arrived(service):
    host, port = service.url.removeprefix("http://").split(":")
    head = f"POST /v1/plans HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as declared:
        declared.sendall(f"{head}Content-Length: {1 << 40}\r\n\r\n".encode())  # and not one byte of the body
        assert declared.recv(1 << 16).startswith(b"HTTP/1.1 413")
    chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as chunked:
        chunked.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        for _ in range(17):  # MiB; nobody says when it ends
            chunked.sendall(chunk)
        assert chunked.recv(1 << 16).startswith(b"HTTP/1.1 413")
    with service.client() as client:
        assert client.get("/livez").status_code == 200


class Links(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, _tag, attrs):
        self.found += [value for name, value in attrs if name in ("src", "href")]


def test_the_documentation_needs_no_other_host(client):
    page = client.get("/docs")
    links = Links(page.text).found
    assert len(links) >= 3
    for link in links:
        assert link.startswith("/")
        assert client.get(link).status_code == 200
    assert "http://" not in page.text
    assert "https://" not in page.text
    document = client.get("/openapi.json").json()
    assert lines_of(document) == RECORDED.read_text(encoding="utf-8").splitlines(), "python -m tests.golden.openapi"
    assert document["servers"][0]["url"] == "/"
    references = set(re.findall(r'"\$ref": ?"([^"]+)"', json.dumps(document)))
    names = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert references <= names


def test_a_client_that_does_not_send_its_body_is_cut_off():
    async def receive():
        await asyncio.sleep(60)

    settings = ServerSettings(body_timeout_s=0.05)
    state = {"buffer": BufferBudget(settings).open("client")}
    request = Request({"type": "http", "headers": [(b"content-type", b"application/json")], "state": state}, receive)
    with pytest.raises(BodyTimeoutError) as caught:
        asyncio.run(read_body(request, settings, 100))
    assert problem_of(caught.value).status == 408
