"""The service's database: SQLite in one file, or PostgreSQL."""
