"""Planners that need no training, and what every planner is."""
