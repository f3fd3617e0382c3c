"""What `status`, a run and its log say of captured tables: hints that work when they are pasted, schemas and warnings
that hold, counts by table, and "all read" only when it is so."""

from __future__ import annotations

import logging
import shlex
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firnline.cli.run_report import RunTotals
from firnline.clock import monotonic
from firnline.history.edits.rollback import Rollback
from firnline.history.schemas import in_force, load_schema_history
from firnline.history.snapshots import ask_snapshot, find_readable
from firnline.history.status import load_status
from firnline.options import Home, PipelineOptions, SchemaOptions
from firnline.rescued import Rescued
from firnline.run.observer import Observer, Observers
from firnline.run.open_pipeline import open_pipeline
from firnline.run.runner import Runner
from firnline.service.metrics import PipelineMetrics
from firnline.sinks.delta.options import DeltaPartsOptions, journal_in
from firnline.sources.cdc.spooling import Spooler
from firnline.sources.mysql.options import MySqlSourceOptions
from firnline.sources.postgres.options import PostgresSourceOptions
from firnline.testing.local import LocalEngine
from tests.support.captured import Capturing, captured, execute, wait_until
from tests.support.mysql import BinlogServer
from tests.support.pipelines import run_to_end

ODD = 'Bob\'s "Big" $Order` Items'


class Tables:
    """Tables of either kind of server, all in one sink with a table each."""

    def __init__(self, server: Any, folder: Path) -> None:
        self.is_binlog = isinstance(server, BinlogServer)
        self._server = server
        self.schema = "shop" if self.is_binlog else "public"
        if self.is_binlog:
            server.run("CREATE DATABASE shop")
            source: Any = MySqlSourceOptions("db", f"{server.dsn}/shop", ("*",))
        else:
            source = PostgresSourceOptions("db", server, ("*",))
        sink = DeltaPartsOptions("all", str(folder / "lake/{table}"), input="db.*")
        journal = journal_in(Home(str(folder / "home")))
        self.options = replace(captured("", folder), sources=(source,), sinks=(sink,), journal=journal)

    def run(self, *statements: str) -> None:
        """Execute statements, with tables in braces."""
        for statement in statements:
            before, _, rest = statement.partition("{")
            name, _, after = rest.partition("}")
            ready = f"{before}{self.quoted(name) if rest else ''}{after}"
            if self.is_binlog:
                self._server.run(ready)
            else:
                execute(self._server, ready)

    def quoted(self, table: str) -> str:
        return "shop.`" + table.replace("`", "``") + "`" if self.is_binlog else '"' + table.replace('"', '""') + '"'

    def with_tables(self, *patterns: str) -> PipelineOptions:
        return replace(self.options, sources=(replace(self.options.sources[0], tables=patterns),))  # type: ignore[call-arg]

    def silent(self, options: PipelineOptions | None = None) -> dict[str, dict[str, Any]]:
        """By table: what `status` says of rows that are not in the log."""
        found = load_status(open_pipeline(options or self.options)).sources[0]["silent_changes"]
        return {one["table"].partition(".")[2]: one for one in found}

    def alter(self, *tables: str) -> None:
        """Change rows without row events, and let the log tell of it."""
        for table in tables:
            self.run(f"ALTER TABLE {{{table}}} ADD COLUMN extra int DEFAULT 5")
            self.run(f"INSERT INTO {{{table}}} VALUES (2, 6)")


@pytest.fixture
def tables(captured_server: Any, tmp_path: Path) -> Tables:
    return Tables(captured_server, tmp_path)


def test_hinted_commands_work_when_they_are_pasted(tables: Tables, caplog: pytest.LogCaptureFixture) -> None:
    """Or other words stand there: of a table without a key, and of one that is gone by now."""
    for name, key in ((ODD, " PRIMARY KEY"), ("UPPER", " PRIMARY KEY"), ("gone", " PRIMARY KEY"), ("plain", "")):
        tables.run(f"CREATE TABLE {{{name}}} (n int{key})", f"INSERT INTO {{{name}}} VALUES (1)")
    run_to_end(tables.options)
    tables.alter(ODD, "UPPER", "gone", "plain")
    with caplog.at_level(logging.WARNING):
        run_to_end(tables.options)
    found = tables.silent()
    assert sorted(found) == sorted([ODD, "UPPER", "gone", "plain"])
    tables.run("DROP TABLE {gone}")
    found = tables.silent()
    assert found["gone"]["command"] == found["plain"]["command"] == ""
    assert found["gone"]["way"] == "the server has no such table now"
    assert "leave it out of `tables`, run once, then name it again" in found["plain"]["way"]
    assert found["plain"]["way"] in caplog.text
    for name in (ODD, "UPPER"):
        command = found[name]["command"]
        assert command in caplog.text
        program, verb, option, table, other, source = shlex.split(command)
        assert (program, verb, option, other) == ("firnline", "snapshot", "--table", "--source")
        pipeline = open_pipeline(tables.options)
        assert find_readable(pipeline, table, source) == ("db", f"{tables.schema}.{name}")
        ask_snapshot(pipeline, source, table)
    run_to_end(tables.options)
    assert sorted({*tables.silent()} - {"gone"}) == ["plain"]
    # The words of the table without a key.
    run_to_end(tables.with_tables("*", "!plain"))
    assert "plain" not in tables.silent()
    run_to_end(tables.options)
    assert "plain" not in tables.silent()
    rows = [row["n"] for row in _history(tables, "plain") if row["_op"] == "read" and row["extra"] is not None]
    assert sorted(rows) == [1, 2]


def _history(tables: Tables, name: str) -> list[dict[str, Any]]:
    from deltalake import DeltaTable

    sink = tables.options.sinks[0]
    rows: list[dict[str, Any]] = DeltaTable(sink.table.replace("{table}", name)).to_pyarrow_table().to_pylist()  # type: ignore[attr-defined]
    return rows


def test_a_warning_goes_with_the_snapshot_and_comes_back_with_a_rollback(tables: Tables) -> None:
    tables.run("CREATE TABLE {orders} (n int PRIMARY KEY)", "INSERT INTO {orders} VALUES (1)")
    run_to_end(tables.options)
    tables.alter("orders")
    run_to_end(tables.options)
    before = open_pipeline(tables.options).load().epoch
    assert [*tables.silent()] == ["orders"]
    pipeline = open_pipeline(tables.options)
    ask_snapshot(pipeline, "db", f"{tables.schema}.orders")
    run_to_end(tables.options)
    assert tables.silent() == {}
    pipeline = open_pipeline(tables.options)
    Rollback(pipeline, before).perform("person")
    assert [*tables.silent()] == ["orders"]


def test_a_table_that_is_left_out_has_no_schema_in_force(tables: Tables) -> None:
    for name in ("orders", "other"):
        tables.run(f"CREATE TABLE {{{name}}} (n int PRIMARY KEY)", f"INSERT INTO {{{name}}} VALUES (1)")
    tables.run("CREATE TABLE {empty} (n int PRIMARY KEY)")
    run_to_end(tables.options)

    def shown(options: PipelineOptions) -> list[tuple[str, int]]:
        found = load_status(open_pipeline(options)).sources[0]["schemas"]
        return [(one["table"].partition(".")[2], one["version"]) for one in found]

    assert shown(tables.options) == [("orders", 1), ("other", 1)]
    before = open_pipeline(tables.options).load().epoch
    without = tables.with_tables("*", "!other")
    assert shown(without) == [("orders", 1)]
    tables.run("INSERT INTO {orders} VALUES (2)")
    run_to_end(without)
    assert shown(without) == [("orders", 1)]
    assert shown(tables.options) == [("orders", 1)]  # until it is read again
    pipeline = open_pipeline(tables.options)
    history = load_schema_history(pipeline)
    assert len(in_force(history, before)) == 2
    assert len(in_force(history, pipeline.load().epoch)) == 1
    run_to_end(tables.options)
    assert [name for name, _ in shown(tables.options)] == ["orders", "other"]


def test_rescued_values_are_counted_by_table(tables: Tables, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("orders", "other"):
        tables.run(f"CREATE TABLE {{{name}}} (n int PRIMARY KEY, due date)")
    bad = "'0000-00-00'" if tables.is_binlog else "'infinity'"
    if tables.is_binlog:
        tables.run("SET GLOBAL sql_mode = ''")
    try:
        tables.run(f"INSERT INTO {{orders}} VALUES (1, {bad}), (2, {bad})", f"INSERT INTO {{other}} VALUES (1, {bad})")
        with caplog.at_level(logging.WARNING):
            run_to_end(tables.options)
    finally:
        if tables.is_binlog:
            tables.run("SET GLOBAL sql_mode = DEFAULT")
    counts = Counter[str]()
    for one in map(Rescued.from_json, load_status(open_pipeline(tables.options)).rescued):
        counts[one.name] += one.values
    assert counts == {f"{tables.schema}.orders.due": 2, f"{tables.schema}.other.due": 1}
    assert f"2 values of {tables.schema}.orders.due" in caplog.text


def test_values_that_one_table_of_many_rescues_are_counted(tables: Tables, caplog: pytest.LogCaptureFixture) -> None:
    """They are found when the sink gets them, after the epoch was decided."""
    (source,) = tables.options.sources
    options = replace(tables.options, sources=(replace(source, schema=SchemaOptions(on_widen="rescue")),))
    tables.run("CREATE TABLE {orders} (n int PRIMARY KEY, amount int)", "INSERT INTO {orders} VALUES (1, 1)")
    run_to_end(options)
    before = open_pipeline(options).load().epoch
    kind = "MODIFY amount bigint" if tables.is_binlog else "ALTER COLUMN amount TYPE bigint"
    tables.run(f"ALTER TABLE {{orders}} {kind}")
    tables.run("INSERT INTO {orders} VALUES (2, 3000000000), (3, 4000000000), (4, 4)")
    totals, metrics = RunTotals(monotonic), PipelineMetrics("p", monotonic)
    with caplog.at_level(logging.WARNING):
        run = Runner(open_pipeline(options, once=True), LocalEngine(1), Observers(totals, metrics), once=True).run()
    assert run.exit_code == 0, run
    name = f"{tables.schema}.orders.amount"
    (found,) = map(Rescued.from_json, load_status(open_pipeline(options)).rescued)
    assert (found.name, found.values, found.expected, found.first) == (name, 2, "int32", "3000000000")
    assert f"rescued 2 values of {name} (expected int32, first: 3000000000)" in caplog.text
    assert [(one.name, one.values) for one in totals.rescued] == [(name, 2)]
    (family,) = [one for one in metrics.collect() if one.name == "firnline_rescued_values"]
    assert [(one.labels["column"], one.value) for one in family.samples] == [(name, 2)]
    kept = {row["n"]: row["_rescued_data"] for row in _history(tables, "orders")}
    assert kept == {1: None, 2: '{"amount":3000000000}', 3: '{"amount":4000000000}', 4: None}
    pipeline = open_pipeline(options)
    Rollback(pipeline, before).perform("person")
    assert load_status(open_pipeline(options)).rescued == []


class Idle(Observer):
    """Remembers that a run said that it has read everything."""

    def __init__(self) -> None:
        self.said = threading.Event()

    def idle(self) -> None:
        self.said.set()


def test_all_is_read_only_once_the_log_is(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that begins with a backlog has not read all before the reader has got it."""
    tables.run("CREATE TABLE {orders} (n int PRIMARY KEY)", "INSERT INTO {orders} VALUES (1)")
    run_to_end(tables.options)
    tables.run("INSERT INTO {orders} VALUES (2)")
    may_read, loop = threading.Event(), Spooler._run

    def reading(self: Spooler) -> None:
        assert may_read.wait(120)
        loop(self)

    monkeypatch.setattr(Spooler, "_run", reading)
    idle = Idle()
    with Capturing(tables.options, idle):
        assert not idle.said.wait(4)
        may_read.set()
        wait_until(lambda: idle.said.is_set())
        assert sorted(row["n"] for row in _history(tables, "orders")) == [1, 2]
