"""How anything is measured: devices, clocks, rounds, caches, drift, and what a sample tells of its machine."""
