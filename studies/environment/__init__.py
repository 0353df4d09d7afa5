"""The speed of the placement environment."""
