"""What snapshots and captured tables of PostgreSQL refuse, and say, instead of waiting or losing rows silently."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firnline.errors import ConfigError, SourceError
from firnline.options import RestartOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sources.cdc import snapshots
from firnline.sources.cdc.log import Chunk
from firnline.sources.cdc.position import LogPosition, TableSnapshot
from firnline.sources.postgres.tables import PostgresTables
from tests.support.captured import (
    ORDERS,
    Capturing,
    captured,
    check_current,
    execute,
    has_read_all,
    history,
    position,
    wait_until,
)
from tests.support.pipelines import run_once, run_to_end

PARTITIONED = (
    "CREATE TABLE orders (id bigint PRIMARY KEY, amount numeric(10,2), note text) PARTITION BY RANGE (id)",
    "CREATE TABLE low PARTITION OF orders FOR VALUES FROM (0) TO (100)",
)


def test_only_a_table_that_can_be_read_again_is_asked_for(postgres: str, tmp_path: Path) -> None:
    execute(postgres, ORDERS, "CREATE TABLE events (n int)")
    source = open_pipeline(captured(postgres, tmp_path, tables=("*",))).sources["db"]
    source.check_snapshot("public.orders")
    with pytest.raises(ConfigError, match="has no table public"):
        source.check_snapshot("public.nothing")
    with pytest.raises(ConfigError, match="events has no key"):
        source.check_snapshot("public.events")


@pytest.mark.parametrize("call", ["set_position", "skip"])
def test_a_position_stays_while_tables_are_read(postgres: str, tmp_path: Path, call: str) -> None:
    source = open_pipeline(captured(postgres, tmp_path)).sources["db"]
    place = {"lsn": "0/2", "system": "1", "timeline": 1}
    reading = LogPosition("postgres", "x", place, 3, {}, {"public.orders": TableSnapshot("00000001-aa", chunks=1)})
    with pytest.raises(ConfigError, match="orders are being read"):
        getattr(source, call)(reading.to_json(), "end")


def test_a_damaged_file_of_the_window_names_the_way_out(
    postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "CHUNK_ROWS", 20)
    execute(postgres, ORDERS, "INSERT INTO orders SELECT g, 1, 'n' FROM generate_series(1, 400) g")
    options = captured(postgres, tmp_path)
    options = replace(options, batch=replace(options.batch, max_events=20), restart=RestartOptions(attempts=1))
    read_chunk, reads = PostgresTables.read_chunk, list[int]()

    def reading(self: PostgresTables, *arguments: Any, **more: Any) -> Chunk | None:
        reads.append(1)
        if len(reads) > 3:
            raise SourceError("the table cannot be read now")
        return read_chunk(self, *arguments, **more)

    with monkeypatch.context() as patched, Capturing(options):
        patched.setattr(PostgresTables, "read_chunk", reading)
        wait_until(lambda: position(options).running and position(options).running["public.orders"].chunks == 3)
        execute(postgres, "INSERT INTO orders VALUES (1000, 1, 'x')")
        wait_until(lambda: (1000, "insert") in history(tmp_path))
    window = position(options).window
    assert window
    for name in window:
        [path] = tmp_path.glob(f"**/{name}")
        data = bytearray(path.read_bytes())
        data[len(data) // 3] ^= 1
        path.write_bytes(bytes(data))
    error = run_once(options).result.error
    assert error is not None
    assert (error.code, "firnline rollback" in error.hint) == ("damaged", True)


@pytest.mark.parametrize("words", ["TABLE orders", "TABLE low", "ALL TABLES"])
def test_a_publication_of_partitions_is_refused_by_the_statement_that_mends_it(
    postgres: str, tmp_path: Path, words: str
) -> None:
    execute(postgres, *PARTITIONED, f"CREATE PUBLICATION theirs FOR {words}", "INSERT INTO orders VALUES (1, 1, 'x')")
    options = captured(postgres, tmp_path, publication="theirs")
    mends = "ALTER PUBLICATION theirs SET (publish_via_partition_root = true);"
    with pytest.raises(ConfigError, match="none of its changes is captured") as refused:
        open_pipeline(options).sources["db"].check()
    assert refused.value.hint == mends
    error = run_once(replace(options, restart=RestartOptions(attempts=1))).result.error
    assert error is not None
    assert error.hint == mends
    if words == "TABLE low":
        execute(postgres, "ALTER PUBLICATION theirs ADD TABLE orders")
    execute(postgres, mends)
    run_to_end(options)
    execute(postgres, "INSERT INTO orders VALUES (2, 1, 'x')")
    run_to_end(options)
    check_current(postgres, tmp_path)


def test_a_partitioned_table_that_comes_into_such_a_publication_is_named(
    postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "LOOK_SECONDS", 0.2)
    execute(postgres, "CREATE PUBLICATION theirs FOR ALL TABLES")
    options = captured(postgres, tmp_path, publication="theirs")
    run_to_end(options)
    with Capturing(options) as run:
        execute(postgres, *PARTITIONED, "INSERT INTO orders VALUES (1, 1, 'x')")
        wait_until(lambda: "publication theirs has the partitions" in str(run.pipeline.sources["db"].unreachable()))
        execute(postgres, "ALTER PUBLICATION theirs SET (publish_via_partition_root = true)")
        wait_until(lambda: has_read_all(options))
    run_to_end(options)
    check_current(postgres, tmp_path)


def test_rows_that_a_partition_loses_are_warned_of_and_come_right_by_a_snapshot(postgres: str, tmp_path: Path) -> None:
    """PostgreSQL's log does not have the TRUNCATE of one partition under the table's name."""
    execute(postgres, *PARTITIONED, "CREATE TABLE high PARTITION OF orders FOR VALUES FROM (100) TO (200)")
    execute(postgres, "INSERT INTO orders SELECT g, 1, 'n' FROM generate_series(90, 110) g")
    options = captured(postgres, tmp_path)
    [remark] = open_pipeline(options).sources["db"].remarks()
    assert "public.orders is partitioned" in remark
    run_to_end(options)
    execute(postgres, "TRUNCATE low")
    run_to_end(options)
    assert len(history(tmp_path)) == 21, "if the log has it now, mend the page and the remark"
    pipeline = open_pipeline(options)
    pipeline.requests.ask_snapshot("public.orders", "db", where="", empties=True, ids=pipeline.ids)
    run_to_end(options)
    check_current(postgres, tmp_path)
