"""Holes through which other tools lose or double changes: each is planted here, and a comparison must find it.

docs/how-it-is-tested.md names the tests for all of them; the last test checks that they exist.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firnline.options import PipelineOptions
from firnline.sources.cdc import reader, source, spooling
from firnline.sources.cdc.spool import Mark
from firnline.sources.postgres import decode, stream
from firnline.sources.postgres import messages as m
from tests.support.captured import ORDERS, captured, check_current, execute, history, query
from tests.support.pipelines import run_once, run_to_end

LARGE = "(SELECT string_agg(md5((g * {0})::text), '') FROM generate_series(1, 400) g)"
Patch = pytest.MonkeyPatch


@pytest.fixture
def database(postgres: str) -> str:
    execute(postgres, ORDERS)
    return postgres


# -- what happens -----------------------------------------------------------------------------------------


def change_large_values(dsn: str, options: PipelineOptions, folder: Path) -> None:
    execute(dsn, f"INSERT INTO orders VALUES (1, 1, {LARGE.format(1)}), (2, 1, {LARGE.format(2)})")
    run_to_end(options)
    execute(dsn, "UPDATE orders SET amount = 2 WHERE id = 1", "UPDATE orders SET id = 12 WHERE id = 2")
    run_to_end(options)
    check_current(dsn, folder)


def stop_and_go_on(dsn: str, options: PipelineOptions, folder: Path) -> None:
    for number in range(3):
        execute(dsn, f"INSERT INTO orders SELECT {number} * 10 + g, 1, 'x' FROM generate_series(1, 3) g")
        run_to_end(options)
        execute(dsn, "UPDATE orders SET amount = amount + 1")
    run_to_end(options)
    check_current(dsn, folder)
    assert Counter(op for _, op in history(folder)) == {"insert": 9, "update": 3 + 6 + 9}


def commit_much_at_once(dsn: str, options: PipelineOptions, folder: Path) -> None:
    execute(dsn, "INSERT INTO orders SELECT g, 1, repeat('x', 300) FROM generate_series(1, 300) g")
    run = run_once(options)
    assert (run.exit_code, run.result.epochs) == (0, 1), "a transaction was split"
    check_current(dsn, folder)


def alter_a_table(dsn: str, options: PipelineOptions, folder: Path) -> None:
    execute(
        dsn,
        "INSERT INTO orders VALUES (1, 1, 'old')",
        "ALTER TABLE orders DROP COLUMN note",
        "ALTER TABLE orders ADD COLUMN note2 text",
        "INSERT INTO orders VALUES (2, 2, 'new')",
    )
    run_to_end(options)
    check_current(dsn, folder, "id, amount, note2")


# -- the bugs ---------------------------------------------------------------------------------------------


def large_values_are_null(patch: Patch, _dsn: str) -> None:
    patch.setattr(reader, "_missing", lambda *_: None)


def moved_rows_lose_large_values(patch: Patch, _dsn: str) -> None:
    change_rows = reader.LogReader._change_rows
    patch.setattr(
        reader.LogReader,
        "_change_rows",
        lambda self, changes, *more: change_rows(self, replace(changes, moved=None), *more),
    )


def position_is_beyond_the_commit(patch: Patch, _dsn: str) -> None:
    """The place of the end of what was sent, instead of the end of the transaction."""
    cut = stream.PostgresStream._cut

    def moved(self: Any, commit: m.Commit, offset: int) -> Any:
        found = cut(self, commit, offset)
        self._place = replace(self._place, lsn=commit.end_lsn + 100_000)
        return replace(found, position=self._place.to_json())

    patch.setattr(stream.PostgresStream, "_cut", moved)


def last_transaction_is_read_again(patch: Patch, _dsn: str) -> None:
    """The place of the begin of the last transaction: it comes again after a restart."""
    cut = stream.PostgresStream._cut

    def moved(self: Any, commit: m.Commit, offset: int) -> Any:
        found = cut(self, commit, offset)
        place = replace(self._place, lsn=commit.commit_lsn, last=None)
        return replace(found, position=place.to_json())

    patch.setattr(stream.PostgresStream, "_cut", moved)


def slices_end_anywhere(patch: Patch, _dsn: str) -> None:
    patch.setattr(Mark, "is_cut", property(lambda self: True))


def todays_schema_for_all_rows(patch: Patch, dsn: str) -> None:
    """Columns have the names that the catalogue has when rows are decoded."""
    set_table = decode._Pass._set_table
    names = (
        "SELECT attname FROM pg_attribute WHERE attrelid = 'orders'::regclass AND attnum > 0 AND NOT attisdropped "
        "ORDER BY attnum"
    )

    def set_from_catalogue(self: Any, relation: m.Relation) -> None:
        today = [name for (name,) in query(dsn, names)]
        columns = [replace(column, name=name) for column, name in zip(relation.columns, today, strict=True)]
        set_table(self, replace(relation, columns=tuple(columns)))

    patch.setattr(decode._Pass, "_set_table", set_from_catalogue)


HOLES: dict[str, tuple[Callable[[Patch, str], None], Callable[[str, PipelineOptions, Path], None]]] = {
    "unchanged large values become null": (large_values_are_null, change_large_values),
    "large values of a row whose key changes become null": (moved_rows_lose_large_values, change_large_values),
    "the position lies beyond the commit": (position_is_beyond_the_commit, stop_and_go_on),
    "the last transaction is read again": (last_transaction_is_read_again, stop_and_go_on),
    "a transaction is split": (slices_end_anywhere, commit_much_at_once),
    "the schema of today for rows of yesterday": (todays_schema_for_all_rows, alter_a_table),
}


@pytest.mark.parametrize("hole", HOLES)
def test_a_planted_hole_is_found(database: str, tmp_path: Path, monkeypatch: Patch, hole: str) -> None:
    """The same events end well without the bug, and not with it: another result, or a run that stops."""
    plant, events = HOLES[hole]
    monkeypatch.setattr(spooling, "PIECE_BYTES", 2000)
    monkeypatch.setattr(
        source, "SpoolSettings", lambda **given: spooling.SpoolSettings(**{**given, "file_bytes": 5000})
    )
    well = captured(database, tmp_path / "well")
    run_to_end(well)
    events(database, well, tmp_path / "well")
    execute(database, "DROP TABLE orders", ORDERS)
    execute(database, "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
    execute(
        database, *(f"DROP PUBLICATION {name}" for (name,) in query(database, "SELECT pubname FROM pg_publication"))
    )
    planted = captured(database, tmp_path / "planted")
    run_to_end(planted)
    plant(monkeypatch, database)
    with pytest.raises(AssertionError):
        events(database, planted, tmp_path / "planted")


def test_every_hole_has_a_test() -> None:
    """The page names tests that exist."""
    root = Path(__file__).parent.parent.parent
    page = (root / "docs" / "how-it-is-tested.md").read_text()
    table = page.partition("## Holes of other tools")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and "`" in line]
    assert len(rows) == 20
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, row
        for path, name in named:
            assert f"def {name}(" in (root / path).read_text(), f"{path} has no {name}"
