"""Actors that play episodes: in this process, in processes of their own, on Ray."""
