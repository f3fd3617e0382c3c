"""What `dry-run` says of captured tables: how many, about how many rows would be read, and which have no key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from firnline.cli.common import load_options
from firnline.cli.main import run_command
from tests.integration.test_mysql_source import DATABASE
from tests.integration.test_mysql_source import ORDERS as BINLOG_ORDERS
from tests.support.captured import ORDERS, execute
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
        "CREATE TABLE events (x int)",
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
    assert "spool file" not in screen
    run_to_end(load_options(None))
    tables, screen = dry_run(capsys)
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
