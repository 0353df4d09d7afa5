"""The database: its schema, what is stored, and what is not lost; on SQLite and on PostgreSQL."""

import contextlib
import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Column, Index, Integer, MetaData, event, insert, inspect, select, text, update

from autoshard.api import JobKind, PlanFilter, RunAnswer
from autoshard.core.errors import FormatError, InvalidOptionError
from server.access import COMMAND_LINE
from server.problems import KeyInUseError, KeyReusedError, StorageError, UnknownPlanError
from server.storage.database import Database
from server.storage.idempotency import IdempotentRequest, KeptAnswer
from server.storage.jobs import NewJob
from server.storage.location import DATABASE_VARIABLE, database_url
from server.storage.plans import plan_row
from server.storage.schema import IDEMPOTENT_REQUESTS, METADATA, PLANS, now_us
from server.storage.sqlite_file import sqlite_engine
from server.storage.storage import Storage, open_storage
from server.storage.upgrading import check_schema, upgrade
from server.tasks.reply import PlanFacts


@pytest.fixture
def database(database_address, monkeypatch):
    monkeypatch.setenv(DATABASE_VARIABLE, database_address)
    opened = Database(database_url())
    yield opened
    opened.close()


@pytest.fixture
def storage(database):
    upgrade(database)
    return Storage(database)


def facts(number, **changes):
    values = {
        "planner": "auto",
        "device": "a100",
        "num_tables": 26,
        "num_ranks": 8,
        "topology": "a100-8",
        "step_ms": 1.5,
    }
    return PlanFacts(id=f"sha256:{number:064x}", **{**values, "search_text": "auto a100 node clicks_100%", **changes})


def add(storage, plan, answer=b"{}"):
    storage.keep(KeptAnswer(status=200, body=answer), plan, None, COMMAND_LINE)


def listed(storage, **chosen):
    return [plan.id for plan in storage.plans.list(PlanFilter(**chosen), "").plans]


def forget_deleted(storage, **kept):
    with storage.database.writing(uses_reserve=True) as connection:
        return storage.plans.forget_deleted(connection, **kept)


def test_an_upgrade_makes_the_schema_once(database):
    with pytest.raises(InvalidOptionError, match=r"has no schema yet: run `autoshard db upgrade`"):
        check_schema(database)
    before, after = upgrade(database)
    assert before is None
    assert upgrade(database) == (after, after)
    check_schema(database)
    with database.reading() as connection:
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []


def test_figures_that_the_tables_lack_are_added(database, monkeypatch):
    upgrade(database)
    storage = Storage(database)
    add(storage, facts(1))
    wider = PLANS.to_metadata(MetaData())
    wider.append_column(Column("num_shards", Integer))
    Index("plans_by_num_shards", wider.c.num_shards, wider.c.created_us, wider.c.id)
    monkeypatch.setattr("server.storage.upgrading.METADATA", wider.metadata)
    with pytest.raises(
        InvalidOptionError, match=r"lacks tables or columns of this version: run `autoshard db upgrade`$"
    ):
        check_schema(database)
    for _ in range(2):
        upgrade(database)
    check_schema(database)
    with database.reading() as connection:
        assert connection.execute(select(wider.c.num_shards)).scalars().all() == [None]
        assert "plans_by_num_shards" in [index["name"] for index in inspect(connection).get_indexes("plans")]
    assert listed(storage) == [facts(1).id]


def test_upgrades_at_the_same_time_wait_for_each_other(database):
    failures = []

    def run():
        try:
            upgrade(database)
        except Exception as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    check_schema(database)


def test_the_schema_of_the_next_version_is_used_as_it_is(database):
    upgrade(database)
    with database.writing() as connection:
        connection.execute(text("ALTER TABLE plans ADD COLUMN of_the_next_version INTEGER"))
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    assert upgrade(database) == ("9999", "9999")
    check_schema(database)
    storage = Storage(database)
    add(storage, facts(1))
    assert listed(storage) == [facts(1).id]


def test_a_plan_is_stored_once_and_read_as_it_was(storage):
    for _ in range(2):
        add(storage, facts(1), b'{"id": "caf\xc3\xa9"}')
    assert storage.plans.read(facts(1).id, "") == b'{"id": "caf\xc3\xa9"}'
    assert listed(storage) == [facts(1).id]
    storage.plans.delete(facts(1).id, COMMAND_LINE)
    for use, who in ((storage.plans.read, ""), (storage.plans.delete, COMMAND_LINE)):
        with pytest.raises(UnknownPlanError):
            use(facts(1).id, who)
    add(storage, facts(1), b"again")  # its document has gone with it
    assert storage.plans.read(facts(1).id, "") == b"again"


def make_read_only(database):
    """Has the connections of a database do nothing but read, as those of a server that follows another one."""
    if database.is_sqlite:
        event.listen(database._engine, "connect", lambda connection, _: connection.execute("PRAGMA query_only=ON"))
    else:
        with database.writing() as connection:
            named = f'ALTER DATABASE "{database.url.database}"'
            connection.execute(text(f"{named} SET default_transaction_read_only = on"))
    database.close()


def add_asked_for_long_ago(storage):
    add(storage, facts(1))
    with storage.database.writing() as connection:
        connection.execute(update(PLANS).values(asked_us=now_us() - 2 * 3600 * 1_000_000))


def test_plans_are_read_where_nothing_can_be_written(storage):
    add_asked_for_long_ago(storage)
    make_read_only(storage.database)
    for _ in range(2):
        assert storage.plans.read(facts(1).id, "") == b"{}"
        storage.plans.check(facts(1).id, "")
    storage.database.check()
    for write in (lambda: add(storage, facts(2)), storage.database.check):
        with pytest.raises(StorageError, match=r"^the database is read-only$"):
            write()


@pytest.mark.parametrize("database_address", ["sqlite"], indirect=True)
def test_plans_are_read_where_they_may_not_be_changed(storage):
    add_asked_for_long_ago(storage)
    with storage.database.writing() as connection:
        refuses = "CREATE TRIGGER refuses BEFORE UPDATE ON plans BEGIN SELECT RAISE(ABORT, 'may not be changed'); END"
        connection.execute(text(refuses))
    assert storage.plans.read(facts(1).id, "") == b"{}"
    storage.plans.check(facts(1).id, "")
    storage.database.check()


def test_pages_hold_every_plan_once_the_latest_first(storage):
    with storage.database.writing() as connection:
        # Three of a kind were made in the same microsecond, and more come while pages are read.
        for number in range(7):
            connection.execute(insert(PLANS).values(plan_row(facts(number), number // 3)))
    found, cursor = [], None
    while True:
        page = storage.plans.list(PlanFilter(limit=2, cursor=cursor), "")
        found += [plan.id for plan in page.plans]
        add(storage, facts(100 + len(found)))
        cursor = page.next
        if cursor is None:
            break
    assert found == [facts(number).id for number in reversed(range(7))]
    assert page.plans[-1].created_at == "1970-01-01T00:00:00.000+00:00"


@pytest.mark.parametrize("cursor", ["x", "", "-", "LTE6YQ", "ΩΩ", "OTk5OTk5OTk5OTk5OTk5OTk5OTk6YQ"])
def test_cursors_that_no_page_gave_are_refused(storage, cursor):
    with pytest.raises(FormatError, match=r"^cursor: must be `next` of a page before$"):
        storage.plans.list(PlanFilter(limit=2, cursor=cursor), "")


def test_lists_are_searched(storage):
    add(storage, facts(1))
    add(storage, facts(2, planner="neo", search_text="neo a100 node äpfel"))
    add(storage, facts(3, device="cpu", num_ranks=4))
    by_number = {facts(number).id: number for number in (1, 2, 3)}

    def found(**chosen):
        return {by_number[plan_id] for plan_id in listed(storage, **chosen)}

    assert found() == {1, 2, 3}
    assert found(planner="neo") == {2}
    assert found(device="a100") == {1, 2}
    assert found(num_ranks=4, device="cpu") == {3}
    assert found(text="ÄPFEL") == {2}
    assert found(text="100%") == {1, 3}
    assert found(text="a_00") == set()  # no pattern
    assert listed(storage, id=facts(1).id) == [facts(1).id]
    assert listed(storage, id=facts(9).id) == []


REQUEST = IdempotentRequest(client="a", key="k", fingerprint="f")


def test_a_request_with_a_key_is_answered_once(storage):
    assert storage.requests.begin(REQUEST) is None
    again = IdempotentRequest(client="a", key="k", fingerprint="f")
    with pytest.raises(KeyInUseError):
        storage.requests.begin(again)
    answer = KeptAnswer(status=200, body=b'{"plan": 1}')
    storage.keep(answer, facts(1), REQUEST, COMMAND_LINE)
    assert storage.requests.begin(again) == answer
    with pytest.raises(KeyReusedError):
        storage.requests.begin(replace(again, fingerprint="other"))
    assert storage.requests.begin(replace(again, client="b")) is None


def test_a_request_that_failed_or_whose_process_died_can_be_sent_again(storage):
    assert storage.requests.begin(REQUEST) is None
    storage.requests.give_up(REQUEST)
    assert storage.requests.begin(REQUEST) is None
    later = IdempotentRequest(client="a", key="k", fingerprint="f")
    age(storage, 301)
    assert storage.requests.begin(later) is None
    with pytest.raises(KeyInUseError, match=r"was given up or begun again"):  # by the process that was thought dead
        storage.keep(KeptAnswer(status=200, body=b"late"), facts(1), REQUEST, COMMAND_LINE)
    assert listed(storage) == []
    with pytest.raises(KeyInUseError):
        storage.requests.begin(later)
    storage.keep(KeptAnswer(status=422, body=b"first"), None, later, COMMAND_LINE)
    assert storage.requests.begin(REQUEST).body == b"first"
    age(storage, 24 * 3600)
    assert storage.requests.begin(REQUEST) is None


def make_job(storage):
    job = NewJob(kind=JobKind.COLLECT, request=b"{}", task="{}", client="a", team="")
    return storage.add_job(job, REQUEST, COMMAND_LINE)


def report_run(storage):
    run = RunAnswer(
        measured_ms=1,
        predicted_ms=1,
        low_ms=1,
        high_ms=1,
        is_outside=False,
        features=[],
        drifted_ms=None,
        is_drifted=False,
    )
    answer = KeptAnswer(status=200, body=run.model_dump_json().encode())
    storage.keep_run(facts(1).id, run, answer, REQUEST, COMMAND_LINE)
    return answer


def num_made(storage):
    jobs = storage.jobs.list("", list(JobKind), limit=10, cursor=None, state=None).jobs
    return len(jobs) + len(storage.runs.list(facts(1).id, "").runs)


@pytest.mark.parametrize("make", [make_job, report_run])
def test_what_was_made_with_its_answer_is_not_given_up(storage, make):
    add(storage, facts(1))
    assert storage.requests.begin(REQUEST) is None
    answer = make(storage)
    storage.requests.give_up(REQUEST)  # its process was told nothing of the commit, or is being ended
    assert storage.requests.begin(replace(REQUEST, owner="again")) == answer
    assert num_made(storage) == 1


@pytest.mark.parametrize("make", [make_job, report_run])
def test_nothing_is_made_for_a_request_that_was_given_up(storage, make):
    add(storage, facts(1))
    assert storage.requests.begin(REQUEST) is None
    storage.requests.give_up(REQUEST)  # cancelled, while a thread of it goes on
    with pytest.raises(KeyInUseError):
        make(storage)
    assert num_made(storage) == 0


def age(storage, seconds):
    with storage.database.writing() as connection:
        older = IDEMPOTENT_REQUESTS.c.started_us - seconds * 1_000_000
        connection.execute(update(IDEMPOTENT_REQUESTS).values(started_us=older))


def test_of_requests_with_one_key_at_the_same_time_one_is_begun(storage):
    barrier, begun = threading.Barrier(4), []

    def begin():
        barrier.wait()
        with contextlib.suppress(KeyInUseError):
            begun.append(storage.requests.begin(IdempotentRequest(client="a", key="k", fingerprint="f")))

    threads = [threading.Thread(target=begin) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert begun == [None]


def test_a_transaction_that_fails_leaves_nothing(storage):
    def fail():
        with storage.database.writing() as connection:
            storage.plans.add(connection, facts(1), b"{}", "", "")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert listed(storage) == []


WRITER = """
from server.access import COMMAND_LINE
from server.storage.database import Database
from server.storage.idempotency import KeptAnswer
from server.storage.location import database_url
from server.storage.storage import Storage
from server.tasks.reply import PlanFacts
storage = Storage(Database(database_url()))
for number in range(10**6):
    plan = PlanFacts(id=f"sha256:{number:064x}", planner="auto", device="cpu", num_tables=1, num_ranks=1, step_ms=1.0,
                     search_text="")
    storage.keep(KeptAnswer(status=200, body=b"{}" * 1000), plan, None, COMMAND_LINE)
    print(number, flush=True)
"""


def test_a_killed_process_loses_no_write_that_it_acknowledged(database, database_address):
    upgrade(database)
    database.close()
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER], stdout=subprocess.PIPE, env={**os.environ, DATABASE_VARIABLE: database_address}
    )
    for _ in range(20):
        process.stdout.readline()
    process.kill()
    acknowledged = 20 + len(process.stdout.read().splitlines())
    process.wait()
    process.stdout.close()
    storage = open_storage()
    for number in range(acknowledged):
        assert storage.plans.read(facts(number).id, "") == b"{}" * 1000
    num_listed = len(storage.plans.list(PlanFilter.model_construct(limit=10**6), "").plans)
    storage.database.close()
    assert num_listed - acknowledged in (0, 1)  # the last may have been stored, and not acknowledged


def test_a_database_that_is_away_is_said_so(monkeypatch):
    monkeypatch.setenv(DATABASE_VARIABLE, "postgresql://nobody@127.0.0.1:1/nothing")
    database = Database(database_url())
    with pytest.raises(StorageError, match=r"^the database does not answer$"):
        database.check()


SECRET = "hunter2"


@pytest.mark.parametrize(
    "address",
    ["nonsense", "mysql://u:hunter2@h/d", "sqlite://", "sqlite:///:memory:", "postgresql://u:hunter2@h", "://hunter2"],
)
def test_other_addresses_are_refused_without_their_password(address, monkeypatch):
    monkeypatch.setenv(DATABASE_VARIABLE, address)
    with pytest.raises(InvalidOptionError, match=rf"^{DATABASE_VARIABLE}: must be sqlite:///FILE or") as caught:
        database_url()
    assert SECRET not in str(caught.value)


def test_an_old_sqlite_serves_one_process_at_a_time(tmp_path):
    path = tmp_path / "service.sqlite"
    engine = sqlite_engine(path, (3, 51, 2))
    with engine.begin() as connection:
        assert connection.execute(text("PRAGMA journal_mode")).scalar() == "delete"
    with pytest.raises(InvalidOptionError) as caught:
        sqlite_engine(path, (3, 51, 2))
    engine.dispose()
    message = str(caught.value)
    assert "is in use by another process, and SQLite 3.51.2 can corrupt" in message
    assert "stop the other one, set AUTOSHARD_DATABASE_URL to a PostgreSQL database, or use" in message
    assert "\n" not in message


def test_a_newer_sqlite_serves_several(tmp_path):
    for _ in range(2):
        engine = sqlite_engine(tmp_path / "service.sqlite", (3, 51, 3))
        with engine.begin() as connection:
            assert connection.execute(text("PRAGMA journal_mode")).scalar() == "wal"
        engine.dispose()


def test_a_file_is_upgraded_when_it_is_opened(tmp_path, monkeypatch):
    monkeypatch.setenv(DATABASE_VARIABLE, f"sqlite:///{tmp_path}/a/b/service.sqlite")
    for expected in ([], [facts(1).id]):
        storage = open_storage()
        assert listed(storage) == expected
        add(storage, facts(1))
        storage.database.close()


def test_a_server_s_database_is_upgraded_by_its_command(postgresql, monkeypatch, run, published):
    monkeypatch.setenv(DATABASE_VARIABLE, postgresql.new_database())
    with pytest.raises(InvalidOptionError, match=r"run `autoshard db upgrade`$"):
        open_storage()
    upgraded = published("database", run("db", "upgrade", "--json")[0])
    assert upgraded["before"] is None
    storage = open_storage()
    assert listed(storage) == []
    storage.database.close()


def test_what_was_deleted_a_day_ago_is_forgotten(storage, monkeypatch):
    for number in (1, 2):
        add(storage, facts(number))
    storage.plans.delete(facts(1).id, COMMAND_LINE)
    assert forget_deleted(storage) == 0
    assert listed(storage, is_deleted=True) == [facts(1).id]
    later = now_us() + 24 * 3600 * 1_000_000 + 1
    monkeypatch.setattr("server.storage.plans.now_us", lambda: later)
    assert listed(storage, is_deleted=True) == []
    with pytest.raises(UnknownPlanError):
        storage.plans.restore(facts(1).id, COMMAND_LINE)
    assert forget_deleted(storage) == 1
    with storage.database.reading() as connection:
        assert connection.scalars(select(PLANS.c.id)).all() == [facts(2).id]
