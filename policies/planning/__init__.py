"""The trained policy as a planner: tasks, decoding, the choices that it has."""
