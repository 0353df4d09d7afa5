"""FlexShard: tables cut by access rank into replicated, per-node and row-wise tiers."""
