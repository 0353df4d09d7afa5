"""Changes of the schema, for Alembic; `env.py` is run by it."""
