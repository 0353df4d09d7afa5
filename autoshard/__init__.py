"""autoshard plans how the embedding tables of recommendation models are sharded, and executes the plan."""

__version__ = "0.1.0"
