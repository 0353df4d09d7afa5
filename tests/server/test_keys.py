"""Keys: what each route needs, who is let in, and what is kept of it."""

import contextlib
import re
import socket
from dataclasses import replace

import pytest
from sqlalchemy import select
from starlette.routing import Mount
from starlette.testclient import TestClient

from autoshard.api import Scope
from autoshard.core.errors import InvalidOptionError, UnknownNameError
from server.access import ALL_SCOPES, COMMAND_LINE, Principal
from server.first_keys import KEY_FILE_VARIABLE, KEY_VARIABLE, provide_keys
from server.planning.workers import WorkerPool
from server.problems import MEDIA_TYPE
from server.settings import ServerSettings
from server.storage.database import Database
from server.storage.location import DATABASE_VARIABLE, database_url
from server.storage.schema import API_KEYS, AUDIT_LOG, now_us
from server.storage.storage import Storage, open_storage
from server.storage.upgrading import upgrade
from server.web.app import guarded, make_routes
from server.web.routes.page import PAGE_FILES

VERBS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "NONSENSE")
TASK = {"tables": "criteo-kaggle", "topology": "cpu-8", "planner": "cost-greedy"}
PLAN_ID = "sha256:" + "0" * 64
#: Values of parameters of paths; others are `x`.
PARAMETERS = {"{plan_id}": PLAN_ID, "{other_id}": PLAN_ID, "{job_id}": "0" * 32}


@pytest.fixture
def storage(database_address, monkeypatch):
    monkeypatch.setenv(DATABASE_VARIABLE, database_address)
    database = Database(database_url())
    upgrade(database)
    yield Storage(database)
    database.close()


@pytest.fixture
def file_storage(tmp_path, monkeypatch):
    monkeypatch.setenv(DATABASE_VARIABLE, f"sqlite:///{tmp_path}/service.sqlite")
    with contextlib.closing(open_storage()) as opened:
        yield opened


@pytest.fixture
def routes(file_storage):
    """The routes without planning processes: nothing here gets as far as planning."""
    pool = WorkerPool(ServerSettings(), on_ready=lambda: None, on_failure=lambda _: None)
    return make_routes(ServerSettings(), pool, file_storage)


@pytest.fixture
def requests(routes, file_storage):
    return TestClient(
        guarded(routes, file_storage, ServerSettings(allowed_hosts=["testserver"], stranger_rate=1e6)),
        client=("192.0.2.7", 1),
    )


def bearer(secret):
    return {"Authorization": f"Bearer {secret}"}


def test_a_key_is_found_by_its_secret_until_it_is_revoked(storage):
    key, secret = storage.keys.create("trainer", {Scope.PLAN}, COMMAND_LINE)
    other, _ = storage.keys.create("other", ALL_SCOPES, COMMAND_LINE)
    assert storage.keys.find(secret) == key
    assert storage.keys.find(secret + "x") is None
    assert (key.name, key.scopes, key.revoked_at) == ("trainer", [Scope.PLAN], None)
    revoked = storage.keys.revoke(key.id, COMMAND_LINE)
    assert revoked.revoked_at is not None
    assert storage.keys.find(secret) is None
    assert storage.keys.revoke(key.id, COMMAND_LINE) == revoked
    assert storage.keys.list(COMMAND_LINE) == (revoked, other)
    assert storage.keys.exist()
    with pytest.raises(UnknownNameError, match=r'^key: no key is "nothing"'):
        storage.keys.revoke("nothing", COMMAND_LINE)
    assert audited(storage) == [
        ("command line", "key.create", key.id),
        ("command line", "key.create", other.id),
        ("command line", "key.revoke", key.id),
    ]


def test_a_session_is_that_of_its_actor_until_it_ends(storage):
    key, secret = storage.keys.create("trainer", {Scope.PLAN}, COMMAND_LINE, "red")
    of_key = storage.keys.principal(secret)
    of_token = Principal(name="oidc somebody", scopes=frozenset({Scope.READ}), expires_us=now_us() + 60_000_000)
    ended = replace(of_token, expires_us=now_us() - 1)
    by_key, by_token, late = map(storage.sessions.begin, (of_key, of_token, ended))
    found = storage.sessions.find(by_key)
    assert (found.name, found.team, found.scopes) == (f"key {key.id}", "red", {Scope.PLAN})
    assert found.expires_us > now_us()
    assert storage.sessions.find(by_token) == of_token
    assert storage.sessions.find(late) is storage.sessions.find("none") is storage.sessions.find(secret) is None
    storage.sessions.end(by_token, of_token)
    assert storage.sessions.find(by_token) is None
    storage.keys.revoke(key.id, COMMAND_LINE)
    assert storage.sessions.find(by_key) is None


def audited(storage):
    with storage.database.reading() as connection:
        rows = connection.execute(select(AUDIT_LOG).order_by(AUDIT_LOG.c.id)).all()
    return [(row.actor, row.action, row.target) for row in rows]


def test_no_secret_is_stored(storage):
    _, secret = storage.keys.create("trainer", {Scope.PLAN}, COMMAND_LINE)
    with storage.database.reading() as connection:
        stored = str(connection.execute(select(API_KEYS)).all())
    assert secret not in stored
    assert secret.removeprefix("autoshard_") not in stored


def test_a_secret_made_elsewhere_is_added_once_and_stays_revoked(storage):
    secret = "s" * 32
    key = storage.keys.add(secret, "environment", ALL_SCOPES, COMMAND_LINE)
    assert storage.keys.add(secret, "environment", ALL_SCOPES, COMMAND_LINE) is None
    storage.keys.revoke(key.id, COMMAND_LINE)
    assert storage.keys.add(secret, "environment", ALL_SCOPES, COMMAND_LINE) is None
    assert storage.keys.find(secret) is None


@pytest.mark.parametrize(
    ("secret", "name", "scopes", "field"),
    [
        ("short", "name", {Scope.PLAN}, "secret"),
        ("s" * 32, "", {Scope.PLAN}, "name"),
        ("s" * 32, "two\nlines", {Scope.PLAN}, "name"),
        ("s" * 32, "name", (), "scope"),
    ],
)
def test_keys_that_are_none_are_refused(storage, secret, name, scopes, field):
    with pytest.raises(InvalidOptionError) as caught:
        storage.keys.add(secret, name, scopes, COMMAND_LINE)
    assert caught.value.field == field
    assert secret not in str(caught.value)


def test_every_route_and_verb_is_closed_without_a_key(requests, routes, file_storage):
    file_storage.keys.create("somebody's", ALL_SCOPES, COMMAND_LINE)
    opened = set()
    for path in all_paths(routes):
        for verb in VERBS:
            answer = requests.request(verb, path)
            if answer.status_code == 401:
                assert answer.headers["content-type"] == MEDIA_TYPE
                assert answer.headers["www-authenticate"] == "Bearer"
            else:
                opened.add((verb, path))
    # Of the last one, the path is `/`, at a host of this name.
    paths = {"/livez", "/readyz", *PAGE_FILES, "/page/session", "//livez"}
    assert opened == {(verb, path) for verb in ("GET", "HEAD") for path in paths}


def test_what_is_no_key_is_refused(requests, file_storage):
    file_storage.keys.create("somebody's", ALL_SCOPES, COMMAND_LINE)
    for given in (b"", b"Bearer", b"Bearer ", b"Bearer wrong", b"Basic dTpw", b"Bearer \xff", b"Bearer \0"):
        for path in ("/v1/plans", "/nothing", "/openapi.json"):
            answer = requests.get(path, headers=[("authorization", given)])
            assert answer.status_code == 401, (given, path)


def all_paths(routes):
    """Every path of the application, and some that it does not have."""
    others = ["/nothing", "/v1", "/v1/plans/", "/v1/plans/x/y", "/livez/x", "//livez", "/livez/", "/LIVEZ"]
    return [*map(path_of, routes.routes), *others]


def path_of(route):
    path = re.sub(r"\{\w+\}", lambda parameter: PARAMETERS.get(parameter[0], "x"), route.path)
    return f"{path}/swagger-ui.css" if isinstance(route, Mount) else path


def test_a_route_that_no_rule_opens_is_open_to_nobody(requests, routes, file_storage):
    _, secret = file_storage.keys.create("admin", ALL_SCOPES, COMMAND_LINE)
    for route in routes.routes:
        for verb in getattr(route, "methods", None) or ("GET",):
            answer = requests.request(verb, path_of(route), headers=bearer(secret))
            assert answer.status_code not in (401, 403), (verb, path_of(route))
    routes.add_api_route("/v1/new", lambda: "new", methods=["GET"])
    assert requests.get("/v1/new", headers=bearer(secret)).status_code == 403


def test_a_key_opens_what_its_scopes_are_for(requests, file_storage):
    for scopes, may in (
        ({Scope.READ}, True),
        ({Scope.PLAN}, True),
        ({Scope.ADMIN}, True),
        ({Scope.TRAIN}, False),
        (ALL_SCOPES, True),
    ):
        _, secret = file_storage.keys.create("some", scopes, COMMAND_LINE)
        answer = requests.get("/v1/plans", headers=bearer(secret))
        assert answer.status_code == (200 if may else 403), scopes
        if not may:
            assert answer.json()["detail"] == "authorization: needs a key with the scope read"
        assert requests.get("/openapi.json", headers=bearer(secret)).status_code == 200
        assert requests.get("/nothing", headers=bearer(secret)).status_code == 404


def test_a_key_that_is_revoked_is_refused_at_its_next_request(requests, file_storage):
    key, secret = file_storage.keys.create("some", {Scope.PLAN}, COMMAND_LINE)
    assert requests.get("/v1/plans", headers=bearer(secret)).status_code == 200
    file_storage.keys.revoke(key.id, COMMAND_LINE)
    assert requests.get("/v1/plans", headers=bearer(secret)).status_code == 401


def test_a_service_without_keys_is_closed_from_the_first_key_on(requests, file_storage):
    assert requests.get("/v1/plans").status_code == 200
    file_storage.keys.create("some", {Scope.PLAN}, COMMAND_LINE)
    assert requests.get("/v1/plans").status_code == 401


def test_other_hosts_are_refused(client):
    for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example:8000", ""):
        answer = client.get("/v1/plans", headers={"Host": host})
        assert (answer.status_code, answer.headers["content-type"]) == (421, MEDIA_TYPE), host
        assert answer.json()["type"] == "urn:autoshard:problem:host"


def test_names_of_this_machine_are_taken(client):
    for host in ("localhost", "LOCALHOST:80", "127.0.0.1:1", "[::1]:8000", "[::1]"):
        assert client.get("/v1/plans", headers={"Host": host}).status_code == 200, host


@pytest.mark.slow
def test_what_was_done_is_audited_with_who_did_it(own_service, tmp_path, monkeypatch, run, published):
    monkeypatch.setenv(DATABASE_VARIABLE, f"sqlite:///{tmp_path}/service.sqlite")
    made = published("key", run("keys", "create", "trainer", "--scope", "plan", "--json")[0])
    service = own_service("--workers", "1", "--host", "0.0.0.0", "--first-key")  # of which there is one
    with service.client() as client:
        assert client.post("/v1/plans", json=TASK).status_code == 401
        client.headers.update(bearer(made["secret"]))
        plan_id = client.post("/v1/plans", json=TASK, headers={"X-Request-ID": "first"}).json()["id"]
        assert client.delete(f"/v1/plans/{plan_id}").status_code == 204
    assert service.stop() == 0
    assert made["secret"] not in service.log_file.read_text()
    (listed,) = published("keys", run("keys", "list", "--json")[0])["keys"]
    assert listed == made["key"]
    revoked = published("key", run("keys", "revoke", listed["id"], "--json")[0])
    assert revoked["key"]["id"] == listed["id"]
    assert revoked["key"]["revoked_at"] is not None
    database = Database(database_url())
    with database.reading() as connection:
        rows = connection.execute(select(AUDIT_LOG).order_by(AUDIT_LOG.c.id)).all()
    database.close()
    key = f"key {listed['id']}"
    assert [(row.actor, row.address, row.action, row.target) for row in rows] == [
        ("command line", "", "key.create", listed["id"]),
        (key, "127.0.0.1", "plan.make", plan_id),
        (key, "127.0.0.1", "plan.delete", plan_id),
        ("command line", "", "key.revoke", listed["id"]),
    ]
    assert rows[1].request_id == "first"


@pytest.fixture
def listener():
    """Makes a socket that listens."""
    with contextlib.ExitStack() as stack:
        yield lambda host: stack.enter_context(socket.create_server((host, 0)))


def test_without_keys_only_this_machine_is_served(file_storage, listener):
    settings = ServerSettings(host="0.0.0.0")
    with pytest.raises(
        InvalidOptionError, match=r"^--host: 0\.0\.0\.0 can be reached from other machines, which needs"
    ):
        provide_keys(settings, listener("0.0.0.0"), file_storage.keys)
    assert provide_keys(settings, listener("127.0.0.1"), file_storage.keys) is None
    file_storage.keys.create("some", {Scope.PLAN}, COMMAND_LINE)
    assert provide_keys(settings, listener("0.0.0.0"), file_storage.keys) is None


def test_the_first_key_is_made_once(file_storage, listener):
    settings = ServerSettings(host="0.0.0.0", first_key=True)
    secret = provide_keys(settings, listener("0.0.0.0"), file_storage.keys)
    assert file_storage.keys.find(secret).scopes == sorted(ALL_SCOPES)
    assert provide_keys(settings, listener("0.0.0.0"), file_storage.keys) is None


@pytest.mark.parametrize("by_file", [False, True])
def test_a_key_comes_from_the_environment(by_file, file_storage, listener, tmp_path, monkeypatch):
    secret = "made-elsewhere-" * 3
    if by_file:
        (tmp_path / "key").write_text(f"{secret}\n")
        monkeypatch.setenv(KEY_FILE_VARIABLE, str(tmp_path / "key"))
    else:
        monkeypatch.setenv(KEY_VARIABLE, secret)
    for _ in range(2):
        assert provide_keys(ServerSettings(host="0.0.0.0"), listener("0.0.0.0"), file_storage.keys) is None
    assert file_storage.keys.find(secret).scopes == sorted(ALL_SCOPES)
    assert len(file_storage.keys.list(COMMAND_LINE)) == 1


def test_what_is_no_key_of_the_environment_is_named(file_storage, listener, tmp_path, monkeypatch):
    for variable, value in ((KEY_VARIABLE, "short"), (KEY_FILE_VARIABLE, str(tmp_path / "none"))):
        monkeypatch.setenv(variable, value)
        with pytest.raises(InvalidOptionError) as caught:
            provide_keys(ServerSettings(), listener("127.0.0.1"), file_storage.keys)
        monkeypatch.delenv(variable)
        assert caught.value.field == variable
