"""Prices plans."""
