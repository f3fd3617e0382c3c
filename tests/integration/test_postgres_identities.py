"""What the log of PostgreSQL has of a row: identities of partitions, generated columns; and rows that policies hide."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firnline.errors import ConfigError, SchemaError
from firnline.run.open_pipeline import open_pipeline
from firnline.sources.cdc import snapshots
from firnline.sources.postgres.source import PostgresSource
from tests.support.captured import (
    ORDERS,
    Capturing,
    captured,
    check_current,
    delta_rows,
    execute,
    has_read_all,
    position,
    query,
    wait_until,
)
from tests.support.pipelines import run_once, run_to_end
from tests.support.postgres import PASSWORD

PARTITIONED = "CREATE TABLE orders (id bigint{}, amount numeric(10,2), note text) PARTITION BY RANGE (id)"
FIRST = "CREATE TABLE first PARTITION OF orders FOR VALUES FROM (0) TO (1000)"
SECOND = "CREATE TABLE second PARTITION OF orders FOR VALUES FROM (1000) TO (2000)"
FULL = "ALTER TABLE {} REPLICA IDENTITY FULL"
LARGE = "repeat('t', 5000)"


def source_of(dsn: str, folder: Path, **more: Any) -> PostgresSource:
    source = open_pipeline(captured(dsn, folder, **more)).sources["db"]
    inner = getattr(source, "inner", source)
    assert isinstance(inner, PostgresSource)
    return inner


def test_large_values_go_with_a_row_whose_partition_logs_the_key_alone(postgres: str, tmp_path: Path) -> None:
    execute(postgres, PARTITIONED.format(" PRIMARY KEY"), FIRST, SECOND, FULL.format("orders"), FULL.format("second"))
    execute(
        postgres,
        "ALTER TABLE first ALTER note SET STORAGE EXTERNAL",
        "ALTER TABLE second ALTER note SET STORAGE EXTERNAL",
    )
    options = captured(postgres, tmp_path)
    assert [remark for remark in source_of(postgres, tmp_path).remarks() if "not whole" in remark] == [
        "table public.orders has partitions whose old rows are not whole in the log, though its replica identity is "
        "FULL: partitions do not inherit it (ALTER TABLE public.first REPLICA IDENTITY FULL)"
    ]
    run_to_end(options)
    execute(
        postgres, f"INSERT INTO orders SELECT i, 1, {LARGE} FROM unnest(ARRAY[1, 2, 3, 4, 1001, 1002, 1003, 1004]) i"
    )
    run_to_end(options)
    for start in (0, 1000):
        execute(
            postgres,
            f"UPDATE orders SET id = {start + 5} WHERE id = {start + 1}",
            f"UPDATE orders SET amount = 9 WHERE id = {start + 2}",
            f"UPDATE orders SET note = NULL, id = {start + 6} WHERE id = {start + 3}",
            f"DELETE FROM orders WHERE id = {start + 4}",
        )
    run_to_end(options)
    check_current(postgres, tmp_path)


def test_a_partition_without_whole_rows_stops_a_sink_with_another_key(postgres: str, tmp_path: Path) -> None:
    execute(postgres, PARTITIONED.format(" PRIMARY KEY"), FIRST, FULL.format("orders"))
    options = captured(postgres, tmp_path)
    options = replace(options, sinks=(replace(options.sinks[1], key=("note",)),))
    execute(postgres, "INSERT INTO orders VALUES (1, 1, 'a')")
    run_to_end(options)
    execute(postgres, "UPDATE orders SET note = 'b'")
    error = run_once(options).result.error
    assert isinstance(error, SchemaError)
    assert "of every partition" in error.hint


def test_a_partition_without_an_identity_keeps_its_updates(postgres: str, tmp_path: Path) -> None:
    execute(postgres, PARTITIONED.format(""), FIRST, FULL.format("orders"), "INSERT INTO orders VALUES (1, 1, 'x')")
    options = captured(postgres, tmp_path)
    options = replace(options, sinks=options.sinks[:1])
    assert source_of(postgres, tmp_path).remarks()[1:] == [
        "table public.orders has partitions whose replica identity is not its own (public.first): only its inserts "
        "are captured (ALTER TABLE public.first REPLICA IDENTITY FULL captures all changes)"
    ]
    run_to_end(options)
    execute(postgres, "UPDATE orders SET amount = 3", "INSERT INTO orders VALUES (2, 1, 'y')")  # not refused
    run_to_end(options)
    assert delta_rows(tmp_path / "history", "id", "_op") == [(1, "read"), (2, "insert")]


def test_a_partition_that_names_rows_by_another_index_is_refused(postgres: str, tmp_path: Path) -> None:
    execute(postgres, PARTITIONED.format(" PRIMARY KEY"), FIRST, "ALTER TABLE first ALTER note SET NOT NULL")
    execute(postgres, "CREATE UNIQUE INDEX by_note ON first (note)")
    execute(postgres, "ALTER TABLE first REPLICA IDENTITY USING INDEX by_note")
    execute(postgres, "CREATE PUBLICATION mine FOR TABLE orders WITH (publish_via_partition_root = true)")
    with pytest.raises(ConfigError, match=r"public\.first name rows by other columns than the key"):
        source_of(postgres, tmp_path, publication="mine").check()
    assert run_once(captured(postgres, tmp_path, publication="mine")).exit_code == 2


def test_rows_that_a_policy_hides_are_not_left_out(postgres: str, tmp_path: Path) -> None:
    execute(
        postgres,
        ORDERS,
        "INSERT INTO orders VALUES (1, 1, 'seen'), (2, 2, 'hidden')",
        "ALTER TABLE orders ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY p ON orders USING (note = 'seen')",
        f"CREATE ROLE reader LOGIN REPLICATION PASSWORD '{PASSWORD}'",
        "GRANT USAGE ON SCHEMA public TO reader",
        "GRANT SELECT ON orders TO reader",
        "CREATE PUBLICATION mine FOR TABLE orders",
    )
    dsn = postgres.replace("firnline:", "reader:")
    with pytest.raises(ConfigError, match=r"row security may hide rows of public\.orders") as caught:
        source_of(dsn, tmp_path, publication="mine").check()
    assert 'ALTER ROLE "reader" BYPASSRLS' in caught.value.hint
    options = captured(dsn, tmp_path, publication="mine")
    error = run_once(options).result.error
    assert error is not None
    assert "row-level security" in error.message
    assert 'ALTER ROLE "reader" BYPASSRLS' in error.hint
    execute(postgres, "ALTER ROLE reader BYPASSRLS")
    run_to_end(options)
    check_current(postgres, tmp_path)


def test_a_generated_column_is_left_out_of_the_snapshot_as_of_the_log(
    postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "CHUNK_ROWS", 20)
    execute(postgres, ORDERS, "ALTER TABLE orders ADD COLUMN twice bigint GENERATED ALWAYS AS (id * 2) STORED")
    execute(postgres, "INSERT INTO orders SELECT i, i, 'n' FROM generate_series(1, 60) i")
    options = captured(postgres, tmp_path)
    count = iter(range(10_000_000))

    def change() -> bool:
        execute(postgres, f"UPDATE orders SET note = 'u{next(count)}' WHERE id = {next(count) % 60 + 1}")
        return has_read_all(options)

    with Capturing(options):
        wait_until(change)
    assert position(options).snapshots["public.orders"].again == 0
    run_to_end(options)
    check_current(postgres, tmp_path)
    assert len(position(options).schemas) == 1


def test_a_generated_column_in_the_key_makes_a_table_for_appends_only(postgres: str, tmp_path: Path) -> None:
    execute(
        postgres,
        "CREATE TABLE orders (id bigint, twice bigint GENERATED ALWAYS AS (id * 2) STORED, note text, "
        "PRIMARY KEY (id, twice))",
        "INSERT INTO orders VALUES (1, DEFAULT, 'x')",
    )
    options = captured(postgres, tmp_path)
    keyless = replace(options, sinks=(options.sinks[0], replace(options.sinks[1], key=())))
    error = run_once(keyless).result.error
    assert isinstance(error, ConfigError)
    assert "public.orders has no key" in error.message
    assert source_of(postgres, tmp_path).remarks() == [
        "public.orders: the log does not have generated columns, so that no sink gets twice",
        "the key of table public.orders has the generated column twice, which is not logged: only its inserts are "
        "captured (ALTER TABLE public.orders REPLICA IDENTITY FULL captures all changes)",
    ]
    options = replace(options, sinks=options.sinks[:1])
    run_to_end(options)
    execute(postgres, "INSERT INTO orders VALUES (2, DEFAULT, 'y')", "UPDATE orders SET note = 'z'")
    run_to_end(options)
    assert delta_rows(tmp_path / "history", "id", "_op") == [(1, "read"), (2, "insert")]
    assert query(postgres, "SELECT count(*) FROM orders WHERE note = 'z'") == [(2,)]
