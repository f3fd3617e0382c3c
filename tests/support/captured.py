"""A pipeline that captures PostgreSQL tables into Delta tables, and comparisons with the database."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
from deltalake import DeltaTable

from firnline.options import BatchOptions, CheckpointOptions, PipelineOptions
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.postgres.options import PostgresSourceOptions

Row = tuple[Any, ...]
ORDERS = "CREATE TABLE orders (id bigint PRIMARY KEY, amount numeric(10,2), note text)"


def execute(dsn: str, *statements: str) -> None:
    """Execute statements, each in a transaction of its own."""
    with psycopg.connect(dsn, autocommit=True) as db:
        for statement in statements:
            db.execute(statement)


def query(dsn: str, statement: str) -> list[Row]:
    """Return what the database answers."""
    with psycopg.connect(dsn, autocommit=True) as db:
        return list(db.execute(statement).fetchall())


def captured(dsn: str, folder: Path, *, rollback_window: int = 64, **source: Any) -> PipelineOptions:
    """A pipeline with the history of the table `orders`, which decides, and its current state."""
    return PipelineOptions(
        name="shop",
        sources=(PostgresSourceOptions("db", dsn, **{"tables": ("orders",), **source}),),
        sinks=(
            DeltaSinkOptions("history", str(folder / "history"), input="db.orders"),
            DeltaSinkOptions("current", str(folder / "current"), input="db.orders", write="upsert", key=("id",)),
        ),
        batch=BatchOptions(max_events=1000),
        checkpoint=CheckpointOptions(rollback_window=rollback_window),
    )


def delta_rows(path: Path, *columns: str) -> list[Row]:
    """Rows of a Delta table, by another reader, in the order of their columns."""
    rows = DeltaTable(str(path)).to_pyarrow_table().select(list(columns)).to_pylist()
    return sorted((tuple(row[name] for name in columns) for row in rows), key=repr)


def check_current(dsn: str, folder: Path, columns: str = "id, amount, note") -> None:
    """The current state is what the database holds."""
    held = query(dsn, f"SELECT {columns} FROM orders")  # a column list of tests
    assert delta_rows(folder / "current", *columns.split(", ")) == sorted(held, key=repr)


def history(folder: Path) -> list[Row]:
    """The history, as (id, op), sorted."""
    return delta_rows(folder / "history", "id", "_op")
