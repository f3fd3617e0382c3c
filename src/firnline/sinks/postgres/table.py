"""The table of a sink: its columns, its creation and growth, and the statements that write rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from psycopg import Connection
from psycopg.sql import SQL, Composable, Composed, Identifier

from firnline.errors import SchemaError
from firnline.sinks.postgres.checkpoints import ADVISORY_LOCK
from firnline.sinks.postgres.columns import Column, Way, find_way, find_wider_numeric, is_name_ok, type_for

Db = Connection[tuple[Any, ...]]

OWNER, EPOCH, EVENT_ID = "_firnline_sink", "_firnline_epoch", "_firnline_id"
OWN = {OWNER: pa.string(), EPOCH: pa.int64(), EVENT_ID: pa.string()}
ROW, DELETES, ORDER = "_firnline_row", "_firnline_delete", "_firnline_order"  # of a table of changes
LACKS = "_firnline_lacks"  # of a table of changes: the columns whose values a row does not have
MOVED_HERE = "_firnline_moved"  # of a table of changes: the row before deletes the key that the row had until then
STAGED = Identifier("pg_temp", "firnline_rows")
UNSTAGE = "DROP TABLE IF EXISTS pg_temp.firnline_rows"

_COLUMNS = """
SELECT a.attname, b.typname, n.nspname, format_type(a.atttypid, a.atttypmod), b.typtype = 'e',
       CASE WHEN t.typtype = 'd' THEN t.typtypmod ELSE a.atttypmod END, NOT a.attnotnull
FROM pg_attribute a
JOIN pg_type t ON t.oid = a.atttypid
JOIN pg_type b ON b.oid = CASE WHEN t.typtype = 'd' THEN t.typbasetype ELSE t.oid END
JOIN pg_namespace n ON n.oid = b.typnamespace
WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attnum
"""
_UNIQUE = """
SELECT 1 FROM pg_index i
WHERE i.indrelid = %s AND i.indisunique AND i.indisvalid AND i.indpred IS NULL AND i.indexprs IS NULL
  AND (SELECT array_agg(a.attname::text ORDER BY a.attname) FROM pg_attribute a
       WHERE a.attrelid = i.indrelid AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])) = %s
"""


@dataclass(frozen=True, slots=True)
class Table:
    """A table as a transaction finds it. Its columns stay until the transaction ends if `lock_table` found it."""

    schema: str
    name: str
    oid: int
    columns: Mapping[str, Column]

    @property
    def identifier(self) -> Identifier:
        return Identifier(self.schema, self.name)

    @property
    def shown(self) -> str:
        return f"{self.schema}.{self.name}"

    @property
    def has_marks(self) -> bool:
        """Whether every row says which sink wrote it in which epoch, so that the sink can go back."""
        return {OWNER, EPOCH} <= self.columns.keys()

    def has_unique(self, db: Db, key: Sequence[str]) -> bool:
        """Return whether a unique index or primary key has exactly these columns."""
        return db.execute(_UNIQUE, (self.oid, sorted(key))).fetchone() is not None

    def ways(self, rows: pa.Schema) -> dict[str, Way]:
        """Return how each column of rows is written.

        Raises:
            SchemaError: the table lacks a column, or its type cannot hold the values.
        """
        ways: dict[str, Way] = {}
        for field in rows:
            column = self.columns.get(field.name)
            if column is None:
                raise SchemaError(
                    f"table {self.shown} lacks the column {field.name!r}",
                    hint="Set `evolution: add` on the sink, add the column, or leave it out with `exclude`.",
                    column=field.name,
                )
            way = find_way(field.type, column)
            if way is None:
                raise SchemaError(
                    f"column {field.name!r} of table {self.shown} is {column.shown}, and cannot hold {field.type}",
                    hint=f"Change its type to {type_for(field)}, or leave the column out with `exclude`.",
                    column=field.name,
                )
            ways[field.name] = way
        return ways


def find_table(db: Db, schema: str, name: str) -> Table | None:
    """Return a table; None if there is none of this name.

    Raises:
        SchemaError: it is a view or the like, or forgets its rows after a crash.
    """
    found = db.execute(
        "SELECT c.oid, c.relkind, c.relpersistence FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE n.nspname = %s AND c.relname = %s",
        (schema, name),
    ).fetchone()
    if found is None:
        return None
    oid, kind, persistence = found
    if _text(kind) not in ("r", "p"):
        raise SchemaError(
            f"{schema}.{name} is no table", hint="Name a table; a view or a foreign table cannot hold rows."
        )
    if _text(persistence) != "p":
        raise SchemaError(
            f"table {schema}.{name} is unlogged: a crash of the server empties it",
            hint=f"ALTER TABLE {schema}.{name} SET LOGGED",
        )
    columns = [Column(*row) for row in db.execute(_COLUMNS, (oid,)).fetchall()]
    return Table(schema, name, oid, {column.name: column for column in columns})


def lock_table(db: Db, table: Table) -> Table:
    """Keep the columns of a table as they are until the transaction ends, and return it."""
    db.execute(SQL("LOCK TABLE {} IN ROW EXCLUSIVE MODE").format(table.identifier))
    locked = find_table(db, table.schema, table.name)
    if locked is None or locked.oid != table.oid:
        raise SchemaError(f"table {table.shown} was replaced meanwhile", hint="Run again.")
    return locked


def prepare_table(
    db: Db, schema: str, name: str, rows: pa.Schema, own: Sequence[str], key: Sequence[str], *, may_add: bool
) -> Table:
    """Return the table with all columns of the rows: created, or altered, as part of the transaction.

    Args:
        db: Within a transaction.
        schema: The schema of the table; created when missing.
        name: The name of the table.
        rows: The columns of the rows.
        own: Columns of Firnline that the table should have. An existing table gets them if it `may_add` columns.
        key: The primary key of a new table.
        may_add: Whether missing columns are added.
    """
    table = find_table(db, schema, name)
    wanted = {**{field.name: type_for(field) for field in rows}, **{n: type_for(pa.field(n, OWN[n])) for n in own}}
    for column in wanted:
        if not is_name_ok(column):
            raise SchemaError(f"PostgreSQL cannot have a column named {column!r}", hint="Leave it out with `exclude`.")
    if table is None:
        db.execute("SELECT pg_advisory_xact_lock(%s)", (ADVISORY_LOCK,))  # two creators would conflict
        table = find_table(db, schema, name)
    if table is None:
        _create(db, schema, name, wanted, key)
        table = find_table(db, schema, name)
        assert table is not None
        return table
    table = lock_table(db, table)
    changes = _changes(table, rows, wanted) if may_add else []
    if changes:
        db.execute(SQL("ALTER TABLE {} ").format(table.identifier) + SQL(", ").join(changes))
        return lock_table(db, table)
    return table


def _create(db: Db, schema: str, name: str, columns: Mapping[str, str], key: Sequence[str]) -> None:
    found = db.execute("SELECT to_regnamespace(quote_ident(%s)) IS NOT NULL", (schema,)).fetchone()
    if not found or not found[0]:
        db.execute(SQL("CREATE SCHEMA {}").format(Identifier(schema)))
    lines: list[Composable] = [Identifier(column) + _sql(f" {kind}") for column, kind in columns.items()]
    if key:
        lines.append(SQL("PRIMARY KEY ({})").format(names(key)))
    db.execute(SQL("CREATE TABLE {} ({})").format(Identifier(schema, name), SQL(", ").join(lines)))


def _changes(table: Table, rows: pa.Schema, wanted: Mapping[str, str]) -> list[Composed]:
    """Return the clauses of ALTER TABLE that make room for the rows."""
    changes = [
        SQL("ADD COLUMN {} ").format(Identifier(name)) + _sql(kind)
        for name, kind in wanted.items()
        if name not in table.columns
    ]
    for field in rows:
        column = table.columns.get(field.name)
        if column is None:
            continue
        try:
            wider = find_wider_numeric(field.type, column)
        except ValueError as error:
            raise SchemaError(
                f"column {field.name!r} of table {table.shown} is {column.shown}, and would round {field.type}",
                hint=f"ALTER TABLE {table.shown} ALTER COLUMN {field.name} TYPE {error}; it rewrites the table.",
                column=field.name,
            ) from None
        if wider is not None:
            changes.append(SQL("ALTER COLUMN {} TYPE ").format(Identifier(field.name)) + _sql(wider))
    return changes


def names(columns: Sequence[str]) -> Composed:
    """Return column names as a list."""
    return SQL(", ").join([Identifier(name) for name in columns])


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _sql(text: str) -> SQL:
    """Return our own words as SQL: types of `type_for`, never names of a user."""
    return SQL(text)


# -- statements -------------------------------------------------------------------------------------------


def copy_statement(target: Identifier, columns: Sequence[str]) -> Composed:
    """Return the statement that takes rows in the binary format."""
    return SQL("COPY {} ({}) FROM STDIN (FORMAT binary)").format(target, names(columns))


def stage_statement(table: Table, ways: Mapping[str, Way], extra: Mapping[str, str]) -> Composed:
    """Return the statement that creates an empty temporary table for rows on their way."""
    columns = [
        SQL("t.{0}").format(Identifier(name)) if way == "direct" else SQL("NULL::text AS {0}").format(Identifier(name))
        for name, way in ways.items()
    ]
    columns += [SQL("NULL::{0} AS {1}").format(_sql(kind), Identifier(name)) for name, kind in extra.items()]
    return SQL("CREATE TEMPORARY TABLE firnline_rows ON COMMIT DROP AS SELECT {} FROM {} AS t LIMIT 0").format(
        SQL(", ").join(columns), table.identifier
    )


@dataclass(frozen=True, slots=True)
class Merge:
    """The statements that bring staged rows into a table: appended, or by key."""

    table: Table
    ways: Mapping[str, Way]
    own: Mapping[str, Any]  # columns of Firnline with one value in all rows
    key: Sequence[str] = ()  # upsert
    sequence_by: str | None = None  # upsert: a column of the table that orders the rows of one key
    lacking: Sequence[str] = ()  # upsert: columns that some staged rows have no value of

    def keep_newest(self) -> Composed:
        """Return the statement that removes all staged rows but the newest of each key."""
        return SQL(
            "DELETE FROM {0} AS d USING (SELECT s.ctid AS place, row_number() OVER (PARTITION BY {1} ORDER BY {2}) AS n"
            " FROM {0} AS s) AS ranked WHERE d.ctid = ranked.place AND ranked.n > 1"
        ).format(STAGED, self._key_values(), self._newest_first())

    def forget_before(self, row: int) -> Composed:
        """Return the statement that removes the staged rows before the one that empties the table."""
        return SQL("DELETE FROM {} AS s WHERE s.{} < {}").format(STAGED, Identifier(ROW), row)

    def forget(self, rows: Sequence[int]) -> Composed:
        """Return the statement that removes the staged rows with these numbers."""
        return SQL("DELETE FROM {} AS s WHERE s.{} = ANY({})").format(STAGED, Identifier(ROW), list(rows))

    def empty(self) -> Composed:
        """Return the statement that empties the table. Readers see the old rows until the transaction ends."""
        return SQL("DELETE FROM {}").format(self.table.identifier)

    def fill(self, name: str) -> Composed:
        """Return the statement that gives the newest staged row of each key the newest value of a column.

        A delete has all values: none of the row is left. Rows whose key has no value keep their mark in `LACKS`. A row
        that was moved to its key has all values by then.
        """
        return SQL(
            "UPDATE {staged} AS d SET {column} = CASE WHEN f.{deletes} THEN NULL ELSE f.{column} END,"
            " {lacks} = d.{lacks} - {name}"
            " FROM (SELECT s.ctid AS place, row_number() OVER (PARTITION BY {key} ORDER BY {order}) AS n,"
            " first_value(s.ctid) OVER (PARTITION BY {key} ORDER BY {lacking}, {order}) AS source"
            " FROM {staged} AS s) AS ranked, {staged} AS f"
            " WHERE d.ctid = ranked.place AND ranked.n = 1 AND f.ctid = ranked.source"
            " AND {target_lacks} AND NOT {source_lacks}"
        ).format(
            staged=STAGED,
            column=Identifier(name),
            name=name,
            deletes=Identifier(DELETES),
            lacks=Identifier(LACKS),
            key=self._key_values(),
            order=self._newest_first(),
            lacking=_lacks("s", name),
            target_lacks=_lacks("d", name),
            source_lacks=_lacks("f", name),
        )

    def find_homeless(self) -> Composed:
        """Return the query for the numbers of moved rows whose old key is not among the staged rows."""
        return SQL(
            "SELECT m.{row} FROM {staged} AS m LEFT JOIN {staged} AS o ON o.{row} = m.{row} - 1 AND o.{deletes}"
            " WHERE m.{moved} AND m.{lacks} ?| {names} AND o.{row} IS NULL ORDER BY 1"
        ).format(**self._words(), names=list(self.lacking))

    def carry(self, name: str, *, from_table: bool) -> Composed:
        """Return the statement that gives staged rows which were moved to their key the value that a column had under
        the old key: the newest staged one, along all moves of the row, or else the value in the table.

        `from_table`: whether the table has rows from before these changes. No moved row lacks a value afterwards.
        """
        values = self._words(name)
        held: Composable = SQL("NULL")
        if from_table:
            held = SQL("(SELECT {} FROM {} AS t, {} AS s WHERE s.{} = c.origin AND {})").format(
                SQL("t.{}" if self.ways[name] == "direct" else "CAST(t.{} AS text)").format(Identifier(name)),
                self.table.identifier,
                STAGED,
                Identifier(ROW),
                _all(self._match()),
            )
        return SQL(
            "WITH RECURSIVE known AS MATERIALIZED (SELECT s.{row} AS number, s.{moved} AND {lacking} AS takes,"
            " max(s.{row}) FILTER (WHERE s.{moved} OR NOT {lacking}) OVER (PARTITION BY {key} ORDER BY s.{row}"
            " ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before FROM {staged} AS s),"
            " chain AS (SELECT k.number, k.number - 1 AS origin, o.before FROM known AS k"
            " JOIN known AS o ON o.number = k.number - 1 WHERE k.takes"
            " UNION ALL SELECT c.number, c.before - 1, o.before FROM chain AS c JOIN known AS k ON k.number = c.before"
            " JOIN known AS o ON o.number = c.before - 1 WHERE k.takes)"
            " UPDATE {staged} AS d SET {column} = CASE WHEN c.before IS NULL THEN {held}"
            " WHEN f.{deletes} THEN NULL ELSE f.{column} END, {lacks} = NULLIF(d.{lacks} - {name}, '[]')"
            " FROM chain AS c LEFT JOIN {staged} AS f ON f.{row} = c.before"
            " WHERE d.{row} = c.number AND (c.before IS NULL OR NOT {source_lacks} OR NOT f.{moved})"
        ).format(
            **values,
            key=self._key_values(),
            held=held,
            lacking=_lacks("s", name),
            source_lacks=_lacks("f", name),
        )

    def _words(self, name: str = "") -> dict[str, Any]:
        """Return what statements about moved rows have in common."""
        words: dict[str, Any] = {"staged": STAGED, "row": Identifier(ROW), "moved": Identifier(MOVED_HERE)}
        words |= {"lacks": Identifier(LACKS), "deletes": Identifier(DELETES)}
        return words | ({"column": Identifier(name), "name": name} if name else {})

    def _key_values(self) -> Composed:
        return SQL(", ").join([self._value(name) for name in self.key])

    def _newest_first(self) -> Composed:
        order = [SQL("{} DESC NULLS LAST").format(self._order("s"))] if self.sequence_by else []
        order += [SQL("s.{} DESC NULLS LAST, s.{} DESC").format(Identifier(ORDER), Identifier(ROW))]
        return SQL(", ").join(order)

    def statements(self, rows: tuple[int, int] | None = None) -> list[Composed]:
        """Return the statements that write staged rows: all, or those with a number in a range, both ends included."""
        where = [SQL("s.{} BETWEEN {} AND {}").format(Identifier(ROW), *rows)] if rows is not None else []
        if not self.key:
            return [self._insert(where)]
        deletes = SQL("s.{}").format(Identifier(DELETES))
        keeps = [SQL("NOT ") + deletes, *where]
        new = [*keeps, SQL("(s.{} IS NULL OR {})").format(Identifier(LACKS), self._is_new())] if self.lacking else keeps
        return [
            *([self._update(keeps)] if self.lacking else []),
            SQL("DELETE FROM {} AS t USING {} AS s WHERE {}").format(
                self.table.identifier, STAGED, _all([deletes, *where, *self._match(), *self._is_no_older("s")])
            ),
            self._insert(new) + self._on_conflict(),
        ]

    def _update(self, where: Sequence[Composable]) -> Composed:
        """Return the statement that writes staged rows which lack values over rows of the table, which keep theirs."""
        sets = []
        for name in (name for name in self.ways if name not in self.key):
            value = self._value(name)
            if name in self.lacking:
                value = SQL("CASE WHEN {} THEN t.{} ELSE {} END").format(_lacks("s", name), Identifier(name), value)
            sets.append(SQL("{} = {}").format(Identifier(name), value))
        lacks = SQL("s.{} IS NOT NULL").format(Identifier(LACKS))
        return SQL("UPDATE {} AS t SET {} FROM {} AS s WHERE {}").format(
            self.table.identifier,
            SQL(", ").join(sets),
            STAGED,
            _all([lacks, *where, *self._match(), *self._is_no_older("s")]),
        )

    def _is_new(self) -> Composed:
        """Return the condition under which the table has no row with the key of a staged row."""
        return SQL("NOT EXISTS (SELECT FROM {} AS t WHERE {})").format(self.table.identifier, _all(self._match()))

    def _insert(self, where: Sequence[Composed]) -> Composed:
        columns = [*self.ways, *self.own]
        values = [self._value(name) for name in self.ways] + [SQL("{}").format(value) for value in self.own.values()]
        return SQL("INSERT INTO {} AS t ({}) SELECT {} FROM {} AS s").format(
            self.table.identifier, names(columns), SQL(", ").join(values), STAGED
        ) + (SQL(" WHERE ") + _all(where) if where else SQL(""))

    def _on_conflict(self) -> Composed:
        others = [name for name in (*self.ways, *self.own) if name not in self.key]
        target = SQL(" ON CONFLICT ({}) ").format(names(self.key))
        if not others:
            return target + SQL("DO NOTHING")
        sets = [SQL("{0} = excluded.{0}").format(Identifier(name)) for name in others]
        guard = self._is_no_older("excluded")
        return (
            target + SQL("DO UPDATE SET ") + SQL(", ").join(sets) + (SQL(" WHERE ") + _all(guard) if guard else SQL(""))
        )

    def _match(self) -> list[Composed]:
        """Return the conditions under which a staged row has the key of a row of the table."""
        conditions = []
        for name in self.key:
            held, new = SQL("t.{}").format(Identifier(name)), self._value(name)
            equal = SQL("{} = {}").format(held, new)
            if self.table.columns[name].is_nullable:
                equal = SQL("({} OR ({} IS NULL AND {} IS NULL))").format(equal, held, new)
            conditions.append(equal)
        return conditions

    def _is_no_older(self, new: str) -> list[Composed]:
        """Return the condition under which a change counts: the table holds no newer row of its key."""
        if self.sequence_by is None:
            return []
        return [SQL("({0} IS NULL OR {1} >= {0})").format(self._order("t"), self._order(new))]

    def _order(self, alias: str) -> Composed:
        """Return the value that orders rows of one key; NaN counts as null."""
        assert self.sequence_by is not None
        column = self.table.columns[self.sequence_by]
        value = self._value(self.sequence_by) if alias == "s" else _column(alias, self.sequence_by)
        if column.type in ("float4", "float8", "numeric"):
            return SQL("NULLIF({}, 'NaN')").format(value)
        return value

    def _value(self, name: str) -> Composed:
        """Return a value of a staged row; text is cast to the type of the column, whose length is checked later."""
        value = _column("s", name)
        if self.ways[name] == "direct":
            return value
        column = self.table.columns[name]
        return SQL("CAST({} AS {})").format(value, Identifier(column.type_schema, column.type))


def _column(alias: str, name: str) -> Composed:
    return SQL("{}.{}").format(SQL(alias), Identifier(name))


def _lacks(alias: str, name: str) -> Composed:
    """Return whether a staged row has no value of a column."""
    a, deletes, lacks = SQL(alias), Identifier(DELETES), Identifier(LACKS)
    return SQL("(coalesce({}.{} ? {}, false) AND NOT {}.{})").format(a, lacks, name, a, deletes)


def _all(conditions: Sequence[Composable]) -> Composed:
    return SQL(" AND ").join(conditions)
