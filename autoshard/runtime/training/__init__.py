"""A DLRM's training step around the embedding tables, its synthetic samples, and the unsharded reference."""
