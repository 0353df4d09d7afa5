"""Embeddings on their way back to those who asked for them, and their gradients to the rows."""
