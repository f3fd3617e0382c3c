"""A pipeline that captures PostgreSQL tables into Delta tables, and comparisons with the database."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
from deltalake import DeltaTable

from firnline.options import BatchOptions, CheckpointOptions, PipelineOptions
from firnline.run.observer import Observer
from firnline.run.open_pipeline import open_pipeline
from firnline.run.runner import Runner, RunResult
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.cdc.position import LogPosition
from firnline.sources.postgres.options import PostgresSourceOptions
from firnline.testing.local import LocalEngine
from tests.support import processes

Row = tuple[Any, ...]
WAIT_SECONDS = 120.0  # on a busy machine
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


def position(options: PipelineOptions) -> LogPosition:
    """Where the one source of a pipeline stands."""
    kind, checkpoint = options.sources[0].type, open_pipeline(options).load().checkpoint
    return LogPosition.from_json(checkpoint.positions["db"], kind) if checkpoint else LogPosition(kind, "")


def has_read_all(options: PipelineOptions) -> bool:
    """Whether the rows of all tables have been read that were there before."""
    found = position(options)
    return bool(found.snapshots) and not found.running


def delta_rows(path: Path, *columns: str) -> list[Row]:
    """Rows of a Delta table, by another reader, in the order of their columns."""
    rows = DeltaTable(str(path)).to_pyarrow_table().select(list(columns)).to_pylist()
    return sorted((tuple(row[name] for name in columns) for row in rows), key=repr)


def check_current(dsn: str, folder: Path, columns: str = "id, amount, note") -> None:
    """The current state is what the database holds."""
    held = query(dsn, f"SELECT {columns} FROM orders")  # a column list of tests
    assert delta_rows(folder / "current", *columns.split(", ")) == sorted(held, key=repr)


def count_history(folder: Path) -> int:
    """The rows of the history; 0 before it has a column."""
    return int(DeltaTable(str(folder / "history")).to_pyarrow_table().num_rows)


def history(folder: Path) -> list[Row]:
    """The history, as (id, op), sorted."""
    return delta_rows(folder / "history", "id", "_op")


class Capturing:
    """A run in a thread of its own that goes on until the block ends. It must not fail, or with the code `fails`."""

    def __init__(self, options: PipelineOptions, observer: Observer | None = None, *, fails: str = "") -> None:
        self._fails = fails
        self.pipeline = open_pipeline(options)
        self.runner = Runner(self.pipeline, LocalEngine(1), observer or Observer())
        self.results: list[RunResult] = []
        self._thread = threading.Thread(target=lambda: self.results.append(self.runner.run()), daemon=True)

    def __enter__(self) -> Capturing:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.runner.stop()
        self._thread.join(WAIT_SECONDS)
        if kind is None:
            assert [result.error.code if result.error else "" for result in self.results] == [self._fails]

    @property
    def has_ended(self) -> bool:
        return bool(self.results)


def wait_until(is_true: Callable[[], object]) -> None:
    """Wait for something that a run does."""
    processes.wait_until(lambda: bool(is_true()), seconds=WAIT_SECONDS)
