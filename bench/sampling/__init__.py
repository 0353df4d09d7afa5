"""Which sets of shards to measure: strategies, their mixture as one resumable stream, and where a model is in doubt."""
