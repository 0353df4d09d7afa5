"""The policy's network."""
