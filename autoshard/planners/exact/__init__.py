"""Exact plans of small tasks, by CP-SAT."""
