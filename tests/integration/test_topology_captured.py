"""Change capture, one Delta table for each captured table, and pipelines that read some: taken back to one instant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from firnline.clock import SystemClock
from firnline.history.topology.restore import find_or_order, find_snapshot_epochs, perform_restore
from firnline.options import BatchOptions, CheckpointOptions, Home, PipelineOptions
from firnline.sinks.delta.options import DeltaPartsOptions, DeltaSinkOptions, journal_in
from firnline.sources.delta.options import DeltaSourceOptions
from firnline.sources.postgres.options import PostgresSourceOptions
from firnline.topology.decide import Decision, Outcome
from firnline.types import RandomIds
from tests.support.captured import execute, query
from tests.support.pipelines import pipeline_options, run_to_end
from tests.support.topologies import TIMEOUT, open_snapshots, settle


def capture(dsn: str, folder: Path) -> PipelineOptions:
    """The current state and the history of every table; decides in its journal."""
    sinks = (
        DeltaPartsOptions("current", f"{folder}/lake/{{table}}", input="db.*", write="upsert"),
        DeltaPartsOptions("history", f"{folder}/history/{{table}}", input="db.*"),
    )
    return PipelineOptions(
        name="shop",
        sources=(PostgresSourceOptions("db", dsn, ("*.*",)),),
        sinks=sinks,
        batch=BatchOptions(max_events=1000),
        checkpoint=CheckpointOptions(rollback_window=64),
        journal=journal_in(Home(str(folder / "home"))),
    )


def silver(folder: Path, *tables: str) -> PipelineOptions:
    """Copies the history of some tables."""
    sources = [DeltaSourceOptions(table, str(folder / "history" / table), poll_interval_secs=0.05) for table in tables]
    sinks = [DeltaSinkOptions(f"to_{table}", str(folder / "silver" / table), input=table) for table in tables]
    return pipeline_options("", "", f"silver_{'_'.join(tables)}", sources=sources, sinks=sinks)


def rows(path: Path) -> list[tuple[Any, ...]]:
    """The ids and operations in a table, read by delta-rs."""
    found = DeltaTable(str(path)).to_pyarrow_table()
    return sorted(zip(*(found.column(name).to_pylist() for name in ("id", "_op")), strict=True)) if len(found) else []


def test_a_captured_lake_goes_back_to_one_instant(postgres: str, tmp_path: Path) -> None:
    for table in ("orders", "items"):
        execute(
            postgres,
            f"CREATE TABLE {table} (id bigint PRIMARY KEY, note text)",
            f"INSERT INTO {table} VALUES (1, 'a'), (2, 'b')",
        )
    shop, orders, others = capture(postgres, tmp_path), silver(tmp_path, "orders"), silver(tmp_path, "items", "extras")
    members = [shop, orders, others]

    def run() -> None:
        for one in members:
            run_to_end(one)

    def read(*tables: str) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {
            f"{kind}/{table}": rows(tmp_path / kind / table) for kind in ("history", "silver") for table in tables
        }
        current = {table: DeltaTable(str(tmp_path / "lake" / table)).to_pyarrow_table() for table in tables}
        return found | {f"lake/{table}": sorted(one.column("id").to_pylist()) for table, one in current.items()}

    run()
    snapshots = open_snapshots(tmp_path, members)
    assert {(one.reader, one.source, one.part) for one in snapshots.topology.channels} == {
        ("silver_orders", "orders", True),
        ("silver_items_extras", "items", True),
        ("silver_items_extras", "extras", True),
    }
    order = snapshots.order(TIMEOUT)
    execute(postgres, "INSERT INTO orders VALUES (3, 'c')")  # the record may have rows of orders, and none of items
    run()
    assert settle(snapshots, order) == (Outcome.COMMIT, "")
    then = read("orders", "items")
    execute(
        postgres,
        "UPDATE items SET note = 'z' WHERE id = 1",
        "DELETE FROM orders WHERE id = 2",
        "CREATE TABLE extras (id bigint PRIMARY KEY, note text)",
        "INSERT INTO extras VALUES (7, 'x')",
    )
    run()
    now = read("orders", "items", "extras")
    assert now["lake/extras"] == [7]
    assert now["silver/extras"] == now["history/extras"] != []
    assert now["lake/orders"] == [1, 3]
    target, epochs = find_snapshot_epochs(snapshots, order.snapshot)
    restore = find_or_order(snapshots, target, epochs, SystemClock(), RandomIds())
    result = perform_restore(snapshots, restore, RandomIds().new(), SystemClock(), print)
    assert (result.decision, result.reason) == (Decision.GO, "")
    assert read("orders", "items") == then
    for path in ("lake/extras", "history/extras", "silver/extras"):
        assert DeltaTable(str(tmp_path / path)).to_pyarrow_table().num_rows == 0
    run()
    assert read("orders", "items", "extras") == now, "the same changes, from the spool"
    for table in ("orders", "items", "extras"):
        assert now[f"lake/{table}"] == sorted(row[0] for row in query(postgres, f"SELECT id FROM {table}"))
