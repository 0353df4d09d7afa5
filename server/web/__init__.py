"""The service over HTTP: its routes, what guards them, its OpenAPI document."""
