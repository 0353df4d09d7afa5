"""The trained policy where plans are made: what it is stored as, how it plays, and the planner."""
