"""Figures and tables of the papers, made again from what autoshard computes."""
