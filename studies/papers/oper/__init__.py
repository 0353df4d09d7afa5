"""OPER's Tables 2 and 3 and Fig. 8 and 10, from autoshard's planner, with CP-SAT as the reference."""
