"""The engine: who holds which rows, how ids and embeddings travel, and how rows are looked up and updated."""
