"""Micro-benchmarks of embedding kernels, and the store of their samples."""
