"""A database with a random history: transactions from a seed, run on a real server, and its state after every commit.

    model = ModelDatabase(PostgresSide(server), seed=7)
    model.create()
    for _ in range(50):
        model.step()                      # a few transactions, some rolled back, or a statement that alters a table
    check_current(model, folder)          # the tables `current-<name>` hold what the database holds
    check_history(model, folder)          # the tables `history-<name>` replay to the state after every commit

Steps contain inserts, updates, deletes, changes of keys, large values that updates leave unchanged, savepoints with
partial rollback, transactions that are rolled back, two transactions that overlap, truncates, and columns that are
added, dropped and made wider. The database itself says what its state after a commit is.
"""

from __future__ import annotations

import contextlib
import json
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote

import pyarrow.parquet as pq
from deltalake import DeltaTable

from firnline.options import BatchOptions, CheckpointOptions, Home, PipelineOptions, SinkOptions, SourceOptions
from firnline.sinks.delta.options import DeltaPartsOptions, DeltaSinkOptions, journal_in
from firnline.sources.mysql.options import MySqlSourceOptions
from firnline.sources.postgres.options import PostgresSourceOptions
from tests.support.mariadb import MariaDbServer
from tests.support.mysql import BinlogServer
from tests.support.postgres import PostgresServer

Key = tuple[Any, ...]
Row = dict[str, Any]

SMALL, LARGE = 20, 9000  # characters of a value; PostgreSQL keeps large ones beside the row
INCLUDED = ("transaction", "position")


@dataclass(slots=True)
class Table:
    """A table of the model."""

    name: str
    key: tuple[str, ...]
    columns: dict[str, str]  # those that are not part of the key, with the kind of their values
    added: int = 0  # columns that were added, for their names


@dataclass(frozen=True, slots=True)
class State:
    """The rows of a table after a commit, as the database tells them."""

    columns: tuple[str, ...]
    rows: Mapping[Key, Row]


class Side(ABC):
    """One kind of server."""

    types: ClassVar[Mapping[str, str]]  # by kind of value: the type in this database

    @abstractmethod
    def connect(self, *, autocommit: bool) -> Any:
        """Return a connection of the driver."""

    @abstractmethod
    def source(self, port: int = 0) -> SourceOptions:
        """Return the source that captures all tables; `port`: of a proxy before the server."""

    @property
    @abstractmethod
    def server(self) -> PostgresServer | BinlogServer:
        """The server, to be killed and started."""

    def prepare(self, cursor: Any) -> None:  # noqa: B027  # most need nothing
        """Make what tables need."""


class PostgresSide(Side):
    """PostgreSQL."""

    types: ClassVar[Mapping[str, str]] = {
        "id": "bigint", "word": "varchar(20)", "decimal": "numeric(12,2)", "text": "text", "large": "text",
        "bytes": "bytea", "float": "double precision", "int": "integer",
    }  # fmt: skip

    def __init__(self, server: PostgresServer) -> None:
        self._server = server

    @property
    def server(self) -> PostgresServer:
        return self._server

    def connect(self, *, autocommit: bool) -> Any:
        import psycopg

        return psycopg.connect(self._server.dsn, autocommit=autocommit)

    def source(self, port: int = 0) -> SourceOptions:
        dsn = self._server.dsn.replace(str(self._server.port), str(port or self._server.port))
        return PostgresSourceOptions("db", dsn, ("model_*",), include=INCLUDED)


class BinlogSide(Side):
    """MySQL, or MariaDB."""

    types: ClassVar[Mapping[str, str]] = {
        "id": "bigint", "word": "varchar(20)", "decimal": "decimal(12,2)", "text": "varchar(500)", "large": "longtext",
        "bytes": "blob", "float": "double", "int": "int",
    }  # fmt: skip

    def __init__(self, server: BinlogServer) -> None:
        self._server = server
        self._images = random.Random(0)

    @property
    def server(self) -> BinlogServer:
        return self._server

    def connect(self, *, autocommit: bool) -> Any:
        begin = "SET SESSION transaction_isolation = 'READ-COMMITTED'"
        if isinstance(self._server, MariaDbServer):
            begin = "SET SESSION tx_isolation = 'READ-COMMITTED'"
        image = self._images.choice(("FULL", "FULL", "MINIMAL", "NOBLOB"))  # what the log has of rows
        return self._server.connect(
            autocommit=autocommit,
            database="shop",
            init_command=f"{begin}, SESSION binlog_row_image = {image}, SESSION lock_wait_timeout = 120",
        )

    def source(self, port: int = 0) -> SourceOptions:
        dsn = self._server.dsn.replace(str(self._server.port), str(port or self._server.port))
        return MySqlSourceOptions("db", f"{dsn}/shop", ("model_*",), include=INCLUDED)

    def prepare(self, cursor: Any) -> None:
        cursor.execute("CREATE DATABASE IF NOT EXISTS shop")
        cursor.execute("USE shop")


@dataclass(slots=True)
class ModelDatabase:
    """Random transactions on a real server, and the state of every table after each of them."""

    side: Side
    seed: int
    most_rows: int = 40  # that one statement inserts
    most_changes: int = 0  # of a transaction that is larger than all others; 0: there is none
    tables: list[Table] = field(default_factory=list)
    states: dict[str, list[State]] = field(default_factory=dict)
    statements: list[str] = field(default_factory=list)  # what was executed, without values
    _random: random.Random = field(default_factory=random.Random)
    _next_id: int = 1

    def create(self) -> None:
        """Make empty tables."""
        self._random.seed(self.seed)
        self.tables = [
            Table("model_orders", ("id",), {"amount": "decimal", "note": "large", "mark": "text"}),
            Table("model_lines", ("region", "number"), {"value": "float", "doc": "large", "raw": "bytes"}),
            Table("model_plain", ("id",), {"count": "int"}),
        ]
        kinds = {"id": "id", "region": "word", "number": "int"}
        with self._session(autocommit=True, new=True) as cursor:
            for table in self.tables:
                columns = {**{name: kinds[name] for name in table.key}, **table.columns}
                words = ", ".join(f"{name} {self.side.types[kind]}" for name, kind in columns.items())
                cursor.execute(f"CREATE TABLE {table.name} ({words}, PRIMARY KEY ({', '.join(table.key)}))")
        self.states = {table.name: [State((), {})] for table in self.tables}

    def options(self, folder: Path, port: int = 0, *, together: bool = False) -> PipelineOptions:
        """The pipeline: of every table the history and the current state; the first history decides.

        `together`: one sink has the histories of all tables and one their current states, and the journal decides.
        """
        sinks: list[SinkOptions] = []
        if together:
            sinks += [
                DeltaPartsOptions("history", f"{folder}/history-{{table}}", input="db.*"),
                DeltaPartsOptions("current", f"{folder}/current-{{table}}", input="db.*", write="upsert"),
            ]
        for table in self.tables if not together else ():
            of = f"db.{table.name}"
            sinks.append(DeltaSinkOptions(f"history-{table.name}", str(folder / f"history-{table.name}"), input=of))
            sinks.append(
                DeltaSinkOptions(
                    f"current-{table.name}",
                    str(folder / f"current-{table.name}"),
                    input=of,
                    write="upsert",
                    key=table.key,
                )
            )
        return PipelineOptions(
            name="model",
            sources=(self.side.source(port),),
            sinks=tuple(sinks),
            batch=BatchOptions(max_events=200),
            checkpoint=CheckpointOptions(rollback_window=2),
            journal=journal_in(Home(f"{folder}-home")) if together else None,
        )

    # -- steps ----------------------------------------------------------------------------------------

    def step(self) -> None:
        """Do something with the database; note its state after every commit."""
        chance = self._random.random()
        if self.most_changes and chance > 0.985:
            self.burst()
            return
        if chance < 0.06:
            self._empty(self._random.choice(self.tables))
        elif chance < 0.16:
            self._alter(self._random.choice(self.tables))
        elif chance < 0.35:
            self._overlap()
        else:
            with self._session(autocommit=False) as cursor:
                self._transact(cursor, 0)
                self._finish(cursor)
        self._note()

    def burst(self) -> None:
        """Run a large transaction that leaves few rows: the states of the model stay small."""
        table = self.tables[2]
        count = self._random.randint(self.most_changes // 4, self.most_changes) // 2
        keys = [self._new_key(table, 0) for _ in range(count)]
        name, rows = table.key[0], 1000
        with self._session(autocommit=False) as cursor:
            for first in range(0, count, rows):
                some = [value for key in keys[first : first + rows] for value in key]
                places = ", ".join(["(%s)"] * len(some))
                self._execute(cursor, f"INSERT INTO {table.name} ({name}) VALUES {places}", some)
            between = (keys[1][0], keys[-3][0])  # three of them stay
            self._execute(cursor, f"DELETE FROM {table.name} WHERE {name} BETWEEN %s AND %s", between)
            self._finish(cursor)
        self._note()

    def rows_of(self, table: Table) -> list[Key]:
        """The keys that the table has now."""
        return list(self.states[table.name][-1].rows)

    @contextlib.contextmanager
    def _session(self, *, autocommit: bool, new: bool = False) -> Iterator[Any]:
        side = self.side
        connection = (
            side.server.connect(autocommit=autocommit)
            if new and isinstance(side, BinlogSide)
            else side.connect(autocommit=autocommit)
        )
        with contextlib.closing(connection), connection.cursor() as cursor:
            if new:
                side.prepare(cursor)
            yield cursor

    def _overlap(self) -> None:
        """Two transactions that are open at once; the first to begin is the last to end. They touch different keys."""
        with self._session(autocommit=False) as first, self._session(autocommit=False) as second:
            self._transact(first, 0, most=2)
            self._transact(second, 1, most=2)
            self._finish(second)
            self._note()
            self._finish(first)

    def _finish(self, cursor: Any) -> None:
        cursor.execute("ROLLBACK" if self._random.random() < 0.15 else "COMMIT")

    def _transact(self, cursor: Any, parity: int, most: int = 5) -> None:
        """Statements of one transaction, on keys with this parity; the transaction stays open."""
        keys = {t.name: [k for k in self.rows_of(t) if k[-1] % 2 == parity] for t in self.tables}
        for _ in range(self._random.randint(1, most)):
            savepoint = self._random.random() < 0.2
            kept = {name: list(of) for name, of in keys.items()}
            if savepoint:
                cursor.execute("SAVEPOINT here")
            self._change(cursor, self._random.choice(self.tables), keys, parity)
            if savepoint and self._random.random() < 0.7:
                cursor.execute("ROLLBACK TO SAVEPOINT here")
                keys = kept

    def _change(self, cursor: Any, table: Table, keys: dict[str, list[Key]], parity: int) -> None:
        known = keys[table.name]
        kind = self._random.choice(("insert", "insert", "update", "update", "delete", "move")) if known else "insert"
        if kind == "insert":
            self._insert(cursor, table, known, parity)
            return
        chosen = self._random.sample(known, min(len(known), self._random.choice((1, 1, 2, 6))))
        for key in chosen:
            where = " AND ".join(f"{name} = %s" for name in table.key)
            if kind == "update":
                names = self._random.sample(list(table.columns), self._random.randint(1, len(table.columns)))
                values = [self._value(table.columns[name]) for name in names]
                words = ", ".join(f"{name} = %s" for name in names)
                self._execute(cursor, f"UPDATE {table.name} SET {words} WHERE {where}", (*values, *key))
            elif kind == "delete":
                self._execute(cursor, f"DELETE FROM {table.name} WHERE {where}", key)
                known.remove(key)
            else:
                new = self._new_key(table, parity)
                words = ", ".join(f"{name} = %s" for name in table.key)
                self._execute(cursor, f"UPDATE {table.name} SET {words} WHERE {where}", (*new, *key))
                known[known.index(key)] = new

    def _insert(self, cursor: Any, table: Table, known: list[Key], parity: int) -> None:
        count = self._random.choice((1, 1, 2, 5, self._random.randint(1, self.most_rows)))
        names = (*table.key, *table.columns)
        values: list[Any] = []
        for _ in range(count):
            key = self._new_key(table, parity)
            if key in known:
                continue
            known.append(key)
            values += (*key, *(self._value(kind) for kind in table.columns.values()))
        places = ", ".join([f"({', '.join(['%s'] * len(names))})"] * (len(values) // len(names)))
        self._execute(cursor, f"INSERT INTO {table.name} ({', '.join(names)}) VALUES {places}", values)

    def _new_key(self, table: Table, parity: int) -> Key:
        """A key that no row has; now and then one that a row had before."""
        self._next_id += 1
        number = self._next_id * 2 + parity
        if len(table.key) == 2:
            return (self._random.choice(("north", "süd", "")), number)
        return (number,)

    def _value(self, kind: str) -> Any:
        if self._random.random() < 0.1:
            return None
        if kind == "decimal":
            return self._random.randint(-(10**9), 10**9) / 100
        if kind == "float":
            return self._random.choice((0.0, -1.5, 1e300, self._random.random()))
        if kind == "int":
            return self._random.randint(-(2**31), 2**31 - 1)
        if kind == "bytes":
            return self._random.randbytes(self._random.randint(0, SMALL))
        size = self._random.choice((0, SMALL, SMALL, LARGE)) if kind == "large" else self._random.randint(0, SMALL)
        return "".join(self._random.choices("abcdé €\n'\\𝄞", k=min(size, SMALL))) + "".join(
            f"{self._random.getrandbits(32):08x}" for _ in range(max(0, size - SMALL) // 8)
        )

    def _empty(self, table: Table) -> None:
        with self._session(autocommit=True) as cursor:
            self._execute(cursor, f"TRUNCATE TABLE {table.name}", ())

    def _alter(self, table: Table) -> None:
        """Add a column, drop one that was added, or make one wider."""
        own = [name for name in table.columns if name.startswith("extra")]
        with self._session(autocommit=True) as cursor:
            if own and self._random.random() < 0.5:
                name = self._random.choice(own)
                del table.columns[name]
                self._execute(cursor, f"ALTER TABLE {table.name} DROP COLUMN {name}", ())
                return
            table.added += 1
            name, kind = f"extra{table.added}", self._random.choice(("decimal", "text", "int"))
            table.columns[name] = kind
            self._execute(cursor, f"ALTER TABLE {table.name} ADD COLUMN {name} {self.side.types[kind]}", ())

    def _execute(self, cursor: Any, statement: str, values: Sequence[Any]) -> None:
        self.statements.append(statement[:80])
        cursor.execute(statement, values or None)

    def _note(self) -> None:
        """Ask the database for its state."""
        with self._session(autocommit=True) as cursor:
            for table in self.tables:
                names = (*table.key, *table.columns)
                cursor.execute(f"SELECT {', '.join(names)} FROM {table.name}")
                rows = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
                state = State(names, {tuple(row[name] for name in table.key): row for row in rows})
                if state != self.states[table.name][-1]:
                    self.states[table.name].append(state)


# -- comparisons ------------------------------------------------------------------------------------------


def check_current(model: ModelDatabase, folder: Path) -> None:
    """Every table of the current state holds the rows of the database: no other, none twice."""
    for table in model.tables:
        state = model.states[table.name][-1]
        rows = DeltaTable(str(folder / f"current-{table.name}")).to_pyarrow_table().to_pylist()
        found = {tuple(row.get(name) for name in table.key): row for row in rows}
        assert len(found) == len(rows), f"{table.name} has a key twice (seed {model.seed})"
        _same(found, state, f"{table.name} at the end (seed {model.seed})")


def check_history(model: ModelDatabase, folder: Path) -> None:
    """Every history, applied row by row, goes through the states of its table, each at the end of a transaction."""
    for table in model.tables:
        states, at = model.states[table.name], 0
        held: dict[Key, Row] = {}
        where = f"{table.name} (seed {model.seed})"
        for transaction, rows in _transactions(folder / f"history-{table.name}"):
            # A state that differs from the one before in its columns alone has no rows in the log.
            at = _pass(held, states, at)
            gone: Row = {}
            for row in rows:
                gone = _apply(held, row, table, gone)
            if at + 1 < len(states) and _is(held, states[at + 1]):
                at += 1
                continue
            assert _is(held, states[at]), f"{where}: after {transaction} its state is not one of the database: " + (
                _difference(held, states[min(at + 1, len(states) - 1)])
            )
        at = _pass(held, states, at)
        assert at == len(states) - 1, f"{where}: the history ends at state {at} of {len(states) - 1}"


def _pass(held: Mapping[Key, Row], states: Sequence[State], at: int) -> int:
    while at + 1 < len(states) and _is(held, states[at + 1]):
        at += 1
    return at


def _transactions(path: Path) -> Iterator[tuple[str, list[Row]]]:
    """Yield the rows of a history by transaction, in the order of commits, files of a commit and rows of a file."""
    open_id, rows, seen = "", list[Row](), set[str]()
    for row in _rows(path):
        if row["_transaction"] != open_id:
            if open_id:
                yield open_id, rows
            open_id, rows = row["_transaction"], []
            assert open_id not in seen, f"transaction {open_id} comes twice in {path.name}"
            seen.add(open_id)
        rows.append(row)
    if open_id:
        yield open_id, rows


def _rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a table that is only appended to: the log names the files of a commit in order."""
    for version in range(DeltaTable(str(path)).version() + 1):
        for line in (path / "_delta_log" / f"{version:020d}.json").read_text().splitlines():
            if added := json.loads(line).get("add"):
                yield from pq.read_table(path / unquote(added["path"])).to_pylist()


def _apply(held: dict[Key, Row], row: Row, table: Table, gone: Row) -> Row:
    """Apply a change row; `gone` is the row that was deleted just before. Returns the row that this one deletes."""
    key = tuple(row.get(name) for name in table.key)
    if row["_op"] == "truncate":
        held.clear()
        return {}
    if row["_op"] == "delete":
        assert key in held, f"{table.name}: a delete of {key}, which is not there"
        return held.pop(key)
    assert (key in held) == (row["_op"] == "update"), f"{table.name}: {row['_op']} of {key}"
    missing = set(row.get("_missing") or ())
    old = held.get(key, {})
    if row.get("_moved"):
        assert gone, f"{table.name}: no row was deleted before {key}, whose key changed"
        old = gone
    held[key] = {name: old.get(name) if name in missing else value for name, value in row.items()}
    return {}


def _is(held: Mapping[Key, Row], state: State) -> bool:
    return held.keys() == state.rows.keys() and all(
        held[key].get(name) == row[name] for key, row in state.rows.items() for name in state.columns
    )


def _same(found: Mapping[Key, Row], state: State, where: str) -> None:
    assert _is(found, state), f"{where}: {_difference(found, state)}"


def _difference(found: Mapping[Key, Row], state: State) -> str:
    lost, extra = state.rows.keys() - found.keys(), found.keys() - state.rows.keys()
    other = [
        (key, name, str(found[key].get(name))[:40], str(row[name])[:40])
        for key, row in state.rows.items() if key in found
        for name in state.columns if found[key].get(name) != row[name]
    ]  # fmt: skip
    return f"lost {sorted(lost)[:5]}, extra {sorted(extra)[:5]}, other values (found, wanted) {other[:5]}"
