"""Clusters of one machine: nodes are network namespaces, whose links have a set rate and latency."""
