"""Publications that somebody changes while their tables are captured: what the log lacks is read again, or named."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from firnline.cli.run import Gap
from firnline.errors import ConfigError, SourceGapError
from firnline.history.status import load_status
from firnline.options import PipelineOptions
from firnline.run.open_pipeline import open_pipeline
from firnline.sinks.delta.options import DeltaSinkOptions
from firnline.sources.cdc import snapshots
from tests.integration.test_capture_gaps import run_with
from tests.support.captured import (
    ORDERS,
    Capturing,
    captured,
    check_current,
    delta_rows,
    execute,
    history,
    position,
    query,
    wait_until,
)
from tests.support.kills import kill
from tests.support.pipelines import run_once, run_to_end

OURS = "firnline_shop_db"
BOTH = ("orders", "items")
# Not in the log: a row that changed before, in the log, is gone, one is new, and one has another value.
UNSEEN = (
    "DELETE FROM orders WHERE id = 1",
    "INSERT INTO orders VALUES (4, 4, 'unseen')",
    "UPDATE orders SET note = 'unseen' WHERE id = 2",
)


@pytest.fixture
def database(postgres: str) -> str:
    execute(
        postgres,
        ORDERS,
        "CREATE TABLE items (id bigint PRIMARY KEY)",
        "INSERT INTO orders SELECT g, g, 'before' FROM generate_series(1, 3) g",
        "CREATE PUBLICATION mine FOR TABLE orders, items",
    )
    return postgres


def begin(dsn: str, folder: Path, publication: str, **source: Any) -> PipelineOptions:
    """A pipeline that has read both tables; `publication` is its own one, or that of somebody else."""
    given = None if publication == OURS else publication
    options = captured(dsn, folder, tables=BOTH, publication=given, **source)
    run_to_end(options)
    return options


@pytest.mark.parametrize("publication", [OURS, "mine"])
def test_a_table_that_was_out_of_the_publication_between_two_runs(
    database: str, tmp_path: Path, publication: str
) -> None:
    """It was put back before anybody looked, and changes before the hole are still to be read."""
    options = begin(database, tmp_path, publication)
    first = position(options)
    execute(database, "UPDATE orders SET note = 'seen'", f"ALTER PUBLICATION {publication} DROP TABLE orders")
    execute(database, *UNSEEN, f"ALTER PUBLICATION {publication} ADD TABLE orders")
    execute(database, "INSERT INTO orders VALUES (5, 5, 'after')")
    run_to_end(options)
    check_current(database, tmp_path)
    found = position(options)
    assert found.snapshots["public.orders"].id != first.snapshots["public.orders"].id
    assert found.snapshots["public.items"].id == first.snapshots["public.items"].id
    assert Counter(op for _, op in history(tmp_path))["truncate"] == 1
    assert run_once(options).result.epochs == 0


def test_our_publication_gets_a_table_back(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "LOOK_SECONDS", 0.2)
    with Capturing(begin(database, tmp_path, OURS)):
        execute(database, f"ALTER PUBLICATION {OURS} DROP TABLE orders", *UNSEEN)
        wait_until(lambda: (4, "read") in history(tmp_path) or (4, "insert") in history(tmp_path))
        execute(database, "INSERT INTO orders VALUES (5, 5, 'after')")
        wait_until(lambda: (5, "insert") in history(tmp_path))
    check_current(database, tmp_path)


def test_somebody_elses_publication_lacks_a_table(database: str, tmp_path: Path) -> None:
    """The run names it and goes on with the others. Once it is back, it is read again."""
    options = captured(database, tmp_path, tables=BOTH, publication="mine")
    options = replace(options, sinks=(*options.sinks, DeltaSinkOptions("all", str(tmp_path / "all"), input="db")))
    run_to_end(options)
    execute(database, "ALTER PUBLICATION mine DROP TABLE orders", *UNSEEN, "INSERT INTO items VALUES (7)")
    run = run_once(options)
    error = run.result.error
    assert isinstance(error, ConfigError)
    assert "publication mine has the table public.orders no more" in error.message
    assert str(error.hint).startswith("ALTER PUBLICATION mine ADD TABLE public.orders;")
    assert [after for table, after in delta_rows(tmp_path / "all", "_table", "after") if "items" in table] == [
        '{"id":7}'
    ]
    with Capturing(options) as capturing:
        wait_until(lambda: "public.orders no more" in str(capturing.pipeline.sources["db"].unreachable()))
    execute(database, str(error.hint).partition(";")[0])
    run_to_end(options)
    check_current(database, tmp_path)


@pytest.mark.parametrize("publication", [OURS, "mine"])
def test_kinds_of_changes_are_taken_out(database: str, tmp_path: Path, publication: str) -> None:
    """We mend our own publication. Somebody else's is named, and the table is read again once that is mended."""
    options = begin(database, tmp_path, publication)
    execute(database, f"ALTER PUBLICATION {publication} SET (publish = 'insert, update')", *UNSEEN)
    run = run_once(options)
    if publication == "mine":
        assert run.result.error is not None
        assert "does not publish each delete of public." in run.result.error.message
        with pytest.raises(ConfigError) as refused:
            open_pipeline(options).sources["db"].check()
        execute(database, str(refused.value.hint))
        run = run_once(options)
    assert run.exit_code == 0, run.result
    check_current(database, tmp_path)
    kinds = "SELECT pubinsert, pubupdate, pubdelete, pubtruncate FROM pg_publication WHERE pubname = "
    assert query(database, f"{kinds}'{publication}'") == [(True, True, True, True)]


def test_a_publication_of_some_kinds_is_refused_before_the_first_run(database: str, tmp_path: Path) -> None:
    execute(database, "CREATE PUBLICATION partly FOR TABLE orders WITH (publish = 'insert, update')")
    options = captured(database, tmp_path, publication="partly")
    source = open_pipeline(options).sources["db"]
    with pytest.raises(ConfigError, match=r"does not publish each delete of public\.orders") as refused:
        source.check()
    assert refused.value.hint == "ALTER PUBLICATION partly SET (publish = 'insert, update, delete, truncate');"
    assert run_once(options).error_code == "config"
    execute(database, "ALTER PUBLICATION partly SET (publish = 'insert, update, delete')")
    source.check()
    assert any("does not publish TRUNCATE" in remark for remark in source.remarks())
    execute(database, "DROP TABLE orders", ORDERS.replace(" PRIMARY KEY", ""))
    execute(database, "ALTER PUBLICATION partly ADD TABLE orders", "ALTER PUBLICATION partly SET (publish = 'insert')")
    source.check()  # the server could publish no more of a table without a key


def test_other_rows_are_published(database: str, tmp_path: Path) -> None:
    """A row filter: the table is read again, with the rows that the publication has."""
    if int(query(database, "SHOW server_version_num")[0][0]) < 150000:
        pytest.skip("the server has no row filters")
    options = begin(database, tmp_path, "mine")
    execute(database, "ALTER PUBLICATION mine SET TABLE items, orders WHERE (id > 1)")
    run_to_end(options)
    assert delta_rows(tmp_path / "current", "id") == [(2,), (3,)]
    execute(database, "ALTER PUBLICATION mine SET TABLE items, orders")
    run_to_end(options)
    check_current(database, tmp_path)


def test_a_table_without_a_key_that_was_out(database: str, tmp_path: Path) -> None:
    execute(database, "CREATE TABLE events (n int)", "INSERT INTO events VALUES (1)")
    options = captured(database, tmp_path, tables=("events",))
    options = replace(options, sinks=(DeltaSinkOptions("events", str(tmp_path / "events"), input="db.events"),))
    run_to_end(options)
    execute(database, f"ALTER PUBLICATION {OURS}_inserts DROP TABLE events", "INSERT INTO events VALUES (2)")
    run_to_end(options)
    execute(database, "INSERT INTO events VALUES (3)")
    run_to_end(options)
    rows = delta_rows(tmp_path / "events", "n", "_op")
    assert Counter(rows) == Counter([(1, "read"), (None, "truncate"), (1, "read"), (2, "read"), (3, "insert")])


def test_changes_alone_are_captured_and_some_are_missing(database: str, tmp_path: Path) -> None:
    """Nothing is read again by itself: `status` has the command until somebody has typed it."""
    options = begin(database, tmp_path, "mine", snapshot="never")
    execute(database, "INSERT INTO orders VALUES (9, 9, 'x')")
    run_to_end(options)
    execute(database, "ALTER PUBLICATION mine DROP TABLE orders", *UNSEEN, "ALTER PUBLICATION mine ADD TABLE orders")
    run_to_end(options)
    (change,) = load_status(open_pipeline(options)).sources[0]["silent_changes"]
    assert change["command"] == "firnline snapshot --table public.orders --empty --source db"
    assert "the publication did not have it" in change["reason"]
    assert run_once(options).result.epochs == 0


def test_a_publication_that_gets_more_tables_changes_nothing_for_others(database: str, tmp_path: Path) -> None:
    options = begin(database, tmp_path, "mine")
    execute(database, "CREATE TABLE other (id int PRIMARY KEY)", "ALTER PUBLICATION mine ADD TABLE other")
    execute(database, "VACUUM FREEZE pg_publication", "VACUUM FULL pg_publication_rel")
    assert run_once(options).result.epochs == 0


def test_a_position_that_does_not_say_how_tables_are_logged(database: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Positions of older versions: the next epoch adds it."""
    with monkeypatch.context() as older:
        older.setattr("firnline.sources.cdc.snapshots.SnapshotTaker.find_logged", lambda *_: [])
        older.setattr("firnline.sources.postgres.server.PostgresServer.find_members", _AnyTable)
        options = begin(database, tmp_path, "mine")
        assert position(options).logged == {}
    execute(database, "INSERT INTO orders VALUES (9, 9, 'x')")
    run_to_end(options)
    assert sorted(position(options).logged) == ["public.items", "public.orders"]
    execute(database, "ALTER PUBLICATION mine DROP TABLE orders", *UNSEEN, "ALTER PUBLICATION mine ADD TABLE orders")
    run_to_end(options)
    check_current(database, tmp_path)


class _AnyTable(dict[str, None]):
    """Members of a publication of which nothing is known."""

    def __init__(self, *_: object) -> None:
        super().__init__()

    def get(self, *_: object) -> None:
        return None


def work(dsn: str, folder: Path) -> None:
    """In a child."""
    assert run_once(captured(dsn, folder, tables=BOTH)).exit_code == 0


@pytest.mark.crash
@pytest.mark.parametrize("point", ["postgres.publication.after:1", "spool.chunk.after:1"])
def test_killed_when_our_publication_has_a_table_back(database: str, tmp_path: Path, point: str) -> None:
    """Before its snapshot has begun, or in the middle of it: the result is the database."""
    options = begin(database, tmp_path, OURS)
    execute(database, "UPDATE orders SET note = 'seen'", f"ALTER PUBLICATION {OURS} DROP TABLE orders", *UNSEEN)
    kill(point, partial(work, database, tmp_path))
    execute(database, "INSERT INTO orders VALUES (5, 5, 'after')")
    run_to_end(options)
    check_current(database, tmp_path)


@pytest.mark.parametrize("now", ["mine", "other"])
def test_a_publication_that_the_log_does_not_know_yet(database: str, tmp_path: Path, now: str) -> None:
    """It is created anew, or the spec names another one: the server cannot read what was written before."""
    begin(database, tmp_path, "mine")
    dropped = ["DROP PUBLICATION mine"] if now == "mine" else []
    execute(database, *dropped, *UNSEEN, f"CREATE PUBLICATION {now} FOR TABLE orders, items")
    options = captured(database, tmp_path, tables=BOTH, publication=now)
    error = run_once(options).result.error
    assert isinstance(error, SourceGapError)
    assert f'publication "{now}" does not exist' in error.message
    assert "--resnapshot-all" in error.hint
    assert run_with(options, Gap(resnapshot_all=True)) is None
    check_current(database, tmp_path)
    execute(database, "INSERT INTO orders VALUES (5, 5, 'logged')")
    run_to_end(options)
    check_current(database, tmp_path)
