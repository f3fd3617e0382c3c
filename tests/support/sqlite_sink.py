"""A follower in a SQLite file: rows and head change in one transaction. Real, small, and usable from any process."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from firnline.errors import CommitConflictError, FencedError, SinkError
from firnline.faults import fault_point
from firnline.options import FollowerOptions
from firnline.sinks import registry
from firnline.sinks.base import Capabilities, SinkContext
from firnline.sinks.dead_letters import DeadLetter
from firnline.sinks.follower import EpochDelivery, Follower, FollowerHead
from firnline.types import Delivery, Json

DOWN = ".down"  # a file of this name beside the database makes it unreachable
RANGE_ROWS = 100


@dataclass(frozen=True, slots=True)
class SqliteSinkOptions(FollowerOptions):
    """A SQLite file. With `ranges` an epoch is delivered in ranges of rows, each in a transaction of its own."""

    type: ClassVar[str] = "sqlite"

    path: str
    ranges: bool = field(default=False, kw_only=True)
    refused: int | None = field(default=None, kw_only=True)  # rows with this `id` are bad

    @property
    def location(self) -> str:
        return self.path

    def own_shape(self) -> dict[str, Json]:
        return {"ranges": self.ranges}


class SqliteSink(Follower):
    """Rows as JSON text, with their ids."""

    capabilities: ClassVar[Capabilities] = Capabilities(Delivery.EXACTLY_ONCE, fed_from_outbox=True, has_columns=False)

    def __init__(self, options: SqliteSinkOptions, context: SinkContext) -> None:
        super().__init__(options, context)
        self._path = options.path
        self._refused = options.refused

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        if Path(self._path + DOWN).exists():
            raise SinkError(f"{self._path} is down")
        with closing(sqlite3.connect(self._path, timeout=60, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("CREATE TABLE IF NOT EXISTS head (sink TEXT PRIMARY KEY, record TEXT)")
            connection.execute("CREATE TABLE IF NOT EXISTS rows (id TEXT PRIMARY KEY, record TEXT)")
            yield connection
            fault_point("follower.commit.before")
            connection.execute("COMMIT")
            fault_point("follower.commit.after")

    def _read(self, connection: sqlite3.Connection) -> FollowerHead | None:
        found = connection.execute("SELECT record FROM head WHERE sink = ?", [self._key]).fetchone()
        return FollowerHead.from_json(json.loads(found[0]), "head") if found else None

    @property
    def _key(self) -> str:
        return f"{self.context.pipeline}/{self.head_name}"

    def read_head(self) -> FollowerHead | None:
        if not Path(self._path).exists() and not Path(self._path + DOWN).exists():
            return None
        with self._transaction() as connection:
            return self._read(connection)

    def swap_head(self, expected: FollowerHead | None, new: FollowerHead) -> None:
        with self._transaction() as connection:
            self._swap(connection, expected, new)

    def _swap(self, connection: sqlite3.Connection, expected: FollowerHead | None, new: FollowerHead) -> None:
        held = self._read(connection)
        if held is not None and held.generation > new.generation:
            raise FencedError(f"generation {held.generation} took over")
        if held != expected:
            raise CommitConflictError("the head moved")
        connection.execute("INSERT OR REPLACE INTO head VALUES (?, ?)", [self._key, json.dumps(new.to_json())])

    def deliver(self, delivery: EpochDelivery) -> FollowerHead:
        bad = [
            DeadLetter(number, "refused", row)
            for rows in delivery.rows.read()
            for number, row in zip(rows.numbers.to_pylist(), rows.batch.to_pylist(), strict=True)
            if self._refused is not None and row.get("id") == self._refused
        ]
        if bad:
            delivery.refuse(bad)
            delivery = delivery.without(bad)
        head, total = delivery.head, delivery.rows.rows
        most = RANGE_ROWS if delivery.shape["ranges"] else None
        pending: list[tuple[str, str]] = []
        for rows in delivery.rows.read(delivery.first_row, most):
            ids = delivery.rows.event_ids(rows.numbers).to_pylist()
            pending += [
                (one, json.dumps(row, default=str)) for one, row in zip(ids, rows.batch.to_pylist(), strict=True)
            ]
            if most and rows.end < total:
                head = self._write(head, delivery.partial_head(rows.end), pending)
                pending = []
        return self._write(head, delivery.final_head, pending)

    def _write(self, head: FollowerHead, new: FollowerHead, rows: list[tuple[str, str]]) -> FollowerHead:
        with self._transaction() as connection:
            self._swap(connection, head, new)
            connection.executemany("INSERT INTO rows VALUES (?, ?)", rows)
        return new


def register_sqlite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `sqlite` a kind of sink for one test."""
    kind = ModuleType("sqlite_kind")
    kind.__dict__.update(open_sink=SqliteSink)
    monkeypatch.setitem(sys.modules, "sqlite_kind", kind)
    monkeypatch.setitem(registry.KINDS, "sqlite", "sqlite_kind")


def sqlite_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a SQLite sink, by id, with another reader than the sink."""
    if not path.exists():
        return []
    with closing(sqlite3.connect(path, timeout=60)) as connection:
        known = connection.execute("SELECT name FROM sqlite_master WHERE name = 'rows'").fetchone()
        found = connection.execute("SELECT record FROM rows").fetchall() if known else []
    return [json.loads(record) for (record,) in found]


def sqlite_ids(path: Path) -> Counter[int]:
    """Return how often each `id` is there."""
    return Counter(int(row["id"]) for row in sqlite_rows(path))


open_sink = SqliteSink  # what the module of a kind has
