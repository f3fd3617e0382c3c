"""PostgreSQL tables with a template: one transaction for all tables of an epoch, names, keys, bad rows, going back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from firnline.checkpoint.ledger import Ledger
from firnline.errors import BadRowError, RollbackRefusedError, SchemaError, SinkError
from firnline.postgres_client import place_of
from firnline.sinks.base import RestoreVersion
from firnline.sinks.known import COPY
from firnline.sinks.postgres import parts as parts_module
from firnline.sinks.postgres.kind import open_sink as open_postgres
from firnline.sinks.postgres.options import PostgresSinkOptions
from firnline.storage import LocalStorage
from firnline.testing.sinks import PIPELINE, OpenSink, ReadRows, SinkConformance, rows
from tests.support.postgres_sink import drive, execute, postgres_ids, read_all_letters, table_rows

TEMPLATE = "lake.{region}"


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(LocalStorage(str(tmp_path / "ledger")), PIPELINE)


def tables(dsn: str) -> list[str]:
    """Return the tables of the schemas that are neither the system's nor Firnline's."""
    with psycopg.connect(dsn) as db:
        found = db.execute(
            "SELECT schemaname || '.' || tablename FROM pg_tables"
            " WHERE schemaname NOT IN ('pg_catalog', 'information_schema', 'firnline') ORDER BY 1"
        ).fetchall()
    return [str(row[0]) for row in found]


def ids(dsn: str) -> dict[str, list[int]]:
    return {table: sorted(postgres_ids(dsn, table).elements()) for table in tables(dsn)}


def of(region: str | None, *numbers: int, **columns: Any) -> list[dict[str, Any]]:
    return rows(*numbers, region=region, **columns)


class TestAppend(SinkConformance):
    @pytest.fixture
    def open_sink(self, postgres: str) -> OpenSink:
        options = PostgresSinkOptions("copy", postgres, "lake.t{id}")
        return lambda context: open_postgres(options, context)

    @pytest.fixture
    def read_rows(self, postgres: str) -> ReadRows:
        return lambda: [row for table in tables(postgres) for row in table_rows(postgres, table)]


class TestUpsert(TestAppend):
    writes_changes = True

    @pytest.fixture
    def open_sink(self, postgres: str) -> OpenSink:
        options = PostgresSinkOptions("copy", postgres, "lake.t{id}", write="upsert", key=("id",))
        return lambda context: open_postgres(options, context)


def test_tables_are_created_with_their_first_row(postgres: str, ledger: Ledger) -> None:
    run = drive(postgres, ledger, table=TEMPLATE)
    run.apply(of("eu", 1, 2) + of("us", 3))
    run.apply(of("eu", 4, note="x"))
    run.apply(of("Asia", 5))
    assert ids(postgres) == {"lake.Asia": [5], "lake.eu": [1, 2, 4], "lake.us": [3]}
    assert "note" not in table_rows(postgres, "lake.us")[0]
    place = place_of(postgres)
    assert run.sink.find_parts() == [f"{place}/{name}" for name in ("lake.Asia", "lake.eu", "lake.us")]
    run.sink.check()


def test_a_column_may_name_the_schema(postgres: str, ledger: Ledger) -> None:
    run = drive(postgres, ledger, table="{region}.orders_{kind}")
    run.apply(of("lake", 1, kind=7))
    assert ids(postgres) == {"lake.orders_7": [1]}
    for name in ("firnline", "pg_catalog", "information_schema"):
        with pytest.raises(BadRowError, match="schema of the system"):
            run.sink.commit(run.stage(of(name, 2, kind=7)))


@pytest.mark.parametrize(
    "name", ["", "a.b", "..", "a/b", "a\0b", "a\nb", 'a"b', "a;DROP TABLE x", "a b", "%s", "x" * 64, None]
)
def test_a_name_that_does_not_match_stops_the_sink(postgres: str, ledger: Ledger, name: str | None) -> None:
    run = drive(postgres, ledger, table=TEMPLATE)
    with pytest.raises(BadRowError, match="demo/1/numbers/1"):
        run.apply(of("eu", 1) + of(name, 2))
    assert tables(postgres) == []


def test_names_are_quoted_if_a_pattern_allows_them(postgres: str, ledger: Ledger) -> None:
    run = drive(postgres, ledger, table=TEMPLATE, parts_allowed="(?s).*", on_bad_row="dead_letter")
    fine = ['a"b', "a;DROP TABLE x", "a b", "%s", "Ü", "select"]
    bad = ["", "a.b", "..", "a/b", "a\0b", "x" * 64]
    run.apply([{"id": number, "region": name} for number, name in enumerate([*fine, *bad, None])])
    assert tables(postgres) == sorted(f"lake.{name}" for name in fine)
    assert [letter.row for letter in read_all_letters(ledger)] == list(range(len(fine), len(fine) + len(bad) + 1))
    plan, refused = run.sink.plan_return(0, ())
    assert (refused, plan.rows_removed) == ([], len(fine))


@pytest.mark.parametrize("gathered", [parts_module.GATHERED_BYTES, 0], ids=["at once", "read per table"])
@pytest.mark.parametrize("write", ["append", "upsert"])
def test_a_row_that_one_table_refuses_leaves_the_others_whole(
    postgres: str, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, write: str, gathered: int
) -> None:
    monkeypatch.setattr(parts_module, "GATHERED_BYTES", gathered)
    execute(postgres, "CREATE SCHEMA lake", "CREATE TABLE lake.us (id bigint PRIMARY KEY CHECK (id <> 7), region text)")
    run = drive(postgres, ledger, table=TEMPLATE, write=write)
    with pytest.raises(BadRowError, match="demo/1/numbers/2"):
        run.apply(of("eu", 1, 2) + of("us", 7, 8))
    assert ids(postgres) == {"lake.us": []}, "no table without the others"
    run = drive(postgres, ledger, table=TEMPLATE, write=write, on_bad_row="dead_letter", generation=2)
    run.apply(of("eu", 1, 2) + of("us", 7, 8))
    assert ids(postgres) == {"lake.eu": [1, 2], "lake.us": [8]}
    assert [letter.row for letter in read_all_letters(ledger)] == [2]


def test_every_table_goes_back_and_keeps_the_rows_of_others(postgres: str, ledger: Ledger) -> None:
    run = drive(postgres, ledger, table=TEMPLATE)
    run.apply(of("eu", 1) + of("us", 2))
    run.apply(of("eu", 3) + of("asia", 4))
    execute(postgres, "INSERT INTO lake.eu (id, region) VALUES (99, 'eu')")
    plan, refused = run.sink.plan_return(1, ())
    assert (refused, plan.rows_removed) == ([], 2)
    run.edit(run.stage_edit("rollback", to_epoch=1), RestoreVersion(run.sink.version_of(1)))
    assert ids(postgres) == {"lake.asia": [], "lake.eu": [1, 99], "lake.us": [2]}
    run.apply(of("asia", 5))
    assert ids(postgres)["lake.asia"] == [5]
    execute(postgres, "ALTER TABLE lake.us DROP COLUMN _firnline_epoch")
    with pytest.raises(RollbackRefusedError, match=r"lake\.us"):
        run.sink.version_of(3)


def test_a_copy_takes_the_place_of_the_rows_in_every_table(postgres: str, ledger: Ledger) -> None:
    run = drive(postgres, ledger, table=TEMPLATE)
    run.apply(of("eu", 1) + of("us", 2))
    execute(postgres, "INSERT INTO lake.us (id, region) VALUES (99, 'us')")
    commit = run.stage(of("eu", 3) + of("asia", 4))
    run.commit(replace(commit, shape={**commit.shape, COPY: True}))
    assert ids(postgres) == {"lake.asia": [4], "lake.eu": [3], "lake.us": [99]}


def test_tables_of_other_sinks_are_refused(postgres: str, ledger: Ledger) -> None:
    drive(postgres, ledger, name="other", table="lake.eu").apply(rows(1))
    run = drive(postgres, ledger, table=TEMPLATE, on_bad_row="dead_letter")
    run.apply(of("eu", 2) + of("us", 3))
    assert ids(postgres) == {"lake.eu": [1], "lake.us": [3]}
    assert [letter.reason for letter in read_all_letters(ledger)] == ["table 'lake.eu' belongs to sink demo/other"]


def test_the_number_of_tables_is_bounded(postgres: str, ledger: Ledger) -> None:
    run = drive(postgres, ledger, table="lake.t{id}", max_parts=2)
    run.apply(rows(1, 2))
    for more in (rows(3), rows(1, 2, 3), rows(4, 5, 6)):
        with pytest.raises(SinkError, match="max_parts is 2"):
            run.sink.commit(run.stage(more))
    assert tables(postgres) == ["lake.t1", "lake.t2"]


def test_a_column_that_cannot_name_a_table_is_refused(postgres: str, ledger: Ledger) -> None:
    run = drive(postgres, ledger, table=TEMPLATE)
    with pytest.raises(SchemaError, match="no column 'region'"):
        run.apply(rows(1))
