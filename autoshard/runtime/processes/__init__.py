"""The processes of a run: the launcher, its workers, and the session that executes requests in them."""
