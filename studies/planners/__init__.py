"""Planners beside each other: predicted, replayed and executed."""
