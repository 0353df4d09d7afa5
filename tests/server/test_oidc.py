"""Tokens of an issuer of OpenID Connect, which runs on loopback and signs with a key of the test."""

import asyncio
import contextlib
import http.server
import json
import socket
import threading
import time
from types import SimpleNamespace

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from starlette.testclient import TestClient

from autoshard.core.errors import InvalidOptionError
from server.access import COMMAND_LINE, Principal
from server.first_keys import provide_keys
from server.oidc import TokenIssuer
from server.planning.workers import WorkerPool
from server.problems import ForbiddenError, NotReadyError, UnauthenticatedError
from server.settings import ServerSettings
from server.storage.location import DATABASE_VARIABLE
from server.storage.storage import open_storage
from server.web.app import create_app

AUDIENCE = "plans.example.org"
#: A generator of real keys; one for all tests, since it takes a while.
SIGNING, OTHER = (rsa.generate_private_key(public_exponent=65537, key_size=2048) for _ in range(2))


class Issuer:
    """Publishes keys, and makes tokens."""

    def __init__(self):
        self.keys = {"one": SIGNING}
        self.requests = []
        self.is_away = False
        issuer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                issuer.requests.append(self.path)
                found = None if issuer.is_away else issuer.documents.get(self.path)
                self.send_response(404 if found is None else 200)
                self.end_headers()
                self.wfile.write(json.dumps(found).encode())

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.configuration = {"issuer": self.url, "jwks_uri": f"{self.url}/keys"}

    @property
    def documents(self):
        described = [
            jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key(), as_dict=True) | {"kid": name, "use": "sig"}
            for name, key in self.keys.items()
        ]
        others = [{"kty": "oct", "kid": "shared", "k": "c2VjcmV0"}, {"kty": "strange", "kid": "strange"}]
        return {"/.well-known/openid-configuration": self.configuration, "/keys": {"keys": described + others}}

    def claims(self, **changes):
        now = int(time.time())
        made = {"iss": self.url, "aud": AUDIENCE, "sub": "trainer", "exp": now + 300, "scope": "openid plan"}
        return {name: value for name, value in (made | changes).items() if value is not None}

    def token(self, key=SIGNING, algorithm="RS256", kid="one", **changes):
        return jwt.encode(self.claims(**changes), key, algorithm=algorithm, headers={"kid": kid})


@pytest.fixture
def issuer(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    made = Issuer()
    thread = threading.Thread(target=made.server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


@pytest.fixture
def clock():
    return SimpleNamespace(now_s=0.0)


@pytest.fixture
def tokens(issuer, clock):
    return TokenIssuer(issuer.url, AUDIENCE, "scope", clock=lambda: clock.now_s)


def identified(tokens, token):
    return asyncio.run(tokens.identify(token))


def test_a_token_names_its_bearer_and_scopes(issuer, tokens):
    found = identified(tokens, issuer.token(exp=4_000_000_000))
    assert found == Principal(name="oidc trainer", scopes=frozenset({"plan"}), expires_us=4_000_000_000_000_000)
    assert identified(tokens, issuer.token(scope=["train", "admin", 7])).scopes == {"train", "admin"}
    assert identified(tokens, issuer.token(aud=["other", AUDIENCE])).name == "oidc trainer"
    assert identified(TokenIssuer(issuer.url, AUDIENCE, "roles"), issuer.token(roles=["plan"])).scopes == {"plan"}
    assert len(issuer.requests) == 4  # of the keys, once for each reader


@pytest.mark.parametrize(
    "changes",
    [
        {"exp": 1},
        {"exp": None},
        {"aud": None},
        {"aud": "other"},
        {"iss": "https://other.example.org"},
        {"sub": None},
        {"sub": ""},
        {"sub": "two\nlines"},
        {"sub": "s" * 121},
        {"nbf": 4_000_000_000},
        {"key": OTHER},
        {"kid": "two"},
        {"kid": "shared", "key": "secret" * 8, "algorithm": "HS256"},
        {"kid": "one", "key": "secret" * 8, "algorithm": "HS256"},
        {"key": None, "algorithm": "none"},
        {"key": ec.generate_private_key(ec.SECP256R1()), "algorithm": "ES256"},
    ],
)
@pytest.mark.filterwarnings("ignore::jwt.warnings.InsecureKeyLengthWarning")
def test_other_tokens_are_refused(issuer, tokens, changes):
    with pytest.raises(UnauthenticatedError):
        identified(tokens, issuer.token(**changes))


def test_what_is_no_token_is_refused(tokens):
    nested = jwt.utils.base64url_encode(b'{"a":' * 20_000).decode()
    for text in (
        "",
        "a.b.c",
        "..",
        "\0",
        "é.é.é",
        nested,
        f"{nested}.{nested}.x",
        "eyJhbGciOiJub25lIn0..",
        "W10.W10.x",
    ):
        with pytest.raises(UnauthenticatedError):
            identified(tokens, text)


@pytest.mark.parametrize("scope", [None, "", "openid", "planning", "PLAN", {"plan": True}, 7, ["openid"]])
def test_a_token_without_scopes_may_do_nothing(issuer, tokens, scope):
    with pytest.raises(ForbiddenError, match="the token's scope has none of read, plan, train, admin"):
        identified(tokens, issuer.token(scope=scope))


def test_new_keys_are_found_and_unknown_ones_are_not_asked_for_each_time(issuer, tokens, clock):
    identified(tokens, issuer.token())
    issuer.keys["two"] = OTHER
    for _ in range(5):
        with pytest.raises(UnauthenticatedError):
            identified(tokens, issuer.token(kid="two", key=OTHER))
    assert len(issuer.requests) == 2
    clock.now_s += 60
    assert identified(tokens, issuer.token(kid="two", key=OTHER)).name == "oidc trainer"
    assert len(issuer.requests) == 4


def test_an_issuer_that_is_away_is_asked_again(issuer, tokens, clock):
    issuer.is_away = True
    with pytest.raises(NotReadyError):
        identified(tokens, issuer.token())
    issuer.is_away = False
    clock.now_s += 60
    identified(tokens, issuer.token())
    issuer.is_away = True
    clock.now_s += 3600
    assert identified(tokens, issuer.token()).name == "oidc trainer"  # by the keys that are known


@pytest.mark.parametrize(
    "changes", [{"issuer": "https://other.example.org"}, {"jwks_uri": "http://other.example.org/keys"}, {"jwks_uri": 7}]
)
def test_a_configuration_of_another_issuer_is_not_followed(issuer, tokens, changes):
    issuer.configuration |= changes
    with pytest.raises(NotReadyError):
        identified(tokens, issuer.token())
    assert issuer.requests == ["/.well-known/openid-configuration"]


@pytest.fixture
def storage(tmp_path, monkeypatch):
    monkeypatch.setenv(DATABASE_VARIABLE, f"sqlite:///{tmp_path}/service.sqlite")
    with contextlib.closing(open_storage()) as opened:
        yield opened


def test_without_keys_every_request_needs_a_token(issuer, storage):
    settings = ServerSettings(oidc_issuer=issuer.url, oidc_audience=AUDIENCE, allowed_hosts=["testserver"])
    pool = WorkerPool(settings, on_ready=lambda: None, on_failure=lambda _: None)
    client = TestClient(create_app(settings, pool, storage), client=("192.0.2.7", 1))

    def status(path, token):
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return client.get(path, headers=headers).status_code

    assert not storage.keys.exist()
    for path in ("/v1/plans", "/openapi.json", "/nothing"):
        assert status(path, None) == status(path, "nonsense") == status(path, issuer.token(key=OTHER)) == 401
        assert status(path, issuer.token(scope="none")) == 403
    assert status("/v1/plans", issuer.token()) == 200
    assert status("/v1/plans", issuer.token(scope="train")) == 403
    assert status("/livez", None) == 200
    _, secret = storage.keys.create("beside", {"plan"}, COMMAND_LINE)
    assert status("/v1/plans", secret) == status("/v1/plans", issuer.token()) == 200


def test_an_issuer_stands_for_the_first_key(storage):
    settings = ServerSettings(
        host="0.0.0.0", first_key=True, oidc_issuer="https://issuer.example.org", oidc_audience=AUDIENCE
    )
    with socket.create_server(("0.0.0.0", 0)) as listener:
        assert provide_keys(settings, listener, storage.keys) is None
    assert not storage.keys.exist()


@pytest.mark.parametrize(
    "url", ["http://issuer.example.org", "issuer", "", "https://", "https://a?b", "https://[", "file:///x"]
)
def test_an_issuer_s_address_is_secure(url):
    with pytest.raises(InvalidOptionError, match=r"^--oidc-issuer: must be an address that begins with https://"):
        ServerSettings(oidc_issuer=url, oidc_audience=AUDIENCE)


@pytest.mark.parametrize("given", [{"oidc_issuer": "https://issuer.example.org"}, {"oidc_audience": AUDIENCE}])
def test_an_issuer_needs_an_audience(given):
    with pytest.raises(InvalidOptionError, match="needs --oidc-issuer and --oidc-audience"):
        ServerSettings(**given)
