"""The REST service as a process of its own: under load, killed, and restarted behind a proxy."""
