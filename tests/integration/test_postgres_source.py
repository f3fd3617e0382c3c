"""PostgreSQL as a source: changes of a real server in Delta tables, compared with the database."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from firnline.history.edits.rollback import Rollback
from firnline.history.schemas import in_force, in_force_at, load_schema_history
from firnline.run.open_pipeline import open_pipeline
from tests.support.captured import ORDERS, captured, check_current, delta_rows, execute, history, query
from tests.support.pipelines import run_once, run_to_end


@pytest.fixture
def database(postgres: str) -> str:
    execute(postgres, ORDERS)
    return postgres


def test_changes_become_history_and_current_state(database: str, tmp_path: Path) -> None:
    options = captured(database, tmp_path, include=("committed_at", "position", "transaction"))
    run_to_end(options)  # creates publication and slot
    execute(database, "INSERT INTO orders SELECT g, g / 4.0, 'n' || g FROM generate_series(1, 2500) g")
    execute(database, "UPDATE orders SET amount = -1 WHERE id <= 10", "DELETE FROM orders WHERE id = 11")
    execute(database, "UPDATE orders SET id = 9000 WHERE id = 12")
    run_to_end(options)
    check_current(database, tmp_path)
    ops = Counter(op for _, op in history(tmp_path))
    assert ops == {"insert": 2501, "update": 10, "delete": 2}
    assert run_once(options).result.epochs == 0


def test_nothing_is_read_twice_and_nothing_is_lost_between_runs(database: str, tmp_path: Path) -> None:
    options = captured(database, tmp_path)
    run_to_end(options)
    for number in range(5):
        execute(database, f"INSERT INTO orders VALUES ({number}, 0, 'x')", "UPDATE orders SET amount = amount + 1")
        run_to_end(options)
    check_current(database, tmp_path)
    assert Counter(op for _, op in history(tmp_path)) == {"insert": 5, "update": 15}


def test_rolled_back_transactions_and_savepoints_leave_nothing(database: str, tmp_path: Path) -> None:
    options = captured(database, tmp_path)
    run_to_end(options)
    execute(
        database,
        "BEGIN; INSERT INTO orders VALUES (1, 1, 'no'); ROLLBACK",
        "BEGIN; INSERT INTO orders VALUES (2, 2, 'yes'); SAVEPOINT s; INSERT INTO orders VALUES (3, 3, 'no'); "
        "ROLLBACK TO s; COMMIT",
    )
    run_to_end(options)
    assert history(tmp_path) == [(2, "insert")]
    check_current(database, tmp_path)


def test_a_transaction_is_never_split(database: str, tmp_path: Path) -> None:
    """The limit of events is far below the size of the transaction."""
    options = captured(database, tmp_path)
    run_to_end(options)
    execute(database, "INSERT INTO orders SELECT g, 1, repeat('x', 400) FROM generate_series(1, 60000) g")
    run = run_once(options)
    assert (run.exit_code, run.result.epochs) == (0, 1)
    check_current(database, tmp_path)


def test_an_altered_table_takes_effect_at_its_place(database: str, tmp_path: Path) -> None:
    options = captured(database, tmp_path)
    run_to_end(options)
    execute(
        database,
        "INSERT INTO orders VALUES (1, 1, 'old')",
        "ALTER TABLE orders ADD COLUMN extra int",
        "INSERT INTO orders VALUES (2, 2, 'new', 7)",
        "ALTER TABLE orders DROP COLUMN note",
        "INSERT INTO orders VALUES (3, 3, 8)",
    )
    run_to_end(options)
    assert delta_rows(tmp_path / "current", "id", "note", "extra") == [(1, "old", None), (2, "new", 7), (3, None, 8)]


def test_every_schema_is_recorded_and_goes_back_with_a_rollback(database: str, tmp_path: Path) -> None:
    options = captured(database, tmp_path)
    run_to_end(options)
    execute(database, "INSERT INTO orders VALUES (1, 1, 'x')")
    run_to_end(options)
    before = open_pipeline(options).load().epoch
    execute(
        database,
        "ALTER TABLE orders ADD COLUMN extra int",
        "INSERT INTO orders VALUES (2, 2, 'x', 7)",
        "ALTER TABLE orders ALTER COLUMN extra TYPE bigint",
        "INSERT INTO orders VALUES (3, 3, 'x', 8)",
    )
    run_to_end(options)
    history = load_schema_history(open_pipeline(options), "orders")
    assert [one.number for one in history] == [1, 2, 3]
    assert history[0].epoch == before < history[1].epoch
    assert [one.changed for one in history] == [("3 columns",), ("+ extra integer",), ("~ extra integer -> bigint",)]
    assert [one.number for one in in_force(history, before)] == [1]
    for one in history:  # two of them begin in one epoch
        assert in_force_at(history, one.version.position) == [one]
    Rollback(open_pipeline(options), before).perform("test")
    assert [one.number for one in load_schema_history(open_pipeline(options))] == [1]
    run_to_end(options)  # from the spool: the server was told to forget
    assert [one.number for one in load_schema_history(open_pipeline(options))] == [1, 2, 3]
    check_current(database, tmp_path)


def test_tables_that_are_not_captured_are_left_out(database: str, tmp_path: Path) -> None:
    execute(database, "CREATE TABLE private (id int PRIMARY KEY)")
    options = captured(database, tmp_path)
    run_to_end(options)
    execute(database, "INSERT INTO private VALUES (1)", "INSERT INTO orders VALUES (1, 1, 'x')")
    run_to_end(options)
    published = query(database, "SELECT tablename FROM pg_publication_tables")
    assert published == [("orders",)]
    assert history(tmp_path) == [(1, "insert")]


def test_large_values_that_an_update_leaves_unchanged_stay(database: str, tmp_path: Path) -> None:
    """Such values are not in the log: within an epoch, over several, and for a row that is new in the epoch."""
    large = "(SELECT string_agg(md5(g::text), '') FROM generate_series(1, 400) g)"
    options = captured(database, tmp_path)
    run_to_end(options)
    execute(database, f"INSERT INTO orders VALUES (1, 1, {large}), (2, 1, {large}), (3, 1, {large}), (4, 1, 'short')")
    run_to_end(options)
    execute(
        database,
        "UPDATE orders SET amount = 2 WHERE id IN (1, 4)",
        "UPDATE orders SET amount = 3 WHERE id = 1",
        f"UPDATE orders SET note = {large} || 'x', amount = 4 WHERE id = 2",
        "UPDATE orders SET amount = 5 WHERE id = 2",
        "DELETE FROM orders WHERE id = 3",
        f"INSERT INTO orders VALUES (3, 1, {large} || 'y')",
        "UPDATE orders SET amount = 6 WHERE id = 3",
        f"INSERT INTO orders VALUES (5, 1, {large} || 'z')",
        "UPDATE orders SET amount = 7 WHERE id = 5",
    )
    run_to_end(options)
    check_current(database, tmp_path)
    missing = delta_rows(tmp_path / "history", "id", "_op", "_missing")
    assert (1, "update", ["note"]) in missing
    assert (4, "update", None) in missing


def test_an_emptied_table_is_emptied_in_that_commit(database: str, tmp_path: Path) -> None:
    options = captured(database, tmp_path)
    run_to_end(options)
    execute(database, "INSERT INTO orders SELECT g, g, 'x' FROM generate_series(1, 50) g")
    run_to_end(options)
    execute(
        database,
        "INSERT INTO orders VALUES (60, 1, 'gone')",
        "TRUNCATE orders",
        "INSERT INTO orders VALUES (7, 7, 'new')",
    )
    run_to_end(options)
    check_current(database, tmp_path)
    execute(database, "TRUNCATE orders")
    run_to_end(options)
    check_current(database, tmp_path)
    execute(database, "INSERT INTO orders VALUES (8, 8, 'again')")
    run_to_end(options)
    check_current(database, tmp_path)
    assert Counter(op for _, op in history(tmp_path)) == {"insert": 53, "truncate": 2}


@pytest.mark.parametrize("epochs", ["one epoch", "an epoch each"])
def test_large_values_go_with_a_row_whose_key_changes(database: str, tmp_path: Path, epochs: str) -> None:
    """The log has neither the old row nor the large value: the row of the old key has it, in the table or in the epoch.
    A row may move several times, to a key that another row has left, and back."""
    large = "(SELECT string_agg(md5((g * {0})::text), '') FROM generate_series(1, 400) g)"
    options = captured(database, tmp_path)
    run_to_end(options)
    rows = ", ".join(f"({number}, {number}, {large.format(number)})" for number in range(1, 9))
    execute(database, f"INSERT INTO orders VALUES {rows}")
    run_to_end(options)
    for statement in (
        "UPDATE orders SET id = 11 WHERE id = 1",
        "UPDATE orders SET id = 12, amount = 0 WHERE id = 2; UPDATE orders SET id = 13 WHERE id = 12",
        "DELETE FROM orders WHERE id = 3; UPDATE orders SET id = 3 WHERE id = 4",  # a key that was left
        "UPDATE orders SET id = 15 WHERE id = 5; UPDATE orders SET id = 5 WHERE id = 15",  # and back
        f"UPDATE orders SET note = {large.format(77)} WHERE id = 6; UPDATE orders SET id = 16 WHERE id = 6",
        f"INSERT INTO orders VALUES (20, 1, {large.format(9)}); UPDATE orders SET id = 21 WHERE id = 20",
        "UPDATE orders SET id = 17 WHERE id = 7; UPDATE orders SET amount = 5 WHERE id = 17",
        "BEGIN; UPDATE orders SET id = 100 WHERE id = 8; UPDATE orders SET id = 8 WHERE id = 17; "
        "UPDATE orders SET id = 17 WHERE id = 100; COMMIT",  # two rows change places
    ):
        execute(database, statement)
        if epochs == "an epoch each":
            run_to_end(options)
    run_to_end(options)
    check_current(database, tmp_path)
    execute(database, "UPDATE orders SET amount = amount + 1", "UPDATE orders SET id = id + 1000")
    run_to_end(options)
    check_current(database, tmp_path)
