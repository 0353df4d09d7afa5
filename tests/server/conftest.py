"""A real server process on a loopback port, and real databases."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import httpx
import psycopg
import pytest
import structlog

import costmodel
from costmodel.registry.versions import Registry
from studies.service.processes import postgresql_server

START_TIMEOUT_S = 120


@dataclass
class Service:
    process: subprocess.Popen
    log_file: Path
    url: str

    def client(self):
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    def log(self):
        return [json.loads(line) for line in self.log_file.read_text(encoding="utf-8").splitlines()]

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


def start_service(folder, *arguments, until_ready=True, database=None):
    log_file = folder / "service.log"
    program = Path(sys.executable).with_name("autoshard")
    environment = {
        **os.environ,
        "AUTOSHARD_REGISTRY": str(folder / "no-registry"),
        "HOME": str(folder),
        "AUTOSHARD_DATABASE_URL": database or f"sqlite:///{folder}/service.sqlite",
    }
    log_file.unlink(missing_ok=True)  # what is left of a killed service may still write into its own
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [program, "serve", "--port", "0", *arguments], cwd=folder, stdout=log, stderr=log, env=environment
        )
    service = Service(process, log_file, _await(lambda: _address(log_file), process))
    if until_ready:
        with service.client() as client:
            _await(lambda: _answers_ready(client), process)
    return service


def _address(log_file):
    lines = map(json.loads, log_file.read_text().splitlines())
    return next((line["url"] for line in lines if line["event"] == "starting"), None)


def _answers_ready(client):
    try:
        return client.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False


def _await(condition, process):
    deadline = time.monotonic() + START_TIMEOUT_S
    while not (found := condition()):
        assert process.poll() is None, "the service ended"
        assert time.monotonic() < deadline, "the service did not start"
        time.sleep(0.05)
    return found


@pytest.fixture(scope="session", autouse=True)
def short_tracebacks():
    """Logs of this process, without the values of all variables, which take a second to lay out."""
    plain = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[structlog.contextvars.merge_contextvars, structlog.processors.add_log_level, plain])


@pytest.fixture(scope="session")
def service(tmp_path_factory):
    """One service for all tests that leave it as it is."""
    started = start_service(tmp_path_factory.mktemp("service"))
    yield started
    started.stop()


@pytest.fixture
def own_service(tmp_path):
    """Starts a service for one test, with the arguments that it gives."""
    started = []

    def start(*arguments, folder=tmp_path, **settings):
        folder.mkdir(exist_ok=True)
        started.append(start_service(folder, *arguments, **settings))
        return started[-1]

    yield start
    for item in started:
        if item.process.poll() is None:
            item.process.kill()
            item.process.wait()


@pytest.fixture
def registry(tmp_path):
    """The shipped model of a CPU as the production version, and one that is 10% dearer."""
    models = Registry(tmp_path / "registry")
    stored = Registry(Path(costmodel.__file__).parent / "shipped").load("cost", "cpu")
    card = {key: value for key, value in stored.card.items() if key != "weights_sha256"}
    models.publish("cost", "cpu", stored.tensors, card)
    models.publish("cost", "cpu", stored.tensors, {**card, "scale_ms": 1.1 * card["scale_ms"]}, alias=None)
    return models


@pytest.fixture
def client(service):
    with service.client() as opened:
        yield opened


@pytest.fixture(scope="session")
def postgresql():
    """A PostgreSQL server of its own: on loopback and a free port, in a folder that is removed with it."""
    if not any(Path("/usr/lib/postgresql").glob("*/bin")):
        pytest.skip("this machine has no PostgreSQL server (Debian: postgresql-15)")
    with (
        postgresql_server("fsync=off") as address,
        psycopg.connect(f"{address}/postgres", autocommit=True) as connection,
    ):
        yield PostgresServer(connection, address)


@dataclass
class PostgresServer:
    connection: psycopg.Connection
    address: str

    def new_database(self):
        """The address of a new database."""
        name = f"test_{uuid.uuid4().hex}"
        self.connection.execute(f"CREATE DATABASE {name}")
        return f"{self.address}/{name}"


@pytest.fixture(params=["sqlite", "postgresql"])
def database_address(request, tmp_path):
    """The address of an empty database, of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/service.sqlite"
    return request.getfixturevalue("postgresql").new_database()
