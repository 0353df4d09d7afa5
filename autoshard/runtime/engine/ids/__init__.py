"""Ids on their way to the processes that hold their rows."""
