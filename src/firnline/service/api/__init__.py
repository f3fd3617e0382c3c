"""The REST interface, `/api/v1`: one module per family of routes."""
