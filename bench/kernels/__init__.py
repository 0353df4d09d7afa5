"""Sets of shards as FBGEMM runs them, and the replay of plans."""
