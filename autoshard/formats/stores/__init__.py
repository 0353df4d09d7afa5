"""Stores of measured samples."""
