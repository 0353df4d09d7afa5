"""Local search on the cost model: `improve` makes the slowest rank of a placement faster."""

from autoshard.planners.search.local_search import SearchResult, Stopped, improve

__all__ = ["SearchResult", "Stopped", "improve"]
