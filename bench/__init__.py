"""Micro-benchmarks of embedding kernels, dense layers and collectives, and the store of their samples."""
