"""Fields of TorchRec's configs of tables, by what becomes of them."""

from __future__ import annotations

from collections.abc import Mapping

#: Fields that tables take over, and those that say how weights begin or kernels run.
READ_CONFIG = ("num_embeddings", "embedding_dim", "name", "data_type", "feature_names", "pooling")
LEFT_CONFIG = ("weight_init_max", "weight_init_min", "init_fn", "need_pos", "enable_embedding_update", "stash_weights")
#: Fields that change what a table is, and what they stand for.
REFUSED_CONFIG: Mapping[str, str] = {
    "use_virtual_table": "a virtual table; give num_embeddings the rows that are in use",
    "virtual_table_eviction_policy": "a virtual table; give num_embeddings the rows that are in use",
    "total_num_buckets": "buckets of managed collisions; leave it out",
    "input_dim": "ids that are hashed to rows; leave it out",
    "num_embeddings_post_pruning": "rows pruned after training; give it as num_embeddings",
}
