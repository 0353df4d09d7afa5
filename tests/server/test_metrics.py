"""Figures for Prometheus, and the rate of requests."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.problems import RateLimitError
from server.web.rate_limit import RateLimit

TASK = {"tables": "criteo-kaggle", "topology": "cpu-8", "planner": "cost-greedy"}


def samples(client):
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    families = text_string_to_metric_families(answer.text)
    return {(one.name, frozenset(one.labels.items())): one.value for family in families for one in family.samples}


def value(found, name, **labels):
    return found.get((name, frozenset(labels.items())), 0.0)


def test_requests_and_work_are_counted(client):
    before = samples(client)
    assert client.post("/v1/plans", json=TASK).status_code == 200
    assert client.get("/v1/plans/nothing").status_code == 400
    assert client.request("MADE-UP", "/nowhere").status_code == 404
    after = samples(client)
    for name, labels in (
        ("autoshard_request_seconds_count", {"method": "POST", "endpoint": "/v1/plans", "status": "200"}),
        ("autoshard_request_seconds_count", {"method": "GET", "endpoint": "/v1/plans/{plan_id}", "status": "400"}),
        ("autoshard_request_seconds_count", {"method": "other", "endpoint": "other", "status": "404"}),
        ("autoshard_work_seconds_count", {"kind": "plan", "planner": "cost-greedy", "status": "200"}),
        ("autoshard_plan_floor_gap_count", {"planner": "cost-greedy"}),
    ):
        assert value(after, name, **labels) == value(before, name, **labels) + 1, (name, labels)
    assert value(after, "autoshard_waiting_requests") == 0
    assert value(after, "autoshard_idle_workers") >= 1


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


def test_a_client_sends_as_many_as_the_limit_and_a_burst():
    clock = Clock()
    limit = RateLimit(0.5, clock=clock)  # a burst of one
    limit.check("a")
    with pytest.raises(RateLimitError, match=r"clients may send 0\.5 requests per second") as caught:
        limit.check("a")
    assert caught.value.retry_after_s == 2
    limit.check("b")
    clock.now_s += 1.9
    with pytest.raises(RateLimitError) as caught:
        limit.check("a")
    # Not 0: whoever comes again at once comes too early.
    assert caught.value.retry_after_s == 1
    clock.now_s += 0.2
    limit.check("a")


def test_quiet_clients_are_forgotten():
    clock = Clock()
    limit = RateLimit(10.0, clock=clock)
    for number in range(5000):
        limit.check(f"client {number}")
        clock.now_s += 0.01
    assert len(limit.buckets) < 4200
    for _ in range(19):
        limit.check("client 4999")
    with pytest.raises(RateLimitError):
        limit.check("client 4999")


@pytest.mark.slow
def test_beyond_the_rate_requests_are_told_when_to_come_again(own_service):
    service = own_service("--workers", "1", "--rate", "0.5")
    with service.client() as client:
        assert client.get("/v1/plans").status_code == 200
        answer = client.get("/v1/plans")
        assert (answer.status_code, answer.json()["type"]) == (429, "urn:autoshard:problem:rate-limit")
        assert answer.headers["retry-after"] in ("1", "2")
        assert client.get("/livez").status_code == 200
