"""Figures of papers beside their own, comparisons of planners and the figures of docs: `python -m studies NAME`.

A study may import every other folder; nothing imports it, and it is not part of the installed package.
"""
