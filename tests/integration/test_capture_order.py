"""The order of change rows in a history: with `lineage`, rows replay to the state after every transaction."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest
from deltalake import DeltaTable

from firnline.history.snapshots import ask_snapshot
from firnline.options import BatchOptions, PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sources.cdc import snapshots
from tests.integration.test_capture_ddl import Database, database  # noqa: F401
from tests.support.captured import Row
from tests.support.pipelines import run_to_end

REPOSITORY = Path(__file__).parents[2]
TRANSACTIONS = [
    ["UPDATE orders SET amount = amount + 1 WHERE id < 5", "UPDATE orders SET amount = amount * 2 WHERE id < 3"],
    ["UPDATE orders SET id = -1 WHERE id = 1", "UPDATE orders SET id = 1 WHERE id = 2"],
    ["UPDATE orders SET id = 2 WHERE id = -1", "DELETE FROM orders WHERE id = 3"],
    ["INSERT INTO orders VALUES (3, 3, 'again')", "UPDATE orders SET note = 'and again' WHERE id = 3"],
    ["DELETE FROM orders WHERE id = 3", "INSERT INTO orders VALUES (3, 4, 'third')", "DELETE FROM orders WHERE id = 4"],
    ["UPDATE orders SET note = 'all'"],
    ["TRUNCATE TABLE orders"],
    ["INSERT INTO orders VALUES (9, 9, 'x'), (10, 10, 'y')", "UPDATE orders SET amount = 0"],
]


def documented_order() -> str:
    """The ORDER BY of the docs."""
    text = (REPOSITORY / "docs" / "delivery.md").read_text(encoding="utf-8")
    block = text.partition("```sql\nSELECT * FROM orders_history")[2].partition("```")[0]
    assert "ORDER BY" in block
    return block.strip().rstrip(";")


def replay(folder: Path) -> list[list[Row]]:
    """Return the states after every transaction, by another reader; rows of a snapshot belong to none."""
    with duckdb.connect() as db:
        db.register("orders_history", DeltaTable(str(folder / "history")).to_pyarrow_table())
        select = f"SELECT _op, _transaction, id, amount, note FROM orders_history {documented_order()}"
        rows = db.execute(select).fetchall()
    states: list[list[Row]] = []
    state: dict[int, Row] = {}
    last: Any = None
    for op, transaction, *row in rows:
        if transaction != last and last:
            states.append(sorted(state.values(), key=repr))
        last = transaction
        if op == "truncate":
            state.clear()
        elif op == "delete":
            del state[row[0]]
        elif op == "insert":
            assert row[0] not in state
            state[row[0]] = tuple(row)
        else:
            state[row[0]] = tuple(row)
    return [*states, sorted(state.values(), key=repr)]


def with_small_epochs(database: Database) -> PipelineOptions:  # noqa: F811
    options = database.with_source(lineage=True, include=("transaction",))
    return replace(options, batch=BatchOptions(max_events=3))


def test_a_history_replays_to_the_state_after_every_transaction(
    database: Database,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshots, "CHUNK_ROWS", 3)
    options = with_small_epochs(database)
    values = ", ".join(f"({number}, {number}, 'n{number}')" for number in range(1, 9))
    database.run(f"INSERT INTO orders VALUES {values}")
    run_to_end(options)
    states = []
    for number, statements in enumerate(TRANSACTIONS):
        database.transact(*statements)
        states.append(sorted(database.query("SELECT id, amount, note FROM orders"), key=repr))
        if number == 4:
            run_to_end(options)
            ask_snapshot(open_pipeline(options), "db", open_pipeline(options).sources["db"].table_name("orders") or "")
            run_to_end(options)
    run_to_end(options)
    found = replay(tmp_path)
    assert found == states
