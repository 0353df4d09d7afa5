"""FlexShard's Tables 5 and 6 and Fig. 1, 3, 5, 6 and 7, from autoshard's equations and planner."""
