"""Two-dimensional sparse parallelism's Tables 1 and 2 and Fig. 6 and 7, from autoshard's planner and prices."""
