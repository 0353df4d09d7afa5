"""What is found about plans, as data and as JSON: comparisons, explanations, differences, sweeps."""
