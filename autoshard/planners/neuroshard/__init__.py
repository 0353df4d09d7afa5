"""NeuroShard's search: columns halved by beam search, every candidate packed greedily under caps on dimensions."""
