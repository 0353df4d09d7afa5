"""What planners choose from: items (tables that share their ranks, or parts of tables) and their sharding options.

`options` cuts tables into shards, `tiers` says which ranks hold a shard at a site, `constraints` which sites and tiers
a table allows, `step_cost` prices steps from sums per rank. On these stand two views as arrays:

- `placement`: single shards, each on one rank, with the cost model's own float32 codes. `feasibility` repairs
  placements that exceed memory.
- `planner_space`, with `kinds`: all options of tables, with float64 sums that stay exact through any number of moves.
  Searches and policies choose from it.
"""
