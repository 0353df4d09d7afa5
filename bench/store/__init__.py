"""What a store of samples holds: summary, checks, coverage."""
