"""Keys of captured tables: a sink that upserts takes the table's own key, and follows rows whose key changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firnline.cli.main import run_command
from firnline.errors import ConfigError
from firnline.options import PipelineOptions, SinkOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaPartsOptions, DeltaSinkOptions
from firnline.sinks.postgres.options import PostgresSinkOptions
from firnline.sources.mysql.options import MySqlSourceOptions
from tests.support.captured import captured, delta_rows, execute, query
from tests.support.mysql import BinlogServer
from tests.support.pipelines import run_once, run_to_end

LINES = "CREATE TABLE lines (place int, note text, region text NOT NULL, number int, PRIMARY KEY (number, region))"
COLUMNS = ("place", "note", "region", "number")
SPEC = """
name: shop
sources:
  db: {{type: postgres, dsn: "{dsn}", tables: [lines, notes, seen]}}
sinks:
  - {{name: history, table: out/history, input: db.lines}}
  - {{name: current, table: out/current, input: "{input}", write: upsert}}
"""


def upserts(dsn: str, folder: Path) -> tuple[SinkOptions, ...]:
    """Sinks of every kind that upsert the table without a key in the spec."""
    reads: dict[str, Any] = {"input": "db.lines", "write": "upsert"}
    return (
        DeltaSinkOptions("current", str(folder / "current"), **reads),
        DeltaSinkOptions("optional", str(folder / "optional"), required=False, **reads),
        PostgresSinkOptions("copy", dsn, "lake.lines", **reads),
        DeltaPartsOptions("parts", str(folder / "parts" / "{region}"), **reads),
    )


def test_the_key_is_that_of_the_table(postgres: str, tmp_path: Path) -> None:
    execute(postgres, LINES)
    options = captured(postgres, tmp_path, tables=("lines",))
    options = replace(options, sinks=upserts(postgres, tmp_path))
    run_to_end(options)
    execute(postgres, "INSERT INTO lines SELECT g, 'n', 'r' || g % 2, g / 2 FROM generate_series(1, 40) g")
    run_to_end(options)
    execute(
        postgres,
        "UPDATE lines SET note = 'new' WHERE number < 5",
        "UPDATE lines SET number = number + 100 WHERE number > 15",
        "DELETE FROM lines WHERE number = 7",
    )
    run_to_end(options)
    run_to_end(options)  # an optional table may come later
    wanted = sorted(query(postgres, f"SELECT {', '.join(COLUMNS)} FROM lines"), key=repr)
    assert delta_rows(tmp_path / "current", *COLUMNS) == wanted
    assert delta_rows(tmp_path / "optional", *COLUMNS) == wanted
    assert sorted(query(postgres, f"SELECT {', '.join(COLUMNS)} FROM lake.lines"), key=repr) == wanted
    parts = [row for name in ("r0", "r1") for row in delta_rows(tmp_path / "parts" / name, *COLUMNS)]
    assert sorted(parts, key=repr) == wanted


def test_another_replica_identity_is_the_key(postgres: str, tmp_path: Path) -> None:
    execute(
        postgres,
        LINES,
        "ALTER TABLE lines ALTER COLUMN place SET NOT NULL",
        "CREATE UNIQUE INDEX by_place ON lines (place)",
        "ALTER TABLE lines REPLICA IDENTITY USING INDEX by_place",
    )
    options = captured(postgres, tmp_path, tables=("lines",))
    options = replace(options, sinks=upserts(postgres, tmp_path)[:1])
    run_to_end(options)
    execute(postgres, "INSERT INTO lines SELECT g, 'n', 'r', g FROM generate_series(1, 5) g")
    execute(postgres, "UPDATE lines SET number = 50 WHERE place = 3", "DELETE FROM lines WHERE number = 4")
    run_to_end(options)
    wanted = sorted(query(postgres, f"SELECT {', '.join(COLUMNS)} FROM lines"), key=repr)
    assert delta_rows(tmp_path / "current", *COLUMNS) == wanted


def test_commands_that_only_look_ask_no_server(postgres: str, tmp_path: Path) -> None:
    """What is held can be shown while the database is away."""
    execute(postgres, LINES)
    options = captured(postgres, tmp_path, tables=("lines",))
    options = replace(options, sinks=upserts(postgres, tmp_path))
    run_to_end(options)
    source = replace(options.sources[0], dsn="postgresql://nobody@127.0.0.1:9/none")  # type: ignore[call-arg]
    away = open_pipeline(replace(options, sources=(source,)))
    assert [sink.load().epoch for sink in away.sinks if sink.name != "optional"] == [away.load().epoch] * 3


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("lines", "current keeps one row per number, region: the later row counts"),
        ("notes", "table public.notes has no key, so its changes can be appended and not upserted"),
        ("seen", "table public.seen has no key"),
        ("", "a source does not say what identifies a row"),
    ],
)
def test_dry_run_says_which_key(
    table: str,
    words: str,
    postgres: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    execute(postgres, LINES, "CREATE TABLE notes (text text)")
    execute(postgres, "CREATE TABLE seen (id int PRIMARY KEY)", "ALTER TABLE seen REPLICA IDENTITY NOTHING")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "firnline.yml").write_text(SPEC.format(dsn=postgres, input=f"db.{table}" if table else "db"))
    code = run_command(["dry-run"])
    captured_text = capsys.readouterr()
    assert words in " ".join((captured_text.out + captured_text.err).split())
    assert (code == 0) == (table == "lines")


def test_a_table_that_does_not_exist_has_no_key(postgres: str, tmp_path: Path) -> None:
    options = captured(postgres, tmp_path, tables=("lines",))
    options = replace(options, sinks=upserts(postgres, tmp_path)[:1])
    run = run_once(options)
    assert isinstance(run.result.error, ConfigError)
    assert "table public.lines does not exist yet" in run.result.error.message


# -- MySQL and MariaDB ------------------------------------------------------------------------------------


def test_the_key_of_a_binlog_table(binlog_server: BinlogServer, tmp_path: Path) -> None:
    binlog_server.run(
        "CREATE DATABASE shop", LINES.replace("lines", "shop.lines").replace("region text", "region varchar(9)")
    )
    options = PipelineOptions(
        name="shop",
        sources=(MySqlSourceOptions("db", f"{binlog_server.dsn}/shop", ("lines",)),),
        sinks=upserts("", tmp_path)[:1],
    )
    run_to_end(options)
    values = ", ".join(f"({n}, 'n', 'r{n % 2}', {n // 2})" for n in range(20))
    binlog_server.run(
        f"INSERT INTO shop.lines VALUES {values}",
        "UPDATE shop.lines SET number = number + 100 WHERE number > 7",
        "UPDATE shop.lines SET note = 'new' WHERE number = 3",
        "DELETE FROM shop.lines WHERE number = 4 AND region = 'r0'",
    )
    run_to_end(options)
    held = binlog_server.run(f"SELECT {', '.join(COLUMNS)} FROM shop.lines")
    assert delta_rows(tmp_path / "current", *COLUMNS) == sorted((tuple(row) for row in held), key=repr)
