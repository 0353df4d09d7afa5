"""Formats of other projects, read into tables."""
