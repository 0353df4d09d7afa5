"""The audit log: who changed what."""

from __future__ import annotations

from sqlalchemy import Connection, insert

from server.access import Principal
from server.storage.schema import AUDIT_LOG, now_us


def record(connection: Connection, actor: Principal, action: str, target: str) -> None:
    """Adds a row.

    Args:
        connection: The transaction of the change, so that neither is kept without the other.
        actor: Who.
        action: What was done, such as `plan.make`.
        target: Id of what it was done to.
    """
    row = {
        "at_us": now_us(),
        "actor": actor.name,
        "address": actor.address,
        "request_id": actor.request_id,
        "action": action,
        "target": target,
    }
    connection.execute(insert(AUDIT_LOG).values(row))
