"""Compares the three tables with queries of DuckDB over all input."""

from __future__ import annotations

import sys
from pathlib import Path

import duckdb
from deltalake import DeltaTable

# Rows of the table, then rows that the input says it has.
QUERIES = {
    "bronze": (
        "SELECT order_id, customer, cents FROM held",
        "SELECT order_id, customer, cents FROM input",
    ),
    "silver": (
        "SELECT order_id, customer, cents FROM held",
        "SELECT DISTINCT order_id, customer, cents FROM input",
    ),
    "gold": (
        "SELECT customer, orders, cents FROM held",
        "SELECT customer, count(*), sum(cents)::BIGINT FROM (SELECT DISTINCT order_id, customer, cents FROM input) "
        "GROUP BY customer",
    ),
}


def compare(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return for each table its rows, the expected rows, and how many differ."""
    found = {}
    for table, (held, expected) in QUERIES.items():
        with duckdb.connect() as connection:
            connection.read_json(str(folder / "in" / "*.json")).create_view("input")
            connection.read_parquet(
                DeltaTable(str(folder / "out" / table)).file_uris(), union_by_name=True
            ).create_view("held")
            rows, wanted = connection.sql(held), connection.sql(expected)
            apart = len(rows.except_(wanted).union(wanted.except_(rows)).fetchall())
            found[table] = (len(rows.fetchall()), len(wanted.fetchall()), apart)
    return found


if __name__ == "__main__":
    compared = compare(Path())
    for name, (rows, wanted, apart) in compared.items():
        print(f"{name}: {rows:,} rows, {wanted:,} expected, {apart} differ")
    sys.exit(any(apart for _, _, apart in compared.values()))
