"""Sharding policies learned by reinforcement learning, and the planner that uses them."""
