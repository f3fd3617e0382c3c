"""Queries DuckDB, which reads files by other code than ours."""

from __future__ import annotations

from typing import Any


def execute(query: str, parameters: object = None) -> Any:
    """DuckDB's answer: `fetchall`, `description`. Each call has a cursor of its own, so threads may query at once."""
    import duckdb  # starts threads, which a process that is forked from one that loaded this module would lack

    return duckdb.cursor().execute(query, parameters)
