"""Learned costs of embedding kernels: features, networks, training and the registry of models."""
