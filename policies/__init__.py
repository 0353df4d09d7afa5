"""The sharding policy: its network, its training, and the planner that uses it."""
