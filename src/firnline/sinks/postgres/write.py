"""Writes the rows of one epoch in a transaction: by COPY into the table itself, or into a temporary one and from there.

Rows are appended directly if every column can be encoded as its type. Values that PostgreSQL has to read as text, and
changes by key, are copied into a temporary table first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import Connection
from psycopg.sql import Composed, Identifier

from firnline.errors import SchemaError
from firnline.options import MISSING, MOVED, OP, OPERATIONS, SEQUENCE
from firnline.sinks.changes import find_deletes, find_truncates, table_columns
from firnline.sinks.follower import EpochRows
from firnline.sinks.postgres.database import is_row_error
from firnline.sinks.postgres.encode import SIGNATURE, TRAILER, Encoded, constant, encode, join_rows, text_of
from firnline.sinks.postgres.table import (
    DELETES,
    EPOCH,
    EVENT_ID,
    LACKS,
    MOVED_HERE,
    ORDER,
    OWNER,
    ROW,
    STAGED,
    UNSTAGE,
    Merge,
    Table,
    copy_statement,
    stage_statement,
)
from firnline.types import Json

CHUNK_ROWS = 65_536
CHUNK_BYTES = 16 * 1024 * 1024
COPY_BYTES = 64 * 1024 * 1024  # in one statement, which has a timeout
_LINE = re.compile(r"COPY [^,]+, line ([0-9]+)")
_EXTRA = {ROW: "bigint", DELETES: "boolean", ORDER: "bigint", LACKS: "jsonb", MOVED_HERE: "boolean"}


_T = TypeVar("_T")


class RowsRefusedError(Exception):
    """The server, or the type of a column, refused a row. Nothing says yet which one."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How rows are written: the settings that an epoch was made with."""

    key: tuple[str, ...] = ()  # none: rows are appended
    sequence_by: str | None = None
    delete_when: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    of_records: bool = False  # upsert: rows are records of a source, not changes of an operator
    event_id: bool = False

    @classmethod
    def of(cls, own: Mapping[str, Json]) -> Shape:
        if own["write"] == "append":
            return cls(event_id=bool(own["event_id"]))
        return cls(
            tuple(own["key"]),
            own["sequence_by"] if own["of_records"] else None,
            {name: tuple(values) for name, values in own["delete_when"].items()},
            bool(own["of_records"]),
            bool(own["event_id"]),
        )

    def columns(self, rows: pa.Schema) -> pa.Schema:
        """Return the columns that rows with these columns have in the table."""
        columns = table_columns(rows) if self.key else rows
        return columns.append(pa.field(EVENT_ID, pa.string())) if self.event_id else columns


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some rows with the columns of the table. An upsert's have deletes, an order, and perhaps columns without values.

    `emptied` is the number of the last change row among them that empties the table; such rows are left out.
    """

    batch: pa.RecordBatch
    numbers: pa.Array
    deletes: pa.Array | None = None
    order: pa.Array | None = None
    lacks: pa.Array | None = None  # of each row the columns whose values it does not have
    moved: pa.Array | None = None  # rows that lack values and had the key which the row before them deletes
    emptied: int | None = None

    def slice(self, first: int, end: int) -> Chunk:
        return self._each(lambda column: column.slice(first, end - first))

    def filter(self, keep: pa.Array) -> Chunk:
        return self._each(lambda column: column.filter(keep))

    def _each(self, change: Callable[[Any], Any]) -> Chunk:
        own = (self.deletes, self.order, self.lacks, self.moved)
        deletes, order, lacks, moved = (change(column) if column is not None else None for column in own)
        return Chunk(change(self.batch), change(self.numbers), deletes, order, lacks, moved, self.emptied)


def read_chunks(epoch: EpochRows, shaped: Iterable[tuple[pa.RecordBatch, pa.Array]], shape: Shape) -> Iterator[Chunk]:
    """Yield rows of an epoch, given as batches with the numbers of their rows, in chunks of bounded size.

    Raises:
        SchemaError: a change row has an unknown operation, or lacks a column.
    """
    for batch, batch_numbers in shaped:
        if not batch.num_rows:
            continue
        step = max(1, min(CHUNK_ROWS, batch.num_rows * CHUNK_BYTES // max(1, batch.nbytes)))
        for first in range(0, batch.num_rows, step):
            part, numbers = batch.slice(first, step), batch_numbers.slice(first, step)
            emptied = None
            if shape.key and (empties := find_truncates(part)) is not None:
                emptied = pc.max(numbers.filter(empties)).as_py()
                part, numbers = part.filter(pc.invert(empties)), numbers.filter(pc.invert(empties))
            deletes, order = _changes(part, shape) if shape.key else (None, None)
            lacks = part.column(MISSING) if shape.key and MISSING in part.schema.names else None
            moved = part.column(MOVED).fill_null(False) if lacks is not None and MOVED in part.schema.names else None
            names = [name for name in shape.columns(part.schema).names if name != EVENT_ID]
            part = part.select(names)
            if shape.event_id:
                part = part.append_column(EVENT_ID, epoch.event_ids(numbers))
            yield Chunk(part, numbers, deletes, order, lacks, moved, emptied)


def _changes(batch: pa.RecordBatch, shape: Shape) -> tuple[pa.Array, pa.Array]:
    """Return which change rows delete their key, and the sequence of each."""
    for name in shape.key:
        if batch.schema.get_field_index(name) < 0:
            raise SchemaError(f"rows for an upsert lack the key column {name!r}", column=name)
    operation, sequence = batch.schema.get_field_index(OP), batch.schema.get_field_index(SEQUENCE)
    if not shape.of_records and (operation < 0 or sequence < 0):
        raise SchemaError(
            f"rows for an upsert lack the column {OP if operation < 0 else SEQUENCE}",
            hint="Feed the sink from an operator that makes changes.",
        )
    deletes = find_deletes(batch, shape.delete_when)
    if operation >= 0:
        words = batch.column(operation).cast(pa.string())
        known = pc.is_in(words, pa.array(OPERATIONS))
        if not shape.of_records and not pc.all(known).as_py():
            word = words.filter(pc.invert(known))[0].as_py()
            raise SchemaError(f"a change row has {OP} {word!r}", hint=f"It must be one of {', '.join(OPERATIONS)}.")
        deletes = pc.or_(deletes, pc.equal(words, "delete").fill_null(False))
    has_order = sequence >= 0 and shape.sequence_by is None
    order = batch.column(sequence).cast(pa.int64()) if has_order else pa.nulls(batch.num_rows, pa.int64())
    return deletes.fill_null(False), order


class RowWriter:
    """Writes the rows of one epoch into a table that has their columns, within one transaction."""

    def __init__(
        self, db: Connection[tuple[Any, ...]], table: Table, columns: pa.Schema, shape: Shape, owner: str, epoch: int
    ) -> None:
        self._db = db
        self._table = table
        self._ways = table.ways(columns)
        self._shape = shape
        self._own: dict[str, Any] = {OWNER: owner, EPOCH: epoch} if not shape.key and table.has_marks else {}
        self._wires = {
            name: table.columns[name].wire if way == "direct" else "text" for name, way in self._ways.items()
        }
        self._is_direct = not shape.key and all(way == "direct" for way in self._ways.values())
        self._emptied: int | None = None  # the number of the last change row so far that empties the table
        self._lacking: set[str] = set()  # columns that a change row so far has no value of
        self._has_moved = False  # whether a change row so far takes values along from another key

    @property
    def _merge(self) -> Merge:
        lacking = [name for name in self._ways if name in self._lacking]
        return Merge(self._table, self._ways, self._own, self._shape.key, self._shape.sequence_by, lacking)

    # -- all rows at once -------------------------------------------------------------------------------

    def write(self, chunks: Iterator[Chunk]) -> None:
        """Write all rows.

        Raises:
            RowsRefusedError: at least one row can never be held; the transaction must be rolled back.
        """
        try:
            if self._is_direct:
                self._copy(self._table.identifier, chunks)
                return
            self._stage()
            self._copy(STAGED, self._noted(chunks))
            if self._find_homeless():
                raise RowsRefusedError
            self._keep_newest()
            if self._emptied is not None:
                self._db.execute(self._merge.empty())
            for statement in self._merge.statements():
                self._db.execute(statement)
        except psycopg.Error as error:
            if not is_row_error(error):
                raise
            raise RowsRefusedError from error

    def _noted(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """Yield chunks, and remember what they say about the table as a whole."""
        for chunk in chunks:
            if chunk.emptied is not None:
                self._emptied = chunk.emptied
            if chunk.lacks is not None:
                self._lacking |= set(pc.unique(chunk.lacks.flatten()).to_pylist())
            if chunk.moved is not None:
                self._has_moved = self._has_moved or bool(pc.any(chunk.moved, min_count=0).as_py())
            if chunk.batch.num_rows:
                yield chunk

    def _keep_newest(self) -> None:
        """Leave one staged row of each key: the newest, with the newest value of every column."""
        if not self._shape.key:
            return
        if self._emptied is not None:
            self._db.execute(self._merge.forget_before(self._emptied))
        for name in self._merge.lacking if self._has_moved else ():
            self._db.execute(self._merge.carry(name, from_table=self._emptied is None))
        for name in self._merge.lacking:
            self._db.execute(self._merge.fill(name))
        self._db.execute(self._merge.keep_newest())

    def _find_homeless(self) -> list[int]:
        """Return the numbers of rows whose missing values this table has under no key: the sink, or this table, does
        not get the delete of their old key."""
        if not self._has_moved or not self._merge.lacking:
            return []
        return [int(row[0]) for row in self._db.execute(self._merge.find_homeless()).fetchall()]

    def _stage(self) -> None:
        self._db.execute(UNSTAGE)  # that of another table of the same epoch
        self._db.execute(stage_statement(self._table, self._ways, _EXTRA))

    def _copy(self, target: Identifier, chunks: Iterator[Chunk]) -> None:
        """Copy rows into the table or into the temporary one, in as many statements as their size asks for."""
        with ThreadPoolExecutor(1, "firnline encode") as executor:  # encodes a chunk while the one before is sent
            pieces = _ahead(executor, (self._encode(chunk, target) for chunk in chunks))
            piece = next(pieces, None)
            while piece is not None:
                sent = 0
                with self._db.cursor().copy(self._copy_statement(target)) as copy:
                    copy.write(SIGNATURE)
                    while piece is not None and sent < COPY_BYTES:
                        data, bad = piece
                        if bad is not None:
                            raise RowsRefusedError
                        copy.write(data)
                        sent += len(data)
                        piece = next(pieces, None)
                    copy.write(TRAILER)

    def _copy_statement(self, target: Identifier) -> Any:
        own = self._own if target is not STAGED else _EXTRA
        return copy_statement(target, [*self._ways, *own])

    def _encode(self, chunk: Chunk, target: Identifier) -> tuple[memoryview, pa.Array | None]:
        """Return rows as COPY takes them, and which of them hold a value that its column cannot hold."""
        columns = [
            encode(text_of(column) if self._ways[name] == "text" else column, self._wires[name])
            for name, column in zip(chunk.batch.schema.names, chunk.batch.columns, strict=True)
        ]
        bad = None
        for column in columns:
            if column.bad is not None:
                bad = column.bad if bad is None else pc.or_(bad, column.bad)
        if target is not STAGED:
            own = [
                value.encode() if isinstance(value, str) else value.to_bytes(8, "big") for value in self._own.values()
            ]
            return memoryview(join_rows(columns, [constant(value) for value in own])), bad
        count = chunk.batch.num_rows
        extra: list[Encoded] = [
            encode(chunk.numbers, "int8"),
            encode(chunk.deletes if chunk.deletes is not None else pa.nulls(count, pa.bool_()), "bool"),
            encode(chunk.order if chunk.order is not None else pa.nulls(count, pa.int64()), "int8"),
            encode(chunk.lacks if chunk.lacks is not None else pa.nulls(count, pa.string()), "jsonb"),
            encode(chunk.moved if chunk.moved is not None else pa.repeat(pa.scalar(False), count), "bool"),
        ]
        return memoryview(join_rows([*columns, *extra])), bad

    # -- rows one by one --------------------------------------------------------------------------------

    def find_bad(self, chunks: Iterator[Chunk], reason: Callable[[BaseException], str]) -> dict[int, str]:
        """Return the numbers of the rows that can never be held, each with the reason.

        It tries to write, in parts that get ever smaller, and leaves the transaction to be rolled back.
        """
        bad: dict[int, str] = {}
        numbers: list[int] = []
        self._stage()
        for chunk in self._noted(chunks):
            _, outside = self._encode(chunk, STAGED)
            if outside is not None:
                bad |= self._find_unfit(chunk)
                chunk = chunk.filter(pc.invert(outside.fill_null(False)))
            refused = self._try_parts(chunk.batch.num_rows, partial(self._copy_part, chunk))
            found = {chunk.numbers[at].as_py(): reason(error) for at, error in refused.items()}
            numbers += [number for number in chunk.numbers.to_pylist() if number not in found]
            bad |= found
        if self._shape.key:
            homeless = self._find_homeless()
            bad |= dict.fromkeys(
                homeless, "the log does not have all of its values, and the table has no row of its old key"
            )
            self._db.execute(self._merge.forget(homeless))
            self._keep_newest()
            rows = self._db.execute(f"SELECT {ROW} FROM pg_temp.firnline_rows ORDER BY {ROW}").fetchall()  # noqa: S608
            numbers = [int(row[0]) for row in rows]
        if (emptied := self._emptied) is not None:
            refused = self._try_parts(1, lambda _, __: self._run(self._merge.empty()))
            bad |= {emptied + at: reason(error) for at, error in refused.items()}
        refused = self._try_parts(len(numbers), lambda a, b: self._merge_part(numbers[a], numbers[b - 1]))
        return bad | {numbers[at]: reason(error) for at, error in refused.items()}

    def _find_unfit(self, chunk: Chunk) -> dict[int, str]:
        """Return the numbers of the rows with a value that its column cannot hold, each with the column."""
        found: dict[int, str] = {}
        for name, column in zip(chunk.batch.schema.names, chunk.batch.columns, strict=True):
            wire = self._wires[name]
            unfit = encode(text_of(column) if self._ways[name] == "text" else column, wire).bad
            if unfit is not None:
                text = f"the value of column {name!r} does not fit its type {wire}"
                found = dict.fromkeys(chunk.numbers.filter(unfit.fill_null(False)).to_pylist(), text) | found
        return found

    def _copy_part(self, chunk: Chunk, first: int, end: int) -> None:
        part = chunk.slice(first, end)
        with self._db.cursor().copy(self._copy_statement(STAGED)) as copy:
            for data in (SIGNATURE, self._encode(part, STAGED)[0], TRAILER):
                copy.write(data)

    def _run(self, statement: Composed) -> None:
        self._db.execute(statement)

    def _merge_part(self, first: int, last: int) -> None:
        for statement in self._merge.statements((first, last)):
            self._db.execute(statement)

    def _try_parts(self, count: int, attempt: Callable[[int, int], None]) -> dict[int, psycopg.Error]:
        """Attempt a range of rows; split it where it fails, until single rows are left. Returns those that failed."""
        failed: dict[int, psycopg.Error] = {}
        ranges = [(0, count)] if count else []
        while ranges:
            first, end = ranges.pop()
            self._db.execute("SAVEPOINT part")
            try:
                attempt(first, end)
            except psycopg.Error as error:
                if not is_row_error(error):
                    raise
                self._db.execute("ROLLBACK TO SAVEPOINT part")
                if end - first == 1:
                    failed[first] = error
                    continue
                at = first + _bad_line(error, end - first)
                ranges += [(a, b) for a, b in ((at + 1, end), (at, at + 1), (first, at)) if a < b]
            self._db.execute("RELEASE SAVEPOINT part")
        return failed


def _ahead(executor: Executor, items: Iterator[_T]) -> Iterator[_T]:
    """Yield the items of an iterator that the executor runs one item ahead."""
    waiting = executor.submit(next, items, None)
    while (item := waiting.result()) is not None:
        waiting = executor.submit(next, items, None)
        yield item


def _bad_line(error: psycopg.Error, count: int) -> int:
    """Return the number of the row that an error of COPY names; the middle if it names none."""
    match = _LINE.search(error.diag.context or "")
    line = int(match.group(1)) - 1 if match else -1
    return line if 0 <= line < count else count // 2
