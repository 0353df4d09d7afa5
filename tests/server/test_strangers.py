"""Who has no right: what it costs, what it is told, and that others do not notice it."""

import asyncio
import contextlib
import json
import re
import socket
import threading
import time

import httpx
import pytest
from sqlalchemy import select
from starlette.concurrency import run_in_threadpool
from starlette.testclient import TestClient

from autoshard.api import JobKind, Scope
from autoshard.core.errors import InvalidOptionError
from server.access import ALL_SCOPES, COMMAND_LINE, Principal
from server.planning.workers import WorkerPool
from server.settings import ServerSettings
from server.storage.jobs import NewJob
from server.storage.location import DATABASE_VARIABLE
from server.storage.schema import AUDIT_LOG
from server.storage.storage import open_storage
from server.web import access
from server.web.access import PAGE_COOKIE
from server.web.app import guarded, make_routes
from server.web.routes import page
from tests.server.test_connections import serving
from tests.server.test_oidc import AUDIENCE, Issuer, issuer  # noqa: F401 - a fixture

PLACES = {"plan_id": "sha256:" + "0" * 64, "other_id": "sha256:" + "0" * 64, "job_id": "0" * 32}


@pytest.fixture
def storage(tmp_path, monkeypatch):
    monkeypatch.setenv(DATABASE_VARIABLE, f"sqlite:///{tmp_path}/service.sqlite")
    with contextlib.closing(open_storage()) as opened:
        yield opened


def application(storage, **settings):
    """The service without planning processes, and its routes."""
    chosen = ServerSettings(allowed_hosts=["testserver", "127.0.0.1"], **settings)
    routes = make_routes(chosen, WorkerPool(chosen, on_ready=lambda: None, on_failure=lambda _: None), storage)
    return guarded(routes, storage, chosen), routes


def caller(app, address="192.0.2.7", **options):
    return TestClient(app, client=(address, 1), **options)


def bearer(secret):
    return {"Authorization": f"Bearer {secret}"}


@pytest.fixture
def quick(monkeypatch):
    """Strangers are told at once that they were too many."""
    monkeypatch.setattr("server.web.access._STRANGER_WAIT_S", 0.0)


@pytest.mark.usefixtures("quick")
def test_wrong_keys_and_sign_ins_are_counted_by_address(storage):
    key, secret = storage.keys.create("somebody's", ALL_SCOPES, COMMAND_LINE)
    app, _ = application(storage, stranger_rate=0.5)
    client, known = caller(app), caller(app)
    assert known.get("/v1/plans", headers=bearer(secret)).status_code == 200
    asks = (
        lambda: client.get("/v1/plans", headers=bearer("wrong" * 8)),
        lambda: client.post("/page/session", headers=bearer("wrong" * 8)),
        lambda: client.get("/v1/plans", headers={"Cookie": f"{PAGE_COOKIE}=wrong"}),
        lambda: client.get("/v1/plans"),
    )
    answers = [asks[number % 4]() for number in range(40)]
    statuses = [answer.status_code for answer in answers]
    assert statuses[:12] == [401] * 12
    assert statuses[13:] == [429] * 27
    assert answers[-1].headers["retry-after"] in ("1", "2")
    assert answers[-1].json()["type"] == "urn:autoshard:problem:rate-limit"
    # A key that is known is none of these, and neither is another address, of which IPv6 has as many as one likes.
    assert known.get("/v1/plans", headers=bearer(secret)).status_code == 200
    assert caller(app, "198.51.100.1").get("/v1/plans", headers=bearer(secret)).status_code == 200
    for number in range(13):
        status = caller(app, f"2001:db8::{number}").get("/v1/plans").status_code
    assert status == 429
    assert caller(app, "2001:db8:0:1::1").get("/v1/plans").status_code == 401
    storage.keys.revoke(key.id, COMMAND_LINE)
    assert known.get("/v1/plans", headers=bearer(secret)).status_code == 401  # was known until now
    assert known.get("/v1/plans", headers=bearer(secret)).status_code == 429


@pytest.mark.usefixtures("quick")
def test_a_good_key_is_not_counted_at_its_first_request(storage):
    app, _ = application(storage, stranger_rate=0.01)  # one wrong secret
    for _ in range(5):
        _, secret = storage.keys.create("one of many", {Scope.READ}, COMMAND_LINE)
        assert caller(app).get("/v1/plans", headers=bearer(secret)).status_code == 200


def test_a_key_that_is_known_stays_so_while_it_is_looked_for(storage, monkeypatch):
    _, secret = storage.keys.create("mine", {Scope.READ}, COMMAND_LINE)
    app, _ = application(storage, stranger_rate=0.01)
    find, together = storage.keys.principal, threading.Barrier(8, timeout=20)

    def slow(given):
        together.wait()
        return find(given)

    async def play():
        transport = httpx.ASGITransport(app, client=("192.0.2.7", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
            answers = [await client.get("/v1/plans", headers=bearer(secret))]
            monkeypatch.setattr(storage.keys, "principal", slow)
            answers += await asyncio.gather(*(client.get("/v1/plans", headers=bearer(secret)) for _ in range(8)))
            return {answer.status_code for answer in answers}

    assert asyncio.run(play()) == {200}


def test_who_is_told_that_it_was_too_often_waits_for_it(storage, monkeypatch):
    assert access._STRANGER_WAIT_S >= 1.0
    monkeypatch.setattr(access, "_STRANGER_WAIT_S", 0.1)
    storage.keys.create("somebody's", ALL_SCOPES, COMMAND_LINE)
    app, _ = application(storage, stranger_rate=0.01)
    client, started = caller(app), time.monotonic()
    assert [client.get("/v1/plans").status_code for _ in range(3)] == [401, 429, 429]
    assert time.monotonic() - started >= 0.2


def unsafe(routes):
    """Method and path of everything that may change something."""
    for route in routes.routes:
        for method in getattr(route, "methods", None) or ():
            if method not in ("GET", "HEAD"):
                yield method, re.sub(r"\{(\w+)\}", lambda place: PLACES.get(place[1], "x"), route.path)


@pytest.mark.parametrize("with_keys", [False, True])
def test_no_page_of_another_site_changes_anything(storage, with_keys):
    headers = bearer(storage.keys.create("mine", ALL_SCOPES, COMMAND_LINE)[1]) if with_keys else {}
    app, routes = application(storage)
    client = caller(app)
    assert len(list(unsafe(routes))) >= 20
    for method, path in unsafe(routes):
        for given in (
            {"Origin": "https://evil.example"},
            {"Origin": "http://testserver.evil.example"},
            {"Origin": "http://testserver:8080"},
            {"Origin": "null"},
            {"Sec-Fetch-Site": "cross-site"},
            {"Sec-Fetch-Site": "same-site"},
            {"Origin": "http://testserver", "Sec-Fetch-Site": "cross-site"},
        ):
            answer = client.request(method, path, headers={**headers, **given, "Content-Type": "text/plain"})
            assert answer.status_code == 403, (method, path, given)
            assert answer.json()["field"] in ("origin", "sec-fetch-site")
    for given in ({}, {"Origin": "http://testserver"}, {"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"}):
        assert client.post("/v1/schedules/nightly/pause", headers={**headers, **given}).status_code == 404


def test_a_session_is_no_key_and_ends_with_it(storage):
    key, secret = storage.keys.create("mine", {Scope.READ}, COMMAND_LINE)
    app, _ = application(storage)
    client = caller(app)
    answer = client.post("/page/session", headers=bearer(secret))
    assert answer.status_code == 204
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert "secure" not in cookie
    held = client.cookies[PAGE_COOKIE]
    assert secret not in cookie
    assert client.get("/v1/plans").status_code == 200
    assert client.get("/v1/plans", headers=bearer(held)).status_code == 401  # it is no key either
    assert client.get("/v1/schedules").status_code == 403  # the scopes are those of the key
    assert client.delete("/page/session").json()["field"] == "origin"  # which browsers send
    assert client.delete("/page/session", headers={"Origin": "http://testserver"}).status_code == 204
    client.cookies.set(PAGE_COOKIE, held)
    assert client.get("/v1/plans").status_code == 401
    client.cookies.clear()
    client.post("/page/session", headers=bearer(secret))
    assert client.get("/v1/plans").status_code == 200
    storage.keys.revoke(key.id, COMMAND_LINE)
    assert client.get("/v1/plans").status_code == 401


def test_a_long_secret_signs_in(storage):
    secret = "s" * 512
    storage.keys.add(secret, "long", ALL_SCOPES, COMMAND_LINE)
    app, _ = application(storage)
    assert caller(app).post("/page/session", headers=bearer(secret)).status_code == 204
    assert caller(app).post("/page/session", headers=bearer("s" * 9000)).status_code == 401


def test_a_token_signs_in_and_its_session_ends_with_it(storage, issuer, monkeypatch):  # noqa: F811
    app, _ = application(storage, oidc_issuer=issuer.url, oidc_audience=AUDIENCE)
    client = caller(app)
    expires_s = int(time.time()) + 60
    assert client.post("/page/session", headers=bearer(issuer.token(exp=expires_s))).status_code == 204
    assert client.get("/v1/plans").status_code == 200
    # Tokens are taken for 30 s after their end, which clocks may differ by; sessions are not.
    monkeypatch.setattr("server.storage.sessions.now_us", lambda: expires_s * 1_000_000)
    assert client.get("/v1/plans").status_code == 401


def test_forwarded_headers_count_from_trusted_proxies_only(storage):
    _, secret = storage.keys.create("mine", ALL_SCOPES, COMMAND_LINE)
    headers = {"X-Forwarded-For": "6.6.6.6, 203.0.113.9", "X-Forwarded-Proto": "https"}
    for proxies, address, is_believed in (
        (None, "127.0.0.1", False),
        (["10.0.0.0/8"], "127.0.0.1", False),
        (["10.0.0.0/8", "::1"], "10.1.2.3", True),
    ):
        app, _ = application(storage, trusted_proxies=proxies)
        cookie = caller(app, address).post("/page/session", headers={**headers, **bearer(secret)}).headers["set-cookie"]
        assert ("secure" in cookie.lower()) is is_believed
        with storage.database.reading() as connection:
            addresses = connection.execute(select(AUDIT_LOG.c.address).order_by(AUDIT_LOG.c.id)).scalars().all()
        assert addresses[-1] == ("203.0.113.9" if is_believed else address)


@pytest.mark.usefixtures("quick")
def test_requests_behind_a_proxy_are_counted_by_client(storage):
    storage.keys.create("mine", ALL_SCOPES, COMMAND_LINE)
    app, _ = application(storage, stranger_rate=0.01, trusted_proxies=["192.0.2.7"])
    statuses = [
        caller(app).get("/v1/plans", headers={"X-Forwarded-For": address}).status_code
        for address in ("203.0.113.1", "203.0.113.2", "203.0.113.1", "203.0.113.2")
    ]
    assert statuses == [401, 401, 429, 429]


@pytest.mark.parametrize("proxy", ["localhost", "10.0.0.1/8", "", "*"])
def test_a_proxy_is_an_address_or_a_network(proxy):
    with pytest.raises(InvalidOptionError, match=r"^--trusted-proxy: must be an address or a network"):
        ServerSettings(trusted_proxies=[proxy])


class Silent(Issuer):
    """An issuer that takes requests and does not answer."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"


@pytest.mark.slow
def test_an_issuer_that_hangs_costs_only_those_who_ask_for_it(storage):
    _, secret = storage.keys.create("mine", ALL_SCOPES, COMMAND_LINE)
    silent = Silent()

    async def play():
        app, _ = application(
            storage, oidc_issuer=silent.url, oidc_audience=AUDIENCE, stranger_rate=1e6, max_connections=1000
        )
        async with (
            serving(app) as (host, port),
            httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=30) as client,
        ):
            token = Issuer.token(silent)
            asked = [asyncio.ensure_future(client.get("/v1/plans", headers=bearer(token))) for _ in range(60)]
            await asyncio.sleep(0.5)
            for _ in range(6):
                async with asyncio.timeout(2):
                    answer = await client.get("/v1/plans", headers=bearer(secret))
                assert answer.status_code == 200
            assert not any(one.done() for one in asked)
            return {answer.status_code for answer in await asyncio.gather(*asked)}

    with silent.listener:
        assert asyncio.run(play()) == {503}


@pytest.mark.parametrize("kind", ["key", "session", "token", "none"])
def test_events_end_soon_after_who_watches_has_ended(storage, issuer, monkeypatch, kind):  # noqa: F811
    assert page._KEY_S + page._LOOK_S < 10
    monkeypatch.setattr(page, "_LOOK_S", 0.0625)
    monkeypatch.setattr(page, "_KEY_S", 0.125)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    settings, client_headers, cookies, key = {}, {}, {}, None
    expires_s = int(time.time()) + 60
    if kind in ("key", "session"):
        key, secret = storage.keys.create("somebody's", ALL_SCOPES, COMMAND_LINE)
        client_headers = bearer(secret)
    if kind == "session":
        cookies = {PAGE_COOKIE: storage.sessions.begin(storage.keys.principal(client_headers["Authorization"][7:]))}
        client_headers = {}
    if kind == "token":
        settings = {"oidc_issuer": issuer.url, "oidc_audience": AUDIENCE}
        client_headers = bearer(issuer.token(exp=expires_s))
    app, _ = application(storage, **settings)
    made = storage.add_job(NewJob(kind=JobKind.PLAN, request=b"{}", task="{}", client="", team=""), None, Principal())
    looks, path, answers = [], f"/v1/jobs/{json.loads(made.body)['id']}/events", []
    client = caller(app, cookies=cookies)

    async def counted(look):
        looks.append(look)
        return await run_in_threadpool(look)

    watching = threading.Thread(target=lambda: answers.append(client.get(path, headers=client_headers)))
    monkeypatch.setattr(page, "run_in_threadpool", counted)
    watching.start()
    while watching.is_alive() and len(looks) < 6:  # at the job, and whether the key has ended
        time.sleep(0.01)
    assert watching.is_alive()
    if key is not None:
        storage.keys.revoke(key.id, COMMAND_LINE)
    elif kind == "token":
        monkeypatch.setattr(access, "now_us", lambda: expires_s * 1_000_000)
    else:
        storage.keys.create("the first", ALL_SCOPES, COMMAND_LINE)
    watching.join(10)
    assert not watching.is_alive()
    assert answers[0].text.count("event: job") == 1
    if kind != "token":  # which other requests take for a while longer, since clocks differ
        assert client.get(path, headers=client_headers).status_code == 401
