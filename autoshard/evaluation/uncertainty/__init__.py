"""Errors that the prices of sets and of plans have in common, and draws of what plans may take."""
