"""The collector: measures sets for a while and appends them to a store; locks, signals, faults, and clusters."""
