"""Rows that a process holds: how they are looked up, and updated."""
