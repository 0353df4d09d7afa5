"""Benchmark of dense layers: bottom and top MLP, interaction."""
