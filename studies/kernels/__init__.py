"""Kernels and their measurement: AutoShard's Fig. 4, repeatability, the cache flush, collectors that are killed."""
