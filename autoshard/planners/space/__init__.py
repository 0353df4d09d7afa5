"""What planners choose from: items and ranks, ways to hold tables, constraints, feasibility, prices of steps."""
