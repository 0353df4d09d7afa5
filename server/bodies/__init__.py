"""Request and answer bodies of the service."""
