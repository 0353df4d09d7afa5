"""Figures of the evaluation, one module each: parts that are computed, and the section that shows them."""
