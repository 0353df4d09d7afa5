"""Documents of autoshard: tables, topologies, plans, access profiles, and their published schemas."""
