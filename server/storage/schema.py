"""Tables of the database. A migration makes each change (`migrations/`); a test compares the two.

Times are microseconds since 1970, UTC. A version of the service works on the schema of the next one too: a migration
adds what may be left empty, and drops only what no version uses that may still run.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any, Final, get_args

from pydantic.fields import FieldInfo
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Row,
    String,
    Table,
    Text,
)

from autoshard.api import PLAN_FILTERS, PlanFigures

METADATA = MetaData()
_TYPES: Final[dict[Any, Any]] = {str: String(512), bool: Boolean(), int: Integer(), float: Float()}


def _figure(name: str, field: FieldInfo) -> Column[Any]:
    """The column of a model's field; one with a default may be empty."""
    kinds = (*get_args(field.annotation), field.annotation)
    return Column(name, next(_TYPES[kind] for kind in kinds if kind in _TYPES), nullable=not field.is_required())


def _team(**options: Any) -> Column[Any]:
    """Whose a row is: nobody sees rows of another team."""
    return Column("team", String(64), nullable=False, server_default="", **options)


def _owner() -> Column[Any]:
    """Who made a row."""
    return Column("owner", String(128), nullable=False, server_default="")


PLANS = Table(
    "plans",
    METADATA,
    _team(primary_key=True),
    Column("id", String(71), primary_key=True),
    _owner(),
    Column("created_us", BigInteger, nullable=False),
    Column("asked_us", BigInteger),
    Column("deleted_us", BigInteger),
    Column("num_bytes", Integer, nullable=False, server_default="0"),
    Column("name", String(128), nullable=False, server_default=""),
    Column("tags", String(256), nullable=False, server_default=""),
    Column("search_text", Text, nullable=False),
    *(_figure(name, field) for name, field in PlanFigures.model_fields.items()),
    Index("plans_by_time", "team", "created_us", "id"),
    Index("plans_by_owner", "owner", "num_bytes"),
    *(Index(f"plans_by_{name}", "team", name, "created_us", "id") for name in PLAN_FILTERS),
)
"""What lists of plans show and are searched by; documents are kept apart, so that lists stay fast. Figures are those of
`autoshard.api`: an upgrade adds what the table lacks of them. `asked_us` is when a plan was last made again, read,
named or restored, known to the hour, and `num_bytes` is the size of its document."""

PLAN_DOCUMENTS = Table(
    "plan_documents",
    METADATA,
    _team(primary_key=True),
    Column("plan_id", String(71), primary_key=True),
    Column("answer", LargeBinary, nullable=False),
    ForeignKeyConstraint(("team", "plan_id"), ("plans.team", "plans.id"), ondelete="CASCADE"),
)
"""Answers that hold the plans, compressed by zlib."""

IDEMPOTENT_REQUESTS = Table(
    "idempotent_requests",
    METADATA,
    Column("client", String(128), primary_key=True),
    Column("key", String(128), primary_key=True),
    Column("fingerprint", String(64), nullable=False),
    Column("owner", String(32), nullable=False),
    Column("started_us", BigInteger, nullable=False),
    Column("status", Integer),
    Column("answer", LargeBinary),
    Index("idempotent_requests_by_time", "started_us"),
)
"""Requests with an idempotency key; without a status while one is being answered, by the process `owner` names."""

API_KEYS = Table(
    "api_keys",
    METADATA,
    Column("id", String(16), primary_key=True),
    Column("secret_hash", String(64), nullable=False, unique=True),
    Column("name", String(128), nullable=False),
    _team(),
    Column("scopes", String(128), nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Column("revoked_us", BigInteger),
)
"""Keys: SHA-256 of the secret, which has 256 random bits; scopes separated by commas. Revoked ones stay."""

SESSIONS = Table(
    "sessions",
    METADATA,
    Column("secret_hash", String(64), primary_key=True),
    Column("actor", String(128), nullable=False),
    _team(),
    Column("scopes", String(128), nullable=False),
    Column("expires_us", BigInteger, nullable=False),
)
"""Sessions on the page, of keys and of tokens."""

AUDIT_LOG = Table(
    "audit_log",
    METADATA,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("at_us", BigInteger, nullable=False),
    Column("actor", String(128), nullable=False),
    _team(),
    Column("address", String(128), nullable=False),
    Column("request_id", String(64), nullable=False),
    Column("action", String(64), nullable=False),
    Column("target", String(512), nullable=False),
    Index("audit_log_by_team", "team", "id"),
)
"""Who changed what; each row is written in the transaction of its change."""

JOBS = Table(
    "jobs",
    METADATA,
    Column("id", String(32), primary_key=True),
    Column("kind", String(32), nullable=False),
    Column("state", String(16), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("num_starts", Integer, nullable=False),
    _team(),
    Column("client", String(128), nullable=False),
    Column("owner", String(32)),
    Column("created_us", BigInteger, nullable=False),
    Column("started_us", BigInteger),
    Column("seen_us", BigInteger, nullable=False),
    Column("finished_us", BigInteger),
    Column("cancelled_us", BigInteger),
    Column("stopped_us", BigInteger),
    Column("request", LargeBinary, nullable=False),
    Column("task", Text),
    Column("priority", Integer),
    Column("progress", String(512), nullable=False),
    Column("log", Text, nullable=False),
    Column("plan_id", String(71)),
    Column("result", LargeBinary),
    Column("problem", Text),
    Index("jobs_by_time", "team", "created_us", "id"),
    Index("jobs_by_state", "state", "seen_us"),
    Index("jobs_by_client", "client", "started_us"),
    Index("jobs_by_plan", "plan_id"),
)
"""Jobs. `owner` names the run that does one, which renews `seen_us`: one that does not any more has lost the job.
Requests and results are JSON texts, compressed by zlib; `task` is a request in few words, as JSON. A plan that a job
made is in `plans`."""

SCHEDULES = Table(
    "schedules",
    METADATA,
    _team(primary_key=True),
    Column("name", String(64), primary_key=True),
    _owner(),
    Column("cron", String(128), nullable=False),
    Column("kind", String(32), nullable=False),
    Column("body", Text, nullable=False),
    Column("is_paused", Boolean, nullable=False),
    Column("next_us", BigInteger, nullable=False),
    Column("fired_us", BigInteger),
)
"""Schedules. The transaction that moves `next_us` on makes the job of that time."""

SHADOW_PRICES = Table(
    "shadow_prices",
    METADATA,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("at_us", BigInteger, nullable=False),
    Column("name", String(201), nullable=False),
    Column("candidate", String(16), nullable=False),
    Column("production", String(512), nullable=False),
    Column("plan_id", String(71), nullable=False),
    Column("production_ms", Float, nullable=False),
    Column("candidate_ms", Float, nullable=False),
    Index("shadow_prices_by_candidate", "name", "candidate"),
)
"""Steps of plans that the service made, as predicted by the production model of kernels and by a candidate; of a plan
that was made again, there are several."""


RUNS = Table(
    "runs",
    METADATA,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    _team(),
    Column("plan_id", String(71), nullable=False),
    Column("reported_us", BigInteger, nullable=False),
    Column("measured_ms", Float, nullable=False),
    Column("predicted_ms", Float, nullable=False),
    Column("is_drifted", Boolean, nullable=False),
    Index("runs_by_plan", "team", "plan_id", "id"),
    ForeignKeyConstraint(("team", "plan_id"), ("plans.team", "plans.id"), ondelete="CASCADE"),
)
"""Steps of plans that training jobs measured, beside those predicted when the plans were made."""


def now_us() -> int:
    """The time now."""
    return time.time_ns() // 1000


def iso_time(time_us: int) -> str:
    """A time as ISO 8601, UTC."""
    return datetime.fromtimestamp(time_us / 1e6, UTC).isoformat(timespec="milliseconds")


def told(row: Row[*tuple[Any, ...]]) -> dict[str, Any]:
    """A row's values by the names of answers, which have times as ISO 8601: `created_at` of `created_us`."""
    return {
        (name.removesuffix("_us") + "_at" if name.endswith("_us") else name): (
            iso_time(value) if name.endswith("_us") and value is not None else value
        )
        for name, value in row._mapping.items()
    }
