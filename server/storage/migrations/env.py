"""Runs migrations on the connection, and in the transaction, of `server.storage.upgrading`."""

from __future__ import annotations

from alembic import context

from server.storage.schema import METADATA

context.configure(connection=context.config.attributes["connection"], target_metadata=METADATA)
context.run_migrations()
