"""Benchmark of the collectives that exchange embeddings, and the links fitted to it."""
