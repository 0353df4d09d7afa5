"""The registry of trained models: versions, aliases, promotion."""
