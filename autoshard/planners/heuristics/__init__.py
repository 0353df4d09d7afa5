"""Planners that take one item after the other: greedy ones, and Karmarkar-Karp."""
