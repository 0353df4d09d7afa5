"""Studies that train models with the runtime."""
