"""Published learned placements of whole tables, trained on the prices of this project: AutoShard and DreamShard."""
