"""What policies learn by: V-trace, PPO, returns."""
