"""What `dry-run` says of captured tables: how many, about how many rows would be read, and which have no key."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from firnline.cli.common import load_options
from firnline.cli.main import run_command
from tests.integration.test_mysql_source import DATABASE
from tests.integration.test_mysql_source import ORDERS as BINLOG_ORDERS
from tests.support.captured import ORDERS, execute, wait_until
from tests.support.mysql import BinlogServer
from tests.support.pipelines import run_to_end

SPEC = """
name: shop
sources:
  db: {{type: {kind}, dsn: "{dsn}", tables: [orders, events]}}
sinks:
  - {{name: history, type: delta, table: lake/history, input: db.orders}}
"""


def dry_run(capsys: pytest.CaptureFixture[str]) -> tuple[list[dict[str, object]], str]:
    """Return the tables of `--json`, and the screen without breaks of lines."""
    capsys.readouterr()
    assert run_command(["dry-run", "--json"]) == 0
    tables: list[dict[str, object]] = json.loads(capsys.readouterr().out)["source"]["tables"]
    assert run_command(["dry-run"]) == 0
    return tables, " ".join(capsys.readouterr().out.split())


def test_tables_rows_and_keys(
    postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    execute(
        postgres,
        ORDERS,
        "INSERT INTO orders SELECT g, g, 'x' FROM generate_series(1, 1234) g",
        "CREATE TABLE events (x int, y int GENERATED ALWAYS AS (x * 2) STORED)",
        "INSERT INTO events VALUES (1)",
        "ANALYZE",
    )
    Path("firnline.yml").write_text(SPEC.format(kind="postgres", dsn=postgres))
    tables, screen = dry_run(capsys)
    assert tables == [
        {"table": "public.events", "key": [], "would_read": True, "estimate": 1},
        {"table": "public.orders", "key": ["id"], "would_read": True, "estimate": 1234},
    ]
    assert "would read the rows of 2 tables, about 1,235, then the changes of 2 tables" in screen
    assert "public.events none: append only 1 yes" in screen
    assert "public.events: the log does not have generated columns, so that no sink gets y" in screen
    assert "spool file" not in screen
    assert "respect_source_tx" not in screen
    run_to_end(load_options(None))
    with Path("firnline.yml").open("a") as spec:
        spec.write("batch: {respect_source_tx: false}\n")
    tables, screen = dry_run(capsys)
    assert "batch.respect_source_tx: false has no effect on source db: a transaction of a captured database" in screen
    assert [one["would_read"] for one in tables] == [False, False]
    assert "would read the changes of 2 tables" in screen


def test_tables_of_a_binary_log(
    binlog_server: BinlogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = ", ".join(f"({number}, 1, 'x')" for number in range(100))
    binlog_server.run(
        f"CREATE DATABASE {DATABASE}",
        BINLOG_ORDERS,
        f"INSERT INTO {DATABASE}.orders VALUES {rows}",
        f"CREATE TABLE {DATABASE}.events (x int)",
        f"ANALYZE TABLE {DATABASE}.orders",
    )
    Path("firnline.yml").write_text(SPEC.format(kind="mysql", dsn=f"{binlog_server.dsn}/{DATABASE}"))
    tables, screen = dry_run(capsys)
    assert [(one["table"], one["key"]) for one in tables] == [("shop.events", []), ("shop.orders", ["id"])]
    assert tables[1]["would_read"]
    assert tables[1]["estimate"]
    assert "shop.events none: append only unknown" in screen


def refuse(capsys: pytest.CaptureFixture[str], code: int) -> str:
    """Return what `dry-run` says when it refuses with an exit code."""
    capsys.readouterr()
    assert run_command(["dry-run"]) == code
    return " ".join(capsys.readouterr().err.split())


def test_a_slot_that_is_gone_is_refused_as_a_run_does(
    postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    execute(postgres, ORDERS, "INSERT INTO orders VALUES (1, 1, 'x')")
    Path("firnline.yml").write_text(SPEC.format(kind="postgres", dsn=postgres))
    run_to_end(load_options(None))
    execute(postgres, "SELECT pg_drop_replication_slot('firnline_shop_db')")
    told = refuse(capsys, 1)
    assert "the slot firnline_shop_db does not exist any more" in told
    assert "`firnline run --resnapshot-all`" in told
    assert run_command(["status"]) == 0
    assert "the slot firnline_shop_db does not exist any more: the next run stops" in capsys.readouterr().out


def test_purged_logs_are_refused_as_a_run_does(
    binlog_server: BinlogServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    binlog_server.run(f"CREATE DATABASE {DATABASE}", BINLOG_ORDERS, f"INSERT INTO {DATABASE}.orders VALUES (1, 1, 'x')")
    Path("firnline.yml").write_text(SPEC.format(kind="mysql", dsn=f"{binlog_server.dsn}/{DATABASE}"))
    run_to_end(load_options(None))
    binlog_server.run(f"INSERT INTO {DATABASE}.orders VALUES (2, 2, 'y')", "FLUSH BINARY LOGS")
    newest = binlog_server.run("SHOW BINARY LOGS")[-1][0]
    binlog_server.run(f"INSERT INTO {DATABASE}.orders VALUES (3, 3, 'z')")

    def is_purged() -> bool:
        """The server keeps a file as long as it sends it: it may not know yet that the run has ended."""
        binlog_server.run(f"PURGE BINARY LOGS TO '{newest}'")
        return bool(binlog_server.run("SHOW BINARY LOGS")[0][0] == newest)

    wait_until(is_purged)
    assert "`firnline run --resnapshot-all`" in refuse(capsys, 1)
    assert run_command(["status"]) == 0
    screen = " ".join(capsys.readouterr().out.split())
    assert re.search(r"has purged the log file \S+ of the position: the next run stops", screen)


MANY = """
name: shop
sources:
  db: {{type: postgres, dsn: "{dsn}", tables: ["*"]}}
sinks:
  - {{name: history, type: delta, table: "lake/{{table}}_history", input: "db.*"}}
  - {{name: now, type: delta, table: "{now}/{{table}}", input: "db.*", write: upsert}}
"""


def test_sinks_that_meet_in_a_table_or_have_moved(
    postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    execute(postgres, ORDERS, "CREATE TABLE orders_history (id int PRIMARY KEY)", "INSERT INTO orders VALUES (1)")
    Path("firnline.yml").write_text(MANY.format(dsn=postgres, now="lake"))
    told = refuse(capsys, 2)
    assert "sink 'now' would write table public.orders_history to" in told
    assert "and so would sink 'history' with table public.orders" in told
    Path("firnline.yml").write_text(MANY.format(dsn=postgres, now="now"))
    assert run_command(["dry-run"]) == 0
    run_to_end(load_options(None))
    Path("firnline.yml").write_text(MANY.format(dsn=postgres, now="other"))
    assert "sink 'now' has written to" in refuse(capsys, 2)


def test_a_table_of_nearly_this_name(
    postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    execute(postgres, ORDERS)
    spec = SPEC.format(kind="postgres", dsn=postgres).replace("[orders, events]", "[Orders]")
    Path("firnline.yml").write_text(spec.replace("db.orders", "db.Orders"))
    assert "table public.Orders does not exist yet. Did you mean public.orders?" in dry_run(capsys)[1]
    Path("firnline.yml").write_text(spec.replace("db.orders", "db.Orders, write: upsert"))
    assert "Did you mean public.orders? Create it first" in refuse(capsys, 2)
