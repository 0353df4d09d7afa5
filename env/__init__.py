"""The Gymnasium environment in which a sharding policy is trained."""
