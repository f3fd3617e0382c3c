"""The position of a captured source, changed by hand; a rollback shows the schemas that it restores."""

from __future__ import annotations

from pathlib import Path

import pytest

from firnline.cli.output import Output
from firnline.cli.rollback import show_plan
from firnline.errors import ConfigError
from firnline.history.edits.position import PositionEdit
from firnline.history.edits.rollback import Rollback, SchemaReturn, find_position_texts
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from tests.integration.test_mysql_source import DATABASE
from tests.integration.test_mysql_source import ORDERS as BINLOG_ORDERS
from tests.integration.test_mysql_source import captured as captured_binlog
from tests.support.captured import ORDERS, captured, check_current, delta_rows, execute, history, query
from tests.support.mysql import BinlogServer
from tests.support.pipelines import run_to_end


@pytest.fixture
def database(postgres: str) -> str:
    execute(postgres, ORDERS)
    return postgres


def move(options: PipelineOptions, words: str, action: str = "set") -> tuple[list[str], list[str]]:
    """Change the position of the source; returns what is read again, and what is never read."""
    plan, _ = PositionEdit(open_pipeline(options), action, "db", words).perform("test")  # type: ignore[arg-type]
    return plan.again, plan.never


def place(options: PipelineOptions) -> str:
    checkpoint = open_pipeline(options).load().checkpoint
    assert checkpoint is not None
    return str(checkpoint.positions["db"]["place"]["lsn"])


def test_what_lies_before_a_place_is_never_read(database: str, tmp_path: Path) -> None:
    options = captured(database, tmp_path)
    run_to_end(options)
    execute(database, "INSERT INTO orders VALUES (1, 1, 'x')")
    run_to_end(options)
    before = place(options)
    execute(database, "INSERT INTO orders VALUES (2, 2, 'never')")
    here = query(database, "SELECT pg_current_wal_flush_lsn()::text")[0][0]
    execute(database, "INSERT INTO orders VALUES (3, 3, 'x')")
    assert move(options, here) == ([], [f"the log from {before} to {here}"])
    run_to_end(options)
    assert history(tmp_path) == [(1, "insert"), (3, "insert")]
    execute(database, "INSERT INTO orders VALUES (4, 4, 'never')")
    assert move(options, "end")[1][0].endswith("to its end")
    execute(database, "INSERT INTO orders VALUES (5, 5, 'x')")
    run_to_end(options)
    assert history(tmp_path) == [(1, "insert"), (3, "insert"), (5, "insert")]


def test_what_lies_behind_a_place_is_read_again(database: str, tmp_path: Path) -> None:
    """As far as the server keeps its log: up to the newest epoch but one."""
    options = captured(database, tmp_path)
    run_to_end(options)
    places = [place(options)]
    for number in range(1, 4):
        execute(database, f"INSERT INTO orders VALUES ({number}, 1, 'x')")
        run_to_end(options)
        places.append(place(options))
    with pytest.raises(ConfigError, match="may forget its log") as caught:
        move(options, places[0])
    assert "firnline rollback" in str(caught.value.hint)
    for wrong, words in (("7", "is no place"), ("FF/0", "the log ends at"), ("{}", "is no position of source")):
        with pytest.raises(ConfigError, match=words):
            move(options, wrong)
    assert move(options, places[2]) == ([f"the log from {places[2]} to {places[3]}"], [])
    run_to_end(options)
    assert history(tmp_path) == [(1, "insert"), (2, "insert"), (3, "insert"), (3, "insert")]
    check_current(database, tmp_path)
    with pytest.raises(ConfigError, match="cannot pass over a single transaction"):
        move(options, "7", "skip")


def test_places_of_a_binary_log(binlog_server: BinlogServer, tmp_path: Path) -> None:
    server, orders = binlog_server, f"{DATABASE}.orders"
    server.run(f"CREATE DATABASE {DATABASE}", BINLOG_ORDERS)
    options = captured_binlog(server, tmp_path)
    run_to_end(options)
    server.run(f"INSERT INTO {orders} VALUES (1, 1, 'x')")
    run_to_end(options)
    server.run(f"INSERT INTO {orders} VALUES (2, 1, 'never')")
    assert move(options, "end")[1][0].endswith("to its end")
    server.run(f"INSERT INTO {orders} VALUES (3, 1, 'x')")
    run_to_end(options)
    assert history(tmp_path) == [(1, "insert"), (3, "insert")]
    is_mysql = server.run("SELECT VERSION()")[0][0].startswith(("8", "9"))
    server.run(f"INSERT INTO {orders} VALUES (4, 1, 'never')")
    status = server.run("SHOW BINARY LOG STATUS" if is_mysql else "SHOW MASTER STATUS")[0]
    if is_mysql:
        uuid = server.run("SELECT @@server_uuid")[0][0]
        newest = int(str(status[4]).replace("\\n", "").rpartition("-")[2].rpartition(":")[2])
        assert len(move(options, f"{uuid}:{newest}", "skip")[1]) == 1
        with pytest.raises(ConfigError, match="has not executed"):
            move(options, f"{uuid}:{newest + 1000}", "skip")
    else:
        assert len(move(options, f"{status[0]}:{status[1]}")[1]) == 1
        with pytest.raises(ConfigError, match="has no place"):
            move(options, "other.000001:4")
    server.run(f"INSERT INTO {orders} VALUES (5, 1, 'x')")
    run_to_end(options)
    assert history(tmp_path) == [(1, "insert"), (3, "insert"), (5, "insert")]


def test_a_rollback_shows_the_schemas_that_it_restores(
    database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = captured(database, tmp_path)
    run_to_end(options)
    execute(database, "INSERT INTO orders VALUES (1, 1, 'x')")
    run_to_end(options)
    target = open_pipeline(options).load().epoch
    execute(database, "ALTER TABLE orders ADD COLUMN extra int", "INSERT INTO orders VALUES (2, 2, 'x', 7)")
    run_to_end(options)
    pipeline = open_pipeline(options)
    plan = Rollback(pipeline, target).plan()
    assert plan.schemas == [SchemaReturn("db", "public.orders", 2, 1)]
    show_plan(Output(), plan, find_position_texts(pipeline, plan))
    assert "version 2 now; version 1 then" in capsys.readouterr().out
    Rollback(open_pipeline(options), target).perform("test")
    assert "extra" not in [name for name, *_ in _columns(tmp_path)]
    run_to_end(options)
    assert delta_rows(tmp_path / "current", "id", "extra") == [(1, None), (2, 7)]


def _columns(folder: Path) -> list[tuple[str]]:
    from deltalake import DeltaTable

    return [(field.name,) for field in DeltaTable(str(folder / "current")).schema().fields]
